"""The OpenAI SDK as an agent uses it, with its ordinary retries, and what the replayer needs of any client.

The SDK retries after a refused or broken connection and after 408, 409, 429 and 5xx, waiting 0.5, 1, 2, 4, 8, 8, ...
seconds less up to a quarter, or as `Retry-After` says; 8 s is its cap and cannot be set. So `max_retries` decides how
long it waits for a restarting server: 2 about a second, 8 about half a minute. It does not retry a stream that broke
after its first byte; agents do that themselves, and so does this client, with the same limit.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import openai
from openai import AsyncOpenAI
from openai.types import CompletionUsage

from loadtest.agent import Address, Answer
from loadtest.answers import NONSENSE, Assembly, StreamBroken

INITIAL_BACKOFF_S = 0.5
_NUM_DOUBLINGS = 4
MAX_BACKOFF_S = INITIAL_BACKOFF_S * 2.0**_NUM_DOUBLINGS
# The answer of servers that know no trajectories.
NOT_KNOWN_THERE = (404, 405)


class RequestFailed(Exception):
    """A request got no usable answer, and its retries are used up. The message is the reason.

    Args:
        status: The HTTP status; None if there was no answer at all.
    """

    def __init__(self, reason: str, status: int | None = None, num_retries: int = 0) -> None:
        super().__init__(reason)
        self.status = status
        self.num_retries = num_retries


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, and how it came.

    Args:
        first_token_at: Instant of `time.perf_counter()`; None if the answer came whole.
        queued_s: How long the turn waited for an engine; None if the answer's headers do not report it.
        trajectory_id: The gateway's id of the trajectory; None if the server is not Heddle.
    """

    answer: Answer
    first_token_at: float | None
    num_retries: int
    queued_s: float | None
    trajectory_id: str | None


class ChatClient(Protocol):
    """What the replayer needs of a client. All agents may share one."""

    async def chat(self, body: dict[str, Any], address: Address) -> Reply:
        """The reply to one turn.

        Raises:
            RequestFailed: After all retries.
        """

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path below the base URL.

        Raises:
            RequestFailed: Also if the server does not know the path.
        """

    async def post(self, path: str) -> dict[str, Any] | None:
        """The answer to an empty POST; None if the server does not know the path."""

    async def delete(self, path: str) -> dict[str, Any] | None:
        """The answer to a DELETE; None if the server does not know the path."""

    async def aclose(self) -> None: ...


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


async def if_known(request: Awaitable[dict[str, Any]]) -> dict[str, Any] | None:
    """What a client's request gives; None if the server does not know its path."""
    try:
        return await request
    except RequestFailed as error:
        if error.status in NOT_KNOWN_THERE:
            return None
        raise


def root_of(base_url: str) -> str:
    """The server's address without its `/v1`."""
    return base_url.rstrip("/").removesuffix("/v1")


def backoff_s(num_retries: int) -> float:
    """How long to wait before a retry, as the SDK waits."""
    return INITIAL_BACKOFF_S * 2.0 ** min(num_retries, _NUM_DOUBLINGS) * (1 - 0.25 * random.random())


def patience_s(num_retries: int) -> float:
    """How long a client waits between this many retries at most."""
    num_shorter = min(num_retries, _NUM_DOUBLINGS)
    return INITIAL_BACKOFF_S * (2.0**num_shorter - 1) + MAX_BACKOFF_S * (num_retries - num_shorter)


def queued_s_of(headers: Mapping[str, str]) -> float | None:
    """How long the turn waited for an engine, if the server's headers report it."""
    queued_ms = headers.get("x-heddle-queued-ms")
    return None if queued_ms is None else float(queued_ms) / 1_000


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
