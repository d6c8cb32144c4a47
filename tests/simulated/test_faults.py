"""Faults on purpose: each looks to a client like the real one."""

import asyncio
from typing import Any

import httpx2
import pytest

from engines.profiles import load_profile
from engines.simulated.server import serve_engine
from engines.simulated.settings import Fault, SimulatedEngineSettings

from .conftest import Start
from .http import CHAT, events

BODY = {**CHAT, "max_tokens": 10, "ignore_eos": True}


async def _set(client: httpx2.AsyncClient, **fault: Any) -> None:
    assert (await client.post("/simulate/faults", json={"faults": [fault]})).status_code == 200


@pytest.mark.parametrize(("kind", "status"), [("refuse", 503), ("error", 500)])
async def test_a_fault_ends_after_its_count(start: Start, kind: str, status: int) -> None:
    """One request meets it, the next does not. Health checks are not affected."""
    client = await start()
    await _set(client, kind=kind, count=1)
    assert (await client.get("/health")).status_code == 200
    codes = [(await client.post("/v1/chat/completions", json=BODY)).status_code for _ in range(2)]
    assert codes == [status, 200]


async def test_html_and_nonsense_are_not_json(start: Start) -> None:
    """A proxy's error page, a truncated answer, and one broken event in a stream."""
    client = await start()
    await _set(client, kind="html", count=1)
    page = await client.post("/v1/chat/completions", json=BODY)
    assert (page.status_code, page.headers["content-type"]) == (502, "text/html")
    await _set(client, kind="nonsense", count=1)
    broken = await client.post("/v1/chat/completions", json=BODY)
    assert broken.status_code == 200
    with pytest.raises(ValueError, match=r"JSON|Expecting|char"):
        broken.json()
    await _set(client, kind="nonsense", count=1, after_chunks=3)
    stream = await client.post("/v1/chat/completions", json={**BODY, "stream": True})
    with pytest.raises(ValueError, match=r"JSON|Expecting|delimiter"):
        events(stream.text)


async def test_a_reset_before_the_answer_is_a_connection_error(start: Start) -> None:
    """Nothing of an answer came, so it is safe to try elsewhere."""
    client = await start()
    await _set(client, kind="reset", count=1)
    with pytest.raises((httpx2.ReadError, httpx2.RemoteProtocolError)):
        await client.post("/v1/chat/completions", json=BODY)


@pytest.mark.parametrize("kind", ["reset", "die"])
async def test_a_stream_breaks_after_the_configured_chunks(start: Start, kind: str) -> None:
    """The role and two tokens arrive, then the connection breaks without an end."""
    client = await start(speed_up=1.0)
    await _set(client, kind=kind, count=1, after_chunks=3)
    seen = ""
    with pytest.raises((httpx2.ReadError, httpx2.RemoteProtocolError)):
        async with client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response:
            async for part in response.aiter_text():
                seen += part
    # A reset may overtake bytes that are on their way; a plain close may not.
    assert len(events(seen)) == 3 if kind == "die" else len(events(seen)) <= 3


async def test_an_engine_that_dies_in_mid_body_breaks_the_content_length(start: Start) -> None:
    """The length was promised, so the client notices. The metrics route still answers."""
    client = await start()
    await _set(client, kind="die", count=1)
    with pytest.raises(httpx2.RemoteProtocolError):
        await client.post("/v1/chat/completions", json=BODY)
    assert (await client.get("/metrics")).status_code == 200


async def test_a_stopped_engine_breaks_its_streams() -> None:
    """Leaving `serve_engine` is the death of the process: open streams end, and nothing listens any more."""
    body = {**CHAT, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    settings = SimulatedEngineSettings(profile=load_profile("toy-cpu-tp1"))
    async with httpx2.AsyncClient() as client:
        with pytest.raises((httpx2.ReadError, httpx2.RemoteProtocolError)):
            async with serve_engine(settings) as url:
                request = client.build_request("POST", f"{url}/v1/chat/completions", json=body)
                response = await client.send(request, stream=True)
                parts = response.aiter_raw()
                await anext(parts)
            async for _ in parts:
                pass
        with pytest.raises(httpx2.ConnectError):
            await client.get(f"{url}/health")


async def test_a_hanging_engine_is_alive_and_silent(start: Start) -> None:
    """Health checks are answered, requests never are."""
    client = await start()
    await _set(client, kind="hang", count=1)
    task = asyncio.create_task(client.post("/v1/chat/completions", json=BODY))
    for _ in range(20):
        assert (await client.get("/health")).status_code == 200
    assert not task.done()
    task.cancel()


async def test_a_slow_fault_delays_the_answer_until_it_is_removed(start: Start) -> None:
    """It was given to the constructor; DELETE removes it."""
    client = await start(faults=(Fault("slow", delay_s=0.3),))
    with pytest.raises(httpx2.ReadTimeout):
        await client.post("/v1/chat/completions", json=BODY, timeout=0.05)
    assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200
    await client.delete("/simulate/faults")
    assert (await client.post("/v1/chat/completions", json=BODY, timeout=0.25)).status_code == 200


async def test_a_faults_probability_follows_the_seed(start: Start) -> None:
    """With the same seed the same requests meet the fault."""
    patterns = []
    for seed in (1, 1, 2):
        client = await start(seed=seed, faults=(Fault("refuse", probability=0.5),))
        answers = [await client.post("/v1/chat/completions", json={**BODY, "max_tokens": 1}) for _ in range(24)]
        patterns.append([answer.status_code for answer in answers])
    assert patterns[0] == patterns[1] != patterns[2]
    assert {200, 503} == set(patterns[0])


async def test_an_unknown_fault_is_refused(start: Start) -> None:
    """The message lists the fields of a fault."""
    client = await start()
    response = await client.post("/simulate/faults", json={"faults": [{"kind": "gremlin"}]})
    assert response.status_code == 400 and "after_chunks" in response.text
