"""The OpenAI SDK for Python against the gateway, used as its users do."""

import asyncio
import json
from typing import Any

import pytest
from pydantic import BaseModel

from tests.api.conftest import CHAT, HELLO, MODEL, Site, Wire, running_site, toy
from tests.support.engine import Script, fixed
from tests.support.gateway import eventually

pytestmark = pytest.mark.usefixtures("token_legs")
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo"]}},
            "required": ["city"],
        },
    },
}


class Weather(BaseModel):
    """The class of a structured answer."""

    city: str
    degrees: int


def client_of(site: Site, trajectory: str = "", **options: Any) -> Any:
    from openai import AsyncOpenAI

    base_url = f"{site.url}/t/{trajectory}/v1" if trajectory else f"{site.url}/v1"
    return AsyncOpenAI(**{"base_url": base_url, "api_key": "none", "max_retries": 0} | options)


def raises(exception: str) -> Any:
    """As `pytest.raises`, for the SDK's exception of this name."""
    import openai

    return pytest.raises(getattr(openai, exception))


def chat(**fields: Any) -> Any:
    return {"model": MODEL, "messages": HELLO, "max_tokens": 8, **fields}


async def test_a_chat_is_equal_whole_and_streamed(site: Site) -> None:
    """The same text and usage, a request id, and one trajectory for the base_url."""
    async with client_of(site, "run-7") as client:
        whole = await client.chat.completions.create(**chat())
        stream = await client.chat.completions.create(**chat(stream=True, stream_options={"include_usage": True}))
        chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert whole._request_id is not None and len(whole._request_id) == 32
    assert len({chunk.id for chunk in chunks}) == 1
    assert (await site.trajectory("run-7"))["num_turns"] == 2


async def test_every_chunk_has_a_choice_unless_usage_is_requested(site: Site) -> None:
    """Much code reads `chunk.choices[0]` without a check."""
    async with client_of(site) as client:
        chunks = [chunk async for chunk in await client.chat.completions.create(**chat(stream=True))]
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_the_synchronous_client_works(site: Site) -> None:
    """From a thread, streaming and not, with the raw response's headers."""
    from openai import OpenAI

    def talk() -> tuple[str | None, str, str | None]:
        with OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as client:
            raw = client.chat.completions.with_raw_response.create(**chat())
            chunks = list(client.chat.completions.create(**chat(stream=True)))
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            return raw.parse().choices[0].message.content, text, raw.headers.get("x-trajectory-id")

    whole, streamed, trajectory = await asyncio.to_thread(talk)
    assert whole == streamed
    assert trajectory is not None
    assert (await site.trajectory(trajectory))["num_turns"] == 1


async def test_tool_calls_are_equal_whole_and_streamed(site: Site) -> None:
    """A required tool is called with arguments that are JSON, and its result is accepted in the next turn. The SDK
    tells when a streamed call is done.
    """
    async with client_of(site, "run-7") as client:
        fields = chat(tools=[TOOL], tool_choice="required", max_tokens=80)
        (call,) = (await client.chat.completions.create(**fields)).choices[0].message.tool_calls or []
        async with client.chat.completions.stream(**fields) as stream:
            told = [event.type async for event in stream]
            streamed = (await stream.get_final_completion()).choices[0]
        assert told.count("tool_calls.function.arguments.done") == 1
        assert call.type == "function"
        assert json.loads(call.function.arguments) == {"city": "Oslo"}
        (streamed_call,) = streamed.message.tool_calls or []
        assert streamed.finish_reason == "tool_calls"
        assert streamed_call.function.arguments == call.function.arguments
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        assistant = {"role": "assistant", "tool_calls": [call.model_dump()]}
        after = await client.chat.completions.create(**chat(messages=[*HELLO, assistant, result]))
        assert after.choices[0].finish_reason in ("stop", "length")


async def test_parse_returns_an_object(site: Site) -> None:
    """Structured output arrives as the requested class."""
    async with client_of(site) as client:
        answer = await client.chat.completions.parse(**chat(response_format=Weather, max_tokens=100))
    assert isinstance(answer.choices[0].message.parsed, Weather)


async def test_the_responses_api_works(site: Site) -> None:
    """Whole, as a stream of typed events, and with a function call."""
    function: Any = {
        "type": "function",
        "name": "run",
        "strict": False,
        "parameters": {"type": "object", "properties": {}},
    }
    async with client_of(site, "run-7") as client:
        whole = await client.responses.create(model=MODEL, input="Hello", max_output_tokens=8)
        async with client.responses.stream(model=MODEL, input="Hello") as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        called = await client.responses.create(
            model=MODEL, input="Run.", tools=[function], tool_choice="required", max_output_tokens=80
        )
    assert whole.output_text and whole.usage is not None
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert final.output_text
    assert [item.type for item in called.output] == ["function_call"]


async def test_the_other_resources_work(site: Site) -> None:
    """Models, embeddings (which the SDK requests in base64) and legacy completions."""
    async with client_of(site) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        embedding = (await client.embeddings.create(model=MODEL, input="a")).data[0].embedding
        assert all(isinstance(number, float) for number in embedding)
        completion = await client.completions.create(model=MODEL, prompt="a", max_tokens=3, n=2)
        assert [choice.index for choice in completion.choices] == [0, 1]
        with raises("NotFoundError"):
            await client.models.retrieve("nope")


async def test_extra_fields_and_headers_take_effect(site: Site) -> None:
    """`extra_body` reaches the engine, and `extra_headers` name the trajectory."""
    async with client_of(site) as client:
        raw = await client.chat.completions.with_raw_response.create(
            **chat(), extra_body={"my_field": [1]}, extra_headers={"X-Session-ID": "run-7"}
        )
    assert raw.headers["x-trajectory-id"] == "run-7"
    assert site.engine.seen[0].json["my_field"] == [1]


# --- errors ----------------------------------------------------------------------------------------------------------

ERRORS: list[tuple[str, str, dict[str, Any], str | None]] = [
    ("unknown model", "NotFoundError", {"model": "nope"}, "model_not_found"),
    (
        "too long",
        "BadRequestError",
        {"messages": [{"role": "user", "content": "word " * 9000}]},
        "context_length_exceeded",
    ),
    ("wrong type", "BadRequestError", {"max_tokens": "many"}, None),
    ("bad id", "BadRequestError", {"extra_headers": {"x-trajectory-id": "x" * 300}}, "bad_identity"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("exception", "fields", "code"), [error[1:] for error in ERRORS], ids=[error[0] for error in ERRORS]
)
async def test_an_invalid_request_raises_the_sdks_exception(
    site: Site, exception: str, fields: Any, code: str | None, stream: bool
) -> None:
    """The class follows from the status, with code, message and request id, also if a stream was requested."""
    async with client_of(site) as client:
        with raises(exception) as caught:
            await client.chat.completions.create(**{**chat(stream=stream), **fields})
    error = caught.value
    assert (error.code, error.type) == (code, "invalid_request_error")
    assert error.body["message"] and len(error.request_id) == 32


async def test_a_wrong_key_raises_authentication_error() -> None:
    """And the right key is accepted."""
    async with running_site(api_keys=("right",)) as site:
        async with client_of(site, api_key="wrong") as client:
            with raises("AuthenticationError"):
                await client.chat.completions.create(**chat())
        async with client_of(site, api_key="right") as client:
            assert (await client.chat.completions.create(**chat())).choices


async def test_an_aborted_trajectory_raises_conflict_at_once(site: Site) -> None:
    """The SDK retries a 409 unless the answer forbids it, as here."""
    await site.chat("/t/a/v1/chat/completions")
    await site.client.delete("/v1/trajectories/a")
    async with client_of(site, "a", max_retries=5) as client:
        with raises("ConflictError") as caught:
            await client.chat.completions.create(**chat())
    assert caught.value.code == "trajectory_aborted"
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"


async def test_a_full_gateway_is_retried_until_it_has_room() -> None:
    """429 with Retry-After: with the SDK's own retries, the turn is served once there is room."""
    async with running_site(max_turns_per_key=1) as site:
        first = asyncio.create_task(site.chat("/t/a/v1/chat/completions", max_tokens=8000, ignore_eos=True))
        await eventually(lambda: site.engine.turns)
        async with client_of(site, "b") as client:
            with raises("RateLimitError") as caught:
                await client.chat.completions.create(**chat())
            assert float(caught.value.response.headers["retry-after"]) <= 120
            retrying = asyncio.create_task(client.with_options(max_retries=3).chat.completions.create(**chat()))
            await eventually(lambda: refused(site, 2))
            await site.client.delete("/v1/trajectories/a")
            await first
            assert (await asyncio.wait_for(retrying, 60)).choices


async def refused(site: Site, times: int) -> bool:
    page = (await site.client.get("/metrics")).text
    return f'status="429"}} {float(times)}' in page


async def test_a_stream_that_breaks_raises(wire: Wire) -> None:
    """The SDK takes a stream that just ends for a complete one, so the gateway ends it with an error event; at token
    level, after it has tried again."""

    async def play(_: Any, write: Any) -> None:
        await write(wire.chunk("a"))

    async with running_site(toy(), max_attempts=2, retry_pause_s=0) as site:
        site.engine.scripts[wire.path] = Script(play)
        async with client_of(site) as client:
            with raises("APIError") as caught:
                async for _ in await client.chat.completions.create(**chat(stream=True)):
                    pass
    assert caught.value.code == ("stream_broken" if wire.path == CHAT else "engine_failed")


async def test_a_failing_engine_raises_a_server_error(wire: Wire) -> None:
    """After every attempt has failed; the engine's own body never reaches the client."""
    async with running_site(toy(), max_attempts=2, retry_pause_s=0) as site:
        site.engine.scripts[wire.path] = fixed(500, b"<html>secret</html>", b"text/html")
        async with client_of(site) as client:
            with raises("InternalServerError") as caught:
                await client.chat.completions.create(**chat())
        assert "secret" not in str(caught.value)
        assert len(site.engine.turns) == 2
