"""The simulated vLLM over a real socket."""

import asyncio
import dataclasses

import pytest

from engines.profiles import load_profile

from .conftest import Start
from .http import CHAT, events, metric, until_metric

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


async def test_a_stream_has_the_content_of_the_whole_answer(start: Start) -> None:
    """One chunk per token, the same text, the same usage; the role comes first and [DONE] last."""
    client = await start()
    body = {**CHAT, "max_tokens": 12, "ignore_eos": True}
    whole = (await client.post("/v1/chat/completions", json=body)).json()
    options = {"include_usage": True}
    response = await client.post("/v1/chat/completions", json={**body, "stream": True, "stream_options": options})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    role, *tokens, usage, done = events(response.text)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(tokens) == 12
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in tokens)
    assert text == whole["choices"][0]["message"]["content"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in tokens] == [None] * 11 + ["length"]
    assert not any("usage" in chunk for chunk in [role, *tokens])
    assert usage["system_fingerprint"] == whole["system_fingerprint"] and "system_fingerprint" not in tokens[-1]
    assert (usage["choices"], done) == ([], "[DONE]")
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage["usage"][name] == whole["usage"][name]
    assert len({chunk["id"] for chunk in [role, *tokens, usage]}) == 1


async def test_the_openai_sdk_accepts_every_answer(start: Start) -> None:
    """Chat, stream, tools, n, logprobs, completion, embeddings, models and responses through the official client."""
    import openai

    client = await start()
    async with openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="x", max_retries=0) as sdk:
        chat = await sdk.chat.completions.create(
            model="simulated", messages=CHAT["messages"], max_tokens=5, n=2, logprobs=True, top_logprobs=2
        )
        assert [choice.index for choice in chat.choices] == [0, 1]
        assert chat.choices[0].message.content != chat.choices[1].message.content
        entries = chat.choices[0].logprobs.content
        assert len(entries[0].top_logprobs) == 2 and entries[0].logprob < 0
        call = await sdk.chat.completions.create(
            model="simulated", messages=CHAT["messages"], tools=[LOOK], tool_choice="required"
        )
        assert call.choices[0].finish_reason == "tool_calls"
        assert call.choices[0].message.tool_calls[0].function.name == "look"
        async with sdk.chat.completions.stream(
            model="simulated", messages=CHAT["messages"], tools=[LOOK], tool_choice="required"
        ) as stream:
            streamed = (await stream.get_final_completion()).choices[0].message.tool_calls[0].function
        assert streamed.arguments == call.choices[0].message.tool_calls[0].function.arguments
        completion = await sdk.completions.create(model="simulated", prompt=[300, 301], max_tokens=3)
        assert completion.usage.prompt_tokens == 2
        embedding = await sdk.embeddings.create(model="simulated", input=["a", "b"])
        assert len(embedding.data) == 2 and len(embedding.data[0].embedding) == 32
        assert [model.id async for model in sdk.models.list()] == ["simulated"]
        response = await sdk.responses.create(model="simulated", input="Hello", max_output_tokens=6)
        assert response.output_text and response.usage.output_tokens <= 6
        kinds, text = [], ""
        async for event in await sdk.responses.create(
            model="simulated", input="Hello", max_output_tokens=6, stream=True
        ):
            kinds.append(event.type)
            text += event.delta if event.type == "response.output_text.delta" else ""
        assert text == response.output_text
        assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")


async def test_the_anthropic_sdk_accepts_every_answer(start: Start) -> None:
    """Messages, stream, tools and count_tokens through the official client."""
    import anthropic

    client = await start()
    async with anthropic.AsyncAnthropic(base_url=str(client.base_url), api_key="x", max_retries=0) as sdk:
        request = {"model": "simulated", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
        whole = await sdk.messages.create(**request)
        async with sdk.messages.stream(**request) as stream:
            streamed = await stream.get_final_message()
        assert streamed.content[0].text == whole.content[0].text
        assert streamed.stop_reason == whole.stop_reason
        tool = {"name": "look", "input_schema": LOOK["function"]["parameters"]}
        call = await sdk.messages.create(**{**request, "max_tokens": 200}, tools=[tool], tool_choice={"type": "any"})
        assert call.stop_reason == "tool_use" and set(call.content[0].input) == {"path"}
        count = await sdk.messages.count_tokens(model="simulated", messages=request["messages"])
        assert count.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


async def test_tokens_in_and_out_give_the_chat_answer(start: Start) -> None:
    """Render, generate and derender give the chat route's answer when generated in two legs, with tools, too."""
    client = await start()
    for extra in ({"max_tokens": 30}, {"max_tokens": 200, "tools": [LOOK], "tool_choice": "required"}):
        body = {**CHAT, **extra}
        whole = (await client.post("/v1/chat/completions", json=body)).json()
        rendered = (await client.post("/v1/chat/completions/render", json=body)).json()
        sampling = rendered["sampling_params"]
        first = {**rendered, "sampling_params": {**sampling, "max_tokens": 7}}
        begun = (await client.post("/inference/v1/generate", json=first)).json()["choices"][0]["token_ids"]
        second = {
            **rendered,
            "token_ids": rendered["token_ids"] + begun,
            "sampling_params": {**sampling, "max_tokens": sampling["max_tokens"] - 7},
        }
        made = (await client.post("/inference/v1/generate", json=second)).json()
        [choice] = made["choices"]
        # A parser must not get the text of the token that ended the turn.
        choice["token_ids"] = begun + choice["token_ids"][: -1 if choice["finish_reason"] == "stop" else None]
        derendered = await client.post("/v1/chat/completions/derender", json={"generate_response": made})
        message = derendered.json()["choices"][0]["message"]
        expected = whole["choices"][0]["message"]
        assert message["content"] == expected["content"]
        functions = [[call["function"] for call in one.get("tool_calls") or []] for one in (message, expected)]
        assert functions[0] == functions[1]


async def test_a_token_stream_ends_like_the_whole_answer(start: Start) -> None:
    """The same token ids, the finish reason on the last event, the id from the request."""
    client = await start()
    body = {"request_id": "leg1", "token_ids": [300, 301], "sampling_params": {"max_tokens": 9, "ignore_eos": True}}
    whole = (await client.post("/inference/v1/generate", json=body)).json()
    response = await client.post("/inference/v1/generate", json={**body, "stream": True})
    *chunks, done = events(response.text)
    ids = [id for chunk in chunks for id in chunk["choices"][0]["token_ids"]]
    assert (ids, done) == (whole["choices"][0]["token_ids"], "[DONE]")
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert whole["request_id"] == chunks[0]["request_id"] == "generate-tokens-leg1"


async def test_a_second_turn_reports_cached_tokens(start: Start) -> None:
    """The first turn's prompt and answer are found, in whole blocks. With another cache_salt nothing is."""
    client = await start()
    messages = [{"role": "user", "content": "word " * 60}]
    first = (await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 40})).json()
    answer = first["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
    body = {"messages": messages, "max_tokens": 2}
    second = (await client.post("/v1/chat/completions", json=body)).json()["usage"]
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert cached % 16 == 0 and first["usage"]["total_tokens"] - 16 < cached <= first["usage"]["total_tokens"]
    salted = (await client.post("/v1/chat/completions", json={**body, "cache_salt": "v2"})).json()["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0
    assert await metric(client, "vllm:prefix_cache_hits_total") == cached


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_leaves_frees_its_slot(start: Start, is_stream: bool) -> None:
    """Streaming or not, the engine aborts the sequence."""
    client = await start(speed_up=1.0)
    body = {**CHAT, "max_tokens": 4000, "ignore_eos": True, "stream": is_stream}
    task = asyncio.create_task(client.post("/v1/chat/completions", json=body))
    await until_metric(client, "vllm:num_requests_running", 1)
    task.cancel()
    await until_metric(client, "vllm:num_requests_running", 0)
    assert await metric(client, "vllm:kv_cache_usage_perc") == 0


async def test_errors_have_vllms_form(start: Start) -> None:
    """Nested, with an integer code; the type names the kind."""
    client = await start()
    cases = [
        ("/v1/chat/completions", {**CHAT, "model": "other"}, 404, "NotFoundError"),
        ("/v1/chat/completions", {"messages": "no"}, 400, "Bad Request"),
        ("/v1/chat/completions", {"messages": []}, 400, "BadRequestError"),
        ("/v1/chat/completions", {**CHAT, "tool_choice": "required"}, 400, "BadRequestError"),
        ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}, 400, "BadRequestError"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 0}, 400, "BadRequestError"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 5000}, 400, "BadRequestError"),
        ("/v1/chat/completions", {**CHAT, "temperature": "hot"}, 400, "Bad Request"),
        ("/v1/completions", {"prompt": [-1]}, 400, "BadRequestError"),
    ]
    for path, body, status, kind in cases:
        response = await client.post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["type"]) == (status, status, kind), body
    assert (await client.post("/v1/chat/completions", content=b"{")).status_code == 400
    assert (await client.get("/v1/chat/completions")).status_code == 405
    assert (await client.post("/nowhere", json={})).json() == {"detail": "Not Found"}
    ignored = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1, "unheard_of": {"a": 1}})
    assert ignored.status_code == 200


async def test_a_key_guards_inference_only(start: Start) -> None:
    """A 401 has a string as its error. Control routes need no key."""
    client = await start(api_key="secret")
    response = await client.post("/v1/chat/completions", json=CHAT)
    assert (response.status_code, response.json()) == (401, {"error": "Unauthorized"})
    right = {"authorization": "Bearer secret"}
    assert (await client.get("/v1/models", headers=right)).status_code == 200
    assert (await client.post("/collective_rpc", json={"method": "x"})).status_code == 200


async def test_a_full_queue_answers_503_before_the_stream_begins(start: Start) -> None:
    """Admission control is an HTTP status, and is counted."""
    client = await start(speed_up=1.0, max_num_queued=1)
    long = asyncio.create_task(
        client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 3000, "ignore_eos": True})
    )
    await until_metric(client, "vllm:num_requests_running", 1)
    for is_stream in (True, False):
        response = await client.post("/v1/chat/completions", json={**CHAT, "stream": is_stream})
        assert (response.status_code, response.json()["error"]["code"]) == (503, 503)
    assert await metric(client, "vllm:admission_rejections_total") == 2
    long.cancel()


async def test_while_paused_streams_answer_200_and_then_an_error(start: Start) -> None:
    """The 503 is the first event of a stream and the status of a whole answer, until the engine resumes."""
    client = await start()
    await client.post("/pause?mode=abort")
    assert (await client.get("/is_paused")).json() == {"is_paused": True}
    response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    error, done = events(response.text)
    assert (response.status_code, error["error"]["code"], done) == (200, 503, "[DONE]")
    assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 503
    await client.post("/resume")
    assert (await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2})).status_code == 200


@pytest.mark.parametrize("how", ["/pause?mode=abort", "/abort_requests", "/sleep"])
async def test_aborted_requests_end_with_200_and_abort(start: Start, how: str) -> None:
    """With the text so far. In a stream the last chunk has the finish reason."""
    client = await start(speed_up=1.0)
    body = {**CHAT, "max_tokens": 4000, "ignore_eos": True}
    whole = asyncio.create_task(client.post("/v1/chat/completions", json=body))
    stream = asyncio.create_task(client.post("/v1/chat/completions", json={**body, "stream": True}))
    await until_metric(client, "vllm:num_requests_running", 2)
    await client.post(how)
    answer = (await whole).json()
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert 0 < answer["usage"]["completion_tokens"] < 4000
    *_, last, done = events((await stream).text)
    assert (last["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")


async def test_one_request_can_be_aborted_by_its_own_id(start: Start) -> None:
    """The answer's id: chatcmpl- and the X-Request-Id."""
    client = await start(speed_up=1.0)
    body = {**CHAT, "max_tokens": 2000, "ignore_eos": True}
    tasks = [
        asyncio.create_task(client.post("/v1/chat/completions", json=body, headers={"X-Request-Id": name}))
        for name in ("a", "b")
    ]
    await until_metric(client, "vllm:num_requests_running", 2)
    response = await client.post("/abort_requests", json={"request_ids": ["chatcmpl-a", "unknown"]})
    assert response.json() == {"status": "aborted", "aborted": 2}  # counts the given ids, whether or not they run
    answer = (await tasks[0]).json()
    assert (answer["id"], answer["choices"][0]["finish_reason"]) == ("chatcmpl-a", "abort")
    assert await metric(client, "vllm:num_requests_running") == 1
    tasks[1].cancel()


async def test_the_priority_header_overrides_the_body(start: Start) -> None:
    """X-Vllm-Priority wins, and lower goes first, through the one slot."""
    client = await start(speed_up=4.0, profile=dataclasses.replace(load_profile("toy-cpu-tp1"), slots=1))
    order: list[str] = []

    async def ask(name: str, max_tokens: int, priority: int, headers: dict[str, str]) -> None:
        body = {**CHAT, "max_tokens": max_tokens, "ignore_eos": True, "priority": priority}
        await client.post("/v1/chat/completions", json=body, headers=headers)
        order.append(name)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask("running", 1500, 99, {}))
        await until_metric(client, "vllm:num_requests_running", 1)
        tasks.create_task(ask("last", 20, 9, {}))
        tasks.create_task(ask("first", 20, 50, {"X-Vllm-Priority": "-5"}))
        tasks.create_task(ask("second", 20, 1, {}))
        await until_metric(client, "vllm:num_requests_waiting", 3)
    assert order == ["running", "first", "second", "last"]


async def test_chunks_carry_several_tokens_if_an_interval_is_set(start: Start) -> None:
    """Demos need no chunk per token. Nothing is lost."""
    client = await start(chunk_interval_s=0.02)
    body = {**CHAT, "max_tokens": 400, "ignore_eos": True}
    whole = (await client.post("/v1/chat/completions", json=body)).json()
    *chunks, _ = events((await client.post("/v1/chat/completions", json={**body, "stream": True})).text)
    assert 1 < len(chunks) < 100
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]


async def test_virtual_time_follows_the_profile(start: Start) -> None:
    """The virtual time of a lone answer is prefill plus steps, whatever the speed-up."""
    client = await start(speed_up=1000.0)
    await client.post("/v1/completions", json={"prompt": [300] * 100, "max_tokens": 1000, "ignore_eos": True})
    taken = await metric(client, "vllm:e2e_request_latency_seconds_sum")
    expected = 0.001 + 0.0001 + sum(0.0011 + 0.0001 * (100 + made) / 1000 for made in range(1, 1000))
    assert taken == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat/completions", "completions"])
async def test_log_probabilities_name_tokens_by_their_ids_if_asked_to(start: Start, api: str, stream: bool) -> None:
    """`return_tokens_as_token_ids`: all names are ids, and in completions they count for the offsets. The bytes of a
    chat's own tokens stay those of the text."""
    client = await start()
    asked = CHAT | {"logprobs": True, "top_logprobs": 2} if "chat" in api else {"prompt": "a", "logprobs": 2}
    body = {**asked, "max_tokens": 4, "ignore_eos": True, "stream": stream, "return_token_ids": True}
    answers = []
    for more in ({}, {"return_tokens_as_token_ids": True}):
        response = await client.post(f"/v1/{api}", json=body | more)
        parts = events(response.text)[:-1] if stream else [response.json()]
        choices = [choice for part in parts for choice in part["choices"] if choice["logprobs"] is not None]
        answers.append(([id for choice in choices for id in choice["token_ids"]], [one["logprobs"] for one in choices]))
    (ids, plain), (same_ids, named) = answers
    names = [f"token_id:{id}" for id in ids]
    assert ids == same_ids and len(ids) == 4
    if "chat" in api:
        told = [entry for one in named for entry in one["content"]]
        assert [entry["token"] for entry in told] == names
        assert [entry["bytes"] for entry in told] == [entry["bytes"] for one in plain for entry in one["content"]]
        for rival in (rival for entry in told for rival in entry["top_logprobs"]):
            assert rival["token"].startswith("token_id:") and rival["bytes"] == list(rival["token"].encode())
    else:
        assert [name for one in named for name in one["tokens"]] == names
        assert [offset for one in named for offset in one["text_offset"]] == [len("".join(names[:n])) for n in range(4)]
        assert all(name.startswith("token_id:") for one in named for top in one["top_logprobs"] for name in top)


async def test_return_token_ids_returns_prompt_and_answer(start: Start) -> None:
    """Whole and streamed."""
    client = await start()
    body = {**CHAT, "max_tokens": 5, "return_token_ids": True}
    whole = (await client.post("/v1/chat/completions", json=body)).json()
    *chunks, _ = events((await client.post("/v1/chat/completions", json={**body, "stream": True})).text)
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    ids = [id for chunk in chunks[1:] for id in chunk["choices"][0]["token_ids"]]
    assert ids == whole["choices"][0]["token_ids"]
    text = (await client.post("/detokenize", json={"tokens": ids})).json()["prompt"]
    assert text == whole["choices"][0]["message"]["content"]
    tokenized = (await client.post("/tokenize", json=CHAT)).json()
    assert tokenized["tokens"] == whole["prompt_token_ids"] and tokenized["count"] == len(tokenized["tokens"])


JUNK = [
    None,
    True,
    -1,
    0,
    10**12,
    1.5,
    "",
    "x",
    [],
    [1],
    ["a"],
    [None],
    {},
    {"a": 1},
    {"type": "json_schema"},
    [{"type": 3}],
]
BODIES = {
    "/v1/chat/completions": {**CHAT, "max_tokens": 3, "n": 1, "stop": "x", "tools": [LOOK], "tool_choice": "auto"}
    | dict.fromkeys(("logprobs", "top_logprobs", "response_format", "stream_options", "seed", "priority")),
    "/v1/completions": {"prompt": "a", "max_tokens": 3, "logprobs": 1, "echo": False, "stop_token_ids": [1]},
    "/v1/responses": {"input": "a", "tools": [LOOK["function"]], "text": None, "instructions": None},
    "/v1/messages": {"messages": CHAT["messages"], "max_tokens": 3, "system": None, "tools": [], "tool_choice": None},
    "/v1/embeddings": {"input": "a", "encoding_format": None},
    "/inference/v1/generate": {"token_ids": [300], "sampling_params": {"max_tokens": 3}, "priority": 0},
    "/v1/chat/completions/derender": {"generate_response": {"choices": []}},
    "/detokenize": {"tokens": [300]},
}


@pytest.mark.parametrize("path", BODIES)
async def test_junk_in_any_field_is_never_a_500(start: Start, path: str) -> None:
    """Wrong types are the client's mistake: a 400, or accepted, in streams as well."""
    client = await start(speed_up=1000.0)
    for is_stream in (False, True):
        for name in BODIES[path]:
            for junk in JUNK:
                response = await client.post(path, json={**BODIES[path], "stream": is_stream, name: junk})
                assert response.status_code < 500, (name, junk, response.text)


async def test_idle_connections_are_closed(start: Start) -> None:
    """After `keep_alive_s`, as real engines do after 5 s."""
    client = await start(keep_alive_s=0.1)
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 5)  # until the server closes
    assert answer.startswith(b"HTTP/1.1 200")
    writer.close()
