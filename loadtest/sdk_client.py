"""The OpenAI SDK as an agent uses it, with its ordinary retries.

The SDK does not retry a stream that broke after its first byte; agents do that themselves, and so does this client,
with the same limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
from openai import AsyncOpenAI
from openai.types import CompletionUsage

from loadtest.agent import Address
from loadtest.answers import NONSENSE, Assembly, StreamBroken
from loadtest.clients import Reply, RequestFailed, backoff_s, if_known, queued_s_of, root_of


class SdkClient:
    """`AsyncOpenAI` as the replayer's client.

    Args:
        base_url: Ends in `/v1`.
    """

    def __init__(self, base_url: str, api_key: str, max_retries: int, timeout_s: float) -> None:
        self._root_url = root_of(base_url)
        self._max_retries = max_retries
        self._sdk = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=max_retries, timeout=timeout_s)

    async def chat(self, body: dict[str, Any], address: Address) -> Reply:
        for attempt in range(self._max_retries + 1):
            try:
                return await self._ask(body, address, attempt)
            except StreamBroken as error:
                if attempt == self._max_retries:
                    raise RequestFailed(f"stream broke: {error}", num_retries=attempt) from error
                await asyncio.sleep(backoff_s(attempt))
        raise AssertionError("the last attempt returns or raises")

    async def get(self, path: str) -> dict[str, Any]:
        return await _object(self._sdk.get(path, cast_to=dict[str, Any]))

    async def post(self, path: str) -> dict[str, Any] | None:
        return await if_known(_object(self._sdk.post(path, body={}, cast_to=dict[str, Any])))

    async def delete(self, path: str) -> dict[str, Any] | None:
        return await if_known(_object(self._sdk.delete(path, cast_to=dict[str, Any])))

    async def aclose(self) -> None:
        await self._sdk.close()

    async def _ask(self, body: dict[str, Any], address: Address, num_earlier: int) -> Reply:
        sdk = self._sdk
        if address.path_prefix:
            sdk = sdk.with_options(base_url=f"{self._root_url}{address.path_prefix}/v1")
        known = {name: body[name] for name in ("model", "messages", "max_tokens", "temperature", "stream")}
        extra = {name: value for name, value in body.items() if name not in known} | dict(address.body)
        assembly = Assembly()
        with _mapped_errors():
            raw = await sdk.chat.completions.with_raw_response.create(
                **known, extra_headers=dict(address.headers), extra_body=extra
            )
            if known["stream"]:
                await _read_stream(raw.parse(), assembly)
            else:
                _read_whole(raw.parse(), assembly)
            return Reply(
                assembly.answer(),
                assembly.first_token_at,
                num_earlier + raw.retries_taken,
                queued_s_of(raw.headers),
                raw.headers.get("x-trajectory-id"),
            )


async def _object(request: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    with _mapped_errors():
        return dict(await request or {})


@contextmanager
def _mapped_errors() -> Iterator[None]:
    try:
        yield
    except openai.APIStatusError as error:
        said = error.body.get("message") if isinstance(error.body, dict) else None
        raise RequestFailed(f"HTTP {error.status_code}: {said or error.message}", error.status_code) from error
    except openai.APIConnectionError as error:
        raise RequestFailed(f"no answer: {error.__cause__ or error}") from error
    except (openai.APIError, *NONSENSE) as error:
        raise RequestFailed(f"not an answer of this API: {error!r}") from error


async def _read_stream(stream: Any, assembly: Assembly) -> None:
    try:
        async for chunk in stream:
            if chunk.usage is not None:
                assembly.usage = _counts(chunk.usage)
            for choice in chunk.choices:
                # vLLM's and SGLang's reasoning parsers put reasoning beside the content.
                delta = choice.delta
                if getattr(delta, "reasoning_content", None) or getattr(delta, "reasoning", None):
                    assembly.note_token()
                if delta.content:
                    assembly.add_text(delta.content)
                for call in delta.tool_calls or ():
                    function = call.function
                    assembly.add_tool_call(
                        call.index, call.id, function and function.name, function and function.arguments
                    )
                if choice.finish_reason:
                    assembly.finish_reason = choice.finish_reason
    except openai.APIError as error:
        raise StreamBroken(str(error)) from error


def _read_whole(completion: Any, assembly: Assembly) -> None:
    choice = completion.choices[0]
    assembly.add_text(choice.message.content or "")
    for index, call in enumerate(choice.message.tool_calls or ()):
        assembly.add_tool_call(index, call.id, call.function.name, call.function.arguments)
    # The first token of a whole answer cannot be observed.
    assembly.first_token_at = None
    assembly.finish_reason = choice.finish_reason
    assembly.usage = _counts(completion.usage)


def _counts(usage: CompletionUsage | None) -> tuple[int, int, int] | None:
    if usage is None:
        return None
    details = usage.prompt_tokens_details
    return usage.prompt_tokens, (details and details.cached_tokens) or 0, usage.completion_tokens
