"""One leg of one choice: generates and tells what is left of it, and prepares its end.

If the leg ends early, its tokens stay in the choice's chain, and the next leg continues from there.
"""

import asyncio
from collections.abc import Callable, Iterable

from engines.http import CONNECTION_FAULTS, AnswerTooLarge, Response
from engines.tokens import TokenLeg, TokenRoutes
from engines.upstream import with_headers
from gateway.clock import Clock
from gateway.config import Settings
from gateway.fleet.server import Member
from gateway.http.errors import api_error, engine_error
from gateway.http.sse import EventTooLarge
from gateway.turns.answer_writers import ParsedWriter
from gateway.turns.chain import NewText
from gateway.turns.choice import Choice
from gateway.turns.kept_legs import KeptLegs
from gateway.turns.outcome import LegFailed, refused_by, refused_leg
from gateway.turns.token_relay import TokenRelay
from gateway.turns.turn import Turn
from scheduling.types import Fault
from scheduling.values import value_class

# An event costs the same for one token as for many. A client that waits for the whole answer gains nothing from single
# tokens, but tokens in an event that has not arrived are lost with the engine: a second's work.
_WHOLE_EVENT_TOKENS = 32
# A client that gets parts 0.1 s apart still gets them on time: a sequence makes 20 to 100 tokens a second.
_PART_EVENT_TOKENS = 4


class RefusedTokens(Exception):
    """The engine rejects the request before anything is made; its own route reports why."""


@value_class(frozen=True, slots=True)
class Place:
    """Where a turn's leg runs, and with which request id and priority.

    Args:
        note: called when tokens have come, and before any are told: with a turn, its earlier token count, and whether
            some are told now.
        kept_legs: the legs whose responses outlive this process; None if nothing keeps them.
    """

    routes: TokenRoutes
    member: Member
    request_id: str
    priority: int
    settings: Settings
    clock: Clock
    note: Callable[[Turn, int, bool], None]
    kept_legs: KeptLegs | None = None


class ChoiceLeg:
    """Runs one leg of one choice."""

    def __init__(self, turn: Turn, choice: Choice, place: Place) -> None:
        self._turn = turn
        self._choice = choice
        self._chain = choice.chain
        self._place = place
        self._timeout_s = place.settings.silence_timeout_s

    async def run(self) -> None:
        """Run it to the choice's end.

        Raises: LegFailed, RefusedTokens, Diverged, anything HttpClient raises, and the errors of parsing a malformed
        answer.
        """
        chain, choice = self._chain, self._choice
        await self._begin()
        if chain.finish_reason is None and self._place.kept_legs is not None:
            await self._take_up(self._place.kept_legs)
        if chain.finish_reason is None:
            await self._generate()
        await self._end()
        choice.has_ended = True
        others = [other for other in self._turn.choices if not other.has_ended]
        if others and choice.last:
            self._note(True)
            self._turn.outlet.stream(choice.last)
            choice.last = b""

    # --- the tokens -----------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Continue from what was made before."""
        chain = self._chain
        if chain.output_ids and chain.finish_reason is None:
            chain.drop_doubtful()
            self._tell(await self._mended())
            # What was cut may be written down: the next part begins at the cut, and replaces it.
            self._choice.num_saved = min(self._choice.num_saved, len(chain.output_ids))
            if len(chain.output_ids) >= chain.rendered.max_tokens:
                self._tell(chain.finish("length"))

    async def _take_up(self, kept_legs: KeptLegs) -> None:
        """Read the response that an earlier process asked for, as far as it goes; the rest is asked for again."""
        response: Response | None = None
        try:
            found = await kept_legs.take_up(self._turn, self._choice, self._place.routes, self._place.member)
            if found is None:
                return
            response, version = found
            self._chain.begin_leg()
            if response.status == 200:
                await self._read(response, version)
                response.release()
        except (*CONNECTION_FAULTS, LegFailed):
            pass  # it may have ended long ago: what is missing is asked for next
        finally:
            if response is not None:
                response.close()
        await self._begin()

    async def _generate(self) -> None:
        turn, chain = self._turn, self._chain
        chain.begin_leg()
        response = await self._asked()
        try:
            if response.status != 200:
                error = engine_error(response.status, await response.body(2**20, self._timeout_s))
                if error.is_clients_fault and not turn.num_chunks and not turn.outlet.has_begun:
                    raise RefusedTokens
                raise refused_by(response, error)
            await self._read(response, lambda: self._place.member.server.weight_version)
            response.release()
        finally:
            response.close()

    async def _asked(self) -> Response:
        place = self._place
        http, asked = place.member.http, place.routes.generate(self._chain.rendered, self._leg())
        asked = with_headers(asked, self._turn.ask.trace)
        if place.kept_legs is not None:
            return await place.kept_legs.ask(self._turn, self._choice, place.routes, place.member, asked)
        return await http.request("POST", asked.path, asked.body, asked.headers, place.settings.turn_timeout_s)

    def _leg(self) -> TokenLeg:
        turn, chain, place, index = self._turn, self._chain, self._place, self._choice.index
        return TokenLeg(
            f"{place.request_id}.{index}" if index else place.request_id,
            turn.ask.trajectory_id,
            place.priority,
            chain.prompt_ids + chain.output_ids,
            len(chain.output_ids),
            place.member.server.cache_salt,
            self._event_tokens(),
            place.settings.keep_logprobs and turn.ask.keeps_tokens,
            index,
            place.member.rank,
        )

    def _event_tokens(self) -> int:
        if not self._turn.ask.wants_stream:
            return _WHOLE_EVENT_TOKENS
        return _PART_EVENT_TOKENS if isinstance(self._choice.writer, ParsedWriter) else 1

    async def _read(self, response: Response, version: Callable[[], str]) -> None:
        turn, choice, place, writer = self._turn, self._choice, self._place, self._choice.writer
        outlet = turn.outlet if turn.ask.wants_stream else None
        read = place.routes.reader(self._chain.rendered, only_numbers=not self._chain.tells_logprobs)
        relay = TokenRelay(choice, read, version, outlet, self._note, place.clock)
        while not relay.is_over:
            timeout_s = self._timeout_s if relay.has_begun else place.settings.turn_timeout_s
            try:
                has_more = await response.pour(relay.take, timeout_s)
            except EventTooLarge as error:
                raise AnswerTooLarge(str(error)) from None
            if not has_more and not relay.is_over:
                raise _broken_off()
            if outlet is not None and isinstance(writer, ParsedWriter) and self._chain.finish_reason is None:
                told = await writer.tell(place.routes, place.member.http, self._chain, self._timeout_s)
                writer.pause(place.clock())
                if told:
                    self._note(True)
                    outlet.stream(told)
            if turn.outlet.is_full:
                with place.member.held_up():
                    await turn.outlet.drain()
        if relay.error is not None:
            # A completion's token leg asks for one alternative more, which may be one too many.
            if relay.error.param == "logprobs" and not turn.num_chunks:
                raise RefusedTokens
            raise refused_leg(relay.error)
        if self._chain.finish_reason is None:  # it claimed to be done
            raise _broken_off()

    async def _mended(self) -> NewText:
        outputs = self._chain.candidates()
        if not outputs:
            return self._chain.mend(())
        routes = self._place.routes
        asked = routes.texts(self._chain.rendered, outputs)
        status, body = await self._place.member.http.post(asked.path, asked.body, self._timeout_s)
        if status != 200:
            raise refused_leg(engine_error(status, body))
        return self._chain.mend(routes.read_texts(body))

    def _tell(self, new: NewText) -> None:
        """Tell the client what a seam released."""
        writer, chain = self._choice.writer, self._chain
        if not self._turn.ask.wants_stream:
            return
        if isinstance(writer, ParsedWriter):
            writer.add(new.ids)
        elif chain.finish_reason is not None:
            self._choice.last = writer.tell(new.text, new.logprobs, chain.finish_reason, chain.stop_reason)
        elif new.text or new.logprobs:
            told = writer.tell(new.text, new.logprobs)
            self._note(True)
            self._turn.outlet.stream(told)

    def _note(self, is_told: bool) -> None:
        choice, num_made = self._choice, len(self._chain.output_ids)
        num_before = self._turn.num_chunks
        self._turn.num_chunks += num_made - choice.num_counted
        choice.num_counted = num_made
        self._place.note(self._turn, num_before, is_told)

    # --- the end --------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        choice, chain, place, http = self._choice, self._chain, self._place, self._place.member.http
        writer = choice.writer
        if isinstance(writer, ParsedWriter):
            if self._turn.ask.wants_stream:
                choice.last = await writer.tell(place.routes, http, chain, self._timeout_s)
            else:
                choice.whole = await writer.whole(place.routes, http, chain, self._timeout_s)
        elif not self._turn.ask.wants_stream:
            choice.whole = writer.whole(chain)


async def run_all(legs: Iterable[ChoiceLeg]) -> None:
    """Run legs concurrently. The first failure stops the others, which continue in the next leg. There may be none, if
    a turn was stopped just as its last choice ended.
    """
    legs = tuple(legs)
    if len(legs) == 1:
        await legs[0].run()
        return
    tasks = [asyncio.create_task(leg.run()) for leg in legs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _broken_off() -> LegFailed:
    return LegFailed(Fault.ENGINE, api_error(502, "The engine's stream broke off.", "stream_broken"))
