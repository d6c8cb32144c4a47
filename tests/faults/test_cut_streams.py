"""A stream of tokens that says that it is done, and has no end."""

import asyncio

import httpx
import pytest

from engines.simulated.server import serve_engine
from tests.faults.raw_engine import STREAM_HEAD, chunk, raw_engine, whole
from tests.faults.token_jobs import ENDURING, all_told, body_of, engine_of, undisturbed
from tests.support.gateway import running_gateway


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_whose_end_the_engine_left_out_goes_on_from_there(
    client: httpx.AsyncClient, stream: bool
) -> None:
    """It is no shorter answer: its turn fails there, and the next leg makes the rest."""
    asked = [("chat", body_of(1, "plain", "chat", stream))]
    num_cut = 0
    async with serve_engine(engine_of("vllm", speed_up=200)) as behind:

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """As the engine behind, but the first generation's last tokens are left out."""
            nonlocal num_cut
            head, _, body = engine.posts[-1].partition(b"\r\n\r\n")
            path = head.split()[1].decode()
            said = await client.post(behind + path, content=body, headers={"content-type": "application/json"})
            if "event-stream" not in said.headers["content-type"]:
                writer.write(whole(said.content, b"%d Status" % said.status_code))
                return
            events = [event + b"\n\n" for event in said.content.split(b"\n\n") if event]
            if num_cut == 0:
                num_cut = 1
                events = [*events[:2], events[-1]]
                assert events[-1] == b"data: [DONE]\n\n"
            writer.write(STREAM_HEAD + chunk(b"".join(events)) + b"0\r\n\r\n")

        async with raw_engine(answer) as engine, running_gateway(engine.url, **ENDURING) as gateway:
            got = await all_told(client, gateway.url, asked)
    assert num_cut == 1, "the turn passed through"
    assert got == await undisturbed(asked)
