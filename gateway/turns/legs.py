"""Runs one leg: sends the client's request to an engine and passes its answer on.

If an engine does not answer, whatever happened instead becomes a LegFailed that names whose fault it was.
"""

import asyncio

from engines.http import (
    CONNECTION_FAULTS,
    FAULTS,
    AnswerTooLarge,
    BadResponse,
    Response,
    ResponseTimeout,
)
from engines.upstream import VLLM_GENERATE, Leg, TooDeep, Upstream, with_headers
from gateway.clock import Clock
from gateway.config import Settings
from gateway.fleet.fleet import Fleet, UnknownEngine
from gateway.fleet.server import EngineState, Member
from gateway.http.errors import api_error, engine_error
from gateway.http.sse import EventTooLarge
from gateway.kv.moves import KvMoves
from gateway.messages.answers import content_of, read_answer
from gateway.messages.lazy_object import BrokenValue
from gateway.messages.stream_contents import content_of_stream
from gateway.metrics import Metrics
from gateway.state.driver import Driver
from gateway.tokens.book import TokenBook
from gateway.turns.kept_tokens import KeptTokens
from gateway.turns.lending import Lending
from gateway.turns.outcome import LegFailed, Outcome, Stopped, failed_leg, refused_by, refused_leg
from gateway.turns.relay import Relay
from gateway.turns.token_legs import TokenLegs, may_take_tokens
from gateway.turns.turn import Turn
from gateway.weights.staleness import Staleness
from scheduling.types import Dispatch, Fault, TurnProgressed

_ABORT_TIMEOUT_S = 5.0
# The routes whose streams report usage only on request; others always do.
_TOLD_WHEN_ASKED = frozenset({"/v1/chat/completions", "/v1/completions", VLLM_GENERATE})


class Begun:
    """A leg that has begun: where, and its response if it has been asked for.

    Args:
        first_version: index of the weights that its engine had then.
    """

    __slots__ = ("dispatch", "first_version", "member", "relay", "response")

    def __init__(self, dispatch: Dispatch, member: Member, first_version: int) -> None:
        self.dispatch = dispatch
        self.member = member
        self.first_version = first_version
        self.response: Response | None = None
        self.relay: Relay | None = None


class Legs:
    """Runs legs on the fleet."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        driver: Driver,
        fleet: Fleet,
        metrics: Metrics,
        book: TokenBook,
        kept_tokens: KeptTokens,
        staleness: Staleness,
        kv: KvMoves,
        lending: Lending,
    ) -> None:
        self._settings, self._has_token_legs = settings, settings.has_token_legs
        self._clock = clock
        self._driver = driver
        self._fleet = fleet
        self._metrics = metrics
        self._staleness = staleness
        self._kv = kv
        self.lending = lending
        self._kept_tokens = kept_tokens
        self._token_legs = TokenLegs(settings, clock, book, self._note_first_byte, self._note_progress, kept_tokens)
        self._aborts: set[asyncio.Task[None]] = set()

    def begin(self, turn: Turn, dispatch: Dispatch) -> Begun | None:
        """Begin a leg that passes through, without waiting for anything; None if that is impossible."""
        try:
            member = self._fleet.get(dispatch.engine_id)
        except UnknownEngine:
            return None
        if self._kv.may_bring(turn, member):
            return None
        upstream = self._upstream(turn, dispatch, member)
        response = member.http.post_now(upstream.path, upstream.body, upstream.headers)
        if response is None:
            return None
        begun = self._began(turn, dispatch, member)
        begun.response = response
        self._tell_about(turn, dispatch)
        return begun

    def relay(self, turn: Turn) -> Relay:
        """The relay for the stream of a leg."""
        return Relay(turn, self._note_first_byte, self._note_progress)

    def ended(self, turn: Turn, begun: Begun) -> None:
        """A leg ended with its whole answer received or passed on: its turn is finished."""
        turn.leg_runs_at("", False)
        turn.versions = begun.member.server.versions[begun.first_version :]
        self._fleet.leg_ended(begun.member, None, True)

    async def run(self, turn: Turn, dispatch: Dispatch, begun: Begun | None = None) -> Outcome:
        """Run a leg to its end, or the rest of one that has begun.

        Raises:
            LegFailed: the engine or the request failed.
            Stopped: the client left, the trajectory was aborted, or the leg is paused.
        """
        if begun is None:
            dispatch = self._kept_tokens.placed(turn, dispatch)
            try:
                begun = self._began(turn, dispatch, self._fleet.get(dispatch.engine_id))
            except UnknownEngine:
                raise LegFailed(Fault.ENGINE, api_error(502, "The engine left the fleet.", "engine_lost")) from None
        member, response = begun.member, begun.response
        fault: Exception | None = None
        has_answered = False
        has_begun = response is not None
        try:
            with turn.stoppable():
                if response is not None and not response.was_stale:
                    await response.begun(self._settings.turn_timeout_s)
                    answer = await self._answer(turn, member, response, begun.relay)
                    has_answered = True
                    return answer
                turn.leg_runs_at(dispatch.engine_id, True)  # It may go elsewhere until it is sent to pass through.
                await self._kv.bring(turn, member)
                has_begun = True
                outcome = await self._by_tokens(turn, dispatch, member)
                if outcome is None:
                    turn.begin_again()  # tokens of an earlier leg belong to another answer
                    turn.leg_runs_at(dispatch.engine_id, False)
                    response = await self._ask(turn, dispatch, member, reuses=response is None)
                    outcome = await self._answer(turn, member, response, None)
                has_answered = True
                return outcome
        except FAULTS as error:
            if isinstance(error, CONNECTION_FAULTS):
                fault = error
            elif isinstance(error, ResponseTimeout | AnswerTooLarge):
                self._abort(turn, member)
            raise failed_leg(error) from None
        except (TooDeep, BrokenValue) as error:
            raise LegFailed(Fault.REQUEST, api_error(400, str(error))) from None
        except Stopped as stop:
            self._abort(turn, member)
            if turn.stale_version is not None and stop.fault is Fault.ENGINE:
                raise self._staleness.stopped(turn) from None
            if stop.fault is Fault.ENGINE:
                lost = LegFailed(Fault.ENGINE, api_error(502, "The engine was lost.", "engine_lost"))
                # Not one that was removed, or that may be alive behind a slow network.
                lost.broke_off = member.server.state is EngineState.LOST and not member.server.may_be_alive
                raise lost from None
            raise
        except LegFailed as failure:
            has_answered = True
            if failure.fault is Fault.ENGINE:
                self._abort(turn, member)
            raise
        finally:
            turn.leg_runs_at("", False)
            turn.versions = member.server.versions[begun.first_version :]
            if response is not None:
                response.close()
            if has_begun and fault is None:
                self._kv.contexts.ran(turn, member.engine_id)
            self._fleet.leg_ended(member, fault, has_answered)

    def _began(self, turn: Turn, dispatch: Dispatch, member: Member) -> Begun:
        begun = Begun(dispatch, member, len(member.server.versions) - 1 if member.server.versions else 0)
        turn.versions = member.server.versions[begun.first_version :]
        turn.leg_runs_at(dispatch.engine_id, False)
        self._fleet.leg_began(member)
        return begun

    async def _by_tokens(self, turn: Turn, dispatch: Dispatch, member: Member) -> Outcome | None:
        if not turn.choices and not (self._has_token_legs and may_take_tokens(turn.ask)):
            return None
        self._tell_about(turn, dispatch)
        return await self._token_legs.run(turn, member, _request_id(turn), dispatch.priority)

    async def _ask(self, turn: Turn, dispatch: Dispatch, member: Member, reuses: bool) -> Response:
        upstream = self._upstream(turn, dispatch, member)
        self._tell_about(turn, dispatch)
        timeout_s = self._settings.turn_timeout_s
        return await member.http.request("POST", upstream.path, upstream.body, upstream.headers, timeout_s, reuses)

    def _upstream(self, turn: Turn, dispatch: Dispatch, member: Member) -> Upstream:
        assert member.server.dialect is not None
        ask = turn.ask
        upstream = member.server.dialect.upstream(
            Leg(
                ask.path,
                _request_id(turn),
                ask.trajectory_id,
                dispatch.priority,
                ask.body,
                ask.request,
                ask.wants_stream and ask.path in _TOLD_WHEN_ASKED and not ask.wants_usage,
                member.server.cache_salt,
                member.rank,
            )
        )
        return with_headers(upstream, ask.trace)

    def _tell_about(self, turn: Turn, dispatch: Dispatch) -> None:
        turn.outlet.about(dispatch.engine_id, (turn.first_dispatch_at or turn.arrived_at) - turn.arrived_at)

    async def _answer(self, turn: Turn, member: Member, response: Response, relay: Relay | None) -> Outcome:
        if turn.ask.wants_stream and response.status == 200:
            return await self._relay(turn, member, response, relay)
        body = await response.body(self._settings.max_answer_bytes, self._settings.silence_timeout_s)
        return self.whole(turn, response, body)

    def whole(self, turn: Turn, response: Response, body: bytes) -> Outcome:
        """What a whole answer with this body means. Raises LegFailed, with nothing changed."""
        if response.status != 200:
            raise refused_by(response, engine_error(response.status, body))
        answer = read_answer(turn.ask.api, body, may_be_cut=response.ends_at_eof)
        if answer.error is not None:
            failure = refused_by(response, answer.error)
            failure.has_made = answer.usage is not None and answer.usage.completion_tokens > 0
            raise failure
        turn.usage, turn.finish_reason = answer.usage, answer.finish_reason
        self._note_first_byte(turn)
        api, outlet = turn.ask.api, turn.outlet
        return Outcome(answer.body, lambda: outlet.whole(200, answer.body), lambda: content_of(api, body))

    async def _relay(self, turn: Turn, member: Member, response: Response, relay: Relay | None) -> Outcome:
        if not is_stream(response):
            raise BadResponse("it answered a stream request with something else")
        outlet = turn.outlet
        relay = relay or self.relay(turn)
        reader = relay.reader
        while not relay.is_over:
            settings = self._settings
            timeout_s = settings.turn_timeout_s if turn.first_byte_at is None else settings.silence_timeout_s
            try:
                has_more = await response.pour(relay.take, timeout_s)
            except EventTooLarge as error:
                raise AnswerTooLarge(str(error)) from None
            if not has_more:
                fault = reader.end()
                assert fault is not None, "a stream that has come to its own end is over"
                raise refused_leg(fault)
            if outlet.is_full:
                with member.held_up():
                    await outlet.drain()
            if not relay.is_over:
                await self.lending.until_back(turn, response, relay, settings.silence_timeout_s)
        if reader.error is not None:
            if relay.last and reader.has_begun:
                outlet.stream(relay.last)
            raise refused_leg(reader.error)
        return self.streamed(turn, response, relay)

    def streamed(self, turn: Turn, response: Response, relay: Relay) -> Outcome:
        """The end of a stream that ended well."""
        reader, last, outlet, api = relay.reader, relay.last, turn.outlet, turn.ask.api
        if turn.first_byte_at is None:
            self._note_first_byte(turn)
        response.release()
        turn.usage, turn.finish_reason, turn.num_chunks = reader.usage, reader.finish_reason, reader.num_chunks
        return Outcome(last, lambda: outlet.stream(last, more=False), lambda: content_of_stream(api, reader.kept))

    def _note_first_byte(self, turn: Turn) -> None:
        now = turn.first_byte_at = self._clock()
        self._metrics.turn_timed((turn.first_dispatch_at or now) - turn.arrived_at, now - turn.arrived_at)

    def _note_progress(self, turn: Turn) -> None:
        self._driver.post(TurnProgressed(self._clock(), turn.turn_id, turn.leg, turn.num_chunks))

    def _abort(self, turn: Turn, member: Member) -> None:
        """Stop an engine at once if closing the connection does not suffice; nobody waits for it."""
        dialect, request_id = member.server.dialect, _request_id(turn)  # by the time it is sent, another leg may run
        if dialect is None:
            return

        async def abort() -> None:
            try:
                await dialect.abort(member.http, request_id, _ABORT_TIMEOUT_S)
            except FAULTS:
                return  # An engine that cannot be reached runs none of our turns, or its watch will notice.

        task = asyncio.create_task(abort())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)


def is_stream(response: Response) -> bool:
    """Whether the body of an answer is an event stream."""
    return response.headers.get(b"content-type", b"").find(b"event-stream") >= 0


def _request_id(turn: Turn) -> str:
    """One per leg, because an engine may still know the turn's earlier leg. Its fixed width guards against prefix
    matches.
    """
    return f"{turn.turn_id}-{str(turn.leg).zfill(3)}"
