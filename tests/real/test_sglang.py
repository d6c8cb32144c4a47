"""Two real SGLang servers of the tiny model, each with 4 slots and KV for 131,072 tokens, which somebody has started:
SGLang needs a GPU (docs/gpu.md has the commands, `make sglang` runs this)."""

import asyncio
import os
import random
from dataclasses import replace
from itertools import cycle
from typing import Any

import httpx
import orjson
import pytest

from loadtest.replayer import ReplaySettings, replay
from tests.api.differential import CREATED, assembled, compare, events_of
from tests.api.requests_table import Case, make_cases
from tests.api.varied_requests import messages_case, responses_case
from tests.engines.contract import PROMISES, Promise
from tests.engines.engine_under_test import engine_under_test
from tests.engines.test_contract_simulated import SGLANG
from tests.faults.token_jobs import ENDURING
from tests.support.gateway import ADMIN, PATIENT, running_gateway
from tests.support.rounds import play_rounds
from workloads.laws import draw, law_named

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]

FACTS = replace(
    SGLANG,
    model="tiny",
    max_context_tokens=32_768,
    kv_capacity_tokens=131_072,
    slots=4,
    block_tokens=1,
    template_tokens=16,
    retold_tokens=48,  # the whole answer and its begin: a random model writes what no tokenizer would
    keep_alive_s=5.0,
    num_tries=3,
)
TIMEOUT_S = 120.0
# SGLang closes a connection after 5 idle seconds; a client that stalled meanwhile would still reuse it.
NEW_CONNECTIONS = httpx.Limits(max_keepalive_connections=0)
NUM_VARIED = 110
# SGLang's scheduler dies of these, and its server with it (0.5.17; 0.5.23 checks as little).
DEADLY = {"bad chat, top_logprobs too many", "bad completion, token id"}
# The message shows the whole request, the time or a number as it was written, or it is a defect's (500). The gateway
# names the model.
OWN_WORDS = {
    "bad chat, no messages",
    "bad chat, temperature negative",
    "bad chat, bad schema",
    "bad completion, no prompt",
    "refused chat, a list",
    "no model",
    "a chat's model without a name",
}
# 0.5.17 answers `/v1/responses` in another form: it refuses the output of a call, and calls a cut answer completed.
RESPONSES_SINCE = (0, 5, 23)
# 0.5.17 ends its process if it gets new weights while turns wait, because it cannot flush its cache then.
WEIGHTS_SINCE = (0, 5, 23)
FORMS_SINCE = (0, 5, 18)  # 0.5.17 ignores the format of an answer on `/v1/messages`; the gateway does not


@pytest.fixture(scope="session")
def engines() -> list[str]:
    """The servers' URLs."""
    urls = os.environ.get("SGLANG_URLS", "").split()
    assert len(urls) == 2, "SGLANG_URLS must name two servers; docs/gpu.md says how to start them"
    return urls


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_a_real_sglang_keeps_the_contract(engines: list[str], promise: Promise) -> None:
    """If this fails and the simulated engine's test does not, the double is wrong."""
    async with engine_under_test(engines[0], FACTS) as engine:
        await promise(engine)


@pytest.mark.parametrize("token_legs", ["off", "auto"])
async def test_the_gateway_answers_like_a_real_sglang(engines: list[str], token_legs: str) -> None:
    """As with vLLM: only ids, times and what token routes do not tell differ."""
    untold = frozenset({"system_fingerprint", CREATED}) if token_legs == "auto" else frozenset[str]()
    if token_legs == "auto":
        # A whole answer's weights; without a parser, a zero; the id of the token that ends every answer.
        untold |= {"metadata", "reasoning_tokens", "matched_stop"}
    cases = [case for case in make_cases("tiny") if not is_left_out(case)]
    if await version_of(engines[0]) < RESPONSES_SINCE:
        cases = [case for case in cases if case.path != "/v1/responses" and not has_form(case)]
    found = await differences(engines[token_legs == "auto"], cases, untold, token_legs=token_legs)
    assert not found, f"{len(found)}\n\n" + "\n\n".join(found)


@pytest.mark.parametrize("make_case", [messages_case, responses_case])
async def test_messages_and_responses_equal_a_real_sglangs(engines: list[str], make_case: Any) -> None:
    """At token level the gateway builds both APIs itself; the engine's own answers are the reference."""
    dice = random.Random(make_case.__name__)
    cases = [greedy(make_case(dice, "tiny", number)) for number in range(NUM_VARIED)]
    if make_case is responses_case and await version_of(engines[0]) < RESPONSES_SINCE:
        pytest.skip("this SGLang answers /v1/responses in an older form")
    if await version_of(engines[0]) < FORMS_SINCE:
        cases = [case for case in cases if not has_form(case)]
    found = await differences(engines[0], cases, frozenset(), token_legs="auto")
    assert not found, f"{len(found)}\n\n" + "\n\n".join(found)


def is_left_out(case: Case) -> bool:
    """Whether a request kills the server, or its two answers may differ."""
    if case.name in DEADLY | OWN_WORDS:
        return True
    match case.body:
        case {"seed": int(), "temperature": 1.0}:
            return True  # it draws without the seed
        case {"prompt": _, "logprobs": int()}:
            return True  # it has no text offsets
        case {"prompt": _, "max_tokens": None}:
            return True  # a null is an error there, and no value at token level
        case {"tool_choice": {"type": "tool"}}:
            return True  # on `/v1/messages` a 500
        case {"stream_options": {"continuous_usage_stats": True, **options}} if not options.get("include_usage"):
            return True  # it reports usage in each event nevertheless
    return False


def has_form(case: Case) -> bool:
    """Whether it is a message that must have a format."""
    return isinstance(case.body, dict) and "output_config" in case.body


def greedy(case: Case) -> Case:
    """The same request without chance: SGLang draws from a generator that it does not seed."""
    assert isinstance(case.body, dict)
    return replace(case, body=case.body | {"temperature": 0.0})


async def version_of(engine: str) -> tuple[int, ...]:
    """Such as (0, 5, 23)."""
    async with httpx.AsyncClient(base_url=engine, timeout=TIMEOUT_S) as client:
        version = (await client.get("/server_info")).json()["version"]
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


async def differences(engine: str, cases: list[Case], untold: frozenset[str], **settings: Any) -> list[str]:
    """Where a gateway with these settings answers unlike its engine. One request at a time, for equal numerics."""
    async with (
        running_gateway(engine, **PATIENT, **settings) as gateway,
        httpx.AsyncClient(base_url=engine, timeout=TIMEOUT_S, limits=NEW_CONNECTIONS) as direct,
        httpx.AsyncClient(base_url=gateway.url, timeout=TIMEOUT_S) as proxied,
    ):
        return [one for case in cases for one in await compare(direct, proxied, case, untold)]


async def test_drained_turns_go_on_elsewhere_and_answer_as_if_undisturbed(engines: list[str]) -> None:
    """Twelve turns of 400 tokens at token level, while the engines are drained in turn."""

    async def play(round_number: int) -> bool:
        bodies = [
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"{round_number}: tell me of number {n}"}],
                "temperature": 0,
                "max_tokens": 400,
                "ignore_eos": True,
                "stream": n % 2 == 0,
            }
            for n in range(12)
        ]
        expected = [await text_of(client, url, body) for url, body in zip(cycle(engines), bodies, strict=False)]
        asked = asyncio.gather(*(text_of(client, gateway.url, body) for body in bodies))
        shown = (await client.get(gateway.url + "/v1/engines")).json()["data"]
        num_drains = 0
        for engine in cycle(shown):
            if asked.done():
                break
            route = f"{gateway.url}/v1/engines/{engine['id']}"
            await client.post(f"{route}/drain?timeout_s=60", headers=ADMIN)
            await client.post(f"{route}/uncordon", headers=ADMIN)
            num_drains += 1
        assert await asked == expected
        return num_drains > 2

    async with (
        httpx.AsyncClient(timeout=TIMEOUT_S) as client,
        running_gateway(*engines, **ENDURING | PATIENT) as gateway,
    ):
        await play_rounds("engines were drained while turns ran", play)


async def text_of(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> str:
    """The text of a chat, streamed or not."""
    answer = await client.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text[-300:]
    whole = assembled(events_of(answer.text)) if body["stream"] else answer.json()
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "length", answer.text[-300:]
    return str((choice["delta"] if body["stream"] else choice["message"])["content"])


@pytest.mark.parametrize("token_legs", ["off", "auto"])
async def test_a_rollout_loses_no_turn(engines: list[str], token_legs: str) -> None:
    """Thirty-two agents on eight slots; at token level the gateway knows each trajectory's tokens."""
    workload = draw(law_named("coding"), 32, 1).with_max_turns(8).fitted(4_000).with_max_tool_s(0.2)
    async with (
        running_gateway(*engines, **PATIENT, token_legs=token_legs) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=TIMEOUT_S) as client,
    ):
        settings = ReplaySettings(f"{gateway.url}/v1", rollout_id=f"rollout-{token_legs}")
        result = await replay(workload, settings)
        assert not result.errors
        assert sum(turn.cached_tokens for one in result.trajectories for turn in one.turns) > 0
        if token_legs == "auto":
            exported = (await client.post(f"/v1/rollouts/{result.rollout_id}/export")).text.splitlines()
            records = [one for one in map(orjson.loads, exported) if "calibration" not in one["trajectory_id"]]
            assert len(records) == len({one["trajectory_id"] for one in records}) == len(result.trajectories)
            assert not any(one["missing"] for one in records)
            assert sum(sum(one["loss_mask"]) for one in records) == workload.output_tokens


async def test_new_weights_reach_the_engines_while_turns_run(engines: list[str]) -> None:
    """An update from disk in both modes: running turns finish, and the engines report the new version."""
    if await version_of(engines[0]) < WEIGHTS_SINCE:
        pytest.skip("new weights end this SGLang while turns run")
    folder = os.environ["SGLANG_MODEL"]  # the weights that the servers already have: only the version changes
    async with (
        running_gateway(*engines, **PATIENT, token_legs="auto") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=TIMEOUT_S) as client,
    ):
        for number, mode in enumerate(("keep", "restart")):
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"{mode} on"}],
                "temperature": 0,
                "max_tokens": 2_000,
                "ignore_eos": True,
                "stream": True,
            }
            turns = [asyncio.create_task(text_of(client, gateway.url, body)) for _ in range(4)]
            order = {"version": f"step-{number}", "path": folder, "mode": mode}
            answer = await client.post("/v1/weights", json=order, headers=ADMIN)
            assert answer.status_code == 200 and answer.json()["status"] == "done", answer.text
            await asyncio.gather(*turns)
            later = body | {"max_tokens": 40}
            assert await text_of(client, gateway.url, later) == await text_of(client, engines[0], later)
            for engine in engines:
                assert (await client.get(f"{engine}/model_info")).json()["weight_version"] == f"step-{number}"
