"""What the replayer needs of any client, and how long clients wait between retries.

Clients retry as OpenAI's SDK does: after a refused or broken connection and after 408, 409, 429 and 5xx, waiting 0.5,
1, 2, 4, 8, 8, ... seconds less up to a quarter, or as `Retry-After` says; 8 s is its cap and cannot be set. So
`max_retries` decides how long a client waits for a restarting server: 2 about a second, 8 about half a minute.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from loadtest.agent import Address, Answer

INITIAL_BACKOFF_S = 0.5
_NUM_DOUBLINGS = 4
MAX_BACKOFF_S = INITIAL_BACKOFF_S * 2.0**_NUM_DOUBLINGS
# The answer of servers that know no trajectories.
NOT_KNOWN_THERE = (404, 405)


class RequestFailed(Exception):
    """A request got no usable answer, and its retries are used up. The message is the reason.

    Args:
        status: The HTTP status; None if there was no answer at all.
    """

    def __init__(self, reason: str, status: int | None = None, num_retries: int = 0) -> None:
        super().__init__(reason)
        self.status = status
        self.num_retries = num_retries


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, and how it came.

    Args:
        first_token_at: Instant of `time.perf_counter()`; None if the answer came whole.
        queued_s: How long the turn waited for an engine; None if the answer's headers do not report it.
        trajectory_id: The gateway's id of the trajectory; None if the server is not Heddle.
    """

    answer: Answer
    first_token_at: float | None
    num_retries: int
    queued_s: float | None
    trajectory_id: str | None


class ChatClient(Protocol):
    """What the replayer needs of a client. All agents may share one."""

    async def chat(self, body: dict[str, Any], address: Address) -> Reply:
        """The reply to one turn.

        Raises:
            RequestFailed: After all retries.
        """

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path below the base URL.

        Raises:
            RequestFailed: Also if the server does not know the path.
        """

    async def post(self, path: str) -> dict[str, Any] | None:
        """The answer to an empty POST; None if the server does not know the path."""

    async def delete(self, path: str) -> dict[str, Any] | None:
        """The answer to a DELETE; None if the server does not know the path."""

    async def aclose(self) -> None: ...


async def if_known(request: Awaitable[dict[str, Any]]) -> dict[str, Any] | None:
    """What a client's request gives; None if the server does not know its path."""
    try:
        return await request
    except RequestFailed as error:
        if error.status in NOT_KNOWN_THERE:
            return None
        raise


def root_of(base_url: str) -> str:
    """The server's address without its `/v1`."""
    return base_url.rstrip("/").removesuffix("/v1")


def backoff_s(num_retries: int) -> float:
    """How long to wait before a retry, as the SDK waits."""
    return INITIAL_BACKOFF_S * 2.0 ** min(num_retries, _NUM_DOUBLINGS) * (1 - 0.25 * random.random())


def patience_s(num_retries: int) -> float:
    """How long a client waits between this many retries at most; what exceeds 10^12 retries does not count."""
    num_retries = min(num_retries, 10**12)
    num_shorter = min(num_retries, _NUM_DOUBLINGS)
    return INITIAL_BACKOFF_S * (2.0**num_shorter - 1) + MAX_BACKOFF_S * (num_retries - num_shorter)


def queued_s_of(headers: Mapping[str, str]) -> float | None:
    """How long the turn waited for an engine, if the server's headers report it."""
    queued_ms = headers.get("x-heddle-queued-ms")
    return None if queued_ms is None else float(queued_ms) / 1_000
