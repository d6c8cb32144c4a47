"""Trainers that render prompts themselves: tokens in, tokens out, in exactly the requests that their clients send."""

from typing import Any

import httpx
import orjson
import pytest

from tests.api.conftest import HELLO, MODEL, Site, running_site, toy
from tests.support.engine import fixed, recorded_engine
from tests.support.gateway import running_gateway

VLLM, SGLANG = "/inference/v1/generate", "/generate"
PROMPT = [300, 301, 302, 303]
on_both = pytest.mark.parametrize("dialect", ["vllm", "sglang"])
streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def request_of(dialect: str, ids: list[int], stream: bool = False, **fields: Any) -> dict[str, Any]:
    """A turn as prime-rl's client (through `renderers`) requests it of vLLM, and slime's and AReaL's of SGLang."""
    if dialect == "sglang":
        sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 6, "skip_special_tokens": False}
        return {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "stream": stream, **fields}
    sampling = {"temperature": 1.0, "max_tokens": 6, "logprobs": 1, "skip_special_tokens": False}
    body: dict[str, Any] = {"model": MODEL, "token_ids": ids, "sampling_params": sampling, "cache_salt": "3"}
    return body | ({"stream": True} if stream else {}) | fields


def path_of(dialect: str) -> str:
    return SGLANG if dialect == "sglang" else VLLM


def tokens_of(dialect: str, answer: httpx.Response, stream: bool = False) -> list[int]:
    """The tokens of an answer."""
    assert answer.status_code == 200, answer.text
    if not stream:
        whole = answer.json()
        return whole["output_ids"] if dialect == "sglang" else whole["choices"][0]["token_ids"]
    events = [httpx.Response(200, content=line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert answer.text.endswith("data: [DONE]\n\n")
    if dialect == "sglang":
        return events[-1].json()["output_ids"]
    return [id for event in events for choice in event.json()["choices"] for id in choice["token_ids"]]


@on_both
@streamed
@pytest.mark.parametrize("named_by", ["path", "header"])
async def test_a_trainers_turns_are_scheduled_like_any_turns(dialect: Any, stream: bool, named_by: str) -> None:
    """They are counted and recorded as any client's turns are, and the engine gets a priority."""
    async with running_site(toy(dialect)) as site:
        header = {"X-SMG-Routing-Key" if dialect == "sglang" else "X-Session-ID": "rollout-1"}
        path = path_of(dialect) if named_by == "header" else f"/t/rollout-1{path_of(dialect)}"
        ids, lengths = list(PROMPT), []
        for _ in range(3):
            lengths.append(len(ids))
            answer = await site.client.post(
                path, json=request_of(dialect, ids, stream), headers=header if named_by == "header" else {}
            )
            assert answer.headers["x-trajectory-id"] == "rollout-1"
            ids += [*tokens_of(dialect, answer, stream), 400, 401]
        shown = await site.trajectory("rollout-1")
        assert [turn["outcome"] for turn in shown["turns"]] == ["finished"] * 3
        assert [turn["finish_reason"] in ("stop", "length") for turn in shown["turns"]] == [True] * 3
        assert [turn["prompt_tokens"] for turn in shown["turns"]] == lengths
        assert {one.path for one in site.engine.turns} == {path_of(dialect)}
        assert all(isinstance(one.json["priority"], int) for one in site.engine.turns)


@on_both
@streamed
async def test_tokens_identify_the_trajectory_of_a_turn(dialect: Any, stream: bool) -> None:
    """Without an id, a prompt that begins with another turn's prompt and output continues its trajectory; siblings,
    whose first prompts are equal, are told apart by what they add."""
    async with running_site(toy(dialect)) as site:
        prompts = {name: list(PROMPT) for name in range(3)}
        owners: dict[int, list[str]] = {name: [] for name in prompts}
        for turn in range(3):
            for name, ids in prompts.items():
                answer = await site.client.post(path_of(dialect), json=request_of(dialect, ids, stream))
                owners[name].append(answer.headers["x-trajectory-id"])
                ids += [*tokens_of(dialect, answer, stream), 400 + name, 410 + turn]
        assert all(len(set(ids)) == 1 for ids in owners.values())
        assert len({ids[0] for ids in owners.values()}) == 3
        (group,) = {(await site.trajectory(ids[0]))["group_id"] for ids in owners.values()}
        other = await site.client.post(path_of(dialect), json=request_of(dialect, [*PROMPT, 7]))
        assert (await site.trajectory(other.headers["x-trajectory-id"]))["group_id"] != group


async def test_token_completions_identify_the_trajectory_of_a_turn(site: Site) -> None:
    """TRL's and SkyRL's way: `/v1/completions` with token ids, which requests the generated ids."""
    ids, owners = list(PROMPT), set()
    for turn in range(3):
        body = {"model": MODEL, "prompt": ids, "max_tokens": 5, "n": 1, "logprobs": 0, "return_token_ids": True}
        answer = await site.client.post("/v1/completions", json=body)
        owners.add(answer.headers["x-trajectory-id"])
        ids += [*answer.json()["choices"][0]["token_ids"], 400 + turn]
    assert len(owners) == 1
    assert (await site.trajectory(owners.pop()))["num_turns"] == 3


@streamed
async def test_ids_in_place_of_texts_identify_the_trajectory_of_a_turn(stream: bool) -> None:
    """AReaL's way on vLLM: `return_tokens_as_token_ids`, so the ids are among the log-probabilities."""
    async with running_site(toy()) as site:
        ids, owners = list(PROMPT), set()
        for turn in range(3):
            made = [500 + turn, 510 + turn]
            events = [
                {
                    "index": 0,
                    "text": "x",
                    "finish_reason": reason,
                    "logprobs": {"tokens": [f"token_id:{id}" for id in part]},
                }
                for part, reason in ([(made[:1], None), (made[1:], "length")] if stream else [(made, "length")])
            ]
            said = [orjson.dumps({"object": "text_completion", "choices": [one]}) for one in events]
            streamed = b"".join(b"data: %b\n\n" % one for one in [*said, b"[DONE]"])
            kind = b"text/event-stream" if stream else b"application/json"
            site.engine.scripts["/v1/completions"] = fixed(200, streamed if stream else said[0], kind)
            body = {"model": MODEL, "prompt": ids, "max_tokens": 2, "logprobs": 0, "stream": stream}
            answer = await site.client.post("/v1/completions", json=body | {"return_tokens_as_token_ids": True})
            owners.add(answer.headers["x-trajectory-id"])
            ids += [*made, 400 + turn]
        assert len(owners) == 1


@streamed
@pytest.mark.usefixtures("token_legs")
async def test_tokens_of_a_chat_identify_the_trajectory_of_its_later_turns(stream: bool) -> None:
    """The way of rLLM's gateway with cumulative tokens: a chat, then `/v1/completions` with the chat's tokens and new
    ones. Fields stay as they were, so `logprobs` is true there, which vLLM takes for 1."""
    async with running_site(toy()) as site:
        asked = {"model": MODEL, "logprobs": True, "return_token_ids": True, "max_tokens": 5, "stream": stream}
        told: dict[str, Any] = {"messages": HELLO}
        path, ids, owners = "/v1/chat/completions", list[int](), set()
        for turn in range(3):
            answer = await site.client.post(path, json=asked | told)
            assert answer.status_code == 200, answer.text
            owners.add(answer.headers["x-trajectory-id"])
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            events = [orjson.loads(line) for line in (lines if stream else [answer.text])]
            choices = [choice for event in events for choice in event["choices"]]
            ids = ids or events[0]["prompt_token_ids"]
            ids += [id for choice in choices for id in choice.get("token_ids") or ()] + [400 + turn]
            path, told = "/v1/completions", {"prompt": ids, "add_special_tokens": False}
        assert len(owners) == 1
        assert [one.path for one in site.engine.turns][1:] == ["/v1/completions"] * 2


@on_both
async def test_an_aborted_generation_is_retried_on_another_engine(dialect: Any) -> None:
    """`abort` is a fault of the engine, in either kind's form."""
    aborted: Any = {"choices": [{"index": 0, "token_ids": [5], "finish_reason": "abort", "logprobs": None}]}
    if dialect == "sglang":
        meta = {"finish_reason": {"type": "abort", "message": "Aborted"}, "prompt_tokens": 4, "completion_tokens": 1}
        aborted = {"text": "", "output_ids": [5], "meta_info": meta}
    async with recorded_engine(toy(dialect)) as bad, recorded_engine(toy(dialect)) as good:
        bad.scripts[path_of(dialect)] = fixed(200, httpx.Response(200, json=aborted).content)
        async with (
            running_gateway(bad.url, good.url) as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=30) as client,
        ):
            for number in range(4):
                answer = await client.post(f"/t/{number}{path_of(dialect)}", json=request_of(dialect, PROMPT))
                assert len(tokens_of(dialect, answer)) > 1
        assert bad.turns


@on_both
async def test_a_prompt_that_is_too_long_is_an_error(dialect: Any) -> None:
    """In OpenAI's form, with the status and code that clients check."""
    async with running_site(toy(dialect, max_model_len=64)) as site:
        answer = await site.client.post(path_of(dialect), json=request_of(dialect, list(range(300, 400))))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


@on_both
async def test_the_token_route_of_the_other_kind_is_unknown(dialect: Any) -> None:
    """A fleet has the route of its engines' kind; no engine is asked for the other's."""
    other = "vllm" if dialect == "sglang" else "sglang"
    async with running_site(toy(dialect)) as site:
        answer = await site.client.post(path_of(other), json=request_of(other, PROMPT))
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_route")
        assert not site.engine.turns


@on_both
async def test_several_outputs_are_one_turn(dialect: Any) -> None:
    """All their tokens are counted."""
    async with running_site(toy(dialect)) as site:
        body = request_of(dialect, PROMPT)
        body["sampling_params"]["n"] = 3
        answer = await site.client.post(f"/t/several{path_of(dialect)}", json=body)
        assert answer.status_code == 200, answer.text
        outputs = answer.json() if dialect == "sglang" else answer.json()["choices"]
        num_made = sum(len(one["output_ids" if dialect == "sglang" else "token_ids"]) for one in outputs)
        shown = await site.trajectory("several")
        assert (len(outputs), shown["turns"][0]["output_tokens"]) == (3, num_made)


async def test_engine_clients_find_health_and_tokenize(site: Site) -> None:
    """`/health` before they begin, and `/tokenize` beside the `/v1` of their base URL."""
    assert (await site.client.get("/health")).status_code == 200
    answer = await site.client.post("/t/one/tokenize", json={"model": MODEL, "messages": HELLO})
    assert answer.json()["count"] == len(answer.json()["tokens"])
