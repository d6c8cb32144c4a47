"""A stream with calls that moves from one kind of engine to the other, at any token, is one uninterrupted answer."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import orjson
import pytest

from engines.http import HttpClient
from engines.sglang_facts import facts_of
from engines.sglang_tokens import SglangTokens
from engines.simulated.chat import ToolCall, call_text
from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from engines.simulated.text import END, Tokenizer
from engines.tokens import Rendered, TokenRoutes
from engines.vllm_tokens import token_routes
from gateway.turns.answer_writers import ParsedWriter
from gateway.turns.ask import Ask
from gateway.turns.chain import Chain
from gateway.turns.frames import Frame
from gateway.turns.outcome import LegFailed
from scheduling.types import Fault

PATH, TIMEOUT_S = "/v1/chat/completions", 60.0
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
REQUEST = {"messages": [{"role": "user", "content": "Hm?"}], "tools": [TOOL], "stream": True, "max_tokens": 80}
ARGUMENTS = '{"city":"value 342","days":52}'
CALL = Tokenizer().encode(call_text(ToolCall("get_weather", ARGUMENTS)))
TEXT = Tokenizer().encode("It is <to> be seen, <tool_cal or not.")


class Site:
    """An engine of one kind, and the request as this engine rendered it."""

    def __init__(self, routes: TokenRoutes, http: HttpClient, rendered: Rendered) -> None:
        self.routes = routes
        self.http = http
        self.rendered = rendered


@asynccontextmanager
async def both_kinds() -> AsyncIterator[dict[str, Site]]:
    async with AsyncExitStack() as stack:
        sites = {}
        for kind in ("vllm", "sglang"):
            settings = SimulatedEngineSettings(dialect=kind, speed_up=200)  # type: ignore[arg-type]
            http = HttpClient(await stack.enter_async_context(serve_engine(settings)))
            stack.callback(http.close)
            routes: TokenRoutes | None = await token_routes(http, TIMEOUT_S)
            if kind == "sglang":
                routes = SglangTokens(await facts_of(http, TIMEOUT_S))
            assert routes is not None
            request = routes.render(PATH, REQUEST, orjson.dumps(REQUEST))
            assert request is not None
            status, body = await http.post(request.path, request.body, TIMEOUT_S)
            rendered = routes.rendered(PATH, REQUEST, body)
            assert status == 200 and rendered is not None and rendered.needs_parser
            sites[kind] = Site(routes, http, rendered)
        yield sites


class Client:
    """A client that is told token by token and rebuilds the message.

    Attributes:
        told: the message; `calls` are (id, name, arguments).
    """

    def __init__(self, sites: dict[str, Site]) -> None:
        ask = Ask("chat", PATH, "m", b"", REQUEST, "t", "g", None, 0, False, wants_stream=True)
        rendered = sites["vllm"].rendered
        self._sites = sites
        self._chain = Chain(rendered, rendered.prompt_ids, None, tells=True, tells_logprobs=False)
        self._writer = ParsedWriter(ask, Frame(ask, "turn", 0.0), 0)
        self.roles: list[str] = []
        self.content = ""
        self.calls: list[tuple[str, str, str]] = []
        self.reason: str | None = None

    @property
    def told(self) -> tuple[Any, ...]:
        """The message, except for the calls' ids, which are the engine's."""
        return self.roles, self.content, [call[1:] for call in self.calls], self.reason

    async def hear(self, kind: str, ids: Sequence[int], reason: str | None = None) -> None:
        """Take these tokens from an engine of that kind."""
        site, chain = self._sites[kind], self._chain
        chain.rendered, chain.finish_reason = site.rendered, reason
        chain.output_ids += ids
        self._writer.add(ids)
        events = await self._writer.tell(site.routes, site.http, chain, TIMEOUT_S)
        for line in events.decode().split("\n\n"):
            for choice in orjson.loads(line.removeprefix("data: "))["choices"] if line else ():
                self._take(choice["delta"])
                self.reason = choice["finish_reason"]

    def _take(self, delta: dict[str, Any]) -> None:
        self.roles += [delta["role"]] if "role" in delta else []
        self.content += delta.get("content") or ""
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(self.calls):
                self.calls.append(("", "", ""))
            call_id, name, arguments = self.calls[part["index"]]
            function = part["function"]
            self.calls[part["index"]] = (
                call_id + part.get("id", ""),
                name + function.get("name", ""),
                arguments + function.get("arguments", ""),
            )


@pytest.mark.parametrize("num_away", [1, 5, 100])
@pytest.mark.parametrize(("first", "second"), [("vllm", "sglang"), ("sglang", "vllm")])
@pytest.mark.parametrize("ids", [CALL, TEXT], ids=["call", "text"])
async def test_a_stream_may_change_its_kind_of_engine_at_any_token(
    ids: list[int], first: str, second: str, num_away: int
) -> None:
    """And return after `num_away` tokens: one call, told once, or one text."""
    calls = [("get_weather", ARGUMENTS)] if ids is CALL else []
    text = "" if ids is CALL else Tokenizer().decode(TEXT)
    async with both_kinds() as sites:
        for leaves_at in range(1, len(ids) + 1):
            client = Client(sites)
            for at, id in enumerate(ids):
                await client.hear(second if leaves_at <= at < leaves_at + num_away else first, [id])
            ends_there = leaves_at <= len(ids) < leaves_at + num_away
            await client.hear(second if ends_there else first, [END], "stop")
            assert client.told == (["assistant"], text, calls, "tool_calls" if calls else "stop"), leaves_at


async def test_a_cut_call_is_ended_by_the_kind_that_began_it() -> None:
    """SGLang tells nothing of such a call, so a client that vLLM told its beginning gets the rest from vLLM."""
    ids = CALL[:-6]
    async with both_kinds() as sites:
        alone = Client(sites)
        num_begun = 0  # tokens before the first one that reveals the call
        for id in ids[:-1]:
            await alone.hear("vllm", [id])
            num_begun += not alone.calls
        await alone.hear("vllm", ids[-1:], "length")
        assert 0 < num_begun < len(ids) - 2 and len(alone.calls[0][2]) > 4
        for leaves_at in range(num_begun + 1, len(ids)):
            client = Client(sites)
            for id in ids[:leaves_at]:
                await client.hear("vllm", [id])
            for id in ids[leaves_at:-1]:
                await client.hear("sglang", [id])
            for last in (ids[-1:], []):  # it may be tried there again
                with pytest.raises(LegFailed) as failed:
                    await client.hear("sglang", last, "length")
                assert failed.value.fault is Fault.BUSY
            await client.hear("vllm", [], "length")
            assert client.told == alone.told
