"""Token legs whose responses outlive this process, so that an engine's work is never repeated.

This needs a process that keeps descriptors (`gateway/descriptors.py`). Two are kept for each leg: its connection, and
the tape into which the response is read. The tape's header names the leg, and holds what had been made before it.

1. Both are in keeping before a byte of the request is sent. A request that was not sent completely made nothing.
2. They stay there until the record has what the leg made: at the turn's end, or when the leg ended early.
3. A response that grows above the limit is no longer kept; `save_tokens_s` bounds what is lost of it.
4. A leg that nobody asks for again is closed after a while, which stops its engine.
"""

import asyncio
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import orjson
from xxhash import xxh3_64_hexdigest

from engines.http import Response
from engines.http.kept import bytes_sent, shut_down
from engines.http.tape import Tape, found_tape, new_tape
from engines.token_ids import TokenIds
from engines.tokens import TokenRoutes
from engines.upstream import Upstream
from gateway.config import Settings
from gateway.descriptors import DescriptorStore
from gateway.fleet.fleet import Fleet, UnknownEngine
from gateway.fleet.server import EngineState, Member
from gateway.tokens.turn_tokens import VersionSpan
from gateway.turns.chain import Chain
from gateway.turns.choice import Choice
from gateway.turns.repeats import digest_of
from gateway.turns.turn import Made, Turn
from scheduling.types import Dispatch

_PREFIX = "leg"


class KeptLeg:
    """A leg that an earlier process ran.

    Attributes:
        made: what its choice had before it.
        is_asked: its whole request was sent.
    """

    def __init__(self, name: str, tape: Tape, connection: socket.socket, header: Mapping[str, Any]) -> None:
        self.name = name
        self.tape = tape
        self.connection = connection
        self.turn: tuple[str, str] = (header["trajectory"], header["digest"])
        self.index: int = header["index"]
        self.engine_id: str = header["engine"]
        self.stream_form: str = header["stream_form"]
        self.version: str = header["version"]
        self.order: tuple[float, int] = header["arrived_at"], header["leg"]
        self.prompt: str = header["prompt"]
        ids, logprobs, spans, *_ = header["made"]  # a newer version may add some
        self.made: Made = ids, logprobs, [VersionSpan(*span[:3]) for span in spans]
        self.num_made = len(ids)
        sent = bytes_sent(connection) - header["sent_before"]
        self.is_asked = bool(tape.so_far()) or sent >= header["length"]

    def is_open(self) -> bool:
        """Whether the engine still holds the connection open; one that is gone has closed it."""
        try:
            return bool(self.connection.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Close the connection, which stops the engine."""
        shut_down(self.connection)


class KeptLegs:
    """Keeps the legs of this process, and takes up those of earlier ones.

    Args:
        settled: waits up to this many seconds until the record has everything.
    """

    def __init__(
        self,
        settings: Settings,
        descriptors: DescriptorStore,
        fleet: Fleet,
        settled: Callable[[float], Awaitable[bool]],
    ) -> None:
        self._descriptors = descriptors
        self._fleet = fleet
        self._settled = settled
        self._limit_bytes = settings.kept_leg_bytes
        self._timeout_s = settings.kept_leg_s
        self._keep_timeout_s = settings.connect_timeout_s  # this, too, is a connection to a process nearby
        self._turn_timeout_s = settings.turn_timeout_s
        self._waiting: dict[tuple[str, str], dict[int, KeptLeg]] = {}
        self._claimed: dict[str, dict[int, KeptLeg]] = {}
        self._engines: dict[str, str] = {}
        self._names: dict[str, dict[int, str]] = {}
        self._is_waiting = True
        self._over: list[str] = []
        self._dropping: asyncio.Task[None] | None = None
        self._take_all()
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._give_up)

    # --- of earlier processes -------------------------------------------------------------------------------

    def claim(self, turn: Turn) -> None:
        """A turn has come again: give it the legs that were kept for it."""
        if self._waiting and (legs := self._waiting.pop((turn.ask.trajectory_id, digest_of(turn)), None)):
            self._claimed[turn.turn_id] = legs
            self._engines[turn.turn_id] = next(iter(legs.values())).engine_id
            for leg in legs.values():
                turn.versions_before += [*(span.version for span in leg.made[2]), leg.version]

    def placed(self, turn: Turn, dispatch: Dispatch) -> Dispatch:
        """Send a turn's first leg to the engine where its kept leg runs, even if the scheduler chose another: that
        engine already holds it. The engine need not be known to be ready yet. A turn that begins again does without.
        """
        if not turn.versions_before:
            for leg in self._claimed.pop(turn.turn_id, {}).values():
                self._end(leg)
            self._engines.pop(turn.turn_id, None)
        engine_id = self._engines.pop(turn.turn_id, None)
        if engine_id is None:
            return dispatch
        with suppress(UnknownEngine):
            server = self._fleet.get(engine_id).server
            is_running = any(leg.is_open() for leg in self._claimed[turn.turn_id].values())
            if server.state is EngineState.READY or (is_running and server.token_routes is not None):
                return replace(dispatch, engine_id=engine_id)
        return dispatch

    def made_before(self, turn: Turn, index: int, routes: TokenRoutes, prompt: TokenIds) -> Made | None:
        """What a choice had before its kept leg; None if there is no kept leg for this prompt that can be read."""
        leg = self._claimed.get(turn.turn_id, {}).get(index)
        if leg is None:
            return None
        if leg.stream_form != routes.stream_form or leg.prompt != name_of(prompt):
            self._end(self._claimed[turn.turn_id].pop(index))
            return None
        return leg.made

    async def take_up(
        self, turn: Turn, choice: Choice, routes: TokenRoutes, member: Member
    ) -> tuple[Response, Callable[[], str]] | None:
        """The response of a choice's kept leg, from its beginning, and the version of the weights that make it now.

        Raises: what HttpClient does.
        """
        legs = self._claimed.get(turn.turn_id)
        leg = legs.pop(choice.index, None) if legs else None
        if leg is None:
            return None
        is_its = leg.stream_form == routes.stream_form and leg.num_made == len(choice.chain.output_ids)
        if not leg.is_asked or not is_its:
            self._end(leg)
            return None
        self._names.setdefault(turn.turn_id, {})[choice.index] = leg.name
        response = await member.http.take_up(
            leg.connection, leg.tape, self._turn_timeout_s, lambda: self._descriptors.drop(leg.name)
        )
        is_there = leg.engine_id == member.engine_id
        # Its engine's weights are not known before it has joined.
        return response, lambda: (is_there and member.server.weight_version) or leg.version

    def _take_all(self) -> None:
        found = self._descriptors.found
        for name in [name for name in found if name.startswith(_PREFIX)]:
            leg = found_leg(name, found.pop(name))
            if leg is None:
                self._descriptors.drop(name)
                continue
            legs = self._waiting.setdefault(leg.turn, {})
            older, newer = sorted((legs.get(leg.index) or leg, leg), key=lambda one: one.order)
            if older is not newer:
                self._end(older)
            legs[leg.index] = newer

    def _end(self, leg: KeptLeg) -> None:
        leg.close()
        self._descriptors.drop(leg.name)

    def _give_up(self) -> None:
        self._is_waiting = False
        for legs in self._waiting.values():
            for leg in legs.values():
                self._end(leg)
        self._waiting.clear()

    # --- of this one ----------------------------------------------------------------------------------------

    async def ask(self, turn: Turn, choice: Choice, routes: TokenRoutes, member: Member, asked: Upstream) -> Response:
        """Ask for a leg, and keep its response. Raises what HttpClient does."""
        name = self._descriptors.new_name(_PREFIX)
        names = self._names.setdefault(turn.turn_id, {})

        async def keep(connection: socket.socket, num_bytes: int) -> Tape | None:
            try:
                sent_before = bytes_sent(connection)
                header = _header(turn, choice, member) | {
                    "stream_form": routes.stream_form,
                    "length": num_bytes,
                    "sent_before": sent_before,
                }
                tape, descriptor = new_tape(orjson.dumps(header), self._limit_bytes)
            except OSError:
                return None
            try:
                is_kept = await self._descriptors.keep(name, [connection.fileno(), descriptor], self._keep_timeout_s)
            finally:
                os.close(descriptor)
            if not is_kept:
                return None
            if choice.index in names:  # the new leg's header has what this choice made so far
                self._descriptors.drop(names[choice.index])
            names[choice.index] = name
            return tape

        return await member.http.post_kept(
            asked.path, asked.body, asked.headers, self._turn_timeout_s, keep, lambda: self._descriptors.drop(name)
        )

    def over(self, turn: Turn) -> None:
        """A turn has ended; its output is on its way into the record. Kept legs that it did not reach wait for another
        turn: it may have been refused, or its client may have left while it waited for an engine.
        """
        self._engines.pop(turn.turn_id, None)
        for leg in self._claimed.pop(turn.turn_id, {}).values():
            if self._is_waiting:
                self._waiting.setdefault(leg.turn, {})[leg.index] = leg
            else:
                self._end(leg)
        self._over += self._names.pop(turn.turn_id, {}).values()
        self._drop_later()

    def leg_ended(self, turn: Turn, choice: Choice) -> None:
        """A choice's leg has ended early; its output is on its way into the record."""
        if name := self._names.get(turn.turn_id, {}).pop(choice.index, None):
            self._over.append(name)
            self._drop_later()

    async def close(self) -> None:
        """Stop keeping legs; all that ran have ended."""
        self._timer.cancel()
        self._give_up()
        if self._dropping is not None:
            await self._dropping

    def _drop_later(self) -> None:
        if self._over and self._dropping is None:
            self._dropping = asyncio.create_task(self._drop_settled())

    async def _drop_settled(self) -> None:
        while self._over:
            names, self._over = self._over, []
            await self._settled(self._timeout_s)  # a store that is away gets it later; legs are not kept that long
            for name in names:
                self._descriptors.drop(name)
        self._dropping = None


def _header(turn: Turn, choice: Choice, member: Member) -> dict[str, Any]:
    chain: Chain = choice.chain
    spans = [(span.version, span.start, span.end) for span in chain.versions]
    return {
        "trajectory": turn.ask.trajectory_id,
        "digest": digest_of(turn),
        "index": choice.index,
        "arrived_at": turn.arrived_at,
        "leg": turn.leg,
        "engine": member.engine_id,
        "version": member.server.weight_version,
        "prompt": name_of(chain.prompt_ids),
        "made": (chain.output_ids, chain.logprobs, spans),
    }


def name_of(prompt: TokenIds) -> str:
    """A short name of a prompt, by which the next process tells it from others."""
    return xxh3_64_hexdigest(prompt.text)


def found_leg(name: str, descriptors: list[int]) -> KeptLeg | None:
    """The leg of these descriptors, which are closed; None if they are not a leg, or its answer is gone."""
    connections = [number for number in descriptors if stat.S_ISSOCK(os.fstat(number).st_mode)]
    tapes = [number for number in descriptors if number not in connections]
    try:
        if len(connections) != 1 or len(tapes) != 1:
            return None
        tape, header = found_tape(tapes[0])
        connection = socket.socket(fileno=os.dup(connections[0]))
        connection.setblocking(False)
        return KeptLeg(name, tape, connection, orjson.loads(header))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    finally:
        for number in descriptors:
            os.close(number)
