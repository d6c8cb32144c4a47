"""An engine whose name cannot be looked up for a moment."""

import asyncio
import logging
import socket
from typing import Any

import httpx
import pytest

import engines.http.addresses
from tests.faults.asking import ask, body_of
from tests.faults.raw_engine import CHAT_EVENT, STREAM_HEAD, chunk, raw_engine, resets, writes
from tests.support.gateway import eventually, running_gateway

_END = (
    b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    b"data: [DONE]\n\n"
)


async def test_a_name_that_is_unknown_for_a_moment_costs_no_turn(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream that runs meanwhile goes on, because only an engine that refuses a connection is lost at once."""
    loop = asyncio.get_running_loop()
    num_failed, is_away, may_end = 0, False, asyncio.Event()
    really = loop.getaddrinfo

    async def look_up(host: str, *args: Any, **more: Any) -> Any:
        nonlocal num_failed
        if host == "engine.test" and is_away:
            num_failed += 1
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return await really("127.0.0.1" if host == "engine.test" else host, *args, **more)

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(CHAT_EVENT))
        engine.answer = resets  # the next turn takes the other connection with it
        await may_end.wait()
        writer.write(chunk(_END) + b"0\r\n\r\n")

    monkeypatch.setattr(loop, "getaddrinfo", look_up)
    monkeypatch.setattr(engines.http.addresses, "_FRESH_S", 0.0)
    caplog.set_level(logging.WARNING)
    async with raw_engine(stream) as engine:
        url = engine.url.replace("127.0.0.1", "engine.test")
        async with running_gateway(url, observe_interval_s=0.05, retry_pause_s=0, faults_to_open=1000) as gateway:
            turn = asyncio.create_task(ask(client, gateway.url, "chat", body_of("chat", stream=True)))
            await eventually(lambda: engine.answer is resets)
            is_away = True
            other = asyncio.create_task(ask(client, gateway.url, "chat", body_of("chat")))
            await eventually(lambda: num_failed >= 3)
            engine.answer, is_away = writes(STREAM_HEAD + chunk(CHAT_EVENT + _END) + b"0\r\n\r\n"), False
            may_end.set()
            assert (await turn).is_finished("chat")
            other.cancel()
    assert [record.message for record in caplog.records if record.message == "engine is lost"] == []
