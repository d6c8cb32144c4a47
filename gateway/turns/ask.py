"""What a client asks for with one turn."""

from collections.abc import Mapping
from typing import Any

from engines.flags import flag_of
from gateway.http.client import Headers
from gateway.http.errors import Api
from gateway.messages.transcripts import History
from scheduling.values import value_class


@value_class(frozen=True, slots=True)
class Ask:
    """What a client asks for.

    Args:
        request: the body, parsed as far as it has been read; reading more may raise BrokenValue.
        path: the API route, without an identity in front of it.
        may_be_joined: the same request again, while this one runs, is a retry.
        keeps_tokens: its tokens are kept for later turns and for a trainer.
        wants_stream: the client wants a stream.
        history: its conversation, if no id was sent: the trajectory is new, or was recognised by it; else None.
        is_retry: the client says so.
        retry_key: of all requests that the client means as one and the same; "" if it names none.
        trace: the header lines that name the trace that it belongs to, which its legs are sent with.
    """

    api: Api
    path: str
    model: str
    body: bytes
    request: Mapping[str, Any]
    trajectory_id: str
    group_id: str
    rollout_id: str | None
    priority: int
    may_be_joined: bool
    keeps_tokens: bool = False
    wants_stream: bool = False
    history: History | None = None
    is_retry: bool = False
    retry_key: str = ""
    trace: Headers = b""

    @property
    def wants_usage(self) -> bool:
        """Whether the client asked its stream for a usage event."""
        options = self.request.get("stream_options")
        return isinstance(options, dict) and flag_of(options.get("include_usage")) is True
