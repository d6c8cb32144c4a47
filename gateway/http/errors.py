"""Errors as clients see them: any engine's error is read into one form, and written in each API's form.

Rules: `type` and `code` are OpenAI's words, never an engine's; `code` is a string or null (vLLM sends a number). A
message tells what the engine said, but no address, credential or HTML page; its length is bounded. An engine that
refuses the gateway's own credentials is a fault of the fleet (502), not of the client.
"""

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

import orjson

Api = Literal["chat", "completions", "responses", "messages", "generate", "other"]

# Long enough for every validation message seen; keeps a body that an engine echoes out of logs and headers.
MAX_MESSAGE_LENGTH = 1000

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# The reverse; the first status of a type is its own.
_STATUSES_OF_TYPES = {"invalid_request_error": 400} | {
    kind: status for status, kind in reversed(_ANTHROPIC_TYPES.items())
}
_SECRETS = re.compile(
    r"(?i)(?:proxy-)?authorization['\"]?\s*[:=]\s*['\"]?(?:(?:bearer|basic)\s+)?[^\s,;'\"}]+"
    r"|bearer\s+[\w.~+/=-]+|\bsk-[\w-]{6,}"
)
# What engines say of a prompt that is too long; vLLM's input processor says the last (0.33, v1/engine).
_TOO_LONG = ("context length", "longer than the model", "maximum model length")
_ADDRESSES = re.compile(
    r"\w+://[^\s'\"<>)]+"
    r"|\[[0-9a-fA-F:]*:[0-9a-fA-F:]*\](?::\d+)?"
    r"|\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d+)?"
    r"|\b[a-zA-Z][\w-]*(?:\.[\w-]+)*:\d{4,5}\b"
)


@dataclass(frozen=True, slots=True)
class ApiError:
    """One error. `status` is the HTTP status of the answer, or the one that a stream would have had."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None

    @property
    def is_clients_fault(self) -> bool:
        """True if every engine would answer the same, so that a retry is useless."""
        return 400 <= self.status < 500 and self.status not in (408, 409, 425, 429)

    def openai(self) -> dict[str, str | None]:
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}


def api_error(status: int, message: str, code: str | None = None, param: str | None = None) -> ApiError:
    """An error with OpenAI's type for its status."""
    kind = _OPENAI_TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return ApiError(status, message, kind, code, param)


def engine_error(status: int, body: bytes | dict[str, Any]) -> ApiError:
    """What an engine's error answer means to the client.

    Reads vLLM's nested form, SGLang's flat one, `{"error": "text"}`, FastAPI's `detail`, plain text, HTML, and an empty
    body. Args: status 200 for an error event within a stream: its own code counts then, or else Anthropic's type.
    """
    error = _fields(body)
    code = error.get("code")
    if not 400 <= status <= 599:
        number = code if isinstance(code, int) else _STATUSES_OF_TYPES.get(str(error.get("type")), 0)
        status = number if 400 <= number <= 599 else 502
    message = _clean(error.get("message")) or f"The engine failed with status {status} and no explanation."
    if status in (401, 403):
        return api_error(502, "The engine refused the gateway's credentials.", "engine_refused")
    if status == 422:
        status = 400  # FastAPI's status for errors that OpenAI answers with 400.
    param = error.get("param")
    return api_error(status, message, _code(status, code, message), _clean(param)[:100] if param else None)


def error_body(api: Api, error: ApiError, request_id: str | None = None) -> bytes:
    """The JSON body of an error answer in the API's form."""
    return orjson.dumps(_anthropic(error, request_id) if api == "messages" else {"error": error.openai()})


def error_event(api: Api, error: ApiError, request_id: str | None = None, sequence_number: int = 0) -> bytes:
    """The event that ends a broken stream, so that SDKs raise instead of taking silence for the end.

    The responses form has its documented flat fields and also `error`, because the OpenAI SDK raises on that alone
    (openai 3.52, _streaming.py). `sequence_number`: one more than the last that the client got. The message begins with
    the status, as SDKs format errors of answers: some agents see only this text, and retry if it names a server's fault
    (pi 0.73).
    """
    error = replace(error, message=f"{error.status} {error.message}")
    if api == "messages":
        return b"event: error\ndata: " + error_body(api, error, request_id) + b"\n\n"
    if api == "responses":
        fields = {"type": "error", "sequence_number": sequence_number, "error": error.openai()}
        fields |= {"code": error.code, "message": error.message, "param": error.param}
        return b"event: error\ndata: " + orjson.dumps(fields) + b"\n\n"
    return b"data: " + error_body(api, error) + b"\n\n"


def _anthropic(error: ApiError, request_id: str | None) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": error.message}}
    if error.code:
        body["error"]["details"] = {"error_code": error.code}
    if request_id:
        body["request_id"] = request_id
    return body


def _fields(body: bytes | dict[str, Any]) -> dict[str, Any]:
    """`message`, `param` and `code` of an error in any form, as far as present."""
    parsed: Any = body
    if isinstance(body, bytes):
        try:
            parsed = orjson.loads(body)
        except orjson.JSONDecodeError:
            text = body[: 4 * MAX_MESSAGE_LENGTH].decode("utf-8", "replace").strip()
            return {} if text.startswith("<") else {"message": text}
    if isinstance(parsed, str):
        return {"message": parsed}
    if not isinstance(parsed, dict):
        return {}
    error = parsed.get("error") or parsed.get("detail") or parsed
    match error:
        case dict():
            return error
        case str():
            return {"message": error, "code": parsed.get("code")}
        case [dict() as first, *_]:
            steps = first.get("loc")
            where = ".".join(str(step) for step in steps if step != "body") if isinstance(steps, list) else ""
            return {"message": f"{where}: {first.get('msg')}" if where else first.get("msg"), "param": where}
    return parsed


def _clean(text: object) -> str:
    if not isinstance(text, str):
        return ""
    text = _ADDRESSES.sub("[address]", _SECRETS.sub("[credential]", text[: 4 * MAX_MESSAGE_LENGTH])).strip()
    return text if len(text) <= MAX_MESSAGE_LENGTH else text[: MAX_MESSAGE_LENGTH - 3] + "..."


def _code(status: int, code: object, message: str) -> str | None:
    """OpenAI's code: agents look for the first two; an engine's number only repeats the status."""
    lowered = message.lower()
    if status in (400, 413) and any(words in lowered for words in _TOO_LONG):
        return "context_length_exceeded"
    if status == 404 and "model" in lowered:
        return "model_not_found"
    if status == 404 and lowered == "not found":  # FastAPI's words for a route that it lacks
        return "unknown_route"
    return code if isinstance(code, str) and 0 < len(code) <= 64 and not code.isdigit() else None
