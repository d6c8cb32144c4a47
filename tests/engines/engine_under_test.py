"""An engine as the gateway sees it, through its dialect and our HTTP client, and the facts of its kind."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
import pytest

from engines.dialect import Dialect, Observation
from engines.http import HttpClient, HttpLimits, Response
from engines.probe import discover
from engines.upstream import Leg
from tests.support.rounds import came_about, num_ended

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMIT_BYTES = 16 * 1024 * 1024
TIMEOUT_S = 180.0  # Nothing here takes this long; a process on a busy machine has stalled for 20 s.
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Facts:
    """Where engines differ.

    Args:
        block_tokens: cached tokens come in multiples of this.
        template_tokens: at most so many tokens of a new conversation are cached, because others begin with them.
        retold_tokens: so many tokens of an answer may be others when its text is sent back.
        keep_alive_s: the engine closes an idle connection after this long.
        tells_start: it reports when its process started.
        unknown_model_status: for a request that names a model it does not serve.
        bad_type_status: for a field of the wrong type.
        named_call_reason: the finish reason of a call to the tool that the request named.
        tells_usage_always: if asked for usage in every event, also those that begin and end a chat have it.
        tells_fingerprint: whole answers and the end of a stream have a `system_fingerprint`.
        num_tries: how often a promise about time may be tried. On a busy machine, an engine in a process of its own
            may stall; an engine in this process cannot stall unnoticed.
        abort: target and body of the control route that ends the request with the gateway's id.
    """

    kind: str
    model: str
    max_context_tokens: int
    kv_capacity_tokens: int
    slots: int
    block_tokens: int
    template_tokens: int
    retold_tokens: int
    keep_alive_s: float
    tells_start: bool
    unknown_model_status: int
    bad_type_status: int
    named_call_reason: str
    tells_usage_always: bool
    tells_fingerprint: bool
    num_tries: int
    abort: Callable[[str], tuple[str, Json]]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, or all events of a stream."""

    status: int
    body: bytes

    @property
    def json(self) -> Json:
        parsed: Json = orjson.loads(self.body)
        return parsed

    @property
    def chunks(self) -> list[Json]:
        """The events of the stream except [DONE], which must be the last."""
        *events, done = self.body.removesuffix(b"\n\n").split(b"\n\n")
        assert done == b"data: [DONE]"
        return [orjson.loads(event.removeprefix(b"data: ")) for event in events]


class EngineUnderTest:
    """Sends legs to one engine, as the gateway would."""

    def __init__(self, http: HttpClient, dialect: Dialect, facts: Facts) -> None:
        self.http = http
        self.dialect = dialect
        self.facts = facts
        self._numbers = itertools.count(1)

    @property
    def endless(self) -> Json:
        """A turn that outlasts a test, even if the machine stalls for ten seconds."""
        messages = [{"role": "user", "content": "Hello"}]
        return {"messages": messages, "max_tokens": self.facts.max_context_tokens - 512, "ignore_eos": True}

    def new_id(self) -> str:
        """A new request id of fixed length."""
        return f"contract-{id(self):016x}-{next(self._numbers):04d}"

    async def begin(self, fields: Json, path: str = CHAT, priority: int = 0, request_id: str | None = None) -> Response:
        """Send a leg; returns the response once its head is there."""
        request = {"model": self.facts.model, "temperature": 0} | fields
        body = orjson.dumps(request)
        leg = Leg(
            path, request_id or self.new_id(), "trajectory-1", priority, body, request, bool(request.get("stream"))
        )
        upstream = self.dialect.upstream(leg)
        return await self.http.request("POST", upstream.path, upstream.body, upstream.headers, TIMEOUT_S)

    async def ask(self, fields: Json, path: str = CHAT, priority: int = 0, request_id: str | None = None) -> Answer:
        """Send a leg and wait for its whole answer. Cancelling it abandons the leg."""
        response = await self.begin(fields, path, priority, request_id)
        try:
            return Answer(response.status, await response.body(LIMIT_BYTES, TIMEOUT_S))
        finally:
            response.close()

    @asynccontextmanager
    async def endless_turns(self, num: int, is_stream: bool = True) -> AsyncIterator[list["asyncio.Task[Answer]"]]:
        """This many endless turns at once. On exit they are abandoned, and the engine is told."""
        ids = [self.new_id() for _ in range(num)]
        fields = self.endless | {"stream": is_stream}
        turns = [asyncio.create_task(self.ask(fields, request_id=id)) for id in ids]
        try:
            yield turns
        finally:
            await asyncio.gather(*map(self.abandon, turns, ids))

    async def abandon(self, turn: "asyncio.Task[Any]", request_id: str) -> None:
        """What the gateway does when a client disconnects."""
        turn.cancel()
        await asyncio.wait([turn])
        await self.dialect.abort(self.http, request_id, TIMEOUT_S)

    async def observe(self) -> Observation:
        (seen,) = await self.dialect.observe(self.http, TIMEOUT_S)
        return seen

    async def until(self, holds: Callable[[Observation], bool]) -> Observation:
        """Observe until the condition holds; returns the observation in which it did."""
        seen = await self.until_or_ended(holds, [])
        assert seen is not None
        return seen

    async def until_or_ended(
        self, holds: Callable[[Observation], bool], turns: "Iterable[asyncio.Task[Any]]"
    ) -> Observation | None:
        """As `until`, but None as soon as one of these turns has ended, all of which should be in flight."""
        seen: list[Observation] = []

        async def check() -> bool:
            seen.append(await self.observe())
            return holds(seen[-1])

        try:
            return seen[-1] if await came_about(check, lambda: bool(num_ended(turns))) else None
        except TimeoutError:
            pytest.fail(f"it never held in {len(seen)} observations, the last: {seen[-3:]}")

    async def until_idle(self) -> None:
        await self.until(lambda seen: seen.num_running == 0 and seen.num_waiting == 0)


@asynccontextmanager
async def engine_under_test(url: str, facts: Facts) -> AsyncIterator[EngineUnderTest]:
    """The engine at this address, idle. Requests still in flight on exit fail."""
    # The gateway's client idles for 3 s of the engines' 5 s.
    http = HttpClient(url, HttpLimits(max_idle_s=0.6 * facts.keep_alive_s))
    try:
        found = await discover(http, None, TIMEOUT_S)
        engine = EngineUnderTest(http, found.dialect, facts)
        await engine.until_idle()
        yield engine
    finally:
        http.close()
