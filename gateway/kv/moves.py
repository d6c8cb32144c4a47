"""Brings a trajectory's KV to its new home: fetched from the old home, else loaded from a tier, else computed.

1. In a tool call, when the scheduler sends Move: the old home is asked to offer the context, and the new one to fetch
   it. If it cannot be fetched, the new home gets a request for one token with that context: it loads what it finds in a
   tier shared with the old home, and computes the rest while the tool runs.
2. Before a leg that runs elsewhere than the last one, if the old home still has the KV and can offer it: the same
   fetch. Otherwise the leg itself loads or computes it. A move of its trajectory that is under way is awaited.
3. Nothing fails because of a move. A turn waits for one for at most `kv_move_timeout_s`, and then computes what is
   missing. In a tool call, a prefill after a failed fetch has that long again. Each outcome is counted. A tier that
   lacks what it should have counts as failed, too.
"""

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

from engines.http import FAULTS
from engines.kv import is_mostly, one_token
from gateway.clock import Clock
from gateway.config import Settings
from gateway.fleet.fleet import Fleet, UnknownEngine
from gateway.fleet.server import EngineState, Member
from gateway.kv.contexts import Context, Contexts
from gateway.kv.transfers import MoveFailed, TransferRequest, Transfers, weights_of
from gateway.metrics import Metrics
from gateway.turnlog import LOGGER
from gateway.turns.chain import Chain
from gateway.turns.turn import Turn
from scheduling.types import Move


@dataclass(slots=True)
class _UnderWay:
    """A move in a tool call; until `has_begun` it waits for others to end.

    Args:
        source: the engine that has the KV: not the last home, if an earlier move away from there was broken off.
    """

    move: Move
    source: str
    has_begun: bool = False
    task: "asyncio.Task[None]" = field(init=False)


class KvMoves:
    """All moves of this gateway.

    Args:
        contexts: what is to be moved.
        is_sticky: trajectories have homes; without homes no KV follows them.
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
        self._of_turns: dict[asyncio.Future[None], str] = {}  # what is done when a turn's own move has ended, by source
        self._at_once = asyncio.Semaphore(settings.kv_moves_at_once)
        self._transfers = Transfers(settings, fleet)

    def begin(self, move: Move) -> None:
        """A trajectory in a tool call has another home. Returns at once."""
        self.cancel(move.trajectory_id)
        context = self.contexts.get(move.trajectory_id)
        source = context.engine_id if context is not None else move.source
        if source == move.target:
            return  # it moves back before its KV has left
        under_way = self._under_way[move.trajectory_id] = _UnderWay(move, source)
        under_way.task = asyncio.create_task(self._in_tool_call(under_way), name=f"move {move.trajectory_id}")

    def cancel(self, trajectory_id: str) -> None:
        """The move of a trajectory is no longer useful."""
        under_way = self._under_way.pop(trajectory_id, None)
        if under_way is not None:
            under_way.task.cancel()

    async def settled(self, source: str, timeout_s: float) -> int:
        """Wait for the moves away from an engine. Returns how many are still under way at the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while moves := self._moves_from(source):  # a move that is broken off may be followed by another one
                    await asyncio.wait(moves)
        return len(self._moves_from(source))

    def may_bring(self, turn: Turn, member: Member) -> bool:
        """Whether `bring` may have something to wait for."""
        trajectory_id = turn.ask.trajectory_id
        if trajectory_id in self._under_way:
            return True
        context = self.contexts.get(trajectory_id)
        return context is not None and context.engine_id != member.engine_id and self._is_sticky

    async def bring(self, turn: Turn, member: Member) -> None:
        """Bring a turn's KV to the engine where a leg of it is about to run, as far as possible."""
        trajectory_id = turn.ask.trajectory_id
        under_way = self._under_way.get(trajectory_id)
        is_in_time = under_way is None or await self._has_ended(under_way)
        context = self.contexts.get(trajectory_id)
        if context is None or context.engine_id == member.engine_id or not self._is_sticky:
            return
        context.brought_by = ""  # it may have been brought elsewhere before
        if not is_in_time:
            return
        num_tokens = max([context.num_tokens, *(_made_tokens(one.chain) for one in turn.choices)])
        if num_tokens < self._settings.kv_move_min_tokens:
            return
        source = self._source(context.engine_id, member, context) if context.model == turn.ask.model else None
        is_brought = source is not None and await self._fetched(turn, source, member)
        # For a turn that continues, engines do not report how much they found cached.
        context.is_awaited = not is_brought and not turn.choices and _can_load(context, member)

    def finished(self, turn: Turn, engine_id: str, num_tokens: int) -> None:
        """A turn finished there; note in the turn how its KV got there, unless it was there already."""
        trajectory_id = turn.ask.trajectory_id
        context = self.contexts.get(trajectory_id)
        if context is not None:
            if context.is_awaited:
                self._found(turn, context, engine_id)
            turn.kv_by = context.brought_by
        self.contexts.finished(turn, engine_id, num_tokens)

    async def close(self) -> None:
        """Abandon all moves under way."""
        tasks = [one.task for one in self._under_way.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._transfers.close()

    def _moves_from(self, source: str) -> "list[asyncio.Future[None]]":
        tasks = [one.task for one in self._under_way.values() if one.source == source]
        of_turns = [ended for ended, other in self._of_turns.items() if other == source]
        return [*(task for task in tasks if not task.done()), *of_turns]

    # --- one move -------------------------------------------------------------------------------------------

    async def _fetched(self, turn: Turn, source: Member, target: Member) -> bool:
        """Bring a turn's KV from another engine, which is not evacuated before that has ended."""
        ended = asyncio.get_running_loop().create_future()
        self._of_turns[ended] = source.engine_id
        try:
            asked = await self._asked(turn.ask.trajectory_id, turn, target)
            return asked is not None and await self._counted(asked, source, target)
        finally:
            del self._of_turns[ended]
            ended.set_result(None)

    async def _has_ended(self, under_way: _UnderWay) -> bool:
        """Wait for a move in a tool call; False if that took as long as a move may: then nothing else is tried."""
        if not under_way.has_begun:
            self.cancel(under_way.move.trajectory_id)  # then the turn's own move goes before those that still wait
            return True
        await asyncio.wait([under_way.task], timeout=self._settings.kv_move_timeout_s)
        if not under_way.task.done():
            self.cancel(under_way.move.trajectory_id)
            return False
        return True

    async def _in_tool_call(self, under_way: _UnderWay) -> None:
        move = under_way.move
        try:
            async with self._at_once:
                under_way.has_begun = True
                target = self._fleet.get(move.target)
                context = self.contexts.get(move.trajectory_id)
                is_long = context is None or context.num_tokens >= self._settings.kv_move_min_tokens
                asked = await self._asked(move.trajectory_id, None, target) if is_long else None
                if asked is not None:
                    source = self._source(under_way.source, target, context)
                    await self._counted(asked, source, target, prefills=True)
        except UnknownEngine:
            return  # an engine left the fleet meanwhile
        finally:
            if self._under_way.get(move.trajectory_id) is under_way:
                del self._under_way[move.trajectory_id]

    async def _asked(self, trajectory_id: str, turn: Turn | None, target: Member) -> TransferRequest | None:
        """As `Contexts.request`; None, and counted, also if it cannot be read: its turn was not read whole either."""
        try:
            known = await self.contexts.request(trajectory_id, turn)
        except ValueError as fault:
            self._note("failed", trajectory_id, None, target, why=fault)
            return None
        return TransferRequest(trajectory_id, known[0], one_token(*known)) if known is not None else None

    async def _counted(
        self, asked: TransferRequest, source: Member | None, target: Member, prefills: bool = False
    ) -> bool:
        """Bring it, and count the outcome; returns whether it is there."""
        began_at, version, trajectory_id = self._clock(), target.server.weight_version, asked.trajectory_id
        context = self.contexts.get(trajectory_id)
        can_load = context is not None and _can_load(context, target)
        outcome = ""
        try:
            outcome, num_tokens = await self._moved(asked, source, target, prefills, can_load)
            self._note(outcome, trajectory_id, source, target, num_tokens, self._clock() - began_at)
        except (MoveFailed, TimeoutError, ValueError, *FAULTS) as fault:
            self._note("failed", trajectory_id, source, target, seconds=self._clock() - began_at, why=fault)
        context = self.contexts.get(trajectory_id)
        if context is not None:  # the next turn does not try again in any case: it computes what is missing
            context.engine_id, context.brought_by = target.engine_id, outcome
            if outcome and outcome != "fetched":  # computed there, or loaded: by these weights, and for this tier
                context.version, context.tier = version, target.server.kv_tier
        return bool(outcome)

    async def _moved(
        self, asked: TransferRequest, source: Member | None, target: Member, prefills: bool, can_load: bool
    ) -> tuple[str, int]:
        """How it was brought, and how much of it. Raises MoveFailed, what HttpClient raises, or ValueError."""
        patience_s = self._settings.kv_move_timeout_s
        if source is not None:
            try:
                async with asyncio.timeout(patience_s):
                    return "fetched", await self._transfers.fetched(asked, source, target)
            except (MoveFailed, TimeoutError, ValueError, *FAULTS) as fault:
                if not prefills:
                    raise
                self._note("failed", asked.trajectory_id, source, target, why=fault)
        async with asyncio.timeout(patience_s):
            got = await self._transfers.computed(asked, target)
        if not can_load or got.cached_tokens is None:
            return "prefilled", got.prompt_tokens
        if got.is_there:
            return "loaded", got.cached_tokens
        self._note("failed", asked.trajectory_id, source, target, why=MoveFailed(_NOT_IN_TIER))
        return "prefilled", got.prompt_tokens

    def _found(self, turn: Turn, context: Context, engine_id: str) -> None:
        """Count what a turn found in the tier, if its engine reported it."""
        with contextlib.suppress(UnknownEngine):
            target = self._fleet.get(engine_id)
            cached = turn.usage.cached_tokens if turn.usage else None
            if cached is None:
                return
            if is_mostly(cached, context.num_tokens):
                context.brought_by = "loaded"
                self._note("loaded", turn.ask.trajectory_id, None, target, cached)
            else:
                self._note("failed", turn.ask.trajectory_id, None, target, why=MoveFailed(_NOT_IN_TIER))

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

    # --- source and size ------------------------------------------------------------------------------------

    def _source(self, engine_id: str, target: Member, context: Context | None) -> Member | None:
        """The engine that has the KV, if the target can fetch from it; KV of other weights is useless: it would be
        computed again to be fetched. None is known of a context that an earlier process saw.
        """
        with contextlib.suppress(UnknownEngine):
            source = self._fleet.get(engine_id)
            can = source.server.moves_kv and target.server.moves_kv and source is not target
            is_there = source.server.state is EngineState.READY and not source.server.is_updating
            is_same = weights_of(source) == weights_of(target)
            is_present = context is None or context.version == source.server.weight_version
            return source if can and is_there and is_same and is_present else None
        return None


_NOT_IN_TIER = "the tier has not got it"


def _can_load(context: Context, target: Member) -> bool:
    """Whether an engine should find a context in the tier that it shares with the one that computed it."""
    return bool(context.tier) and (context.tier, context.version) == (
        target.server.kv_tier,
        target.server.weight_version,
    )


def _made_tokens(chain: Chain) -> int:
    """How many tokens an earlier leg left in the cache; 0 before its first token, when nothing is certain."""
    return len(chain.prompt_ids) + len(chain.output_ids) if chain.output_ids else 0
