"""One engine of the fleet, as this process knows it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from engines.dialect import Dialect, Observation
from engines.http import HttpClient
from engines.probe import Model
from gateway.config import EngineSettings
from scheduling.cost import EngineProfile


class EngineState(StrEnum):
    """`starting`: not seen yet. `ready`: it may be used. `lost`: its circuit is open."""

    STARTING = "starting"
    READY = "ready"
    LOST = "lost"


@dataclass(slots=True, eq=False)
class Member:
    """One engine of the fleet.

    Args:
        address: host, port and path of its URL.
        run_id: whose numbers the versions of its weights have.
        generation: counts the processes seen at this address.
        engine_id: its address, and which process there.
        is_cordoned: an operator, or the controller, wants it to get no more turns.
        held: why the gateway itself gives it none: its weights are not the fleet's. "" when they are.
        is_in_doubt: an update began and did not end well, so its weights may not be what it tells.
        is_updating: it is being given weights. It is not looked at meanwhile, for it may stand still for minutes.
        versions: of its weights since this process was first seen, in order; none where it does not tell.
        cache_salt: goes with every request, so that none meets KV of other weights; "" until a version was set.
        asks_tokens: it did not tell yet whether it has token routes, and is asked at each look.
        moves_kv: it offers KV to others and fetches theirs, as far as is known.
        kv_tier: the KV tier that it shares with all engines that have the same; "" for none.
        kv_offered_tokens: KV that it must keep until another engine has fetched it.
        num_legs: legs that this gateway runs on it.
        num_held_up: of these, how many go on when their clients have taken some of their answers.
        num_faults: connection faults since the last good look or answer.
        is_busy: turns ran when it was last looked at, by its own word or because legs of ours did.
        worked_at: when it was last seen to get on, or to have nothing to do.
    """

    settings: EngineSettings
    http: HttpClient
    profile: EngineProfile | None
    address: str
    run_id: str
    generation: int = 1
    started_at: float | None = None
    state: EngineState = EngineState.STARTING
    is_cordoned: bool = False
    held: str = ""
    is_in_doubt: bool = False
    is_updating: bool = False
    versions: list[str] = field(default_factory=list)
    cache_salt: str = ""
    dialect: Dialect | None = None
    models: tuple[Model, ...] = ()
    slots: int | None = None
    observation: Observation | None = None
    asks_tokens: bool = False
    moves_kv: bool = False
    kv_tier: str = ""
    kv_offered_tokens: int = 0
    num_legs: int = 0
    num_held_up: int = 0
    num_faults: int = 0
    last_fault: str = ""
    is_busy: bool = False
    worked_at: float = 0.0
    recheck: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None
    engine_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.engine_id = self.address if self.generation == 1 else f"{self.address}~{self.generation}"

    def become_another(self) -> None:
        """Another process answers at its address: that is another engine."""
        self.generation += 1
        self.engine_id = f"{self.address}~{self.generation}"

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """A leg waits for its client meanwhile: that no token of it comes is not the engine's fault."""
        self.num_held_up += 1
        try:
            yield
        finally:
            self.num_held_up -= 1

    @property
    def weight_version(self) -> str:
        """Which weights its next token is made with; "" where it does not tell."""
        return self.versions[-1] if self.versions else ""

    @property
    def takes_turns(self) -> bool:
        """Whether new turns may go there, as far as the gateway decides it."""
        return not (self.is_cordoned or self.held or self.is_updating)

    def took(self, version: str, number: int) -> None:
        """It has these weights now; `number` is the version's, 0 if it was never set by this gateway.

        The salt is no name: vLLM takes no slash in one (0.33, generate/base/protocol.py), and a version that is set
        again must not meet what it left behind, nor what another run's left in a KV tier.
        """
        self.versions.append(version)
        self.cache_salt = f"w{number}-{self.run_id}" if number else ""
