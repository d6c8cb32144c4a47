"""A request's choices: as requested, and while they run."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.simulated.answers import Wish
from engines.simulated.live import Generation, Signal


@dataclass(frozen=True, slots=True)
class Asked:
    """A request's choices, ready to run.

    Args:
        id: the answer's id, by which the request can be aborted.
        prompts: one for each wish; choices of the same prompt share its list.
        priority: lower is earlier, whatever the dialect's own sign.
        kv_transfer: vLLM's `kv_transfer_params`.
    """

    id: str
    prompts: Sequence[list[int]]
    wishes: Sequence[Wish]
    priority: int
    cache_salt: str
    is_stream: bool
    kv_transfer: Mapping[str, Any] | None = None

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(map(len, {id(prompt): prompt for prompt in self.prompts}.values()))


class Running:
    """The choices of one running request."""

    __slots__ = ("asked", "created", "generations", "is_kept", "kv_offer", "over", "signal")

    def __init__(self, asked: Asked, generations: list[Generation], signal: Signal) -> None:
        self.asked = asked
        self.generations = generations
        self.signal = signal
        self.over = asyncio.Event()
        self.created = int(time.time())
        self.kv_offer: Mapping[str, Any] | None = None
        self.is_kept = False  # its KV is in the tier

    @property
    def is_over(self) -> bool:
        return all(generation.ended_at is not None for generation in self.generations)

    async def end(self) -> None:
        """Returns when the last choice has ended."""
        while not self.is_over:
            await self.signal.wait()
