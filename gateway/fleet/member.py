"""One engine of the fleet, as this process knows it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from engines.dialect import Dialect, Observation
from engines.http import HttpClient
from engines.probe import Model
from gateway.engine_settings import EngineSettings
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
        run_id: of the run that numbers the versions of its weights.
        generation: counts the processes seen at this address.
        engine_id: its address, and which process there.
        is_cordoned: an operator or the controller wants it to get no more turns.
        is_draining: cordoned, and its turns continue elsewhere as soon as they can.
        held: why the gateway itself gives it none: its weights are not the fleet's; "" if they are.
        is_in_doubt: an update began and did not end well, so its weights may not be what it reports. It ends only with
            weights that were loaded whole.
        has_slept: it was put to sleep since the last good look.
        is_updating: it is being given weights. It is not looked at meanwhile, because it may stand still for minutes.
        versions: of its weights since this process was first seen, in order; empty if it does not report them.
        cache_salt: sent with every request, so that none reuses KV of other weights; "" until a version was set.
        models_at: when it last told its models.
        asks_tokens: whether it has token routes is still unknown, and is asked at each look.
        moves_kv: it offers KV to others and fetches theirs, as far as is known.
        kv_tier: names the KV tier that it shares with all engines of the same value; "" for none.
        kv_offered_tokens: KV that it must keep until another engine has fetched it.
        num_legs: legs that this gateway runs on it.
        num_held_up: how many of these wait until their clients have taken some of their answers.
        num_faults: connection faults since the last good look or answer.
        may_be_alive: it was lost because it did not answer in time, hangs, or sleeps.
        is_busy: at the last look turns ran, by its own count or because legs of this gateway did.
        worked_at: when it was last seen to make progress, or to have nothing to do.
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
    is_draining: bool = False
    held: str = ""
    is_in_doubt: bool = False
    has_slept: bool = False
    is_updating: bool = False
    versions: list[str] = field(default_factory=list)
    cache_salt: str = ""
    dialect: Dialect | None = None
    models: tuple[Model, ...] = ()
    models_at: float = 0.0
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
    may_be_alive: bool = False
    is_busy: bool = False
    worked_at: float = 0.0
    recheck: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None
    engine_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.engine_id = self.address if self.generation == 1 else f"{self.address}~{self.generation}"

    def become_another(self, keeps_weights: bool) -> None:
        """Another process answers at its address: that is another engine, of which nothing was observed yet. So is one
        that wakes, but it has the weights that it had.
        """
        self.generation += 1
        self.engine_id = f"{self.address}~{self.generation}"
        self.observation, self.kv_offered_tokens = None, 0
        self.is_in_doubt = self.is_in_doubt and keeps_weights

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

    @property
    def weight_version(self) -> str:
        """The weights that make its next token; "" if it does not report them."""
        return self.versions[-1] if self.versions else ""

    @property
    def takes_turns(self) -> bool:
        """Whether new turns may go there, as far as the gateway decides."""
        return not (self.is_cordoned or self.held or self.is_updating)

    def took(self, version: str, number: int) -> None:
        """It has these weights now; `number` is the version's, 0 if this gateway never set it.

        The salt is not the version's name: vLLM accepts no slash in a salt (0.33, generate/base/protocol.py). A version
        that is set again must not reuse the KV that it left behind, nor what another run left in a KV tier.
        """
        self.versions.append(version)
        self.cache_salt = f"w{number}-{self.run_id}" if number else ""
