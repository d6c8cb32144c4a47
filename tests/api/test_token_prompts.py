"""A trajectory's later prompts: its own earlier tokens exactly as they were generated, then what is new."""

from itertools import chain
from typing import Any

import httpx
import orjson
import pytest

from engines.simulated.text import END, Tokenizer
from tests.api.conftest import DONE, GENERATE, HELLO, MODEL, Site, event, running_site, toy
from tests.support.engine import Script, fixed, recorded_engine
from tests.support.gateway import running_gateway

_CHAT = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
TURNS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": {"model": MODEL, "max_tokens": 4, "prompt": "hi"},
    "/v1/responses": {"model": MODEL, "max_output_tokens": 4, "input": "hi"},
    "/v1/messages": _CHAT,
}
# Only SGLang's own routes have grammars for calls, and it does not show tools that it does not offer.
CHOICES = {"vllm": ("required", "none", "required", "auto"), "sglang": ("auto",) * 4}
on_both = pytest.mark.parametrize("dialect", CHOICES)
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}


def generated(site: Site) -> list[dict[str, Any]]:
    """The requests from which the engine generated."""
    return [request.json for request in site.engine.turns if request.path in ("/inference/v1/generate", "/generate")]


def made(text: str, ids: list[int], stop: int | None = None) -> Script:
    """A script for vLLM's token route: this answer."""
    entries = [{"token": "", "logprob": -0.5, "bytes": None, "top_logprobs": []}] * len(ids)
    choice = {"index": 0, "text": text, "token_ids": ids, "logprobs": {"content": entries}}
    choice |= {"finish_reason": "stop", "stop_reason": stop}
    return fixed(200, event({"request_id": "g", "choices": [choice]}) + DONE, b"text/event-stream")


async def tokens_of(site: Site, trajectory_id: str) -> list[dict[str, Any]]:
    answer = await site.client.get(f"/v1/trajectories/{trajectory_id}/tokens")
    assert answer.status_code == 200, answer.text
    turns: list[dict[str, Any]] = answer.json()["turns"]
    return turns


@pytest.mark.parametrize("broken", [b'"\xff"', b"1e999"])
async def test_a_new_message_that_cannot_be_parsed_is_a_400(broken: bytes) -> None:
    """No engine is asked, or blamed: the trajectory goes on there."""
    async with running_site(token_legs="auto") as site:
        text = b'{"model":"%s","max_tokens":4,"messages":[{"role":"user","content":"%s"}' % (
            MODEL.encode(),
            b"file " * 2_000,
        )
        asked = [text + b"]}", text + b',{"role":"user","content":%s}]}' % broken, text + b',{"role":"user"}]}']
        headers = {"x-trajectory-id": "one", "content-type": "application/json"}
        answers, numbers = [], []
        for body in asked:
            answers.append(await site.client.post("/v1/chat/completions", content=body, headers=headers))
            numbers.append(sum(asked.method == "POST" for asked in site.engine.seen))
        assert [answer.status_code for answer in answers] == [200, 400, 200]
        assert numbers[0] == numbers[1] < numbers[2]


async def test_the_next_prompt_begins_with_the_generated_tokens() -> None:
    """Even though a template renders a tool call differently from how the model wrote it; a changed history begins a
    branch."""
    async with running_site(token_legs="auto") as site:
        headers = {"x-trajectory-id": "spliced"}
        messages: list[dict[str, Any]] = [{"role": "user", "content": "look around"}]
        for number in range(4):
            fields: dict[str, Any] = {"tools": [TOOL], "max_tokens": 200, "headers": headers}
            answer = await site.chat(messages=messages, **fields, tool_choice="required" if number == 1 else "auto")
            assert answer.status_code == 200, answer.text
            message = answer.json()["choices"][0]["message"]
            messages.append({name: message[name] for name in ("role", "content", "tool_calls") if message.get(name)})
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = " " + call["function"]["arguments"]  # as some frameworks write it
            role = "tool" if message.get("tool_calls") else "user"
            messages.append({"role": role, "content": f"result {number}", "tool_call_id": "1"})
        turns = await tokens_of(site, "spliced")
        prompts = [request["token_ids"] for request in generated(site)]
        assert [turn["parent"] for turn in turns] == [None, *(turn["turn_id"] for turn in turns[:-1])]
        whole: list[int] = []
        for turn, prompt in zip(turns, prompts, strict=True):
            whole += turn["prompt_ids"]  # what is new in it
            assert prompt == whole
            whole += turn["output_ids"]
        changed = [{"role": "user", "content": "look elsewhere"}, *messages[1:]]
        assert (await site.chat(messages=changed, **fields)).status_code == 200
        assert (await tokens_of(site, "spliced"))[-1]["parent"] is None


@on_both
async def test_answers_cut_by_their_limit_are_continued_after_a_call_that_was_respelled(dialect: str) -> None:
    """Two in a row, and then one that is not cut. Each turn after a cut answer began a branch: the whole render had to
    be what the engine had, but agents write the arguments of a call with other blanks."""
    async with running_site(toy(dialect), token_legs="auto") as site:
        headers = {"x-trajectory-id": "a", "x-rollout-id": "r"}
        messages: list[dict[str, Any]] = [{"role": "user", "content": "look there"}]
        reasons: list[str] = []
        for limit in (200, 4, 4, 200, 200):
            fields: dict[str, Any] = {"tools": [TOOL], "max_tokens": limit, "ignore_eos": limit == 4}
            fields["tool_choice"] = "auto" if reasons else CHOICES[dialect][0]
            answer = await site.chat(messages=messages, **fields, headers=headers)
            assert answer.status_code == 200, answer.text
            [choice] = answer.json()["choices"]
            reasons.append(choice["finish_reason"])
            message = choice["message"]
            messages.append({name: message[name] for name in ("role", "content", "tool_calls") if message.get(name)})
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = " " + call["function"]["arguments"]
            role = "tool" if message.get("tool_calls") else "user"
            messages.append({"role": role, "content": "go on", "tool_call_id": "1"})
        assert reasons[:3] == ["tool_calls", "length", "length"] and "length" not in reasons[3:], reasons
        turns = await tokens_of(site, "a")
        assert [turn["parent"] for turn in turns] == [None, *(turn["turn_id"] for turn in turns[:-1])]
        prompts = [request.get("token_ids") or request["input_ids"] for request in generated(site)]
        whole: list[int] = []
        for turn, prompt in zip(turns, prompts, strict=True):
            whole += turn["prompt_ids"]
            assert prompt == whole
            whole += turn["output_ids"]
        [line] = (await site.client.post("/v1/rollouts/r/export")).text.splitlines()
        assert orjson.loads(line)["token_ids"] == whole


@on_both
@pytest.mark.parametrize("includes", [False, True], ids=["left out", "included"])
async def test_a_stop_strings_last_token_in_the_next_message_cuts_nothing(includes: bool, dialect: str) -> None:
    """The next prompt lost all from the answer's end up to that token, which was taken for the one that ends a message.
    A turn whose stop string is in its text is still continued."""
    async with running_site(toy(dialect), token_legs="auto") as site:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
        answer = await site.chat(messages=messages, max_tokens=12)
        stop = answer.json()["choices"][0]["message"]["content"][-5:]
        fields = {"max_tokens": 40, "stop": [stop], "include_stop_str_in_output": includes}
        answer = await site.chat(messages=messages, **fields, headers={"x-trajectory-id": "a"})
        [choice] = answer.json()["choices"]
        assert (choice["finish_reason"], choice["message"]["content"].endswith(stop)) == ("stop", includes)
        messages += [choice["message"], {"role": "user", "content": f"Seen:{stop} and more"}]
        for trajectory_id in ("a", "another"):
            assert (await site.chat(messages=messages, headers={"x-trajectory-id": trajectory_id})).status_code == 200
        continued, rendered = (sent.get("token_ids") or sent.get("input_ids") for sent in generated(site)[-2:])
        assert continued == rendered
        first, second = await tokens_of(site, "a")
        assert second["parent"] == (first["turn_id"] if includes else None)


async def test_a_clients_stop_token_in_the_next_message_cuts_nothing() -> None:
    """As a stop string's last token: it ends the answer, and is not in its text."""
    ids = Tokenizer().encode("look around now")
    async with running_site(token_legs="auto") as site:
        site.engine.scripts[GENERATE] = made("look around", ids, ids[-1])
        fields: dict[str, Any] = {"headers": {"x-trajectory-id": "a"}, "stop_token_ids": [ids[-1]]}
        assert (await site.chat(**fields)).status_code == 200
        site.engine.scripts.clear()
        said = {"role": "assistant", "content": "look around"}
        messages = [*HELLO, said, {"role": "user", "content": "What now ?"}]
        for headers in (fields["headers"], {"x-trajectory-id": "another"}):
            assert (await site.chat(messages=messages, headers=headers)).status_code == 200
        continued, rendered = (sent["token_ids"] for sent in generated(site)[-2:])
        assert continued == rendered


# In the pieces in which they were generated. The template tokenises the whole text.
SIBLINGS = {
    "thoughts": (("<think>north is open</think>go n", "orth"), ("<think>south is locked</think>go n", "orth")),
    "blanks at the end": (("go north",), ("go north ",)),
}


@pytest.mark.parametrize("siblings", SIBLINGS.values(), ids=SIBLINGS.keys())
async def test_of_two_like_answers_the_one_that_the_client_has_is_continued(siblings: tuple[tuple[str, ...]]) -> None:
    """A tree search of one trajectory. It was always the latest, whose thoughts the engine got instead."""
    ids_of = {"".join(pieces): [*chain(*map(Tokenizer().encode, pieces)), END] for pieces in siblings}
    async with running_site(token_legs="auto") as site:
        headers = {"x-trajectory-id": "a"}
        for text, ids in ids_of.items():
            site.engine.scripts[GENERATE] = made(text, ids)
            assert (await site.chat(headers=headers)).json()["choices"][0]["message"]["content"] == text
        site.engine.scripts.clear()
        for text, ids in ids_of.items():
            messages = [*HELLO, {"role": "assistant", "content": text}, {"role": "user", "content": "and now?"}]
            assert (await site.chat(messages=messages, headers=headers)).status_code == 200
            sent = generated(site)[-1]["token_ids"]
            assert any(sent[start : start + len(ids)] == ids for start in range(len(sent)))


async def test_an_answer_that_was_continued_is_continued_as_one() -> None:
    """It was cut by its limit, and continued with vLLM's `continue_final_message`. All later turns began branches."""
    async with running_site(token_legs="auto") as site:
        headers, texts, fields = {"x-trajectory-id": "a"}, [""], {}
        for _ in range(2):
            messages = [*HELLO, *([{"role": "assistant", "content": texts[-1]}] if texts[-1] else [])]
            answer = await site.chat(messages=messages, headers=headers, **fields)
            texts.append(texts[-1] + answer.json()["choices"][0]["message"]["content"])
            fields = {"max_tokens": 200, "continue_final_message": True, "add_generation_prompt": False}
        messages = [*HELLO, {"role": "assistant", "content": texts[-1]}, {"role": "user", "content": "and now?"}]
        assert (await site.chat(messages=messages, headers=headers)).status_code == 200
        turns = await tokens_of(site, "a")
        assert [turn["finish_reason"] for turn in turns] == ["length", "stop", "length"]
        assert [turn["parent"] for turn in turns] == [None, turns[0]["turn_id"], turns[1]["turn_id"]]


@on_both
async def test_a_completion_continues_the_turn_with_whose_tokens_its_prompt_begins(dialect: str) -> None:
    """Token by token, which is all that a completion has. Every turn was a branch of its own."""
    async with running_site(toy(dialect), token_legs="auto") as site:
        asked = {"model": MODEL, "max_tokens": 4, "ignore_eos": True}

        async def ask(prompt: list[int]) -> dict[str, Any]:
            answer = await site.client.post("/t/a/v1/completions", json=asked | {"prompt": prompt})
            assert answer.status_code == 200, answer.text
            return (await tokens_of(site, "a"))[-1]

        first = await ask([300, 301])
        begun = [*first["prompt_ids"], *first["output_ids"]]
        second = await ask([*begun, 302])
        third = await ask([*begun, *second["prompt_ids"], *second["output_ids"]])
        again = await ask([*begun, 303])
        other = await ask([*begun[:-1], begun[-1] + 1, 302])
        parents = [turn["parent"] for turn in (first, second, third, again, other)]
        assert parents == [None, first["turn_id"], second["turn_id"], first["turn_id"], None]
        assert [turn["prompt_ids"] for turn in (second, third, again)] == [[302], [], [303]]


# What was generated, what the client sends back, and whether that is still the same answer.
EDITS = {
    "rewritten": ("<think>north is open</think>go", "<think>a note of the client's</think>go", False),
    "added": ("go", "<think>a note of the client's</think>go", False),
    "with other blanks": ("<think>north is open</think>go", "<think>\nnorth is open\n</think>\n\ngo", True),
    "left out": ("<think>north is open</think>go", "go", True),
}


@pytest.mark.parametrize("is_last", [True, False], ids=["of the last answer", "of an earlier answer"])
@pytest.mark.parametrize(("text", "sent", "is_same"), EDITS.values(), ids=EDITS.keys())
async def test_a_client_that_edits_thoughts_begins_a_branch(text: str, sent: str, is_same: bool, is_last: bool) -> None:
    """The engine reads what the client says that it thought. It read the original tokens."""
    async with running_site(token_legs="auto") as site:
        headers, said = {"x-trajectory-id": "a"}, [*HELLO]
        for answer in (text,) if is_last else (text, "went"):
            site.engine.scripts[GENERATE] = made(answer, [*Tokenizer().encode(answer), END])
            assert (await site.chat(messages=said, headers=headers)).status_code == 200
            said += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and now?"}]
        site.engine.scripts.clear()
        said[len(HELLO)] = {"role": "assistant", "content": sent}
        assert (await site.chat(messages=said, headers=headers)).status_code == 200
        *_, before, last = await tokens_of(site, "a")
        assert last["parent"] == (before["turn_id"] if is_same else None)
        read = Tokenizer().decode(generated(site)[-1]["token_ids"])
        assert (text if is_same else sent) in read


@on_both
@pytest.mark.parametrize("limit", [None, 500])
@pytest.mark.parametrize("num_thoughts", [20, 1_700, 2_100], ids=["with room", "with little room", "without room"])
async def test_thoughts_that_a_client_leaves_out_cost_no_answer_its_room(
    num_thoughts: int, limit: int | None, dialect: str
) -> None:
    """The prompt has the thoughts that were generated, so it may fill the context although the client's does not. vLLM
    then refused the turn or cut its answer, and SGLang's passed through. Such a turn begins a branch without them, as
    on the engine's own route. A turn without a limit takes the room that there is."""
    context_tokens = 2_000
    text = "<think> plan" + " with care" * (num_thoughts // 2) + "</think>done"
    ids = [*Tokenizer().encode(text), END]
    engine = toy(dialect, max_model_len=context_tokens, **({} if dialect == "vllm" else {"reasoning_parser": "qwen3"}))
    async with running_site(engine, token_legs="auto") as site:
        meta = {"id": "g", "finish_reason": {"type": "stop", "matched": END}, "prompt_tokens": 5, "cached_tokens": 0}
        meta |= {"completion_tokens": len(ids), "output_token_logprobs": [[-0.5, id, ""] for id in ids]}
        answer = event({"text": text, "output_ids": ids, "meta_info": meta}) + DONE
        site.engine.scripts["/generate"] = fixed(200, answer, b"text/event-stream")
        site.engine.scripts[GENERATE] = made(text, ids)
        fields: dict[str, Any] = {"max_tokens": limit, "headers": {"x-trajectory-id": "a"}}
        assert (await site.chat(**fields)).status_code == 200
        site.engine.scripts.clear()
        messages = [*HELLO, {"role": "assistant", "content": "done"}, {"role": "user", "content": "go on"}]
        answered = await site.chat(messages=messages, **fields)
        assert answered.status_code == 200, answered.text
        first, second = await tokens_of(site, "a")
        continues = num_thoughts == 20 or (num_thoughts == 1_700 and limit is None)
        assert second["parent"] == (first["turn_id"] if continues else None)
        sent = generated(site)[-1]
        prompt_ids, sampling = sent.get("token_ids") or sent["input_ids"], sent["sampling_params"]
        assert (len(prompt_ids) > num_thoughts) is continues
        room = context_tokens - len(prompt_ids) - (dialect == "sglang")
        assert (sampling.get("max_tokens") or sampling.get("max_new_tokens")) == (limit or room)


@on_both
@pytest.mark.parametrize("stream", [False, True])
async def test_messages_are_continued_like_chats(stream: bool, dialect: str) -> None:
    """From what Anthropic's SDK sends back of an answer, with calls and without."""
    from anthropic import AsyncAnthropic

    async with (
        running_site(toy(dialect), token_legs="auto") as site,
        AsyncAnthropic(base_url=site.url, api_key="none") as sdk,
    ):
        headers = {"x-trajectory-id": "spliced"}
        tool: Any = {"name": "look", "input_schema": TOOL["function"]["parameters"]}
        messages: Any = [{"role": "user", "content": "look around"}]
        for choice in CHOICES[dialect]:
            request: Any = {"model": MODEL, "max_tokens": 200, "messages": messages, "tools": [tool]}
            kind = "any" if choice == "required" else choice
            request |= {"tool_choice": {"type": kind}, "extra_headers": headers}
            if stream:
                async with sdk.messages.stream(**request) as events:
                    message = await events.get_final_message()
            else:
                message = await sdk.messages.create(**request)
            messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "dust"}
                for block in message.content
                if block.type == "tool_use"
            ]
            assert results or kind != "any"
            messages.append({"role": "user", "content": results or "and now?"})
        turns = await tokens_of(site, "spliced")
        assert [turn["parent"] for turn in turns] == [None, *(turn["turn_id"] for turn in turns[:-1])]
        assert len(turns) == 4


@on_both
@pytest.mark.parametrize("stream", [False, True])
async def test_responses_are_continued_like_chats(stream: bool, dialect: str) -> None:
    """From what OpenAI's SDK sends back of an answer, with calls and without."""
    from openai import AsyncOpenAI

    async with (
        running_site(toy(dialect), token_legs="auto") as site,
        AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none") as sdk,
    ):
        tool: Any = {"type": "function", "name": "look", "parameters": TOOL["function"]["parameters"]}
        tool |= {"description": "Look there.", "strict": dialect == "vllm"}
        items: Any = [{"role": "user", "content": "look around"}]
        for choice in CHOICES[dialect]:
            request: Any = {"model": MODEL, "max_output_tokens": 200, "input": items, "tools": [tool]}
            request |= {"tool_choice": choice, "extra_headers": {"x-trajectory-id": "spliced"}}
            if stream:
                async with sdk.responses.stream(**request) as events:
                    response: Any = await events.get_final_response()
            else:
                response = await sdk.responses.create(**request)
            items += [item.model_dump(exclude_none=True) for item in response.output]
            results = [
                {"type": "function_call_output", "call_id": item.call_id, "output": "dust"}
                for item in response.output
                if item.type == "function_call"
            ]
            assert results or choice != "required"
            items += results or [{"role": "user", "content": "and now?"}]
        turns = await tokens_of(site, "spliced")
        assert [turn["parent"] for turn in turns] == [None, *(turn["turn_id"] for turn in turns[:-1])]
        assert len(turns) == 4


@on_both
async def test_responses_that_an_engine_keeps_are_passed_through(dialect: str) -> None:
    """A client may ask for them later; the responses of an engine that keeps none are all served at token level."""
    for is_storing in (False, True):
        async with running_site(toy(dialect, response_store=is_storing), token_legs="auto") as site:
            [engine] = (await site.client.get("/v1/engines")).json()["data"]
            assert ("without `store: false`" in engine["token_legs_note"]) is is_storing
            for fields in ({}, {"store": True}, {"store": False}):
                num_before = len(generated(site))
                body = {"model": MODEL, "input": "hi", "max_output_tokens": 8, **fields}
                answer = await site.client.post("/v1/responses", json=body)
                assert answer.status_code == 200, answer.text
                is_seen = is_storing and fields.get("store", True)
                assert len(generated(site)) - num_before == (0 if is_seen else 1)


async def test_prefer_tokens_none_keeps_no_tokens() -> None:
    """For a turn at token level."""
    async with running_site(token_legs="auto") as site:
        headers = {"x-trajectory-id": "private", "prefer": "tokens=none"}
        assert (await site.chat(headers=headers)).status_code == 200
        assert generated(site)
        answer = await site.client.get("/v1/trajectories/private/tokens")
        assert answer.status_code == 404 or not answer.json()["turns"]


@on_both
async def test_apis_reported_at_token_level_are_served_at_token_level(dialect: str) -> None:
    """`GET /v1/engines` reports every API as served at token level or as passed through, and here all are at token
    level."""
    async with running_site(toy(dialect), token_legs="auto") as site:
        [engine] = (await site.client.get("/v1/engines")).json()["data"]
        assert engine["token_legs"] is True
        by_tokens, passed = engine["token_apis"], engine["passed_apis"]
        assert sorted([*by_tokens, *passed]) == sorted(TURNS)
        for path, body in TURNS.items():
            before = len(generated(site))
            answer = await site.client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert len(generated(site)) - before == 1 and path in by_tokens


async def test_responses_of_a_model_that_thinks_pass_through() -> None:
    """And the engine's view reports it: responses state how many tokens were thought, which tokens do not show."""
    async with running_site(toy("sglang", reasoning_parser="qwen3"), token_legs="auto") as site:
        [engine] = (await site.client.get("/v1/engines")).json()["data"]
        assert engine["passed_apis"].keys() == {"/v1/responses"}
        assert (await site.client.post("/v1/responses", json=TURNS["/v1/responses"])).status_code == 200
        assert not generated(site)


async def test_a_completion_with_as_many_logprobs_as_vllm_allows_passes_through() -> None:
    """Token routes are asked for one more, which they refuse once their stream has begun."""
    error = {"message": "Requested sample logprobs of 3.", "type": "BadRequestError", "param": "logprobs", "code": 400}
    async with running_site(token_legs="auto") as site:
        site.engine.scripts["/inference/v1/generate"] = fixed(200, event({"error": error}) + DONE, b"text/event-stream")
        answer = await site.client.post("/v1/completions", json=TURNS["/v1/completions"] | {"logprobs": 2})
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) == 4
        assert [turn.path for turn in site.engine.turns] == ["/inference/v1/generate", "/v1/completions"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_without_logprobs_may_say_so_with_a_0(stream: bool) -> None:
    """As vLLM takes it; a completion that asks for those of all tokens, with -1, passes through, for vLLM to judge."""
    async with running_site(token_legs="auto") as site:
        for wanted, is_told in ((0, False), (False, False), (1, True)):
            answer = await site.chat(logprobs=wanted, stream=stream)
            assert answer.status_code == 200 and ('"logprob":' in answer.text) == is_told, answer.text
        assert len(generated(site)) == 3
        await site.client.post("/v1/completions", json=TURNS["/v1/completions"] | {"logprobs": -1, "stream": stream})
        assert len(generated(site)) == 3


async def test_an_engine_without_token_routes_reports_the_reason() -> None:
    """The setting, or how the engine was started."""
    for setting, why in (("off", "the setting"), ("auto", "--enable-scale-out")):
        async with recorded_engine(toy()) as recorded:
            recorded.scripts["/v1/completions/render"] = fixed(404, b"{}")
            async with running_gateway(recorded.url, token_legs=setting) as gateway, httpx.AsyncClient() as client:
                [engine] = (await client.get(gateway.url + "/v1/engines")).json()["data"]
        assert engine["token_legs"] is False and engine["token_apis"] == []
        assert engine["passed_apis"].keys() == TURNS.keys()
        assert all(why in reason for reason in engine["passed_apis"].values())


@on_both
async def test_requests_that_token_routes_cannot_serve_pass_through(dialect: str) -> None:
    """Fields whose effect does not show in tokens. A 0 asks for something: vLLM answers `prompt_logprobs: 0`."""
    asked: dict[str, tuple[dict[str, Any], ...]] = {
        "vllm": (
            {"best_of": 1},
            {"return_token_ids": True},
            {"prompt_logprobs": 0},
            {"routed_experts_prompt_start": 0},
            {"tools": [TOOL], "stop": ["x"]},
        ),
        "sglang": ({"data_parallel_rank": 0}, {"routed_dp_rank": 0}),
    }
    async with running_site(toy(dialect), token_legs="auto") as site:
        for fields in asked[dialect]:
            answer = await site.chat(**fields)
            assert answer.status_code == 200 and answer.json()["model"] == MODEL
            assert not generated(site), fields
        for number, fields in enumerate(({"return_token_ids": False}, {"prompt_logprobs": None}), 1):
            assert (await site.chat(**fields)).status_code == 200
            assert len(generated(site)) == number, fields


async def test_the_stream_interval_depends_on_what_the_client_waits_for() -> None:
    """One token at a time if its text is sent at once, some for a client that is told in parts, many for a whole
    answer."""
    async with running_site(token_legs="auto") as site:
        for fields, expected in (({"stream": True}, None), ({"stream": True, "tools": [TOOL]}, 4), ({}, 32)):
            assert (await site.chat(**fields)).status_code == 200
            assert generated(site)[-1]["sampling_params"].get("stream_interval") == expected
