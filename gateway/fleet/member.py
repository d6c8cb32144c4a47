"""One engine of the fleet, as this process knows it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engines.dialect import Observation
from engines.http import HttpClient

if TYPE_CHECKING:
    from gateway.fleet.server import Server


@dataclass(slots=True, eq=False)
class Member:
    """One engine of the fleet: a server, or one of its data-parallel ranks.

    Args:
        http: of its turns; a rank's names the rank in every request.
        rank: None if the server has none.
        engine_id: its server's, and its rank if it is not the first.
        kv_offered_tokens: KV that it must keep until another engine has fetched it.
        num_legs: legs that this gateway runs on it.
        num_held_up: how many of these wait until their clients have taken some of their answers.
        is_busy: at the last look turns ran, by its own count or because legs of this gateway did.
        worked_at: when it was last seen to make progress, or to have nothing to do.
    """

    server: "Server"
    http: HttpClient
    rank: int | None = None
    observation: Observation | None = None
    kv_offered_tokens: int = 0
    num_legs: int = 0
    num_held_up: int = 0
    is_busy: bool = False
    worked_at: float = 0.0
    engine_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.become_another()

    def become_another(self) -> None:
        """Its server is another process, so it is another engine, of which nothing was observed yet."""
        server_id = self.server.server_id
        self.engine_id = f"{server_id}@{self.rank}" if self.rank else server_id
        self.observation, self.kv_offered_tokens = None, 0

    def offer_ended(self, engine_id: str, num_tokens: int) -> None:
        """KV that was offered is free again, unless the process that offered it is gone."""
        if engine_id == self.engine_id:
            self.kv_offered_tokens -= num_tokens

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Marks a leg as waiting for its client: that no token comes meanwhile is not the engine's fault."""
        self.num_held_up += 1
        try:
            yield
        finally:
            self.num_held_up -= 1
