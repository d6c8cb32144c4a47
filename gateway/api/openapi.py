"""Declares the hot routes in FastAPI, for its documentation; `front.py` serves them."""

from typing import Any

from fastapi import FastAPI, Response
from starlette.exceptions import HTTPException

from engines.upstream import SGLANG_GENERATE, VLLM_GENERATE

_MESSAGES = {"type": "array", "items": {"type": "object", "required": ["role"]}}
_MODEL = {"type": "string", "description": "A name from /v1/models."}
_STREAM = {"type": "boolean", "default": False, "description": "Answer as server-sent events."}
_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer"}}
_BODIES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "/v1/chat/completions": ("Chat completion (OpenAI)", {"messages": _MESSAGES, "stream": _STREAM}, ["messages"]),
    "/v1/completions": ("Completion (OpenAI)", {"prompt": {}, "stream": _STREAM}, ["prompt"]),
    "/v1/responses": ("Response (OpenAI)", {"input": {}, "stream": _STREAM}, ["input"]),
    "/v1/messages": (
        "Message (Anthropic)",
        {"messages": _MESSAGES, "max_tokens": {"type": "integer"}, "stream": _STREAM},
        ["messages", "max_tokens"],
    ),
    VLLM_GENERATE: (
        "Generate from token ids (vLLM)",
        {"token_ids": _IDS, "sampling_params": {}, "stream": _STREAM},
        ["token_ids"],
    ),
    SGLANG_GENERATE: (
        "Generate from token ids or text (SGLang)",
        {"input_ids": _IDS, "text": _TEXT, "stream": _STREAM},
        [],
    ),
    "/v1/embeddings": ("Embeddings (OpenAI)", {"input": {}}, ["input"]),
    "/v1/messages/count_tokens": ("Count a message's tokens (Anthropic)", {"messages": _MESSAGES}, ["messages"]),
    "/tokenize": ("Tokenize text (vLLM, SGLang)", {"prompt": _TEXT}, []),
    "/detokenize": ("Detokenize token ids (vLLM, SGLang)", {"tokens": _IDS}, []),
    "/v1/tokenize": ("Tokenize text (SGLang)", {"prompt": _TEXT}, []),
    "/v1/detokenize": ("Detokenize token ids (SGLang)", {"tokens": _IDS}, []),
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "details": {"type": "object", "properties": {"error_code": {"type": "string"}}},
            },
        },
        "request_id": {"type": "string"},
    },
}
_STATUSES = (400, 401, 404, 408, 409, 413, 429, 431, 500, 502, 503, 504)


def declare_hot_routes(app: FastAPI) -> None:
    """Add the routes of turns, and those that are passed through, to FastAPI."""

    async def not_served_here() -> Response:
        raise HTTPException(404)  # only a path with a newline behind it comes here: Starlette's patterns overlook that

    for path, (summary, fields, required) in _BODIES.items():
        app.add_api_route(
            path,
            not_served_here,
            methods=["POST"],
            tags=["openai"],
            summary=summary,
            response_class=Response,
            openapi_extra=_described(path, fields, required),
            operation_id=path.strip("/").replace("/", "_"),
        )
    _describe_errors(app)


def _described(path: str, fields: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {"model": _MODEL, **fields},
        "required": required,
        "additionalProperties": True,
    }
    name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    error = {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}}
    answer = {"description": "The answer", "content": {"application/json": {"schema": {}}, "text/event-stream": {}}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": answer,
            **{str(status): {"description": "An error", **error} for status in _STATUSES},
        },
    }


def _describe_errors(app: FastAPI) -> None:
    build = app.openapi

    def openapi() -> dict[str, Any]:
        schema = build()
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        schemas |= {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
