"""The simulated SGLang over a real socket, as far as it differs from vLLM."""

import asyncio
import dataclasses

import pytest

from engines.profiles import load_profile

from .conftest import Start
from .http import CHAT, events, metric, until_metric

RUNNING = "sglang:num_running_reqs"


async def test_errors_are_flat_on_chat_and_nested_on_responses(start: Start) -> None:
    """As SGLang writes them."""
    client = await start(dialect="sglang")
    flat = (await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 0})).json()
    assert (flat["object"], flat["code"]) == ("error", 400) and "error" not in flat
    nested = (await client.post("/v1/responses", json={"input": 3})).json()
    assert nested["error"]["code"] == 400


async def test_the_answers_id_is_the_rid_and_any_model_is_accepted(start: Start) -> None:
    """SGLang ignores X-Request-Id."""
    client = await start(dialect="sglang")
    body = {**CHAT, "max_tokens": 2, "rid": "traj-1.", "model": "whatever"}
    answer = await client.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "no"})
    assert answer.json()["id"] == "traj-1."
    assert "matched_stop" in answer.json()["choices"][0]
    assert (await client.get("/v1/models/simulated")).json()["id"] == "simulated"


async def test_native_streams_are_cumulative_unless_incremental(start: Start) -> None:
    """Both end like the whole answer."""
    body = {"input_ids": [300, 301], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    for incremental in (False, True):
        client = await start(dialect="sglang", incremental_streaming_output=incremental)
        whole = (await client.post("/generate", json=body)).json()
        *chunks, done = events((await client.post("/generate", json={**body, "stream": True})).text)
        assert done == "[DONE]" and len(chunks) > 1
        assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 400}
        if incremental:
            assert [id for chunk in chunks for id in chunk["output_ids"]] == whole["output_ids"]
            assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
        else:
            assert chunks[-1]["output_ids"] == whole["output_ids"]
            assert chunks[-1]["text"] == whole["text"]
            assert chunks[1]["text"].startswith(chunks[0]["text"])


async def test_a_slow_reader_gets_the_end_of_its_stream(start: Start) -> None:
    """The engine finishes the answer while the client reads no more of it than the buffers hold."""
    client = await start(dialect="sglang", speed_up=5.0)  # a faster engine would send everything at once
    # Repeated in each event, these are 27 MB: above the 4 MB that Linux buffers for a socket (tcp_wmem).
    sampling = {"max_new_tokens": 1500, "ignore_eos": True}
    body = {"input_ids": [300, 301], "sampling_params": sampling, "return_logprob": True, "stream": True}
    async with client.stream("POST", "/generate", json=body) as answer:
        await until_metric(client, "sglang:generation_tokens_total", 1500)
        last, done = events(b"".join([piece async for piece in answer.aiter_bytes()])[-400_000:].decode())[-2:]
    assert done == "[DONE]"
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 1500}


async def test_native_routes_refuse_unknown_fields(start: Start) -> None:
    """Unlike the OpenAI routes."""
    client = await start(dialect="sglang")
    response = await client.post("/generate", json={"text": "a", "unheard_of": 1})
    assert response.status_code == 400 and "unheard_of" in response.json()["error"]["message"]


async def test_chat_takes_token_ids_and_refuses_to_stream_them(start: Start) -> None:
    """`input_ids` bypass the template; `return_token_ids` works for whole answers only."""
    client = await start(dialect="sglang")
    ids = (await client.post("/tokenize", json=CHAT)).json()["tokens"]
    body = {**CHAT, "max_tokens": 4}
    by_ids = (await client.post("/v1/chat/completions", json={**body, "messages": [], "input_ids": ids})).json()
    by_messages = (await client.post("/v1/chat/completions", json=body)).json()
    assert by_ids["choices"] == by_messages["choices"]
    refused = await client.post("/v1/chat/completions", json={**body, "stream": True, "return_token_ids": True})
    assert refused.status_code == 400


async def test_an_abort_matches_by_prefix(start: Start) -> None:
    """Aborting `traj-1` also ends `traj-10`, so a gateway must end its ids with a delimiter."""
    client = await start(dialect="sglang", speed_up=1.0)
    tasks = {
        rid: asyncio.create_task(
            client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 3000, "ignore_eos": True, "rid": rid})
        )
        for rid in ("traj-1", "traj-10", "traj-2")
    }
    await until_metric(client, RUNNING, 3)
    await client.post("/abort_request", json={"rid": "traj-1"})
    for rid in ("traj-1", "traj-10"):
        assert (await tasks[rid]).json()["choices"][0]["finish_reason"] == "abort"
    assert await metric(client, RUNNING) == 1
    await client.post("/abort_request", json={"abort_all": True})
    assert (await tasks["traj-2"]).json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(("low_first", "urgent"), [(True, -20), (False, 20)])
async def test_a_much_more_urgent_request_preempts_a_running_one(start: Start, low_first: bool, urgent: int) -> None:
    """By more than the threshold of 10, in the direction that the server was started with. The victim still
    finishes."""
    profile = dataclasses.replace(load_profile("toy-cpu-tp1"), slots=1)
    client = await start(dialect="sglang", speed_up=2.0, profile=profile, low_priority_values_first=low_first)
    order: list[str] = []

    async def ask(name: str, max_tokens: int, priority: int) -> None:
        body = {**CHAT, "max_tokens": max_tokens, "ignore_eos": True, "priority": priority}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        assert answer["usage"]["completion_tokens"] == max_tokens
        order.append(name)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask("running", 3500, 0))
        await until_metric(client, RUNNING, 1)
        tasks.create_task(ask("not enough", 20, urgent // 2))
        tasks.create_task(ask("urgent", 20, urgent))
    assert order[0] == "urgent" and set(order) == {"running", "not enough", "urgent"}
    assert await metric(client, "sglang:num_retracted_requests_total") == 1


async def test_a_full_queue_is_a_503_or_an_event(start: Start) -> None:
    """SGLang's scheduler rejects a streaming request after the stream has begun."""
    client = await start(dialect="sglang", speed_up=1.0, max_num_queued=1)
    long = asyncio.create_task(
        client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 3000, "ignore_eos": True})
    )
    await until_metric(client, RUNNING, 1)
    assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 503
    response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    error, done = events(response.text)
    assert (response.status_code, error["error"]["code"], done) == (200, 503, "[DONE]")
    long.cancel()


async def test_while_paused_new_requests_wait(start: Start) -> None:
    """They block in the HTTP server. `/ready` answers 503 and `/ping` 200; continuing lets them in."""
    client = await start(dialect="sglang")
    await client.post("/pause_generation", json={"mode": "in_place"})
    assert (await client.get("/ready")).status_code == 503
    assert (await client.get("/ping")).status_code == 200
    task = asyncio.create_task(client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 3}))
    assert (await client.get("/v1/loads")).json()["loads"][0]["num_running_reqs"] == 0
    assert not task.done()
    await client.post("/continue_generation", json={})
    assert (await task).status_code == 200
    assert (await client.get("/ready")).status_code == 200
    assert (await client.post("/flush_cache")).status_code == 200


async def test_info_routes_report_what_a_gateway_probes(start: Start) -> None:
    """Model, server arguments and load. vLLM's version route does not exist."""
    client = await start(dialect="sglang")
    assert (await client.get("/model_info")).json()["model_path"] == "simulated"
    info = (await client.get("/server_info")).json()
    assert info["enable_priority_scheduling"] is True and info["max_running_requests"] == 4
    assert (await client.get("/v1/loads")).json()["loads"][0]["max_total_num_tokens"] == 16_384
    assert (await client.get("/version")).status_code == 404
