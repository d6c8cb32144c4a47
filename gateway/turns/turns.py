"""Serves turns: reads a client's request, joins it to the turn that it repeats, or runs it.

This is the hot path. Decisions are made in `scheduling/`; `legs.py` and `outlet.py` pass the bytes.

1. A request that repeats a turn is not another turn (`repeats.py`).
2. The scheduler knows that a turn finished, and the store has it, before the client gets the answer's end.
3. A client that leaves stops its turn, unless another one joined it.
"""

import asyncio
from codecs import BOM_UTF8
from collections.abc import Coroutine
from typing import Any

from engines.upstream import SGLANG_GENERATE, VLLM_GENERATE
from gateway.clock import Clock
from gateway.config import Settings
from gateway.fleet.fleet import Fleet
from gateway.http.client import Client, ClientLeft, unless_left
from gateway.http.errors import Api
from gateway.http.exchange import Exchange
from gateway.http.outlet import Outlet
from gateway.http.refusals import Refused, shutting_down
from gateway.metrics import Metrics
from gateway.turns.endings import Endings
from gateway.turns.hot import HotTurns
from gateway.turns.ids import new_id
from gateway.turns.kept_tokens import KeptTokens
from gateway.turns.repeats import Repeats
from gateway.turns.request_reader import RequestReader, named
from gateway.turns.running import RunningTurns
from gateway.turns.turn import Turn

TURN_ROUTES: dict[str, Api] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    # Tokens in, tokens out: for trainers that render prompts themselves.
    VLLM_GENERATE: "generate",
    SGLANG_GENERATE: "generate",
}


class Turns:
    """Serves the turns of all trajectories.

    Args:
        repeats: know which turn or answer a repeated request asks for.
        running: runs turns that must be awaited.
        hot: runs turns that need no awaiting.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        fleet: Fleet,
        reader: RequestReader,
        repeats: Repeats,
        kept_tokens: KeptTokens,
        running: RunningTurns,
        hot: HotTurns,
        endings: Endings,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._max_answer_bytes, self._has_token_legs = settings.max_answer_bytes, settings.has_token_legs
        self._clock = clock
        self._fleet = fleet
        self._reader = reader
        self._repeats = repeats
        self._kept_tokens = kept_tokens
        self._running = running
        self._hot = hot
        self._endings = endings
        self._metrics = metrics

    async def serve(self, client: Client, path: str, key: str) -> None:
        """Answer one turn request.

        Args:
            client: its raw path may hold an identity.
            path: the API route, without the identity.
            key: names the client's key, for its limit; "" if the gateway is open.
        """
        settings = self._settings
        try:
            body = await client.read(settings.max_body_bytes, settings.body_timeout_s)
        except Refused as refused:
            turn_id = new_id()
            outlet = Outlet(client, TURN_ROUTES[path], turn_id)
            outlet.headers += named(client.scope, b"")
            self._endings.tell(refused, outlet, turn_id)
        except ClientLeft:
            return
        else:
            rest = self.begin(client, path, key, body)
            if rest is not None:
                await rest
        await client.drain()

    def begin(
        self, client: Client, path: str, key: str, body: bytes, taker: Exchange | None = None
    ) -> Coroutine[Any, Any, None] | None:
        """Serve a request whose body is here, as far as possible without waiting. Raises nothing.

        Args:
            taker: the client, if callbacks may continue its answer after this returns.

        Returns: the rest, to be awaited; None if the answer is given, or callbacks will give it.
        """
        body = body.removeprefix(BOM_UTF8)  # which JSON forbids, and engines skip
        turn_id = new_id()
        api = TURN_ROUTES[path]
        outlet = Outlet(client, api, turn_id, self._max_answer_bytes)
        try:
            try:
                ask = self._reader.ask(client.scope, api, path, body)
            except Refused as refused:
                outlet.headers += named(client.scope, body)
                if self._fleet.is_starting and refused.error.code == "no_engine":
                    rest = self._once_started(client, path, key, body)
                    return self._endings.serving(rest, client, outlet, turn_id)
                raise
            outlet.headers += b"x-trajectory-id: %b\r\n" % ask.trajectory_id.encode("latin-1", "replace")
            joined = self._repeats.running(ask)
            if joined is not None:
                # Now: its other clients may leave, and its answer outgrow what is kept, before the rest begins.
                joined.num_clients += 1
                joined.outlet.expect_follower()
                return self._endings.serving(self._join(joined, client), client, outlet, turn_id)
            answer = self._repeats.answer(ask)
            if answer is not None:
                self._metrics.joined_turns.inc()
                self._endings.given_up(ask)
                return self._endings.serving(answer.follow(client), client, outlet, turn_id)
            turn = Turn(turn_id, ask, outlet, self._clock(), key)
            self._running.count(turn)
            if self._has_token_legs:
                return self._endings.serving(self._prepared(turn, client), client, outlet, turn_id)
            self._running.arrive(turn, client)
        except Exception as error:
            self._endings.tell(error, outlet, turn_id)
            return None
        if taker is not None and self._hot.take(turn, taker):
            return None
        return self._endings.serving(self._running.run(turn, client), client, outlet, turn_id)

    async def _prepared(self, turn: Turn, client: Client) -> None:
        """Run a turn that may be served at token level."""
        try:
            await self._kept_tokens.prepare(turn, turn.ask.may_be_joined or turn.ask.is_retry)
        except BaseException as error:
            self._running.give_up(turn)
            if isinstance(error, asyncio.CancelledError):  # uvicorn's, when its shutdown timeout ends
                raise shutting_down() from None
            raise
        try:
            self._running.arrive(turn, client)
            await self._running.run(turn, client)
        finally:
            self._kept_tokens.over(turn)

    async def _once_started(self, client: Client, path: str, key: str, body: bytes) -> None:
        """Serve a request that came before the fleet was known."""
        try:
            await unless_left(client, self._fleet.started())
        except asyncio.CancelledError:  # uvicorn's, when its shutdown timeout ends
            raise shutting_down() from None
        rest = self.begin(client, path, key, body)
        if rest is not None:
            await rest

    async def _join(self, turn: Turn, client: Client) -> None:
        """Give a client, counted already, the answer of a turn that another client began."""
        self._metrics.joined_turns.inc()
        follow = asyncio.create_task(turn.outlet.follow(client))
        client.when_left(follow.cancel)
        try:
            try:
                await asyncio.wait((follow,))
            except asyncio.CancelledError:
                # Uvicorn's, when its shutdown timeout ends: the turn ends, and both clients are told.
                await asyncio.wait((follow,))
            if not follow.cancelled():
                follow.result()
        finally:
            client.unwatch()
            follow.cancel()
            turn.outlet.lose_follower()
            turn.left()
