"""What an engine receives for a request: its body, the scheduler's priority, and no client header but its trace."""

import asyncio
from typing import Any

import httpx
import pytest

from gateway.config import EngineSettings
from gateway.turns.turns import TURN_ROUTES
from tests.api.conftest import HELLO, MODEL, Wire, running_site, toy
from tests.support.engine import Asked, Script, recorded_engine
from tests.support.gateway import eventually, running_gateway

CHAT = "/v1/chat/completions"
APIS = ("chat/completions", "completions", "responses", "messages")

SECRETS = {
    "authorization": "Bearer secret",
    "x-api-key": "secret",
    "cookie": "secret=1",
    "proxy-authorization": "Basic secret",
    "openai-organization": "secret",
    "x-forwarded-for": "10.0.0.1",
    "x-vllm-priority": "-999",
    "x-data-parallel-rank": "3",
    "connection": "x-custom",
    "x-custom": "secret",
}


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize("path", [*(f"/v1/{api}" for api in APIS), "/tokenize", "/v1/embeddings"])
async def test_no_header_of_the_client_reaches_the_engine(dialect: Any, path: str) -> None:
    """Above all not its key, nor anything that would steer the engine around the scheduler."""
    async with running_site(toy(dialect)) as site:
        body = {"model": MODEL, "messages": HELLO, "prompt": "a", "input": "a", "max_tokens": 4}
        answer = await site.client.post(path, json=body, headers=SECRETS)
        assert answer.status_code == 200
        (request,) = site.engine.turns
        ours = {"x-request-id", "x-vllm-priority", "x-session-id", "x-smg-routing-key"}
        assert set(request.headers) - ours == {"host", "content-type", "content-length"}
        assert "secret" not in str(request)
        assert request.headers.get("x-vllm-priority") != "-999"


TRACE = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "a=1,b@c=x y"}


def traces(asked: list[Asked]) -> list[dict[str, str]]:
    """The trace headers of each leg."""
    return [{name: value for name, value in one.headers.items() if name in TRACE} for one in asked]


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_an_engine_is_told_the_trace_of_each_leg(dialect: Any, token_legs: str) -> None:
    """On every API, streamed or not, below ASGI or through it; a turn without a trace gets none."""
    async with running_site(toy(dialect), cors_origins=("*",)) as site:
        body = {"model": MODEL, "messages": HELLO, "prompt": "a", "input": "a", "max_tokens": 4}
        for api in APIS:
            for more in ({}, {"origin": "https://page.example"}):
                for stream in (False, True):
                    answer = await site.client.post(f"/v1/{api}", json={**body, "stream": stream}, headers=TRACE | more)
                    assert answer.status_code == 200, answer.text
        assert (await site.chat()).status_code == 200
        told = traces([asked for asked in site.engine.turns if asked.path in TURN_ROUTES])
    assert told == [TRACE] * 16 + [{}]


async def test_a_later_leg_has_the_trace_too(wire: Wire) -> None:
    """A turn's legs are parts of one trace."""
    async with running_site(retry_pause_s=0) as site:

        async def fail(_: Asked, write: Any) -> None:
            del site.engine.scripts[wire.path]
            await write(b"{}")

        site.engine.scripts[wire.path] = Script(fail, 500)
        assert (await site.chat(headers=TRACE)).status_code == 200
        assert traces([asked for asked in site.engine.turns if asked.path == wire.path]) == [TRACE, TRACE]


@pytest.mark.parametrize(
    ("parent", "state", "told"),
    [
        ("00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01", "a=1", {}),
        ("ff" + TRACE["traceparent"][2:], "a=1", {}),
        ("00-" + "0" * 32 + "-00f067aa0ba902b7-01", "a=1", {}),
        (TRACE["traceparent"] + "-x", "a=1", {}),
        ("", "a=1", {}),
        (TRACE["traceparent"], "a=" + "1" * 511, {"traceparent": TRACE["traceparent"]}),
        (TRACE["traceparent"], "a=\u00e9", {"traceparent": TRACE["traceparent"]}),
        (TRACE["traceparent"], "", {"traceparent": TRACE["traceparent"]}),
    ],
)
async def test_a_malformed_trace_is_not_passed_on(parent: str, state: str, told: dict[str, str]) -> None:
    """The turn is served without it: a trace is never a reason to refuse."""
    async with running_site() as site:
        headers = [(b"traceparent", parent.encode()), (b"tracestate", state.encode("latin-1"))]
        assert (await site.chat(headers=headers)).status_code == 200
        assert traces(site.engine.turns) == [told]


async def test_an_engine_gets_its_own_key() -> None:
    """The key that is configured for it, whatever the client sent."""
    async with recorded_engine(toy(api_key="engine-key")) as engine:
        settings = EngineSettings(url=engine.url, kind="vllm", api_key="engine-key")
        async with running_gateway(settings) as listening, httpx.AsyncClient(base_url=listening.url) as client:
            headers = {"authorization": "Bearer client-key"}
            answer = await client.post(CHAT, json={"model": MODEL, "messages": HELLO, "max_tokens": 4}, headers=headers)
            assert answer.status_code == 200
            assert engine.turns[-1].headers["authorization"] == "Bearer engine-key"


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_a_longer_trajectory_gets_a_lower_priority_number(dialect: Any) -> None:
    """Both kinds of engine serve lower numbers first, so a trajectory that is expected to be longer goes first."""
    async with running_site(toy(dialect)) as site:
        for name, tokens in (("short", 100), ("long", 9000)):
            await site.client.post("/v1/trajectories", json={"id": name, "expected_output_tokens": tokens})
            assert (await site.chat(f"/t/{name}{CHAT}", priority=5)).status_code == 200
        priorities = [
            request.headers.get("x-vllm-priority") or request.json["priority"] for request in site.engine.turns
        ]
        assert int(priorities[1]) < int(priorities[0])


async def test_sglangs_generate_gets_no_model() -> None:
    """The gateway needs the name if a fleet serves several; the engine refuses fields that it does not know."""
    async with running_site(toy("sglang")) as site:
        body = {"model": MODEL, "input_ids": [300, 301], "sampling_params": {"max_new_tokens": 3}}
        answer = await site.client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        (request,) = site.engine.turns
        assert "model" not in request.json and request.json["input_ids"] == [300, 301] and request.json["rid"]


async def test_sglang_gets_request_ids_of_one_length() -> None:
    """SGLang aborts by prefix, so no id may begin another: they are distinct, whatever id the client sent."""
    async with running_site(toy("sglang")) as sglang:
        for number in range(3):
            await sglang.chat(rid=f"mine-{number}")
        ids = [request.json["rid"] for request in sglang.engine.turns]
    assert len(set(ids)) == 3
    assert len({len(one) for one in ids}) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_sglang_is_asked_to_abort_a_turn_whose_client_left(stream: bool) -> None:
    """After a closed connection alone, it would run on for seconds (SGLang 0.5.23, managers/tokenizer_manager.py)."""
    async with running_site(toy("sglang")) as site:
        turn = asyncio.create_task(site.chat(stream=stream, max_tokens=8000, ignore_eos=True))
        await eventually(lambda: site.engine.turns)
        turn.cancel()
        await eventually(lambda: len(site.engine.turns) == 2, 1.0)
        request, aborted = site.engine.turns
        assert (aborted.path, aborted.json["rid"]) == ("/abort_request", request.json["rid"])
