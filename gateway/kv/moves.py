"""Brings a trajectory's KV to its new home: fetched from its old one, or else prefilled while its tool still runs.

1. In a tool call, when the scheduler says Move: the old home is asked to offer the context, the new one to fetch it.
   What cannot be fetched is prefilled.
2. Before a leg that runs elsewhere than the last one, where the old home still has the KV: the same, without the
   prefill, which the leg does itself. A move of its trajectory that is under way is waited for.
3. Nothing fails with a move. It takes `kv_move_timeout_s` at most, is counted, and then the turn computes what is
   absent.

While blocks are offered they are counted as KV in use at the old home: until they were fetched or given back or, where
neither can be done, until the engine's lease is over. A trajectory that stays has nothing offered.
"""

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import Any

import orjson

from engines.http import FAULTS
from engines.kv import LEASE_S, Held, fetching, held, offering, one_token, releasing
from engines.upstream import Leg
from gateway.clock import Clock
from gateway.config import Settings
from gateway.fleet.fleet import Fleet, UnknownEngine
from gateway.fleet.member import EngineState, Member
from gateway.kv.contexts import COMPLETIONS, Contexts
from gateway.metrics import Metrics
from gateway.turnlog import LOGGER
from gateway.turns.chain import Chain
from gateway.turns.turn import Turn
from scheduling.types import Move

# An offer is one token of a context that is cached: it must not wait behind turns. A prefill in a tool call must not
# keep any turn waiting.
_FIRST, _LAST = -1_000_000_000, 1_000_000_000


@dataclass(slots=True)
class _UnderWay:
    """A move in a tool call; until `has_begun` it waits for others to end."""

    move: Move
    has_begun: bool = False
    task: "asyncio.Task[None] | None" = None


class MoveFailed(Exception):
    """The KV could not be brought; the message says why."""


class KvMoves:
    """All moves of this gateway.

    Args:
        contexts: what is to be moved.
        is_sticky: trajectories have homes. Where they have none, nothing follows them.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        fleet: Fleet,
        contexts: Contexts,
        metrics: Metrics,
        is_sticky: bool,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._fleet = fleet
        self.contexts = contexts
        self._metrics = metrics
        self._is_sticky = is_sticky
        self._under_way: dict[str, _UnderWay] = {}
        self._at_once = asyncio.Semaphore(settings.kv_moves_at_once)
        self._given_back: set[asyncio.Task[None]] = set()

    def begin(self, move: Move) -> None:
        """A trajectory in a tool call has another home. Returns at once."""
        self.cancel(move.trajectory_id)
        under_way = self._under_way[move.trajectory_id] = _UnderWay(move)
        under_way.task = asyncio.create_task(self._in_tool_call(under_way), name=f"move {move.trajectory_id}")

    def cancel(self, trajectory_id: str) -> None:
        """The move of a trajectory is of no use any more."""
        under_way = self._under_way.pop(trajectory_id, None)
        if under_way is not None and under_way.task is not None:
            under_way.task.cancel()

    async def settled(self, source: str, timeout_s: float) -> int:
        """Wait for the moves away from an engine. Returns how many are still under way at the timeout."""
        tasks = [one.task for one in self._under_way.values() if one.task and one.move.source == source]
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=timeout_s)
            return len(left)
        return 0

    def may_bring(self, turn: Turn, member: Member) -> bool:
        """Whether `bring` may have something to wait for."""
        trajectory_id = turn.ask.trajectory_id
        if trajectory_id in self._under_way:
            return True
        context = self.contexts.get(trajectory_id)
        return context is not None and context.engine_id != member.engine_id and self._is_sticky

    async def bring(self, turn: Turn, member: Member) -> None:
        """Have a turn's KV at the engine where a leg of it is about to run, as far as that can be done."""
        trajectory_id = turn.ask.trajectory_id
        if (under_way := self._under_way.get(trajectory_id)) is not None:
            await self._end_of(under_way)
        context = self.contexts.get(trajectory_id)
        if context is None or context.engine_id == member.engine_id or not self._is_sticky:
            return
        num_tokens = max([context.num_tokens, *(_made_tokens(one.chain) for one in turn.choices)])
        source = self._source(context.engine_id, member)
        if source is None or num_tokens < self._settings.kv_move_min_tokens:
            return
        asked = await self.contexts.request(trajectory_id, turn)
        if asked is not None:
            await self._counted(trajectory_id, *asked, source, member)

    async def close(self) -> None:
        """Let go of what is under way."""
        tasks = [*(one.task for one in self._under_way.values() if one.task), *self._given_back]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- one move -------------------------------------------------------------------------------------------

    async def _end_of(self, under_way: _UnderWay) -> None:
        if not under_way.has_begun or under_way.task is None:
            self.cancel(under_way.move.trajectory_id)  # then the turn's own move goes before those that still wait
            return
        await asyncio.wait([under_way.task], timeout=self._settings.kv_move_timeout_s)

    async def _in_tool_call(self, under_way: _UnderWay) -> None:
        move = under_way.move
        try:
            async with self._at_once:
                under_way.has_begun = True
                target = self._fleet.get(move.target)
                context = self.contexts.get(move.trajectory_id)
                is_long = context is None or context.num_tokens >= self._settings.kv_move_min_tokens
                asked = await self.contexts.request(move.trajectory_id, None) if is_long else None
                if asked is not None:
                    source = self._source(move.source, target)
                    await self._counted(move.trajectory_id, *asked, source, target, prefills=True)
        except UnknownEngine:
            return  # it left the fleet meanwhile
        finally:
            if self._under_way.get(move.trajectory_id) is under_way:
                del self._under_way[move.trajectory_id]

    async def _counted(
        self,
        trajectory_id: str,
        path: str,
        request: dict[str, Any],
        source: Member | None,
        target: Member,
        prefills: bool = False,
    ) -> None:
        began_at = self._clock()
        try:
            outcome, num_tokens = await self._moved(trajectory_id, path, request, source, target, prefills)
            self._note(outcome, trajectory_id, source, target, num_tokens, self._clock() - began_at)
        except (MoveFailed, TimeoutError, ValueError, *FAULTS) as fault:
            self._note("failed", trajectory_id, source, target, seconds=self._clock() - began_at, why=fault)
        context = self.contexts.get(trajectory_id)
        if context is not None:  # the next turn does not try again, be it as it may: it computes what is absent
            context.engine_id = target.engine_id

    def _note(
        self,
        outcome: str,
        trajectory_id: str,
        source: Member | None,
        target: Member,
        num_tokens: int = 0,
        seconds: float = 0.0,
        why: Exception | None = None,
    ) -> None:
        self._metrics.kv_moved(outcome, num_tokens, seconds)
        fields: dict[str, Any] = {"trajectory_id": trajectory_id, "outcome": outcome, "tokens": num_tokens}
        fields |= {"source": source.engine_id if source else None, "target": target.engine_id}
        fields |= {"seconds": round(seconds, 3), "why": str(why) or type(why).__name__ if why else ""}
        LOGGER.info("kv moved", extra={"fields": fields})

    async def _moved(
        self,
        trajectory_id: str,
        path: str,
        request: dict[str, Any],
        source: Member | None,
        target: Member,
        prefills: bool,
    ) -> tuple[str, int]:
        """How it was brought, and how much of it. Raises MoveFailed, what HttpClient raises, or ValueError."""
        asked, patience_s = one_token(path, request), self._settings.kv_move_timeout_s
        if source is not None:
            try:
                async with asyncio.timeout(patience_s):
                    return "fetched", await self._fetched(trajectory_id, path, asked, source, target)
            except (MoveFailed, TimeoutError, ValueError, *FAULTS) as fault:
                if not prefills:
                    raise
                self._note("failed", trajectory_id, source, target, why=fault)
        async with asyncio.timeout(patience_s):
            return "prefilled", (await self._ask(target, trajectory_id, path, asked, _LAST)).prompt_tokens

    async def _fetched(
        self, trajectory_id: str, path: str, asked: dict[str, Any], source: Member, target: Member
    ) -> int:
        """Tokens that are at the new home then."""
        told = await self._ask(source, trajectory_id, path, offering(asked), _FIRST)
        if told.offer is None:
            source.moves_kv = False  # it was said to, or thought to; and is not asked again
            raise MoveFailed("the old home offers no KV")
        source.kv_offered_tokens += told.prompt_tokens
        is_fetched = False
        try:
            got = await self._ask(target, trajectory_id, path, fetching(asked, told.offer), _FIRST)
            # An engine that could not fetch computes the prompt instead, and all is as well but for the time.
            is_fetched = got.cached_tokens is None or 2 * got.cached_tokens >= got.prompt_tokens
        finally:
            if is_fetched:
                source.kv_offered_tokens -= told.prompt_tokens
            else:
                giving = self._give_back(source, target, trajectory_id, asked.get("model"), told)
                task = asyncio.create_task(giving, name=f"give back {trajectory_id}")
                self._given_back.add(task)
                task.add_done_callback(self._given_back.discard)
        if not is_fetched:
            raise MoveFailed("the new home could not fetch it")
        return got.prompt_tokens if got.cached_tokens is None else got.cached_tokens

    async def _give_back(self, source: Member, target: Member, trajectory_id: str, model: object, told: Held) -> None:
        """Free the old home of an offer that the new one did not fetch."""
        assert told.offer is not None
        try:
            async with asyncio.timeout(self._settings.kv_move_timeout_s):
                await self._ask(target, trajectory_id, COMPLETIONS, releasing(model, told.offer), _FIRST)
        except (MoveFailed, TimeoutError, ValueError, *FAULTS):
            await asyncio.sleep(LEASE_S)
        finally:
            source.kv_offered_tokens -= told.prompt_tokens

    async def _ask(self, member: Member, trajectory_id: str, path: str, request: dict[str, Any], priority: int) -> Held:
        assert member.dialect is not None
        leg = Leg(
            path=path,
            request_id=f"{os.urandom(16).hex()}-kv0",
            trajectory_id=trajectory_id,
            priority=priority,
            body=orjson.dumps(request),
            request=request,
            counts_tokens=False,
            cache_salt=member.cache_salt,
        )
        upstream = member.dialect.upstream(leg)
        timeout_s = self._settings.kv_move_timeout_s
        self._fleet.leg_began(member)  # so that a drain waits for it
        try:
            response = await member.http.request("POST", upstream.path, upstream.body, upstream.headers, timeout_s)
            try:
                answer = await response.body(self._settings.max_answer_bytes, timeout_s)
            finally:
                response.close()
        finally:
            self._fleet.leg_ended(member, None, has_answered=False)
        if response.status != 200:
            raise MoveFailed(f"{member.engine_id} answered {response.status}")
        return held(answer)

    # --- who and what ---------------------------------------------------------------------------------------

    def _source(self, engine_id: str, target: Member) -> Member | None:
        """The engine that has the KV, if the other one can fetch it there; KV of other weights is of no use."""
        with contextlib.suppress(UnknownEngine):
            source = self._fleet.get(engine_id)
            can = source.moves_kv and target.moves_kv and source is not target
            is_there = source.state is EngineState.READY and not source.is_updating
            is_same = (source.cache_salt, source.weight_version) == (target.cache_salt, target.weight_version)
            return source if can and is_there and is_same else None
        return None


def _made_tokens(chain: Chain) -> int:
    """What an earlier leg left in the cache: nothing that is sure before its first token."""
    return len(chain.prompt_ids) + len(chain.output_ids) if chain.output_ids else 0
