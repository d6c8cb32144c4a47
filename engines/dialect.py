"""What the gateway needs to know of an engine kind, and how it finds out which kind an engine is."""

from dataclasses import dataclass
from typing import Protocol

from engines.http import HttpClient
from engines.tokens import TokenRoutes
from engines.upstream import Leg, Upstream

_TRIES = 3
_MAX_COUNT, _MAX_SHARE = 2**53, 100.0


@dataclass(frozen=True, slots=True)
class Observation:
    """What an engine, a server or one of its ranks, reports of itself at one instant.

    Args:
        kv_capacity_tokens, slots: None if the engine does not report them.
        work_counter: grows while the engine works; if it stands still while turns run, the engine hangs.
        started_at: when its process started, in epoch seconds; distinguishes a relaunched server from the old one.
    """

    num_running: int
    num_waiting: int
    kv_used_share: float
    kv_capacity_tokens: int | None
    slots: int | None
    work_counter: float
    started_at: float | None

    def __post_init__(self) -> None:
        """Raises ObservationError for impossible values, which would otherwise surface where they are added up or
        shown.
        """
        counts = (self.num_running, self.num_waiting, self.work_counter, self.kv_capacity_tokens or 0, self.slots or 0)
        if max(map(abs, counts)) > _MAX_COUNT or abs(self.kv_used_share) > _MAX_SHARE:
            raise ObservationError(f"it tells a number that cannot be: {self}"[:300])


class ObservationError(Exception):
    """The engine is unhealthy, or does not answer as its kind does."""


class Asleep(ObservationError):
    """It was put to sleep: it answers, but makes no tokens, and its KV is gone."""


class Dialect(Protocol):
    """How to talk to one kind of engine.

    Attributes:
        tokens: how at token level; None if the engine has no such routes, or until `find_tokens` found them.
        tokens_note: for people to read: why it has none, or which requests pass through anyway; "" until then.
    """

    kind: str
    tokens: TokenRoutes | None
    tokens_note: str

    async def find_tokens(self, http: HttpClient, timeout_s: float) -> None:
        """Ask whether the engine has token routes."""
        ...

    def upstream(self, leg: Leg) -> Upstream:
        """The request that serves a leg."""
        ...

    async def observe(self, http: HttpClient, timeout_s: float) -> tuple[Observation, ...]:
        """Ask a server for the state of each of its data-parallel ranks, in their order; of itself, if it has none.

        Raises: ObservationError, or what HttpClient raises.
        """
        ...

    async def slots(self, http: HttpClient, timeout_s: float) -> int | None:
        """How many turns each rank runs at once, if the server reports that."""
        ...

    async def abort(self, http: HttpClient, request_id: str, timeout_s: float) -> None:
        """Stop a request whose connection was closed, if closing is not enough."""
        ...


async def has_route(http: HttpClient, path: str, timeout_s: float) -> bool:
    """Whether a POST route exists: it refuses an empty request as malformed, not as unknown or forbidden."""
    status, _ = await told(http, path, b"{}", timeout_s)
    return status in (400, 422)


async def told(http: HttpClient, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
    """What a server answers to a POST.

    The gateway relies on the answer until the server is lost, so a server error is retried.
    """
    for _ in range(_TRIES):
        status, answer = await http.post(path, body, timeout_s)
        if status < 500:
            break
    return status, answer
