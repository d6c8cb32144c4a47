"""How a leg ends: with an answer whose end is still to be sent, stopped, or failed by someone's fault."""

from collections.abc import Callable
from typing import Any

from engines.http import AnswerTooLarge, ConnectionBroken, NoMoreConnections, Response, ResponseTimeout
from gateway.http.errors import ApiError, api_error
from scheduling.types import Fault

# An engine that asks for more is tried again after this: a proxy in front of it may send any value.
_LONGEST_PAUSE_S = 60.0


class Outcome:
    """A finished leg, whose answer's end is still to be sent.

    Args:
        end: the last bytes of the answer; all of them, if it comes whole.
        content: gives what the client will send back with its next turn.
    """

    def __init__(self, end: bytes, send_end: Callable[[], object], content: Callable[[], Any]) -> None:
        self.end = end
        self.send_end = send_end
        self.content = content


class LegFailed(Exception):
    """A leg ended without finishing its turn; `error` is for the client, unless the turn can start over.

    Args:
        should_retry: whether the client is told to retry, as in `Refused`.

    Attributes:
        retry_after_s: how long a busy engine asks to be left alone; None if it does not.
        broke_off: whether the engine broke off, as one does that died.
        has_made: whether its answer tells of tokens that it made before.
    """

    def __init__(self, fault: Fault, error: ApiError, should_retry: bool | None = None) -> None:
        super().__init__(error.message)
        self.fault = fault
        self.error = error
        self.should_retry = should_retry
        self.retry_after_s: float | None = None
        self.broke_off = False
        self.has_made = False


class Stopped(Exception):
    """The turn must stop where it is: its client left, it was aborted, or its engine is lost. Without a fault, it must
    pause.
    """

    def __init__(self, fault: Fault | None) -> None:
        super().__init__(fault.value if fault else "pause")
        self.fault = fault


def refused_leg(error: ApiError) -> LegFailed:
    """What an engine's error means: try later, try elsewhere, or tell the client."""
    if error.status in (429, 503):
        return LegFailed(Fault.BUSY, error)
    return LegFailed(Fault.REQUEST if error.is_clients_fault else Fault.ENGINE, error)


def refused_by(response: Response, error: ApiError) -> LegFailed:
    """The same for an error that is a whole answer, with the pause that it asks for; dates (RFC 9110, 10.2.3) are not
    read.
    """
    failure = refused_leg(error)
    pause = response.headers.get(b"retry-after", b"")
    failure.retry_after_s = min(float(pause), _LONGEST_PAUSE_S) if pause.isdigit() else None
    return failure


def failed_leg(error: Exception) -> LegFailed:
    """What it means that an engine did not answer: whose fault it is, and what its client is told."""
    match error:
        case NoMoreConnections():
            return LegFailed(
                Fault.BUSY, api_error(503, f"The gateway has no connection left: {error}.", "gateway_full")
            )
        case ResponseTimeout():
            return LegFailed(Fault.ENGINE, api_error(504, f"The engine timed out: {error}.", "engine_late"))
        case AnswerTooLarge():
            return LegFailed(Fault.REQUEST, api_error(502, f"{error}.", "answer_too_large"), should_retry=False)
        case _:
            failure = LegFailed(Fault.ENGINE, api_error(502, f"The engine failed: {error}.", "engine_failed"))
            failure.broke_off = isinstance(error, ConnectionBroken)
            return failure
