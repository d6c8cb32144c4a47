"""A token stream that claims to be done, but has no end."""

import asyncio

import httpx
import pytest

from engines.simulated.server import serve_engine
from tests.faults.raw_engine import STREAM_HEAD, asked_behind, chunk, raw_engine, whole
from tests.faults.token_jobs import ENDURING, body_of, contents_of_replies, engine_of, undisturbed_contents
from tests.support.gateway import running_gateway


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stream_that_is_done_without_an_end_is_continued(client: httpx.AsyncClient, stream: bool) -> None:
    """It is not a shorter answer: the leg fails there, and the next leg generates the rest."""
    requests = [("chat", body_of(1, "plain", "chat", stream))]
    num_cut = 0
    async with serve_engine(engine_of("vllm", speed_up=200)) as behind:

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Answers as the engine behind does, but leaves out the last tokens of the first generation."""
            nonlocal num_cut
            response = await asked_behind(client, behind, engine.posts[-1])
            if "event-stream" not in response.headers["content-type"]:
                writer.write(whole(response.content, b"%d Status" % response.status_code))
                return
            events = [event + b"\n\n" for event in response.content.split(b"\n\n") if event]
            if num_cut == 0:
                num_cut = 1
                events = [*events[:2], events[-1]]
                assert events[-1] == b"data: [DONE]\n\n"
            writer.write(STREAM_HEAD + chunk(b"".join(events)) + b"0\r\n\r\n")

        async with raw_engine(answer) as engine, running_gateway(engine.url, **ENDURING) as gateway:
            received = await contents_of_replies(client, gateway.url, requests)
    assert num_cut == 1, "the turn did not run at token level"
    assert received == await undisturbed_contents(requests)
