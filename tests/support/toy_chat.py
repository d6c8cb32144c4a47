"""A minimal chat server that only speaks the protocol: one token is four characters, and answers are as long as
requested.

It also runs alone, for measurements: `python tests/support/toy_chat.py --port 9000`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

TEMPLATE_TOKENS = 7


@dataclass
class Faults:
    """What goes wrong, and how many times.

    `short_by`: answers lack this many tokens. `nonsense`: JSON, but no answer. `models_after_s`: how long listing the
    models takes. `models`: what is listed. `prompt_tokens`: what usage counts; 0: the truth.
    """

    num_unavailable: int = 0
    num_broken_streams: int = 0
    short_by: int = 0
    nonsense: bool = False
    models_after_s: float = 0.0
    models: Any = field(default_factory=lambda: [{"id": "toy", "object": "model"}])
    prompt_tokens: Any = 0


@dataclass
class ToyChat:
    """The ASGI application. `seen` has path, headers and body of every chat request; `calls` has every other
    request."""

    faults: Faults = field(default_factory=Faults)
    answer_headers: dict[str, str] = field(default_factory=dict)
    knows_trajectories: bool = False
    with_tool_calls: bool = False
    empty_finish: bool = False
    seen: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive()).get("more_body"):
            body += message.get("body", b"")
        body += message.get("body", b"")
        path = scope["path"]
        if not path.endswith("/chat/completions"):
            self.calls.append((scope["method"], path))
            if self.empty_finish and path.endswith("/finish"):
                await self._start(send, 204, "text/plain")
                await send({"type": "http.response.body", "body": b""})
                return
            await self._json(send, *await self._other(path))
            return
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        request = json.loads(body)
        self.seen.append((path, headers, request))
        if self.faults.num_unavailable > 0:
            self.faults.num_unavailable -= 1
            await self._json(send, 503, {"error": {"message": "no engine", "code": 503}})
            return
        if self.faults.nonsense:
            await self._json(send, 200, {"choices": []})
            return
        await self._chat(send, request)

    async def _other(self, path: str) -> tuple[int, dict[str, Any]]:
        if path == "/v1/models":
            await asyncio.sleep(self.faults.models_after_s)
            return 200, {"object": "list", "data": self.faults.models}
        if path.startswith("/v1/trajectories/") and self.knows_trajectories:
            num_turns = len(self.seen)
            return 200, {"turns": [{"queued_s": 0.5} for _ in range(num_turns)]}
        return 404, {"error": {"message": "no such route", "code": 404}}

    async def _chat(self, send: Any, request: dict[str, Any]) -> None:
        num_chars = sum(len(m["content"]) for m in request["messages"])
        num_tokens = request["max_tokens"] - self.faults.short_by
        usage: dict[str, Any] = {
            "prompt_tokens": TEMPLATE_TOKENS * len(request["messages"]) + num_chars // 4,
            "completion_tokens": num_tokens,
            "total_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        if self.faults.prompt_tokens != 0:
            usage["prompt_tokens"] = self.faults.prompt_tokens
        finish = "stop" if self.faults.short_by else "length"
        function = {"name": "run", "arguments": "{}"}
        call = {"index": 0, "id": "call_1", "type": "function", "function": function}
        calls = {"tool_calls": [call]} if self.with_tool_calls else {}
        common = {"id": "chatcmpl-1", "created": 1, "model": "toy"}
        if not request["stream"]:
            message = {"role": "assistant", "content": "abc " * num_tokens} | calls
            choice = {"index": 0, "message": message, "finish_reason": finish}
            await self._json(send, 200, common | {"object": "chat.completion", "choices": [choice], "usage": usage})
            return
        common |= {"object": "chat.completion.chunk"}
        await self._start(send, 200, "text/event-stream")
        deltas = [{"role": "assistant", "content": ""}, *[{"content": "abc "}] * num_tokens, calls]
        for index, delta in enumerate(deltas):
            ended = finish if index == len(deltas) - 1 else None
            choice = {"index": 0, "delta": delta, "finish_reason": ended}
            await self._event(send, common | {"choices": [choice], "usage": None})
            if index == 1 and self.faults.num_broken_streams > 0:
                self.faults.num_broken_streams -= 1
                return  # The body never ends, so uvicorn drops the connection.
        await self._event(send, common | {"choices": [], "usage": usage})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _start(self, send: Any, status: int, content_type: str) -> None:
        headers = {"content-type": content_type} | self.answer_headers
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _event(self, send: Any, event: dict[str, Any]) -> None:
        body = b"data: " + json.dumps(event).encode() + b"\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _json(self, send: Any, status: int, value: dict[str, Any]) -> None:
        await self._start(send, status, "application/json")
        await send({"type": "http.response.body", "body": json.dumps(value).encode()})


@contextmanager
def serve(app: ToyChat, port: int = 0) -> Iterator[str]:
    """Run the application on its own port in a thread; yields its address, and stops it on exit."""
    listener = socket.create_server(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=0))
    # The socket already listens, so a client that connects before the server is up waits in its backlog.
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=9000)
    uvicorn.run(ToyChat(), port=parser.parse_args().port, log_level="error")
