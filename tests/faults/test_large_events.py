"""An engine's event that is larger than the gateway holds."""

import asyncio

import httpx
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from tests.faults.asking import ask, body_of
from tests.faults.raw_engine import STREAM_HEAD, asked_behind, chunk, raw_engine, whole
from tests.support.gateway import running_gateway


@pytest.mark.parametrize("token_legs", ["off", "auto"])
async def test_an_event_that_is_too_large_fails_its_turn_and_not_the_engine(
    client: httpx.AsyncClient, token_legs: str
) -> None:
    """The request asked for it: it is not generated again, and the circuit stays closed."""
    paths = []
    async with serve_engine(SimulatedEngineSettings(speed_up=200)) as behind:

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Answers as the engine behind does, but a stream's first event is 17 MiB long."""
            response = await asked_behind(client, behind, engine.posts[-1])
            if "event-stream" not in response.headers["content-type"]:
                writer.write(whole(response.content, b"%d Status" % response.status_code))
                return
            paths.append(response.url.path)
            writer.write(STREAM_HEAD + chunk(b": " + b"x" * 17 * 2**20) + chunk(response.content) + b"0\r\n\r\n")
            await writer.drain()

        async with (
            raw_engine(answer) as engine,
            running_gateway(
                engine.url, token_legs=token_legs, faults_to_open=1, observe_interval_s=30, retry_pause_s=0
            ) as gateway,
        ):
            reply = await ask(client, gateway.url, "chat", body_of("chat", True))
            assert (reply.status, reply.error("chat")["code"]) == (502, "answer_too_large")
            assert reply.headers["x-should-retry"] == "false"
            assert paths == ["/v1/chat/completions" if token_legs == "off" else "/inference/v1/generate"]
            (shown,) = (await client.get(gateway.url + "/v1/engines")).json()["data"]
            assert shown["state"] == "ready"
