"""The interface of a short stream, from the process that knows something to one that needs the newest state of it.

It is not a record: an older entry is worth nothing once there is a newer one. So only a few entries are kept, for
people who look, and nothing waits for a server that is away.
"""

from dataclasses import dataclass
from typing import Protocol

DEMAND = "demand"
"""The stream of what the gateway's work demands of the fleet, as JSON: see `GET /v1/demand`."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry's value, and its age in seconds."""

    value: bytes
    age_s: float


class Stream(Protocol):
    """One stream of one namespace. Every method but `aclose` raises StoreAway, and is safe to repeat."""

    async def add(self, value: bytes) -> None:
        """Add an entry; only the last few entries are kept."""

    async def newest(self) -> Entry | None:
        """The newest entry; None if there never was one."""

    async def aclose(self) -> None:
        """Close the connection."""
