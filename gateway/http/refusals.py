"""The one table that turns everything that can go wrong into an HTTP status and an error body."""

from collections.abc import Iterable

from gateway.http.errors import ApiError, api_error
from scheduling.types import Refusal
from store.port import StoreError, StoreFenced

_MAX_LISTED = 5


class Refused(Exception):
    """A request is answered with an error.

    Args:
        retry_after_s: when to try again; None says nothing. The OpenAI SDK waits at most 120 s.
        should_retry: overrides what SDKs do by status (they retry 408, 409, 429 and 5xx).
        more_headers: sent in addition.
    """

    def __init__(
        self,
        error: ApiError,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
        more_headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(error.message)
        self.error = error
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry
        self._more_headers = more_headers

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers on retrying, and `more_headers`."""
        headers = list(self._more_headers)
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, round(self.retry_after_s))).encode()))
        if self.should_retry is not None:
            headers.append((b"x-should-retry", b"true" if self.should_retry else b"false"))
        return headers


_REFUSALS = {
    Refusal.QUEUE_FULL: (429, "The gateway's queue is full (max_waiting_turns)."),
    Refusal.QUEUE_TIMEOUT: (503, "The turn waited too long for an engine (queue_timeout_s)."),
    Refusal.TRAJECTORY_ABORTED: (409, "The trajectory was aborted, so its turns are refused."),
    Refusal.ENGINE_FAILED: (502, "Engines failed the turn too often (max_attempts)."),
    Refusal.ENGINES_KILLED: (
        502,
        "The turn is sent to no other engine: several died before its first token, so its request may kill them"
        " (max_killed_engines).",
    ),
    Refusal.MODEL_GONE: (404, "No engine serves the model any more."),
    Refusal.DUPLICATE_TURN: (409, "A turn with this id exists already."),
}

_WITH_CAUSE = (Refusal.ENGINE_FAILED, Refusal.ENGINES_KILLED, Refusal.QUEUE_TIMEOUT)


def refused_turn(refusal: Refusal, retry_after_s: float | None, last_error: ApiError | None = None) -> Refused:
    """What the scheduler refused, as its client sees it; engines that were only busy do not give a 502."""
    status, message = _REFUSALS[refusal]
    if last_error is not None and refusal in _WITH_CAUSE:
        message = f"{message} Last cause: {last_error.message}"
        status = 503 if last_error.status in (429, 503) else status
    error = api_error(status, message, refusal.value)
    return Refused(error, retry_after_s, should_retry=retry_after_s is not None)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> Refused:
    """400: the client's mistake."""
    return Refused(api_error(400, message, code, param))


def invalid_json(why: str) -> Refused:
    """400: the body cannot be read."""
    return bad_request(f"The request body is not valid JSON: {why}", code="invalid_json")


def no_threads() -> Refused:
    """400: only new messages come, or will come; the client would have the rest kept here. On this code Anthropic's
    SDKs go on with whole conversations (anthropic 2.14, lib/threads).
    """
    message = "Conversations are not kept here: send the whole conversation, without 'thread'."
    return bad_request(message, "thread", "thread_unsupported_request")


def unsupported_encoding(encoding: str) -> Refused:
    """415: the body is compressed."""
    message = f"A body with content-encoding {encoding[:50]!r} is not supported; send it uncompressed."
    return Refused(api_error(415, message, "unsupported_encoding"))


def unreadable(headers: Iterable[tuple[bytes, bytes]], why: str) -> Refused:
    """415 or 400: the body is no JSON, perhaps because it is compressed."""
    for name, value in headers:
        if name == b"content-encoding" and value.lower() != b"identity":
            return unsupported_encoding(value.decode("latin-1"))
    return invalid_json(why)


def unauthorised(message: str) -> Refused:
    """401: no key, or a wrong one."""
    return Refused(api_error(401, message, "invalid_api_key"))


def forbidden(message: str) -> Refused:
    """403: this needs another key."""
    return Refused(api_error(403, message, "forbidden"))


def not_found(message: str, code: str = "not_found") -> Refused:
    """404."""
    return Refused(api_error(404, message, code))


def unknown_model(model: str, served: Iterable[str]) -> Refused:
    """404: no engine serves this model."""
    return not_found(f"The model {model[:200]!r} does not exist. Served: {_listed(served)}.", "model_not_found")


def bad_model(served: Iterable[str]) -> Refused:
    """400: a model must be named, and is not."""
    return bad_request(f"'model' must name one of the models served: {_listed(served)}.", "model")


def unknown_trajectory(trajectory_id: str) -> Refused:
    """404."""
    return not_found(f"No trajectory {trajectory_id[:256]!r}: it was never seen, or ended and was forgotten.")


def unknown_rollout(rollout_id: str) -> Refused:
    """404."""
    return not_found(f"No rollout {rollout_id[:256]!r}: it was never seen, or ended and was forgotten.")


def method_not_allowed(method: str, path: str, allowed: str) -> Refused:
    """405."""
    error = api_error(405, f"{method} is not allowed on {path}.", "method_not_allowed")
    return Refused(error, more_headers=((b"allow", allowed.encode()),))


def not_acceptable(message: str) -> Refused:
    """406: the answer is not available in this form."""
    return Refused(api_error(406, message, "not_acceptable"))


def conflict(message: str) -> Refused:
    """409; trying again does not help."""
    return Refused(api_error(409, message, "conflict"), should_retry=False)


def body_too_large(limit_bytes: int) -> Refused:
    """413."""
    return Refused(
        api_error(413, f"The request body is larger than {limit_bytes:,} bytes (max_body_bytes).", "body_too_large")
    )


def headers_too_large(limit_bytes: int) -> Refused:
    """431."""
    return Refused(
        api_error(
            431, f"The request headers are larger than {limit_bytes:,} bytes (max_header_bytes).", "headers_too_large"
        )
    )


def body_too_slow(timeout_s: float) -> Refused:
    """408: the body stopped coming. Its rest would be taken for the next request, so the connection is closed."""
    error = api_error(408, f"No byte of the request body arrived for {timeout_s:g} s (body_timeout_s).", "body_timeout")
    return Refused(error, more_headers=((b"connection", b"close"),))


def too_many_turns(limit: int) -> Refused:
    """429 for one key."""
    error = api_error(
        429, f"This API key has {limit} turns in progress, its limit (max_turns_per_key).", "too_many_turns"
    )
    return Refused(error, retry_after_s=1.0, should_retry=True)


def no_engine(num_engines: int) -> Refused:
    """503: no engine can serve it now."""
    why = f"0 of {num_engines} in the fleet; GET /v1/engines tells why" if num_engines else "the fleet has none"
    return _none_ready(f"No engine is ready: {why}.")


def no_engine_with(model: str) -> Refused:
    """503: engines are ready, but none that serves the model."""
    return _none_ready(f"No engine with the model {model[:200]!r} is ready; GET /v1/engines tells why.")


def not_seen(model: str, num_unseen: int, num_engines: int) -> Refused:
    """503: no engine serves the model, as far as is known."""
    why = f"{num_unseen} of {num_engines} in the fleet were not seen yet; GET /v1/engines tells why"
    return _none_ready(f"No engine with the model {model[:200]!r} is ready: {why}.")


def store_fault(error: StoreError) -> Refused:
    """503: the answer needs the store, which does not respond, or is another gateway's."""
    if isinstance(error, StoreFenced):
        return fenced()
    return Refused(api_error(503, str(error), "store_away"), retry_after_s=1.0, should_retry=True)


def fenced() -> Refused:
    """503: another gateway owns the store, and the fleet with it. This one stays so: behind a load balancer, only a new
    connection leads to the other one.
    """
    message = "Another gateway has taken over the store of this one, which takes no more requests: ask the other one."
    return Refused(api_error(503, message, "fenced"), more_headers=((b"connection", b"close"),))


def shutting_down() -> Refused:
    """503: the process is ending; its successor, or another gateway, may serve the request."""
    return Refused(api_error(503, "The gateway is shutting down.", "shutting_down"), 1.0, should_retry=True)


def internal_error() -> Refused:
    """500: a defect of the gateway."""
    return Refused(
        api_error(500, "The gateway failed; its log has the cause under this answer's x-request-id.", "internal_error")
    )


def _listed(models: Iterable[str]) -> str:
    names = sorted(models)
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(f"{name[:200]!r}" for name in names[:_MAX_LISTED]) + more or "none"


def _none_ready(message: str) -> Refused:
    return Refused(api_error(503, message, "no_engine"), retry_after_s=5.0, should_retry=True)
