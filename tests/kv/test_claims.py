"""The reported KV that trajectories claim: what their claims amount to in their engine's cache."""

import httpx

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from tests.support.gateway import running_gateway

METRIC = "heddle_engine_kv_claimed_tokens{"


async def test_a_prompt_shared_by_siblings_is_counted_once() -> None:
    """As admission counts it: four siblings in tool calls hold one prompt and four answers, not four contexts. The
    prompt's length was estimated before the first of them had run."""
    body = {"messages": [{"role": "user", "content": "Weave a long prompt. " * 200}], "max_tokens": 5}
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=100)) as engine,
        running_gateway(engine) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as client,
    ):
        contexts = []
        for number in range(4):
            headers = {"x-trajectory-id": f"t{number}", "x-group-id": "g"}
            answer = await client.post("/v1/chat/completions", json=body, headers=headers)
            contexts.append(answer.json()["usage"]["total_tokens"])
        [shown] = (await client.get("/v1/engines")).json()["data"]
        page = (await client.get("/metrics")).text
    [metric] = [float(line.split()[-1]) for line in page.splitlines() if line.startswith(METRIC)]
    assert metric == shown["kv_claimed_tokens"]
    assert max(contexts) <= metric < 1.5 * max(contexts)
