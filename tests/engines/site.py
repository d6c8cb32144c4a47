"""An engine as the gateway meets it, through its dialect and our HTTP client, and what is true of its kind."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
import pytest

from engines.dialect import Dialect, Leg, Observation
from engines.http import HttpClient, HttpLimits, Response
from engines.probe import discover

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMIT_BYTES = 16 * 1024 * 1024
TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.02  # Asked without a pause, a server is busy with nothing else.
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Facts:
    """Where engines differ.

    Args:
        block_tokens: cached tokens come in multiples of this.
        keep_alive_s: an idle connection is closed after this long.
        tells_start: it says when its process started.
        unknown_model_status: for a request that names a model it does not serve.
        bad_type_status: for a field of the wrong type.
        named_call_reason: the finish reason of a call to the tool that the request named.
        tells_fingerprint: whole answers and the end of a stream have a `system_fingerprint`.
        abort: target and body of the control route that ends the request which the gateway called by that id.
    """

    kind: str
    model: str
    max_context_tokens: int
    kv_capacity_tokens: int
    slots: int
    block_tokens: int
    keep_alive_s: float
    tells_start: bool
    unknown_model_status: int
    bad_type_status: int
    named_call_reason: str
    tells_fingerprint: bool
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
        """The stream's events but for [DONE], which must be the last."""
        *events, done = self.body.removesuffix(b"\n\n").split(b"\n\n")
        assert done == b"data: [DONE]"
        return [orjson.loads(event.removeprefix(b"data: ")) for event in events]


class Site:
    """Sends legs to one engine, as the gateway would."""

    def __init__(self, http: HttpClient, dialect: Dialect, facts: Facts) -> None:
        self.http = http
        self.dialect = dialect
        self.facts = facts
        self._numbers = itertools.count(1)

    @property
    def endless(self) -> Json:
        """A turn that outlasts a test, even if the machine stands still for ten seconds."""
        messages = [{"role": "user", "content": "Hello"}]
        return {"messages": messages, "max_tokens": self.facts.max_context_tokens - 512, "ignore_eos": True}

    def new_id(self) -> str:
        """A request id of fixed length, other than any before."""
        return f"contract-{id(self):016x}-{next(self._numbers):04d}"

    async def begin(self, fields: Json, path: str = CHAT, priority: int = 0, request_id: str | None = None) -> Response:
        """Send a leg; gives the response once its head is there."""
        request = {"model": self.facts.model, "temperature": 0} | fields
        body = orjson.dumps(request)
        leg = Leg(
            path, request_id or self.new_id(), "trajectory-1", priority, body, request, bool(request.get("stream"))
        )
        upstream = self.dialect.upstream(leg)
        return await self.http.request("POST", upstream.path, upstream.body, upstream.headers, TIMEOUT_S)

    async def ask(self, fields: Json, path: str = CHAT, priority: int = 0, request_id: str | None = None) -> Answer:
        """Send a leg and wait for all of its answer. To be cancelled is to leave it."""
        response = await self.begin(fields, path, priority, request_id)
        try:
            return Answer(response.status, await response.body(LIMIT_BYTES, TIMEOUT_S))
        finally:
            response.close()

    async def observe(self) -> Observation:
        return await self.dialect.observe(self.http, TIMEOUT_S)

    async def until(self, holds: Callable[[Observation], bool], limit_s: float = TIMEOUT_S) -> Observation:
        """Ask again and again until it holds; gives the observation in which it did."""
        seen: list[Observation] = []
        try:
            async with asyncio.timeout(limit_s):
                while not (seen and holds(seen[-1])):
                    seen.append(await self._look())
        except TimeoutError:
            pytest.fail(f"it never held in {limit_s:g} s and {len(seen)} looks, the last: {seen[-3:]}")
        return seen[-1]

    async def _look(self) -> Observation:
        await asyncio.sleep(LOOK_EVERY_S)
        return await self.observe()

    async def until_idle(self, limit_s: float = TIMEOUT_S) -> None:
        await self.until(lambda seen: seen.num_running == 0 and seen.num_waiting == 0, limit_s)


@asynccontextmanager
async def site(url: str, facts: Facts) -> AsyncIterator[Site]:
    """The engine at this address, idle; requests that are still under way at the end break."""
    # The gateway's client idles for 3 s of the engines' 5 s.
    http = HttpClient(url, HttpLimits(max_idle_s=0.6 * facts.keep_alive_s))
    try:
        found = await discover(http, None, TIMEOUT_S)
        engine = Site(http, found.dialect, facts)
        await engine.until_idle()
        yield engine
    finally:
        http.close()
