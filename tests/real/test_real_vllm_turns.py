"""What a real vLLM does with turns that wait while others run, and whether two servers agree."""

import asyncio

import httpx
import orjson
import pytest

from engines.local_vllm import LocalEngine
from tests.engines.engine_under_test import TIMEOUT_S, EngineUnderTest, engine_under_test
from tests.real.test_contract_real import FACTS
from tests.support.rounds import play_rounds

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]


async def preemptions(engine: EngineUnderTest) -> float:
    _, page = await engine.http.get("/metrics", TIMEOUT_S)
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(b"vllm:num_preemptions_total{"))


async def test_a_waiting_urgent_turn_preempts_nobody_and_aborts_without_tokens(
    real_engines: list[LocalEngine],
) -> None:
    """A running turn keeps its slot. The aborted turn gets HTTP 200 and the reason `abort`, which a gateway must not
    take for finished."""

    async def play(_: int) -> bool:
        before, request_id = await preemptions(engine), engine.new_id()
        async with engine.endless_turns(engine.facts.slots) as others:
            if not await engine.until_or_ended(lambda seen: seen.num_running == engine.facts.slots, others):
                return False
            urgent = asyncio.create_task(engine.ask(engine.endless, priority=-5, request_id=request_id))
            waits = await engine.until_or_ended(lambda seen: seen.num_waiting == 1, others)
            target, body = engine.facts.abort(request_id)
            await engine.http.post(target, orjson.dumps(body), TIMEOUT_S)
            answer = await urgent
            assert await preemptions(engine) == before
        if waits is None:
            return False
        assert answer.status == 200 and answer.json["choices"][0]["finish_reason"] == "abort"
        assert answer.json["usage"]["completion_tokens"] == 0
        return True

    async with engine_under_test(real_engines[0].url, FACTS) as engine:
        await play_rounds("endless turns held all slots", play)


async def test_two_engines_agree_on_greedy_text_of_the_same_context(
    real_engines: list[LocalEngine],
) -> None:
    """Tests of moved and resumed trajectories rely on this: the same context gives the same tokens, another context
    gives others."""
    rows = "".join(f"row {i}; " for i in range(400))

    async def text(engine: LocalEngine, word: str) -> str:
        body = {"model": "tiny", "prompt": f"{word} {rows}", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
        answer = await client.post(f"{engine.url}/v1/completions", json=body)
        return str(answer.json()["choices"][0]["text"])

    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        texts = await asyncio.gather(*(text(engine, word) for word in ("one", "two") for engine in real_engines))
    assert texts[0] == texts[1] and texts[2] == texts[3] and texts[0] != texts[2]
    windows = [texts[0][i : i + 8] for i in range(len(texts[0]) - 8)]
    assert len(set(windows)) > 0.9 * len(windows), "greedy text repeats itself"
