"""One server of the fleet: the process at an address; and its members, the engines: one for each data-parallel rank."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from xxhash import xxh3_64_hexdigest

from engines.dialect import Dialect, Observation
from engines.http import HttpClient, HttpLimits
from engines.probe import Model
from engines.tokens import TokenRoutes
from engines.upstream import RANK_HEADER
from engines.weights import STARTED_WITH
from gateway.engine_settings import EngineSettings
from scheduling.cost import EngineProfile


class EngineState(StrEnum):
    """`starting`: not seen yet. `ready`: it may be used. `lost`: its circuit is open."""

    STARTING = "starting"
    READY = "ready"
    LOST = "lost"


@dataclass(slots=True, eq=False)
class Server:
    """One server of the fleet: all that its engines have in common, because it is true of their process.

    Args:
        limits: of the connections to each of its engines.
        profile: of the speed of each of its engines.
        run_id: of the run that numbers the versions of its weights.
        generation: counts the processes seen at this address.
        is_cordoned: an operator or the controller wants it to get no more turns.
        is_draining: cordoned, and its turns continue elsewhere as soon as they can.
        held: why the gateway itself gives it none: its weights are not the fleet's; "" if they are.
        is_in_doubt: an update began and did not end well, so its weights may not be what it reports. It ends only with
            weights that were loaded whole.
        has_slept: it was put to sleep since the last good look.
        is_updating: it is being given weights. It is not looked at meanwhile, because it may stand still for minutes.
        versions: of its weights since this process was first seen, in order; empty if it does not report them.
        cache_salt: sent with every request, so that none reuses KV of other weights; "" until it is given some.
        models_at: when it last told its models.
        slots: of each of its engines.
        asks_tokens: whether it has token routes is still unknown, and is asked at each look.
        asks_setup: the same of its slots and KV ways.
        moves_kv: its engines offer KV to others and fetch theirs, as far as is known.
        kv_tier: names the KV tier that it shares with all servers of the same value; "" for none.
        num_faults: connection faults since the last good look or answer.
        may_be_alive: it was lost because it did not answer in time, hangs, or sleeps.

    Attributes:
        http: of what concerns the server as a whole.
        members: its engines, by rank; one if it has no ranks, or until it was seen.
    """

    settings: EngineSettings
    limits: HttpLimits
    profile: EngineProfile | None
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
    asks_tokens: bool = False
    asks_setup: bool = False
    moves_kv: bool = False
    kv_tier: str = ""
    num_faults: int = 0
    last_fault: str = ""
    may_be_alive: bool = False
    recheck: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None
    http: HttpClient = field(init=False)
    members: "list[Member]" = field(init=False)

    def __post_init__(self) -> None:
        self.http = self._client()
        self.members = [Member(self, self.http)]

    @property
    def address(self) -> str:
        """Host, port and path of its URL."""
        return self.settings.address

    @property
    def server_id(self) -> str:
        """Its address, and which process there."""
        return self.address if self.generation == 1 else f"{self.address}~{self.generation}"

    @property
    def kind(self) -> str | None:
        """As it was seen, or else as it is configured; None if neither tells."""
        return self.dialect.kind if self.dialect is not None else self.settings.kind

    @property
    def token_routes(self) -> TokenRoutes | None:
        """None if it has none, as far as is known."""
        return self.dialect.tokens if self.dialect is not None else None

    @property
    def context_tokens(self) -> int:
        """The longest prompt with its answer that it takes; 0 if it does not tell."""
        return min(filter(None, (model.max_context_tokens for model in self.models)), default=0)

    @property
    def num_legs(self) -> int:
        """Legs that this gateway runs on its engines."""
        return sum(member.num_legs for member in self.members)

    @property
    def weight_version(self) -> str:
        """The weights that make its next token; "" if it does not report them."""
        return self.versions[-1] if self.versions else ""

    @property
    def takes_turns(self) -> bool:
        """Whether new turns may go there, as far as the gateway decides."""
        return not (self.is_cordoned or self.held or self.is_updating)

    def become_another(self, keeps_weights: bool) -> None:
        """Another process answers at its address, or one that had slept, without its KV. One that wakes has the
        weights that it had.
        """
        self.generation += 1
        self.is_in_doubt = self.is_in_doubt and keeps_weights
        for member in self.members:
            member.become_another()

    def resize(self, number: int) -> "list[Member]":
        """It has so many data-parallel ranks, 1 if none. Returns the engines that it has no more."""
        gone, self.members = self.members[number:], self.members[:number]
        if number > 1 and self.members[0].rank is None:
            self.members[0].rank, self.members[0].http = 0, self._client(0)
        self.members += [Member(self, self._client(rank), rank) for rank in range(len(self.members), number)]
        return gone

    def took(self, version: str, number: int) -> None:
        """It has these weights now; `number` is the version's, 0 if this gateway never set it.

        The salt is not the version's name: vLLM accepts no slash in a salt (0.33, generate/base/protocol.py). A version
        that is set again must not reuse the KV that it left behind, nor what another run left in a KV tier. What
        somebody else set needs a salt too: without one there may be KV of the weights that the engine was started with.
        """
        self.versions.append(version)
        if number:
            self.cache_salt = f"w{number}-{self.run_id}"
        else:
            self.cache_salt = "" if version == STARTED_WITH else f"{xxh3_64_hexdigest(version.encode())}-{self.run_id}"

    def close(self) -> None:
        """Close all connections."""
        self.http.close()
        for member in self.members:
            member.http.close()

    def _client(self, rank: int | None = None) -> HttpClient:
        key = self.settings.api_key
        headers = (("authorization", f"Bearer {key.get_secret_value()}"),) if key else ()
        if rank is not None:
            headers = (*headers, (RANK_HEADER, str(rank)))
        return HttpClient(self.settings.url, self.limits, headers)


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

    server: Server
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
