"""Runs a leg at token level: render, generate, and derender where the answer must be read by an engine.

A turn is served so where its engine has token routes and nothing is asked that they cannot do; the others pass through
(`legs.py`). What came stays in the turn's chain when a leg ends early, and the next one goes on from there.
"""

from collections.abc import Callable, Mapping
from typing import Any

from engines.http import BadResponse
from engines.tokens import Rendered, TokenLeg, TokenRoutes, has_tools
from gateway.clock import Clock
from gateway.config import Settings
from gateway.fleet.member import Member
from gateway.http.errors import api_error, engine_error
from gateway.http.sse import EventTooLarge
from gateway.messages.answers import Usage
from gateway.messages.streams import content_of_stream
from gateway.tokens.turn_tokens import TokenBook
from gateway.turns.chain import Chain, Diverged, Said
from gateway.turns.outcome import Outcome, refused_leg
from gateway.turns.splice import spliced
from gateway.turns.token_relay import TokenRelay
from gateway.turns.turn import Ask, LegFailed, Turn
from gateway.turns.voices import Frame, ParsedVoice, TextVoice
from scheduling.types import Fault

# What these fields ask for is not in the answers of token routes, or not told apart for a single choice.
_BEYOND_TOKENS = (
    "best_of",
    "ec_transfer_params",
    "echo",
    "function_call",
    "functions",
    "kv_transfer_params",
    "logprob_token_ids",
    "mm_payload",
    "prompt_embeds",
    "prompt_logprobs",
    "return_prompt_text",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "return_weight_versions",
    "suffix",
    "use_beam_search",
)
_PROGRESS_TOKENS = 64


def may_take_tokens(ask: Ask) -> bool:
    """Whether a request asks for nothing that token routes cannot do."""
    request = ask.request
    if ask.api not in ("chat", "completions") or request.get("n") not in (None, 1):
        return False
    options = request.get("stream_options")
    if not (options is None or (isinstance(options, dict) and options.get("include_usage") in (None, True, False))):
        return False  # for the engine to refuse
    if (options or {}).get("continuous_usage_stats") or any(
        request.get(name) not in (None, False) for name in _BEYOND_TOKENS
    ):
        return False
    if ask.api == "completions":
        prompt = request.get("prompt")
        return isinstance(prompt, str) or (isinstance(prompt, list) and all(map(_is_id, prompt)))
    # A parser sees no stop strings, and in a stream no log-probabilities.
    return not has_tools(request) or not (request.get("stop") or (ask.wants_stream and request.get("logprobs")))


def _is_id(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < 2**31


class TokenLegs:
    """Runs such legs.

    Args:
        book: the tokens of earlier turns, from which later ones are spliced.
        note_first_byte, note_progress: as in `Legs`.
        save: writes down what a running turn has made, if it is time.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        book: TokenBook,
        note_first_byte: Callable[[Turn], None],
        note_progress: Callable[[Turn], None],
        save: Callable[[Turn], None],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._book = book
        self._note_first_byte = note_first_byte
        self._note_progress = note_progress
        self._save = save

    async def run(self, turn: Turn, member: Member, request_id: str, priority: int) -> Outcome | None:
        """Run a leg to its end; None where the turn must pass through instead.

        Raises: as `Legs.run`, and what HttpClient raises.
        """
        routes = member.dialect.tokens if member.dialect is not None else None
        if routes is None:
            if turn.chain is not None and turn.outlet.has_begun:
                raise LegFailed(Fault.ENGINE, api_error(502, "The engine has no token routes.", "engine_failed"))
            return None
        try:
            if turn.chain is None:
                await self._begin(turn, routes, member)
            if turn.chain is None:
                return None
            if not await self._generated(turn, turn.chain, routes, member, request_id, priority):
                return None
            return await self._outcome(turn, turn.chain, routes, member)
        except Diverged:
            error = api_error(502, "The answer cannot be continued as it began.", "stream_broken")
            raise LegFailed(Fault.REQUEST, error) from None
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise BadResponse(f"its token routes answered nonsense: {error!r}") from None

    # --- the prompt -----------------------------------------------------------------------------------------

    async def _begin(self, turn: Turn, routes: TokenRoutes, member: Member) -> None:
        ask = turn.ask
        asked = routes.render(ask.path, ask.request, ask.body)
        status, body = await member.http.post(asked.path, asked.body, self._settings.silence_timeout_s)
        if status != 200:
            if 400 <= status < 500 and status != 429:
                return  # The engine's own route says it in its own words.
            raise refused_leg(engine_error(status, body))
        rendered = routes.rendered(ask.request, body)
        if rendered is None or (rendered.needs_parser and not _can_be_parsed(ask, rendered)):
            return
        prompt_ids, parent = spliced(self._book, ask, rendered.prompt_ids)
        chain = turn.chain = Chain(rendered, prompt_ids, parent, ask.wants_stream, _wants_logprobs(ask))
        frame = Frame(ask, turn.turn_id, turn.arrived_at)
        turn.voice = ParsedVoice(ask, frame) if rendered.needs_parser else TextVoice(ask, frame)
        if turn.made_before is not None:
            chain.restore(*turn.made_before)

    # --- the tokens -----------------------------------------------------------------------------------------

    async def _generated(
        self, turn: Turn, chain: Chain, routes: TokenRoutes, member: Member, request_id: str, priority: int
    ) -> bool:
        """Make the rest of the output; False where the engine refuses, and its own route shall say why."""
        if chain.output_ids and chain.finish_reason is None:
            self._say(turn, await self._mended(chain, routes, member))
            if len(chain.output_ids) >= chain.rendered.max_tokens:
                self._say(turn, chain.finish("length"))
        if chain.finish_reason is not None:
            return True
        chain.begin_leg()
        leg = TokenLeg(
            request_id=request_id,
            trajectory_id=turn.ask.trajectory_id,
            priority=priority,
            prompt_ids=chain.prompt_ids + chain.output_ids,
            num_made=len(chain.output_ids),
            cache_salt=member.cache_salt,
            is_coarse=not turn.ask.wants_stream,
            wants_logprobs=self._settings.keep_logprobs and turn.ask.keeps_tokens,
        )
        asked = routes.generate(chain.rendered, leg)
        settings = self._settings
        response = await member.http.request("POST", asked.path, asked.body, asked.headers, settings.turn_timeout_s)
        try:
            if response.status != 200:
                error = engine_error(response.status, await response.body(2**20, settings.silence_timeout_s))
                if error.is_clients_fault and not chain.output_ids and not turn.outlet.has_begun:
                    turn.chain = None
                    return False
                raise refused_leg(error)
            outlet = turn.outlet if turn.ask.wants_stream else None
            voice = turn.voice
            assert voice is not None

            def version() -> str:
                return member.weight_version

            relay = TokenRelay(chain, voice, routes.reader(), version, outlet, lambda: self._note(turn, chain))
            try:
                await self._read(turn, chain, relay, response, routes, member)
            finally:
                turn.last_events = relay.last
            response.release()
        finally:
            response.close()
        return True

    async def _read(
        self, turn: Turn, chain: Chain, relay: TokenRelay, response: Any, routes: TokenRoutes, member: Member
    ) -> None:
        settings, voice = self._settings, turn.voice
        while not relay.is_over:
            timeout_s = settings.silence_timeout_s if relay.has_begun else settings.turn_timeout_s
            try:
                has_more = await response.pour(relay.take, timeout_s)
            except EventTooLarge as error:
                raise BadResponse(str(error)) from None
            if not has_more and not relay.is_over:
                raise LegFailed(Fault.ENGINE, api_error(502, "The engine's stream broke off.", "stream_broken"))
            relay.was_heard()
            if isinstance(voice, ParsedVoice) and turn.ask.wants_stream and chain.finish_reason is None:
                told = await voice.say(routes, member.http, chain, settings.silence_timeout_s)
                if told:
                    self._note(turn, chain)
                    turn.outlet.stream(told)
            await turn.outlet.drain()
        if relay.error is not None:
            raise refused_leg(relay.error)

    async def _mended(self, chain: Chain, routes: TokenRoutes, member: Member) -> Said:
        outputs = chain.candidates()
        if not outputs:
            return chain.mend(())
        asked = routes.texts(chain.rendered, outputs)
        status, body = await member.http.post(asked.path, asked.body, self._settings.silence_timeout_s)
        if status != 200:
            raise refused_leg(engine_error(status, body))
        return chain.mend(routes.read_texts(body))

    def _say(self, turn: Turn, said: Said) -> None:
        """Tell what a seam set free."""
        voice, chain = turn.voice, turn.chain
        assert voice is not None and chain is not None
        if not turn.ask.wants_stream:
            return
        if isinstance(voice, ParsedVoice):
            voice.hear(said.ids)
        elif chain.finish_reason is not None:
            turn.last_events = voice.say(said.text, said.logprobs, chain.finish_reason, chain.stop_reason)
        elif said.text or said.logprobs:
            self._note(turn, chain)
            turn.outlet.stream(voice.say(said.text, said.logprobs))

    def _note(self, turn: Turn, chain: Chain) -> None:
        """Tokens have come."""
        before, turn.num_chunks = turn.num_chunks, len(chain.output_ids)
        if turn.ask.wants_stream:
            if turn.first_byte_at is None:
                self._note_first_byte(turn)
            turn.outlet.num_events = turn.num_chunks
        self._save(turn)
        if turn.num_chunks // _PROGRESS_TOKENS != before // _PROGRESS_TOKENS:
            self._note_progress(turn)

    # --- the answer -----------------------------------------------------------------------------------------

    async def _outcome(self, turn: Turn, chain: Chain, routes: TokenRoutes, member: Member) -> Outcome:
        usage = Usage(len(chain.prompt_ids), len(chain.output_ids), chain.cached_tokens)
        voice, outlet, frame = turn.voice, turn.outlet, Frame(turn.ask, turn.turn_id, turn.arrived_at)
        assert voice is not None
        timeout_s = self._settings.silence_timeout_s
        if turn.ask.wants_stream:
            last = turn.last_events
            if isinstance(voice, ParsedVoice):
                last = await voice.say(routes, member.http, chain, timeout_s)
            end = frame.end(last, usage)
            send = lambda: outlet.stream(end, more=False)  # noqa: E731
        else:
            choice = (
                await voice.whole(routes, member.http, chain, timeout_s)
                if isinstance(voice, ParsedVoice)
                else voice.whole(chain)
            )
            end = frame.whole(choice, usage)
            send = lambda: outlet.whole(200, end)  # noqa: E731
        if turn.first_byte_at is None:
            self._note_first_byte(turn)
        turn.usage, turn.num_chunks = usage, len(chain.output_ids)
        turn.finish_reason = chain.finish_reason
        return Outcome(end, send, lambda: _content(turn, chain))


def _content(turn: Turn, chain: Chain) -> Any:
    voice = turn.voice
    if isinstance(voice, TextVoice):
        return voice.content(chain)
    assert voice is not None
    return voice.message or content_of_stream(turn.ask.api, voice.kept)


def _wants_logprobs(ask: Ask) -> bool:
    """A chat asks by a flag, a completion by a number, which may be 0."""
    wanted = ask.request.get("logprobs")
    return wanted is not None and wanted is not False


def _can_be_parsed(ask: Ask, rendered: Rendered) -> bool:
    """Reasoning is known only from the render, so this is asked again after it."""
    request: Mapping[str, Any] = ask.request
    return ask.api == "chat" and not rendered.stop and not (ask.wants_stream and request.get("logprobs"))
