"""Serves turns: takes a client's request, waits for the scheduler's word, runs legs until one finishes.

This is the hot path. What it decides is in `scheduling/`; how bytes pass is in `legs.py` and `outlet.py`.

1. A turn at token level goes on from its last token on another engine; one that passes through starts over there, and
   only while nothing of an answer is out.
2. The scheduler knows that a turn finished, and the store has it, before the client gets the answer's end.
3. A client that leaves stops its turn, unless another one joined it.
"""

import asyncio
import contextlib
import random
from collections.abc import Coroutine, Mapping
from typing import Any

import orjson

from gateway.clock import Clock
from gateway.config import Settings
from gateway.fleet.fleet import Fleet
from gateway.http.client import Client, ClientLeft, Headers
from gateway.http.errors import Api
from gateway.http.exchange import Exchange
from gateway.http.heartbeat import Heartbeat
from gateway.http.outlet import Outlet
from gateway.http.refusals import (
    Refused,
    bad_request,
    internal_error,
    no_engine,
    not_found,
    refused_turn,
    shutting_down,
    too_many_turns,
)
from gateway.kv.moves import KvMoves
from gateway.messages.conversations import Conversations
from gateway.messages.identity import NO_HINTS, Identity, IdentityError, identify, prompt_group
from gateway.metrics import Metrics
from gateway.state.driver import Driver
from gateway.state.ledger import Entry, Ledger
from gateway.tokens.book import StoredTokens
from gateway.tokens.partials import Partials
from gateway.turnlog import TurnLog
from gateway.turns.ask import Ask
from gateway.turns.hot import HotTurns
from gateway.turns.kept_tokens import KeptTokens
from gateway.turns.legs import Begun, Legs
from gateway.turns.outcome import LegFailed, Outcome, Stopped
from gateway.turns.progress import begun
from gateway.turns.repeats import Repeats, is_retry
from gateway.turns.staleness import Staleness
from gateway.turns.turn import Turn
from predictor.outcomes import outcomes
from predictor.progress import Predictor
from scheduling.types import Dispatch, Fault, Prediction, Refusal, TurnArrived, TurnFailed, TurnFinished, TurnPaused
from store.port import Store

TURN_ROUTES: dict[str, Api] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
# Of the first prompts, until the fleet's own tokenizer has been seen at work; typical of English and code.
_BYTES_PER_TOKEN = 4.0
# Larger hints mean no more than this: the number goes on to engines, scaled, and must stay a 64-bit integer there.
_MAX_HINT = 1_000


class Turns:
    """Serves the turns of all trajectories.

    Args:
        predictor: says how much work a trajectory has left.
        conversations: know clients that send no id.
        repeats: know what a retried request asks again.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        driver: Driver,
        fleet: Fleet,
        ledger: Ledger,
        store: Store,
        predictor: Predictor,
        conversations: Conversations,
        repeats: Repeats,
        metrics: Metrics,
        log: TurnLog,
        book: StoredTokens,
        staleness: Staleness,
        kv: KvMoves,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._driver = driver
        self._fleet = fleet
        self._ledger = ledger
        self._store = store
        self._predictor = predictor
        self._conversations = conversations
        self._metrics = metrics
        self._log = log
        before = {entry.record.trajectory_id for entry in ledger}
        self._book = book
        self._kept_tokens = KeptTokens(book, Partials(store), clock, settings.save_tokens_s, before)
        self._legs = Legs(settings, clock, driver, fleet, metrics, book, self._kept_tokens.save, staleness, kv)
        self._staleness = staleness
        self._kv = kv
        self._repeats = repeats
        self._hot = HotTurns(self, self._legs, store, clock, settings, metrics)
        self._num_of_key: dict[str, int] = {}
        self._bytes_per_token = _BYTES_PER_TOKEN

    async def serve(self, client: Client, path: str, key: str) -> None:
        """Answer one turn request.

        Args:
            client: whose raw path may hold an identity.
            path: the API route, without it.
            key: names the client's key, for its limit; "" when the gateway is open.
        """
        settings = self._settings
        try:
            body = await client.read(settings.max_body_bytes, settings.body_timeout_s)
        except Refused as refused:
            turn_id = new_id()
            outlet = Outlet(client, TURN_ROUTES[path], turn_id, keeps=False, max_kept_bytes=0)
            outlet.headers += _named(client.scope, b"")
            self.tell(refused, outlet, turn_id)
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
        """Serve a request whose body is here, as far as that needs no waiting. Raises nothing.

        Args:
            taker: the client, if callbacks may see to its answer once this has returned.

        Returns: the rest, to be awaited; None where the answer is given, or callbacks see to it.
        """
        turn_id = new_id()
        api = TURN_ROUTES[path]
        outlet = Outlet(client, api, turn_id, keeps=True, max_kept_bytes=self._settings.max_answer_bytes)
        try:
            try:
                ask = self._ask(client.scope, api, path, body)
            except Refused:
                outlet.headers += _named(client.scope, body)
                raise
            outlet.headers.append((b"x-trajectory-id", ask.trajectory_id.encode("latin-1", "replace")))
            retries = is_retry(client.scope["headers"])
            joined = self._repeats.running(ask, retries)
            if joined is not None:
                return self.serving(self._join(joined, client), client, outlet, turn_id)
            answer = self._repeats.answer(ask, retries)
            if answer is not None:
                self._metrics.joined_turns.inc()
                return self.serving(answer.follow(client), client, outlet, turn_id)
            self._count(key)
            turn = Turn(turn_id, ask, outlet, self._clock(), 0.0)
            turn.key = key
            if self._settings.token_legs != "off":
                return self.serving(self._prepared(turn, client, retries), client, outlet, turn_id)
            self._arrive(turn, client)
        except Exception as error:
            self.tell(error, outlet, turn_id)
            return None
        if taker is not None and self._hot.take(turn, taker):
            return None
        return self.serving(self.run(turn, client), client, outlet, turn_id)

    async def serving(self, rest: Coroutine[Any, Any, None], client: Client, outlet: Outlet, request_id: str) -> None:
        """Await the rest of what serves a request, and tell its client if that fails."""
        try:
            await rest
        except ClientLeft:
            return
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.tell(error, outlet, request_id)
        await client.drain()

    def tell(self, error: Exception, outlet: Outlet, request_id: str) -> None:
        """Answer with an error, which is being handled."""
        if isinstance(error, Refused):
            self._metrics.refused.labels(str(error.error.status)).inc()
            outlet.refuse(error)
        else:
            self._log.defect(request_id)
            outlet.refuse(internal_error())

    # --- what is asked --------------------------------------------------------------------------------------

    def _ask(self, scope: Mapping[str, Any], api: Api, path: str, body: bytes) -> Ask:
        request = parse_object(body)
        stream = request.get("stream")
        if stream is not None and not isinstance(stream, bool):
            raise bad_request("'stream' must be true or false.", "stream")
        model = self._model(request)
        try:
            identity = identify(scope["raw_path"].decode("latin-1"), scope["headers"], request)
        except IdentityError as error:
            raise bad_request(str(error), code="bad_identity") from None
        trajectory_id, is_inferred = identity.trajectory_id, False
        if trajectory_id is None:
            is_inferred = True
            trajectory_id = self._conversations.continued(request) or f"t-{new_id()[:24]}"
        return Ask(
            api=api,
            path=path,
            model=model,
            body=body,
            request=request,
            trajectory_id=trajectory_id,
            group_id=identity.group_id or self._known_group(trajectory_id) or prompt_group(request),
            rollout_id=identity.rollout_id,
            priority=_priority(identity),
            is_inferred=is_inferred,
            may_be_joined=identity.strong and not is_inferred,
            keeps_tokens=self._settings.token_legs != "off" and self._book.wants(trajectory_id, scope["headers"]),
        )

    def _model(self, request: dict[str, Any]) -> str:
        model = request.get("model")
        known = self._fleet.models()
        if model is None and len(known) == 1:
            return next(iter(known))
        if not isinstance(model, str) or not model:
            raise bad_request("'model' must be the name of a model.", "model")
        if model not in known:
            if not known:
                raise no_engine()
            raise not_found(f"The model {model[:200]!r} does not exist.", "model_not_found")
        return model

    def _known_group(self, trajectory_id: str) -> str | None:
        entry = self._ledger.get(trajectory_id)
        return entry.record.group_id if entry is not None else None

    # --- running --------------------------------------------------------------------------------------------

    async def _prepared(self, turn: Turn, client: Client, retries: bool) -> None:
        try:
            await self._kept_tokens.prepare(turn, turn.ask.may_be_joined or retries)
        except BaseException:
            self._num_of_key[turn.key] -= 1
            raise
        self._arrive(turn, client)
        await self.run(turn, client)

    def _arrive(self, turn: Turn, client: Client) -> None:
        """Tell the scheduler of a turn whose key counts it. Raises Refused; then it is over."""
        ask = turn.ask
        try:
            self._staleness.check(ask.trajectory_id)
        except Refused:
            self._num_of_key[turn.key] -= 1
            raise
        self._repeats.began(turn)
        self._driver.begin(turn.turn_id, turn)
        if ask.wants_stream:
            turn.heartbeat = Heartbeat(turn.outlet, self._settings.heartbeat_s)
        client.when_left(lambda: _leave(turn))
        try:
            self._driver.post(self._arrival(turn))
        except BaseException:
            self.over(turn, client)
            raise

    def over(self, turn: Turn, client: Client) -> None:
        """A turn that arrived has ended, well or not."""
        client.unwatch()
        if turn.heartbeat is not None:
            turn.heartbeat.stop()
        self._driver.end(turn.turn_id)
        self._repeats.ended(turn)
        self._num_of_key[turn.key] -= 1

    async def run(self, turn: Turn, client: Client, begun: Begun | None = None) -> None:
        """Run the legs of a turn that has arrived, until one finishes; the first may have begun."""
        try:
            await self._run_legs(turn, begun)
        finally:
            self.over(turn, client)

    async def _run_legs(self, turn: Turn, begun: Begun | None) -> None:
        dispatch: Dispatch | None = None
        outcome: Outcome | None = None
        try:
            while outcome is None:
                if begun is None:
                    dispatch = await turn.next_leg()
                    turn.first_dispatch_at = turn.first_dispatch_at or self._clock()
                else:
                    dispatch = begun.dispatch
                first, begun = begun, None
                try:
                    outcome = await self._legs.run(turn, dispatch, first)
                except LegFailed as failure:
                    can_retry = turn.can_go_on
                    turn.leg_failed(failure.error)
                    self._driver.post(TurnFailed(self._clock(), turn.turn_id, turn.leg, failure.fault, can_retry))
                    if not can_retry or failure.fault is Fault.REQUEST:
                        raise Refused(failure.error) from None
                    self._metrics.retried_legs.labels(failure.fault.value).inc()
                except Stopped as stop:
                    if stop.fault is not None:
                        raise
                    self._driver.post(TurnPaused(self._clock(), turn.turn_id, turn.leg, turn.num_chunks))
            self.finished(turn, dispatch, outcome)
            await self._settle(turn, outcome)
        except Refused as refused:
            self._close(turn, "refused" if turn.leg == 0 else "failed", dispatch, refused)
            raise
        except (Stopped, asyncio.CancelledError) as stop:
            fault = (stop.fault if isinstance(stop, Stopped) else None) or Fault.CLIENT_LEFT
            self._driver.post(TurnFailed(self._clock(), turn.turn_id, turn.leg, fault, can_retry=False))
            if isinstance(stop, asyncio.CancelledError):  # uvicorn's, at the end of a shutdown's patience
                told = shutting_down()
                self._close(turn, "stopped", dispatch, told)
                raise told from None
            self._close(turn, "left" if fault is Fault.CLIENT_LEFT else "aborted", dispatch, None)
            if fault is Fault.CLIENT_LEFT:
                raise ClientLeft from None
            raise refused_turn(Refusal.TRAJECTORY_ABORTED, None) from None

    def finished(self, turn: Turn, dispatch: Dispatch | None, outcome: Outcome) -> None:
        """Note everywhere that a turn finished; when that is at the store, its client may know it too."""
        usage = turn.usage
        prompt_tokens = usage.prompt_tokens if usage else self._estimated_prompt(turn.ask)
        output_tokens = usage.completion_tokens if usage else turn.num_chunks
        now = self._clock()
        if usage and usage.prompt_tokens > 0:
            self._bytes_per_token += 0.05 * (len(turn.ask.body) / usage.prompt_tokens - self._bytes_per_token)
            self._metrics.tokens(usage.prompt_tokens, usage.cached_tokens or 0, usage.completion_tokens)
        if turn.ask.is_inferred or turn.choices:
            self._remember(turn, outcome.content())
        if dispatch is not None:
            self._kv.contexts.finished(turn, dispatch.engine_id, prompt_tokens + output_tokens)
        stored = self._repeats.to_store(turn, outcome.end)
        if stored is not None:
            self._ledger.answered(turn.ask.trajectory_id, stored)
        self._driver.post(TurnFinished(now, turn.turn_id, turn.leg, prompt_tokens, output_tokens))
        self._close(turn, "finished", dispatch, None)

    async def settled(self, turn: Turn, client: Client, outcome: Outcome) -> None:
        """Send the answer's end of a turn that has finished, once the store knows of it."""
        try:
            await self._settle(turn, outcome)
        finally:
            self.over(turn, client)

    async def _settle(self, turn: Turn, outcome: Outcome) -> None:
        await self._store.settle(self._settings.settle_timeout_s)
        self.end(turn, outcome)

    def end(self, turn: Turn, outcome: Outcome) -> None:
        """Send the answer's end."""
        outcome.send_end()
        self._repeats.answered(turn)

    def _remember(self, turn: Turn, content: Any) -> None:
        trajectory_id = turn.ask.trajectory_id
        self._kept_tokens.ended(turn)
        if not turn.ask.is_inferred:
            return
        self._conversations.remember(trajectory_id, turn.ask.request, content)
        entry = self._ledger.get(trajectory_id)
        if entry is not None:
            entry.conversation = [*entry.conversation[-63:], self._conversations.dump(trajectory_id)]

    def _close(self, turn: Turn, outcome: str, dispatch: Dispatch | None, refused: Refused | None) -> None:
        now = self._clock()
        if outcome != "finished" and turn.ask.is_inferred:
            self._conversations.release(turn.ask.trajectory_id)
        engine_id = dispatch.engine_id if dispatch else None
        row = turn.row(outcome, now, engine_id, dispatch.why if dispatch else "", refused)
        encoded = orjson.dumps(row)
        self._ledger.add_turn(turn.ask.trajectory_id, row, encoded)
        self._metrics.turn_ended(turn.ask.api, outcome, now - turn.arrived_at)
        self._log.turn(turn.ask.trajectory_id, turn.ask.rollout_id, encoded)

    # --- what the scheduler is told -------------------------------------------------------------------------

    def _arrival(self, turn: Turn) -> TurnArrived:
        ask = turn.ask
        entry = self._ledger.get(ask.trajectory_id)
        prompt_tokens = self._prompt_tokens(ask, entry)
        prediction = self._prediction(ask, entry, prompt_tokens)
        turn.predicted_tokens = prediction.total_tokens
        return TurnArrived(
            at=turn.arrived_at,
            turn_id=turn.turn_id,
            trajectory_id=ask.trajectory_id,
            model=ask.model,
            prompt_tokens=prompt_tokens,
            prediction=prediction,
            group_id=ask.group_id,
            rollout_id=ask.rollout_id,
            priority=ask.priority,
        )

    def _prediction(self, ask: Ask, entry: Entry | None, prompt_tokens: int) -> Prediction:
        made = entry.record.output_tokens if entry is not None else 0
        declared = entry.declared.get("expected_output_tokens") if entry is not None else None
        if declared:
            total = float(max(declared, made + 1))
            return Prediction(total, total)
        prompt_id = "" if made else prompt_group(ask.request)
        is_read = made and self._predictor.reads_outcomes
        told = outcomes(ask.request.get("messages") or ask.request.get("input")) if is_read else ()
        progress = begun(ask.trajectory_id, ask.group_id, prompt_id, prompt_tokens, entry, told)
        return self._predictor.predict(progress)

    def _prompt_tokens(self, ask: Ask, entry: Entry | None) -> int:
        known = entry.record.context_tokens if entry is not None else 0
        estimate = max(known, int(len(ask.body) / self._bytes_per_token))
        model = self._fleet.models().get(ask.model)
        limit = model.max_context_tokens if model is not None else None
        return min(estimate, limit) if limit else estimate

    def _estimated_prompt(self, ask: Ask) -> int:
        return self._prompt_tokens(ask, self._ledger.get(ask.trajectory_id))

    # --- repeated requests ----------------------------------------------------------------------------------

    async def _join(self, turn: Turn, client: Client) -> None:
        self._metrics.joined_turns.inc()
        turn.num_clients += 1
        follow = asyncio.create_task(turn.outlet.follow(client))
        client.when_left(follow.cancel)
        try:
            await asyncio.wait((follow,))
            if not follow.cancelled():
                follow.result()
        finally:
            client.unwatch()
            follow.cancel()
            _leave(turn)

    def _count(self, key: str) -> None:
        """Count one of a key's turns under way. Raises Refused above the limit."""
        num = self._num_of_key.get(key, 0)
        if num >= self._settings.max_turns_per_key:
            raise too_many_turns(self._settings.max_turns_per_key)
        self._num_of_key[key] = num + 1


_random = random.Random()  # the system's own source is a system call each time; these ids are no secrets


def new_id() -> str:
    """An id that nobody else has: 32 hexadecimal digits."""
    return f"{_random.getrandbits(128):032x}"


def _leave(turn: Turn) -> None:
    turn.num_clients -= 1
    if turn.num_clients == 0:
        turn.stop(Fault.CLIENT_LEFT)


def _named(scope: Mapping[str, Any], body: bytes) -> Headers:
    """The header that names the trajectory of a request refused early, as far as the request can be read."""
    request: dict[str, Any] = {}
    with contextlib.suppress(Refused):
        request = parse_object(body)
    try:
        identity = identify(scope["raw_path"].decode("latin-1"), scope["headers"], request)
    except IdentityError:
        return []
    return [(b"x-trajectory-id", identity.trajectory_id.encode())] if identity.trajectory_id else []


def _priority(identity: Identity) -> int:
    """The scheduler's priority, lower is earlier. In hints higher is more urgent, and a strict tier goes before all."""
    if identity.hints is NO_HINTS:
        return 0
    tier, priority = (max(-_MAX_HINT, min(_MAX_HINT, hint or 0)) for hint in _hints(identity))
    return -(tier * (2 * _MAX_HINT + 1) + priority)


def _hints(identity: Identity) -> tuple[int | None, int | None]:
    return identity.hints.strict_priority, identity.hints.priority


def parse_object(body: bytes) -> dict[str, Any]:
    """A request body as a JSON object. Raises Refused (400)."""
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"The request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(request, dict):
        raise bad_request("The request body must be a JSON object.", code="invalid_json")
    return request
