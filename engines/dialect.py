"""What the gateway needs to know of an engine kind, and how it asks what kind of engine it meets."""

from dataclasses import dataclass
from typing import Protocol

from engines.http import HttpClient
from engines.tokens import TokenRoutes
from engines.upstream import Leg, Upstream

_TRIES = 3
_MAX_COUNT, _MAX_SHARE = 2**53, 100.0


@dataclass(frozen=True, slots=True)
class Observation:
    """What an engine says of itself at one instant.

    Args:
        kv_capacity_tokens, slots: None where the engine does not say.
        work_counter: grows while the engine works; one that stands still while turns run is a hung engine.
        started_at: when its process started, in epoch seconds; tells a relaunched server from the old one.
    """

    num_running: int
    num_waiting: int
    kv_used_share: float
    kv_capacity_tokens: int | None
    slots: int | None
    work_counter: float
    started_at: float | None

    def __post_init__(self) -> None:
        """Raises ObservationError for what cannot be, which would be found out where it is added up or shown."""
        counts = (self.num_running, self.num_waiting, self.work_counter, self.kv_capacity_tokens or 0, self.slots or 0)
        if max(map(abs, counts)) > _MAX_COUNT or abs(self.kv_used_share) > _MAX_SHARE:
            raise ObservationError(f"it tells a number that cannot be: {self}"[:300])


class ObservationError(Exception):
    """The engine is not healthy, or does not answer as its kind does."""


class Asleep(ObservationError):
    """Somebody put it to sleep: it answers, but makes no tokens, and its KV is gone."""


class Dialect(Protocol):
    """How one kind of engine is spoken to.

    Attributes:
        tokens: how at token level; None for an engine that has no such routes, or until `find_tokens` found them.
        tokens_note: why not, or which requests pass through all the same, for people to read; "" until then.
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

    async def observe(self, http: HttpClient, timeout_s: float) -> Observation:
        """Ask the engine how it is. Raises ObservationError, or what HttpClient raises."""
        ...

    async def slots(self, http: HttpClient, timeout_s: float) -> int | None:
        """How many turns it runs at once, if it tells."""
        ...

    async def abort(self, http: HttpClient, request_id: str, timeout_s: float) -> None:
        """Stop a request whose connection was closed, where closing is not enough."""
        ...


async def has_route(http: HttpClient, path: str, timeout_s: float) -> bool:
    """Whether a POST route is there: it refuses an empty request as malformed, not as unknown or forbidden."""
    status, _ = await told(http, path, b"{}", timeout_s)
    return status in (400, 422)


async def told(http: HttpClient, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
    """What a server says to a POST.

    It stands until the server is lost, so one that fails for once is asked again.
    """
    for _ in range(_TRIES):
        status, answer = await http.post(path, body, timeout_s)
        if status < 500:
            break
    return status, answer
