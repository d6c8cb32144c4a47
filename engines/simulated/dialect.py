"""How vLLM's and SGLang's servers differ on routes that both have."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from engines.simulated.exchange import ApiError, Exchange


@dataclass(frozen=True, slots=True)
class Shape:
    """How the answers of OpenAI's routes differ.

    Args:
        fingerprint: `system_fingerprint` of whole answers and, in a stream, of the last chunk that is not [DONE].
        usage_elsewhere: bytes in the chunks without usage, in a stream that reports usage.
        ends_apart: in a chat's stream, the finish reason has an event of its own, which like the first has no usage.
        answer_nulls, choice_nulls, message_fields: fields of whole answers that are empty here.
        call_content: the content of a message that is a tool call.
        named_call_reason: the finish reason of a call to the tool that the request named.
        has_id_names: `return_tokens_as_token_ids` names the tokens of log-probabilities by their ids.
    """

    call_id_prefix: str
    named_call_reason: str
    call_content: str | None
    fingerprint: str | None = None
    usage_elsewhere: bytes = b""
    ends_apart: bool = False
    has_id_names: bool = False
    answer_nulls: Mapping[str, None] = field(default_factory=dict)
    choice_nulls: Mapping[str, None] = field(default_factory=dict)
    message_fields: Mapping[str, Any] = field(default_factory=dict)


class Dialect(Protocol):
    """How one kind of engine answers."""

    shape: Shape

    def error_body(self, error: ApiError, path: str) -> bytes:
        """The body of an error answer."""

    def error_event(self, error: ApiError) -> bytes:
        """The server-sent event with which a running stream reports an error."""

    def answer_id(self, exchange: Exchange, body: dict[str, Any], prefix: str) -> str:
        """The answer's id, by which it can also be aborted."""

    def priority(self, exchange: Exchange, body: dict[str, Any]) -> int:
        """The request's priority; lower is earlier, whatever the engine's own sign."""

    def check_model(self, body: dict[str, Any]) -> None:
        """Raises ApiError for a model that is not served here, if this engine checks."""

    def check_tokenize(self, body: dict[str, Any]) -> None:
        """Raises ApiError for a prompt or chat that this engine does not tokenize."""

    def check_chat(self, body: dict[str, Any]) -> None:
        """Raises ApiError for combinations of a chat's fields that this engine refuses."""

    async def admit(self) -> None:
        """Lets a request in: may wait, or raise ApiError, which is answered with its HTTP status."""

    def late_refusal(self) -> ApiError | None:
        """A refusal that comes after a stream has already answered 200."""

    def final_fields(self, stop_reason: str | int | None) -> dict[str, Any]:
        """The fields that accompany a choice's finish reason."""
