"""Simulated engines whose weights are updated while requests run."""

import asyncio
from typing import Any

import httpx2
import pytest

from engines.http import HttpClient
from engines.simulated.text import Tokenizer
from engines.weights import WEIGHTS, NewWeights, UpdateMode, WeightsError
from tests.simulated.conftest import Start
from tests.simulated.http import events, metric

KINDS = pytest.mark.parametrize("kind", ["vllm", "sglang"])
MODES = pytest.mark.parametrize("mode", list(UpdateMode))
GAUGE = {"vllm": "vllm:num_requests_running", "sglang": "sglang:num_running_reqs"}
TOKENIZER = Tokenizer()


def transfer_to(kind: str, weights: str) -> dict[str, Any]:
    """The body that a trainer would send."""
    if kind == "vllm":
        return {"init_info": {"master_port": 1}, "update_info": {"weights": weights}}
    return {"init": {"group_name": "g"}, "distributed": {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}}


def body_of(kind: str, ids: list[int], tokens: int) -> tuple[str, dict[str, Any]]:
    """Tokens in, tokens out."""
    if kind == "vllm":
        sampling = {"max_tokens": tokens, "ignore_eos": True}
        return "/inference/v1/generate", {"token_ids": ids, "sampling_params": sampling}
    return "/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}


async def generate(client: httpx2.AsyncClient, kind: str, ids: list[int], tokens: int) -> dict[str, Any]:
    """Token ids, version spans and cached tokens of one answer."""
    path, body = body_of(kind, ids, tokens)
    answer = (await client.post(path, json=body)).raise_for_status().json()
    if kind == "vllm":
        choice, cached = answer["choices"][0], answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return {"ids": choice["token_ids"], "spans": choice["weight_versions"], "cached": cached}
    meta = answer["meta_info"]
    return {"ids": answer["output_ids"], "spans": meta["weight_versions"], "cached": meta["cached_tokens"]}


def engine_http(client: httpx2.AsyncClient) -> HttpClient:
    """The gateway's HTTP client for the same engine."""
    return HttpClient(str(client.base_url))


@KINDS
@MODES
@pytest.mark.parametrize("way", ["path", "transfer"])
async def test_running_requests_continue_under_the_new_weights(
    start: Start, kind: str, mode: UpdateMode, way: str
) -> None:
    """Earlier tokens are those of the old weights. Later ones are those of an engine with the new weights, from the
    next token on."""
    client = await start(dialect=kind, speed_up=2.0)  # 200 tokens take a second: time for a busy machine to pause them
    other = await start(dialect=kind, weight_version="v7", speed_up=1000.0)
    prompt = TOKENIZER.encode("Tell me about looms. " * 20)
    undisturbed = await generate(client, kind, prompt, 200)
    http, weights = engine_http(client), WEIGHTS[kind]
    running = asyncio.create_task(generate(client, kind, prompt, 200))
    async with asyncio.timeout(60):
        while await metric(client, GAUGE[kind]) == 0:
            pass
    await weights.pause(http, mode, 60)
    new_weights = NewWeights("v7", mode, "/weights/v7" if way == "path" else None, transfer_to(kind, "v7"))
    await weights.load(http, new_weights, 60)
    await weights.resume(http, 60)
    assert await weights.version(http, 60) == "v7"
    answer = await running
    assert [span["version"] for span in answer["spans"]] == ["default", "v7"], answer["spans"]
    num_before = answer["spans"][1]["start"]
    assert answer["spans"][0] == {"version": "default", "start": 0, "end": num_before}
    assert 0 < num_before < 200 and answer["spans"][1]["end"] == len(answer["ids"]) == 200
    assert answer["ids"][:num_before] == undisturbed["ids"][:num_before]
    resumed = await generate(other, kind, prompt + answer["ids"][:num_before], 200 - num_before)
    assert answer["ids"][num_before:] == resumed["ids"]
    assert answer["ids"][num_before:] != undisturbed["ids"][num_before:]
    http.close()


@KINDS
@MODES
async def test_only_vllms_keep_mode_keeps_the_prefix_cache(start: Start, kind: str, mode: UpdateMode) -> None:
    """There, requests carry a salt. SGLang has no salt, so its cache is always flushed."""
    client = await start(dialect=kind)
    prompt = TOKENIZER.encode("Tell me about looms. " * 20)
    await generate(client, kind, prompt, 4)
    assert (await generate(client, kind, prompt, 4))["cached"] > 0
    http, weights = engine_http(client), WEIGHTS[kind]
    await weights.pause(http, mode, 60)
    await weights.load(http, NewWeights("v7", mode, "/weights/v7"), 60)
    await weights.resume(http, 60)
    is_kept = (await generate(client, kind, prompt, 4))["cached"] > 0
    assert is_kept == (kind == "vllm" and mode is UpdateMode.KEEP)
    http.close()


@KINDS
async def test_a_failed_update_reports_the_step_and_the_engines_error(start: Start, kind: str) -> None:
    """The engine refuses a path that does not exist. An unreachable engine is a failure but not a refusal."""
    client = await start(dialect=kind)
    http, weights = engine_http(client), WEIGHTS[kind]
    await weights.pause(http, UpdateMode.KEEP, 60)
    with pytest.raises(WeightsError, match=r"load: .*missing-weights") as failed:
        await weights.load(http, NewWeights("v7", UpdateMode.KEEP, "/weights/missing-weights"), 60)
    assert failed.value.is_refusal
    assert await weights.version(http, 60) == "default"
    http.close()
    nobody = HttpClient("http://127.0.0.1:9")
    with pytest.raises(WeightsError, match="pause: ") as failed:
        await weights.pause(nobody, UpdateMode.KEEP, 60)
    assert not failed.value.is_refusal


@KINDS
async def test_a_stream_in_flight_just_pauses(start: Start, kind: str) -> None:
    """No token is lost or repeated, whatever weights it comes from."""
    client = await start(dialect=kind, speed_up=2.0)  # 200 tokens take a second: time for a busy machine to pause them
    body = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 150, "ignore_eos": True, "stream": True}
    http, weights = engine_http(client), WEIGHTS[kind]
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json={**body, "model": "simulated"}) as response:
        lines = response.aiter_lines()
        text += await anext(lines) + "\n"
        for mode in UpdateMode:
            await weights.pause(http, mode, 60)
            await weights.load(http, NewWeights(mode.value, mode, f"/weights/{mode.value}"), 60)
            await weights.resume(http, 60)
        async for line in lines:
            text += line + "\n"
    chunks = events(text)
    assert chunks[-1] == "[DONE]"
    content = "".join(e["choices"][0]["delta"].get("content") or "" for e in chunks[:-1] if e["choices"])
    assert len(TOKENIZER.encode(content)) == 150
    http.close()
