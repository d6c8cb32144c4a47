"""Two hundred requests straight to a simulated engine and through the gateway, and as many to each of the two APIs that
SGLang builds from its chats."""

import asyncio
import random
from typing import Any

import httpx
import pytest

from engines.simulated.server import serve_engine
from tests.api.conftest import MODEL, toy
from tests.api.differential import CREATED, assembled, compare, kinds_of
from tests.api.requests_table import make_cases
from tests.api.varied_requests import messages_case, responses_case
from tests.support.engine import recorded_engine
from tests.support.gateway import REUSED_FOR, running_gateway


@pytest.mark.parametrize("token_legs", ["off", "auto"])
@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_the_gateway_answers_as_the_engine_does(dialect: Any, token_legs: str) -> None:
    """A client that moves from an engine to the gateway sees other ids and times, and nothing else. For a turn at token
    level it does not see the system fingerprint, which token routes do not report."""
    async with (
        serve_engine(toy(dialect)) as engine,
        running_gateway(engine, token_legs=token_legs) as gateway,
        httpx.AsyncClient(base_url=engine, timeout=30, limits=REUSED_FOR) as straight,
        httpx.AsyncClient(base_url=gateway.url, timeout=30, limits=REUSED_FOR) as through,
    ):
        untold = frozenset({"system_fingerprint", CREATED}) if token_legs == "auto" else frozenset[str]()
        found = [one for case in make_cases(MODEL) for one in await compare(straight, through, case, untold)]
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize("make_case", [messages_case, responses_case])
async def test_sglangs_messages_and_responses_are_equal_at_token_level(make_case: Any) -> None:
    """Messages and responses of all shapes have the same answers, and all of them are served at token level."""
    dice, num = random.Random(make_case.__name__), 220
    cases = [make_case(dice, MODEL, number) for number in range(num)]
    async with (
        recorded_engine(toy("sglang")) as engine,
        running_gateway(engine.url, token_legs="auto") as gateway,
        httpx.AsyncClient(base_url=engine.url, timeout=30, limits=REUSED_FOR) as straight,
        httpx.AsyncClient(base_url=gateway.url, timeout=30, limits=REUSED_FOR) as through,
    ):
        found = []
        for start in range(0, num, 10):  # concurrently, because they only wait for their tokens
            comparisons = [compare(straight, through, case) for case in cases[start : start + 10]]
            found += [one for differences in await asyncio.gather(*comparisons) for one in differences]
        num_generated = sum(request.path == "/generate" for request in engine.seen)
    assert not found, "\n\n".join(found[:5])
    assert num_generated == num


def test_joining_tokens_into_one_event_is_no_difference() -> None:
    """A vLLM whose reader is slow puts the tokens made meanwhile into one event."""

    def event(finish: str | None, tokens: int, **fields: Any) -> tuple[str, Any]:
        choice = {"index": 0, "finish_reason": finish, **fields}
        return "", {"choices": [choice], "usage": {"completion_tokens": tokens}}

    apart = [event(None, 1, text="a"), event(None, 2, text="b"), event("length", 3, text="c"), ("", "[DONE]")]
    joined = [event("length", 3, text="abc"), ("", "[DONE]")]
    assert (kinds_of(apart), assembled(apart)) == (kinds_of(joined), assembled(joined))
    thought = [event(None, 1, delta={"reasoning": "a"}), event("stop", 2, delta={"content": "b"})]
    at_once = [event("stop", 2, delta={"reasoning": "a", "content": "b"})]
    assert (kinds_of(thought), assembled(thought)) == (kinds_of(at_once), assembled(at_once))
    without_usage = [("", {"choices": [{"index": 0, "text": "abc", "finish_reason": "length"}]}), ("", "[DONE]")]
    assert kinds_of(without_usage) != kinds_of(joined)
