"""How a leg ends: with an answer whose end is still to be sent, or as a failure that says whose fault it was."""

from collections.abc import Callable
from typing import Any

from gateway.http.errors import ApiError
from gateway.turns.turn import LegFailed
from scheduling.types import Fault


class Outcome:
    """A finished leg, whose answer's end is still to be sent.

    Args:
        end: the last of the answer's bytes; all of them, of one that comes whole.
        content: what the client will send back with its next turn.
    """

    def __init__(self, end: bytes, send_end: Callable[[], None], content: Callable[[], Any]) -> None:
        self.end = end
        self.send_end = send_end
        self.content = content


def refused_leg(error: ApiError) -> LegFailed:
    """What an engine's error means: try later, try elsewhere, or tell the client."""
    if error.status in (429, 503):
        return LegFailed(Fault.BUSY, error)
    return LegFailed(Fault.REQUEST if error.is_clients_fault else Fault.ENGINE, error)
