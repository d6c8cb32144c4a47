"""A simulated server of two data-parallel ranks, as `vllm serve --data-parallel-size 2` and SGLang's `--dp-size 2`."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engines.http import HttpClient
from engines.profiles import load_profile
from engines.simulated.server import serve_engine
from engines.simulated.settings import Fault, SimulatedEngineSettings
from engines.weights import WEIGHTS, NewWeights, UpdateMode
from tests.simulated.http import events

CHAT, HEADER = "/v1/chat/completions", "X-data-parallel-rank"
MESSAGES = [{"role": "user", "content": "Tell me about looms, and about all who wove on them. " * 4}]
KINDS = pytest.mark.parametrize("kind", ["vllm", "sglang"])
LABEL = {"vllm": "engine", "sglang": "dp_rank"}
RUNNING = {"vllm": "vllm:num_requests_running", "sglang": "sglang:num_running_reqs"}
WAITING = {"vllm": "vllm:num_requests_waiting", "sglang": "sglang:num_queue_reqs"}
TOKENS = {"vllm": "vllm:generation_tokens_total", "sglang": "sglang:generation_tokens_total"}
PROFILE = load_profile("toy-cpu-tp1")  # about 1 ms a token
SLOW = 0.1  # an endless turn takes over a minute
TIMEOUT_S = 60


@asynccontextmanager
async def server(kind: str, **more: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a server of two ranks, which are faster than real ones."""
    settings: Any = {"dialect": kind, "profile": PROFILE, "data_parallel_size": 2, "speed_up": 20.0, **more}
    async with (
        serve_engine(SimulatedEngineSettings(**settings)) as url,
        httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client,
    ):
        yield client


@asynccontextmanager
async def endless_turns(
    client: httpx2.AsyncClient, *ranks: int | None
) -> AsyncIterator[list["asyncio.Task[httpx2.Response]"]]:
    """Turns that last as long as the block, on these ranks, or without a header."""
    turns = [asyncio.create_task(ask(client, rank, max_tokens=8_000)) for rank in ranks]
    try:
        yield turns
    finally:
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)


async def ask(client: httpx2.AsyncClient, rank: object = None, max_tokens: int = 5, **more: Any) -> httpx2.Response:
    """A turn of exactly so many tokens."""
    headers = {} if rank is None else {HEADER: str(rank)}
    body = {"messages": MESSAGES, "max_tokens": max_tokens, "ignore_eos": True, **more}
    return await client.post(CHAT, json=body, headers=headers)


async def text_on(client: httpx2.AsyncClient, rank: int) -> str:
    """What a rank answers to the same question."""
    text: str = (await ask(client, rank)).raise_for_status().json()["choices"][0]["message"]["content"]
    return text


async def by_rank(client: httpx2.AsyncClient, kind: str, names: dict[str, str]) -> list[float]:
    """A metric's value on each rank."""
    page = (await client.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    found = {sample.labels[LABEL[kind]]: sample.value for sample in samples if sample.name == names[kind]}
    return [found["0"], found["1"]]


async def until(client: httpx2.AsyncClient, kind: str, names: dict[str, str], values: list[float]) -> None:
    """Returns once the metric has these values on the ranks."""
    async with asyncio.timeout(TIMEOUT_S):
        while await by_rank(client, kind, names) != values:
            pass


# --- turns --------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("rank", [0, 1])
async def test_the_header_names_the_rank_that_answers(kind: str, rank: int) -> None:
    """Its series count the turn, the other's do not."""
    async with server(kind) as client:
        assert (await ask(client, rank)).status_code == 200
        assert await by_rank(client, kind, TOKENS) == [5 * (rank == 0), 5 * (rank == 1)]


@KINDS
async def test_a_stream_comes_from_the_rank_that_the_header_names(kind: str) -> None:
    """With the words that a whole answer has."""
    async with server(kind) as client:
        *chunks, done = events((await ask(client, 1, stream=True)).text)
        assert done == "[DONE]"
        assert await by_rank(client, kind, TOKENS) == [0, 5]
        said = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]]
        assert "".join(said) == await text_on(client, 0)


@pytest.mark.parametrize("rank", [2, 5, -1])
async def test_vllm_refuses_a_rank_out_of_range(rank: int) -> None:
    """With the words of a real server, on each API in its form."""
    message = f"data_parallel_rank {rank} is out of range [0, 2)."
    async with server("vllm") as client:
        refused = await ask(client, rank)
        assert refused.status_code == 400
        assert refused.json() == {
            "error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}
        }  # fmt: skip
        body = {"model": "simulated", "messages": MESSAGES, "max_tokens": 5}
        refused = await client.post("/v1/messages", json=body, headers={HEADER: str(rank)})
        assert refused.status_code == 400 and refused.json()["type"] == "error"
        assert refused.json()["error"]["message"] == message


async def test_sglang_refuses_a_rank_out_of_range_or_that_is_none() -> None:
    """In a header or a field, in the form of the route."""
    message = "routed_dp_rank=5 out of range [0, 2)"
    generate = {"text": "looms", "sampling_params": {"max_new_tokens": 5}}
    async with server("sglang") as client:
        for refused in (await ask(client, 5), await ask(client, routed_dp_rank=5)):
            assert refused.status_code == 400
            assert (refused.json()["object"], refused.json()["message"]) == ("error", message)
        refused = await client.post("/generate", json=generate | {"data_parallel_rank": 5})
        assert (refused.status_code, refused.json()) == (400, {"error": {"message": message}})
        refused = await ask(client, "one")
        assert refused.status_code == 400 and "must be an integer, got 'one'" in refused.json()["message"]


async def test_sglang_takes_a_rank_from_the_body() -> None:
    """The header goes before; `/generate` knows the older name, too."""
    generate = {"text": "looms", "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
    async with server("sglang") as client:
        assert (await ask(client, routed_dp_rank=1)).status_code == 200
        assert await by_rank(client, "sglang", TOKENS) == [0, 5]
        for name in ("routed_dp_rank", "data_parallel_rank"):
            (await client.post("/generate", json=generate | {name: 1})).raise_for_status()
        assert await by_rank(client, "sglang", TOKENS) == [0, 15]
        assert (await ask(client, 0, routed_dp_rank=1)).status_code == 200
        assert await by_rank(client, "sglang", TOKENS) == [5, 15]


@KINDS
async def test_turns_without_a_rank_go_where_the_fewest_are(kind: str) -> None:
    """Where equally many are, ranks take turns. To vLLM, a header that is no integer is none."""
    async with server(kind) as client:
        await ask(client)
        await ask(client, "one" if kind == "vllm" else None)
        assert await by_rank(client, kind, TOKENS) == [5, 5]
    async with server(kind, speed_up=SLOW) as client, endless_turns(client, 1, 1):
        await until(client, kind, RUNNING, [0, 2])
        async with endless_turns(client, None, None):
            await until(client, kind, RUNNING, [2, 2])
            async with endless_turns(client, None, None):
                await until(client, kind, RUNNING, [3, 3])
        await until(client, kind, RUNNING, [0, 2])  # their clients have left


@KINDS
async def test_each_rank_has_its_own_slots(kind: str) -> None:
    """A turn waits for a slot of its rank, though the other has one."""
    profile = replace(PROFILE, slots=1)
    async with server(kind, profile=profile, speed_up=SLOW) as client, endless_turns(client, 1, 1):
        await until(client, kind, WAITING, [0, 1])
        assert await by_rank(client, kind, RUNNING) == [0, 1]


@KINDS
async def test_each_rank_has_its_own_prefix_cache(kind: str) -> None:
    """A prompt is cached where it was computed."""
    async with server(kind) as client:
        cached = []
        for rank in (0, 0, 1, 1):
            usage = (await ask(client, rank)).raise_for_status().json()["usage"]
            cached.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] > 0


# --- control ------------------------------------------------------------------------------------------------


@KINDS
async def test_a_pause_and_its_end_act_on_all_ranks(kind: str) -> None:
    """The turns of all are aborted, and then all answer again."""
    async with server(kind, speed_up=SLOW) as client, endless_turns(client, 0, 1) as turns:
        await until(client, kind, RUNNING, [1, 1])
        await client.post("/pause" if kind == "vllm" else "/pause_generation", json={})
        for turn in turns:
            assert (await turn).json()["choices"][0]["finish_reason"] == "abort"
        if kind == "vllm":
            assert (await client.get("/is_paused")).json() == {"is_paused": True}
            assert [(await ask(client, rank)).status_code for rank in (0, 1)] == [503, 503]
        await client.post("/resume" if kind == "vllm" else "/continue_generation", json={})
        assert [(await ask(client, rank)).status_code for rank in (0, 1)] == [200, 200]


@KINDS
async def test_new_weights_are_those_of_all_ranks(kind: str) -> None:
    """All give the answers of an engine that began with them, and tell of them once."""
    async with server(kind, weight_version="v7") as client:
        expected = await text_on(client, 0)
    async with server(kind) as client:
        before = [await text_on(client, rank) for rank in (0, 1)]
        assert before[0] == before[1] != expected
        http, weights = HttpClient(str(client.base_url)), WEIGHTS[kind]
        await weights.pause(http, UpdateMode.RESTART, TIMEOUT_S)
        await weights.load(http, NewWeights("v7", UpdateMode.RESTART, "/weights/v7"), TIMEOUT_S)
        await weights.resume(http, TIMEOUT_S)
        assert await weights.version(http, TIMEOUT_S) == "v7"
        http.close()
        assert [await text_on(client, rank) for rank in (0, 1)] == [expected, expected]


@KINDS
async def test_a_turn_is_aborted_on_whichever_rank_it_runs(kind: str) -> None:
    """The caller knows its id only."""
    body = {"messages": MESSAGES, "max_tokens": 8_000, "ignore_eos": True, "rid": "a"}
    async with server(kind, speed_up=SLOW) as client:
        headers = {HEADER: "1", "x-request-id": "a"}
        turn = asyncio.create_task(client.post(CHAT, json=body, headers=headers))
        await until(client, kind, RUNNING, [0, 1])
        if kind == "vllm":
            await client.post("/abort_requests", json={"request_ids": ["chatcmpl-a"]})
        else:
            await client.post("/abort_request", json={"rid": "a"})
        assert (await turn).json()["choices"][0]["finish_reason"] == "abort"


async def test_a_failure_of_one_rank_is_the_servers() -> None:
    """An idle rank 0 flushes its cache, a busy rank 1 cannot."""
    async with server("sglang", speed_up=SLOW) as client:
        assert (await client.get("/flush_cache")).status_code == 200
        async with endless_turns(client, 1):
            await until(client, "sglang", RUNNING, [0, 1])
            assert (await client.post("/flush_cache")).status_code == 400
            assert (await client.get("/flush_cache")).status_code == 400


@KINDS
async def test_a_request_meets_a_fault_once_not_on_each_rank(kind: str) -> None:
    """Whether one rank or all are to handle it."""
    path = "/pause" if kind == "vllm" else "/pause_generation"
    faults = (Fault("error", count=3, path=path), Fault("refuse", count=1, path=CHAT))
    async with server(kind, faults=faults) as client:
        assert (await client.post(path, json={})).status_code == 500
        assert [(await ask(client)).status_code for _ in range(3)] == [503, 200, 200]
        assert (await client.get("/simulate/faults")).json()["left"] == [2, 0]


# --- what it shows ------------------------------------------------------------------------------------------


@KINDS
async def test_the_metrics_have_each_series_once_per_rank(kind: str) -> None:
    """In one family, however many ranks have it. What concerns the process is there once."""
    async with server(kind) as client:
        await ask(client, 0)
        page = (await client.get("/metrics")).text
    types = Counter(line for line in page.splitlines() if line.startswith("#"))
    families = list(text_string_to_metric_families(page))
    assert set(types.values()) == {1}
    series = [sample for family in families for sample in family.samples]
    assert len({(sample.name, tuple(sorted(sample.labels.items()))) for sample in series}) == len(series)
    ranked: dict[str, set[tuple[str, tuple[tuple[str, str], ...]]]] = {"0": set(), "1": set()}
    for sample in series:
        if (rank := sample.labels.get(LABEL[kind])) is not None:
            rest = tuple(sorted(label for label in sample.labels.items() if label[0] != LABEL[kind]))
            ranked[rank].add((sample.name, rest))
    assert ranked["0"] == ranked["1"] != set()
    alone = [sample.name for sample in series if LABEL[kind] not in sample.labels]
    assert alone == (["process_start_time_seconds"] if kind == "vllm" else [])


async def test_vllm_tells_the_kv_of_a_rank_and_the_blocks_of_all() -> None:
    """As a real one; its configuration has a rank's slots, and how many ranks there are."""
    tokens = PROFILE.kv_capacity_tokens
    async with server("vllm") as client:
        page = (await client.get("/metrics")).text
        config = (await client.get("/server_info")).json()["vllm_config"]
    infos = [family for family in text_string_to_metric_families(page) if family.name == "vllm:cache_config_info"]
    told = [
        (sample.labels["engine"], sample.labels["kv_cache_size_tokens"], sample.labels["num_gpu_blocks"])
        for sample in infos[0].samples
    ]
    assert told == [(rank, str(tokens), str(2 * (tokens // 16))) for rank in ("0", "1")]
    assert config["parallel_config"] == {
        "tensor_parallel_size": PROFILE.tp,
        "data_parallel_size": 2,
        "data_parallel_size_local": 2,
    }
    assert config["scheduler_config"]["max_num_seqs"] == PROFILE.slots


async def test_sglang_tells_the_load_of_each_rank() -> None:
    """And the sums."""
    async with server("sglang", speed_up=SLOW) as client, endless_turns(client, 1, 1):
        await until(client, "sglang", RUNNING, [0, 2])
        told = (await client.get("/v1/loads?include=core")).json()
        assert (await client.get("/server_info")).json()["dp_size"] == 2
    assert told["dp_rank_count"] == 2
    loads = told["loads"]
    assert [(load["dp_rank"], load["num_running_reqs"]) for load in loads] == [(0, 0), (1, 2)]
    assert [load["max_running_requests"] for load in loads] == [PROFILE.slots] * 2
    assert [load["max_total_num_tokens"] for load in loads] == [PROFILE.kv_capacity_tokens] * 2
    assert told["aggregate"]["num_running_reqs"] == 2
    assert told["aggregate"]["num_used_tokens"] == loads[1]["num_used_tokens"] > 0


# --- one rank -----------------------------------------------------------------------------------------------


@KINDS
async def test_a_server_of_one_engine_does_not_know_of_ranks(kind: str) -> None:
    """It shows no rank, and names none in its configuration."""
    async with server(kind, data_parallel_size=1) as client:
        assert (await ask(client, 5)).status_code == 200
        assert "dp_rank" not in (await client.get("/metrics")).text
        info = (await client.get("/server_info")).json()
    if kind == "vllm":
        assert info["vllm_config"]["parallel_config"] == {"tensor_parallel_size": PROFILE.tp}
    else:
        assert "dp_size" not in info


def test_ranks_do_not_transfer_kv() -> None:
    """The server says so when it is started."""
    with pytest.raises(ValueError, match="several data-parallel ranks cannot transfer KV"):
        SimulatedEngineSettings(data_parallel_size=2, kv_transfer=True)
