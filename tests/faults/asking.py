"""How these tests send requests to a gateway, in the four APIs, and read the replies."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

APIS = ("chat", "completions", "responses", "messages")
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}


def body_of(api: str, stream: bool = False, tokens: int = 8, text: str = "hello", **more: Any) -> dict[str, Any]:
    """A request for this many tokens."""
    messages = [{"role": "user", "content": text}]
    body: dict[str, Any] = {"model": "simulated", "stream": stream, "ignore_eos": True}
    match api:
        case "chat":
            body |= {"messages": messages, "max_tokens": tokens}
        case "completions":
            body |= {"prompt": text, "max_tokens": tokens}
        case "responses":
            body |= {"input": text, "max_output_tokens": tokens}
        case _:
            body |= {"messages": messages, "max_tokens": tokens}
    return body | more


@dataclass(frozen=True)
class Reply:
    """An answer as its client received it: whole, or as the data of a stream's events."""

    status: int
    headers: httpx.Headers
    text: str

    @property
    def json(self) -> Any:
        return orjson.loads(self.text)

    @property
    def events(self) -> list[Any]:
        """The data of all events except [DONE]."""
        lines = [line.removeprefix("data: ") for line in self.text.splitlines() if line.startswith("data: ")]
        return [orjson.loads(line) for line in lines if line != "[DONE]"]

    def is_finished(self, api: str) -> bool:
        """Whether it is a good answer with its proper end."""
        if self.status != 200:
            return False
        if "event-stream" not in self.headers["content-type"]:
            return "error" not in self.json or not self.json["error"]
        if any(event.get("error") or event.get("type") == "error" for event in self.events):
            return False
        if api in ("chat", "completions"):
            return self.text.endswith("data: [DONE]\n\n")
        last = self.events[-1]["type"]
        return last in ("message_stop", "response.completed", "response.incomplete")

    def error(self, api: str) -> dict[str, Any]:
        """The error that it ended with; checks that the error has the API's own form."""
        is_stream = "event-stream" in self.headers["content-type"]
        body = self.events[-1] if is_stream else self.json
        if is_stream:
            assert "[DONE]" not in self.text, "a stream that ends with an error has no [DONE]"
        if api == "messages":
            check_anthropic_error(body)
        else:
            assert set(body["error"]) == {"message", "type", "param", "code"}, body
            assert body["error"]["code"] is None or isinstance(body["error"]["code"], str)
        if api == "responses" and is_stream:
            assert body["type"] == "error" and isinstance(body["sequence_number"], int), body
        error: dict[str, Any] = body["error"]
        assert error["message"]
        return error


@asynccontextmanager
async def client_connection(
    url: str, api: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> AsyncIterator[asyncio.StreamReader]:
    """A client on a connection of its own, which it drops on exit; its answer can be read."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request_bytes(api, body, headers or {}))
    try:
        yield reader
    finally:
        writer.transport.abort()


def request_bytes(api: str, body: dict[str, Any], headers: dict[str, str]) -> bytes:
    """The HTTP request."""
    data = orjson.dumps(body)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {PATHS[api]} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n{lines}\r\n".encode() + data


async def ask(
    client: httpx.AsyncClient, url: str, api: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> Reply:
    """Send a request and read its whole answer."""
    response = await client.post(url + PATHS[api], json=body, headers=headers)
    assert response.headers["x-request-id"]
    return Reply(response.status_code, response.headers, response.text)


def check_anthropic_error(body: dict[str, Any]) -> None:
    """Check that it has Anthropic's form; only an error with a code has details."""
    assert body["type"] == "error" and {"type", "message"} == set(body["error"]) - {"details"}, body
    details = body["error"].get("details", {"error_code": "none"})
    assert list(details) == ["error_code"] and isinstance(details["error_code"], str), body


def check_error(api: str, response: httpx.Response, status: int, code: str | None = None) -> None:
    """Check that the response is an error in the API's own form, with a request id."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    if api == "messages":
        check_anthropic_error(body)
        assert code is None or body["error"]["details"]["error_code"] == code
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}, body
        assert code is None or body["error"]["code"] == code
    assert body["error"]["message"]


async def raw(url: str, data: bytes, timeout_s: float = 5.0) -> bytes:
    """Everything the gateway sends for these bytes until it closes the connection."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        async with asyncio.timeout(timeout_s):
            return await reader.read()
    finally:
        writer.close()


async def are_waiting(client: httpx.AsyncClient, url: str, num: int) -> bool:
    """Whether so many turns wait at a gateway."""
    return bool((await client.get(url + "/healthz")).json()["waiting_turns"] == num)


async def nothing_is_pending(client: httpx.AsyncClient, url: str) -> bool:
    """Whether everything that was put is in the gateway's store."""
    return bool((await client.get(url + "/healthz")).json()["store"]["num_pending"] == 0)
