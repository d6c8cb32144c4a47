"""The Anthropic SDK for Python against the gateway."""

from typing import TYPE_CHECKING, Any

import pytest

from tests.api.conftest import HELLO, MODEL, Site, running_site

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

pytestmark = pytest.mark.usefixtures("token_legs")
TOOL: Any = {
    "name": "get_weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo"]}},
        "required": ["city"],
    },
}


def client_of(site: Site, **options: Any) -> "AsyncAnthropic":
    from anthropic import AsyncAnthropic

    return AsyncAnthropic(**{"base_url": f"{site.url}/t/run-7", "api_key": "none", "max_retries": 0} | options)


def message(**fields: Any) -> Any:
    return {"model": MODEL, "messages": HELLO, "max_tokens": 8, **fields}


async def test_a_message_is_equal_whole_and_streamed(site: Site) -> None:
    """Both have the same text, stop reason and usage, in the trajectory that the base_url names."""
    async with client_of(site) as client:
        whole = await client.messages.create(**message())
        async with client.messages.stream(**message()) as stream:
            text = "".join([part async for part in stream.text_stream])
            final = await stream.get_final_message()
    assert whole.content[0].text == text
    assert (whole.stop_reason, final.stop_reason) == ("max_tokens", "max_tokens")
    assert whole.usage.output_tokens == final.usage.output_tokens == 8
    shown = await site.trajectory("run-7")
    assert [turn["output_tokens"] for turn in shown["turns"]] == [8, 8]


async def test_a_tool_call_and_its_result_round_trip(site: Site) -> None:
    """The call's input is parsed, whole and streamed, and its result is accepted."""
    async with client_of(site) as client:
        fields = message(tools=[TOOL], tool_choice={"type": "any"}, max_tokens=80)
        whole = await client.messages.create(**fields)
        async with client.messages.stream(**fields) as stream:
            streamed = await stream.get_final_message()
        assert (whole.stop_reason, whole.content[0].input) == ("tool_use", {"city": "Oslo"})
        assert streamed.content[0].input == whole.content[0].input
        result = {"type": "tool_result", "tool_use_id": whole.content[0].id, "content": "rain"}
        assistant = {"role": "assistant", "content": [whole.content[0].model_dump()]}
        after = await client.messages.create(
            **message(messages=[*HELLO, assistant, {"role": "user", "content": [result]}])
        )
        assert after.content


async def test_counted_tokens_equal_a_messages_input_tokens(site: Site) -> None:
    """Cached tokens included."""
    async with client_of(site) as client:
        counted = await client.messages.count_tokens(model=MODEL, messages=HELLO)
        usage = (await client.messages.create(**message())).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("fields", "exception", "error_type"),
    [
        ({"model": "nope"}, "NotFoundError", "not_found_error"),
        ({"messages": "Hello"}, "BadRequestError", "invalid_request_error"),
    ],
)
async def test_an_invalid_request_raises_the_sdks_exception(
    site: Site, fields: Any, exception: str, error_type: str, stream: bool
) -> None:
    """In Anthropic's form, with its error types."""
    import anthropic

    async with client_of(site) as client:
        with pytest.raises(getattr(anthropic, exception)) as caught:
            await client.messages.create(**{**message(stream=stream), **fields})
    assert caught.value.body["error"]["type"] == error_type
    assert caught.value.body["type"] == "error"


async def test_a_wrong_key_raises_authentication_error() -> None:
    """The SDK sends its key as `x-api-key`."""
    import anthropic

    async with running_site(api_keys=("right",)) as site:
        async with client_of(site, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(**message())
        async with client_of(site, api_key="right") as client:
            assert (await client.messages.create(**message())).content


async def test_an_aborted_trajectory_raises_conflict(site: Site) -> None:
    """At once, without retries."""
    import anthropic

    async with client_of(site, max_retries=5) as client:
        await client.messages.create(**message())
        await site.client.delete("/v1/trajectories/run-7")
        with pytest.raises(anthropic.ConflictError):
            await client.messages.create(**message())
    assert len(site.engine.turns) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_tool_runner_sends_whole_conversations(site: Site, stream: bool) -> None:
    """It first asks for its conversation to be kept, which engines ignore: they would get a tool's result without the
    question. Each of its turns that reaches an engine has all messages before it.
    """
    from anthropic import beta_async_tool

    @beta_async_tool
    async def look_up(word: str) -> str:
        """What a word means."""
        return "It has many meanings."

    async with client_of(site) as client:
        runner = client.beta.messages.tool_runner(
            **message(max_tokens=200, tools=[look_up], tool_choice={"type": "any"}, max_iterations=3, stream=stream)
        )
        answers = [answer async for answer in runner]
    shown = await site.trajectory("run-7")
    assert len(answers) == 3
    assert [turn["outcome"] for turn in shown["turns"]] == ["finished"] * 3
    prompts = [turn["prompt_tokens"] for turn in shown["turns"]]
    assert prompts == sorted(set(prompts))


async def test_a_thread_is_refused(site: Site) -> None:
    """With the code on which Anthropic's SDKs send the whole conversation instead; no engine is asked."""
    body = message(thread={"type": "continue", "previous_message_id": "msg_1"})
    answer = await site.client.post("/v1/messages", json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert answer.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}
    assert not site.engine.turns
