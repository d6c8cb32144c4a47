"""Brings one context's KV to an engine, with requests for one token to the two engines involved.

Offered blocks count as KV in use at the old home: until they are fetched or given back, or, if neither is possible,
until the engine's lease is over. A trajectory that stays has nothing offered.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import orjson

from engines.http import FAULTS
from engines.kv import LEASE_S, HeldContext, fetching, held, offering, releasing
from engines.upstream import Leg
from gateway.config import Settings
from gateway.fleet.fleet import Fleet
from gateway.fleet.server import Member
from gateway.kv.contexts import COMPLETIONS
from gateway.turns.ids import new_id

# An offer is one token of a cached context: it must not wait behind turns. A prefill in a tool call must not delay any
# turn.
_FIRST, _LAST = -1_000_000_000, 1_000_000_000


class MoveFailed(Exception):
    """The KV could not be brought; the message says why."""


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """A request for one token whose prompt is a trajectory's context."""

    trajectory_id: str
    path: str
    request: dict[str, Any]


class Transfers:
    """Sends these requests to engines."""

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        self._settings = settings
        self._fleet = fleet
        self._given_back: set[asyncio.Task[None]] = set()

    async def computed(self, asked: TransferRequest, target: Member) -> HeldContext:
        """Bring it to an engine, which computes, behind all turns, what it does not find in its cache or a tier."""
        return await self._ask(target, asked, asked.request, _LAST)

    async def fetched(self, asked: TransferRequest, source: Member, target: Member) -> int:
        """Have one engine fetch it from another; returns how many tokens are at the new home then. Raises
        MoveFailed.
        """
        weights = weights_of(source)
        told = await self._ask(source, asked, offering(asked.request), _FIRST)
        if told.offer is None:
            if not source.server.is_updating and weights_of(source) == weights:  # an update may abort what runs
                source.server.moves_kv = False  # it was configured or believed to; it is not asked again
            raise MoveFailed("the old home offers no KV")
        source.kv_offered_tokens += told.prompt_tokens
        offered_by, is_fetched = source.engine_id, False
        try:
            if not weights == weights_of(source) == weights_of(target):  # what is fetched counts as the target's
                raise MoveFailed("new weights came meanwhile")
            got = await self._ask(target, asked, fetching(asked.request, told.offer), _FIRST)
            # An engine that could not fetch computes the prompt instead, which is as good but slower.
            is_fetched = got.cached_tokens is None or got.is_there
        finally:
            if is_fetched:
                source.offer_ended(offered_by, told.prompt_tokens)
            else:
                task = asyncio.create_task(
                    self._give_back(source, offered_by, target, asked, told), name=f"give back {asked.trajectory_id}"
                )
                self._given_back.add(task)
                task.add_done_callback(self._given_back.discard)
        if not is_fetched:
            raise MoveFailed("the new home could not fetch it")
        return got.prompt_tokens if got.cached_tokens is None else got.cached_tokens

    async def close(self) -> None:
        """Abandon everything under way."""
        tasks = list(self._given_back)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _give_back(
        self, source: Member, offered_by: str, target: Member, asked: TransferRequest, told: HeldContext
    ) -> None:
        """Release the old home from an offer that the new one did not fetch."""
        assert told.offer is not None
        giving = TransferRequest(asked.trajectory_id, COMPLETIONS, releasing(asked.request.get("model"), told.offer))
        try:
            async with asyncio.timeout(self._settings.kv_move_timeout_s):
                got = await self._ask(target, giving, giving.request, _FIRST)
            if not (got.cached_tokens is None or got.is_there):  # an engine that could not fetch answers, too
                raise MoveFailed("the offer could not be given back")
        except (MoveFailed, TimeoutError, ValueError, *FAULTS):
            await asyncio.sleep(LEASE_S)
        finally:
            source.offer_ended(offered_by, told.prompt_tokens)

    async def _ask(self, member: Member, asked: TransferRequest, request: dict[str, Any], priority: int) -> HeldContext:
        assert member.server.dialect is not None
        leg = Leg(
            path=asked.path,
            request_id=f"{new_id()}-kv0",
            trajectory_id=asked.trajectory_id,
            priority=priority,
            body=orjson.dumps(request),
            request=request,
            counts_tokens=False,
            cache_salt=member.server.cache_salt,
            rank=member.rank,
        )
        upstream = member.server.dialect.upstream(leg)
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


def weights_of(member: Member) -> tuple[str, str]:
    """What two engines must have in common to use each other's KV."""
    return member.server.cache_salt, member.server.weight_version
