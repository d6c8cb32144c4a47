"""Serves turns: takes a client's request, waits for the scheduler's word, runs legs until one finishes.

This is the hot path. What it decides is in `scheduling/`; how bytes pass is in `legs.py` and `outlet.py`.

1. A turn at token level goes on from its last token on another engine; one that passes through starts over there, and
   only while nothing of an answer is out.
2. The scheduler knows that a turn finished, and the store has it, before the client gets the answer's end.
3. A client that leaves stops its turn, unless another one joined it.
"""

import asyncio
import contextlib
import os
from collections.abc import Mapping
from typing import Any

import orjson

from gateway.clock import Clock
from gateway.config import Settings
from gateway.fleet.fleet import Fleet
from gateway.http.client import Client, ClientLeft, Headers
from gateway.http.errors import Api
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
from gateway.messages.identity import Identity, IdentityError, identify, prompt_group
from gateway.metrics import Metrics
from gateway.state.driver import Driver
from gateway.state.ledger import Ledger
from gateway.tokens.book import StoredTokens
from gateway.tokens.partials import Partials
from gateway.turnlog import TurnLog
from gateway.turns.kept_tokens import KeptTokens
from gateway.turns.legs import Legs
from gateway.turns.outcome import Outcome
from gateway.turns.progress import begun
from gateway.turns.repeats import Repeats, is_retry
from gateway.turns.staleness import Staleness
from gateway.turns.turn import Ask, LegFailed, Stopped, Turn
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
        self._num_of_key: dict[str, int] = {}
        self._bytes_per_token = _BYTES_PER_TOKEN

    async def serve(self, client: Client, path: str, key: str) -> None:
        """Answer one turn request.

        Args:
            client: whose raw path may hold an identity.
            path: the API route, without it.
            key: names the client's key, for its limit; "" when the gateway is open.
        """
        turn_id = os.urandom(16).hex()
        api = TURN_ROUTES[path]
        settings = self._settings
        outlet = Outlet(client, api, turn_id, keeps=True, max_kept_bytes=settings.max_answer_bytes)
        body, ask = b"", None
        try:
            body = await client.read(settings.max_body_bytes, settings.body_timeout_s)
            ask = self._ask(client.scope, api, path, body)
            outlet.headers.append((b"x-trajectory-id", ask.trajectory_id.encode("latin-1", "replace")))
            retries = is_retry(client.scope["headers"])
            joined = self._repeats.running(ask, retries)
            if joined is not None:
                await self._join(joined, client)
                return
            answer = self._repeats.answer(ask, retries)
            if answer is not None:
                self._metrics.joined_turns.inc()
                await answer.follow(client)
                return
            with self._counted(key):
                turn = Turn(turn_id, ask, outlet, self._clock(), 0.0)
                if settings.token_legs != "off":
                    await self._kept_tokens.prepare(turn, ask.may_be_joined or retries)
                await self._run(turn, client)
        except Refused as refused:
            self._metrics.refused.labels(str(refused.error.status)).inc()
            if ask is None:
                outlet.headers += _named(client.scope, body)
            outlet.refuse(refused)
        except ClientLeft:
            return
        except asyncio.CancelledError:
            raise
        except Exception:
            self._log.defect(turn_id)
            outlet.refuse(internal_error())
        await client.drain()

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
            trajectory_id = self._conversations.continued(request) or f"t-{os.urandom(12).hex()}"
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

    async def _run(self, turn: Turn, client: Client) -> None:
        ask = turn.ask
        self._staleness.check(ask.trajectory_id)
        self._repeats.began(turn)
        self._driver.begin(turn.turn_id, turn)
        heartbeat = Heartbeat(turn.outlet, self._settings.heartbeat_s) if ask.wants_stream else None
        client.when_left(lambda: _leave(turn))
        try:
            self._driver.post(self._arrival(turn))
            await self._run_legs(turn)
        finally:
            client.unwatch()
            if heartbeat is not None:
                heartbeat.stop()
            self._driver.end(turn.turn_id)
            self._repeats.ended(turn)

    async def _run_legs(self, turn: Turn) -> None:
        dispatch: Dispatch | None = None
        outcome: Outcome | None = None
        try:
            while outcome is None:
                dispatch = await turn.next_leg()
                turn.first_dispatch_at = turn.first_dispatch_at or self._clock()
                try:
                    outcome = await self._legs.run(turn, dispatch)
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
            await self._finish(turn, dispatch, outcome)
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

    async def _finish(self, turn: Turn, dispatch: Dispatch | None, outcome: Outcome) -> None:
        usage = turn.usage
        prompt_tokens = usage.prompt_tokens if usage else self._prompt_tokens(turn.ask)
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
        await self._store.settle(self._settings.settle_timeout_s)
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
        self._ledger.add_turn(turn.ask.trajectory_id, row)
        self._metrics.turn_ended(turn.ask.api, outcome, now - turn.arrived_at)
        self._log.turn(turn.ask.trajectory_id, turn.ask.rollout_id, row)

    # --- what the scheduler is told -------------------------------------------------------------------------

    def _arrival(self, turn: Turn) -> TurnArrived:
        ask = turn.ask
        prediction = self._prediction(ask)
        turn.predicted_tokens = prediction.total_tokens
        return TurnArrived(
            at=turn.arrived_at,
            turn_id=turn.turn_id,
            trajectory_id=ask.trajectory_id,
            model=ask.model,
            prompt_tokens=self._prompt_tokens(ask),
            prediction=prediction,
            group_id=ask.group_id,
            rollout_id=ask.rollout_id,
            priority=ask.priority,
        )

    def _prediction(self, ask: Ask) -> Prediction:
        entry = self._ledger.get(ask.trajectory_id)
        made = entry.record.output_tokens if entry is not None else 0
        declared = entry.declared.get("expected_output_tokens") if entry is not None else None
        if declared:
            total = float(max(declared, made + 1))
            return Prediction(total, total)
        prompt_id = "" if made else prompt_group(ask.request)
        is_read = made and self._predictor.reads_outcomes
        told = outcomes(ask.request.get("messages") or ask.request.get("input")) if is_read else ()
        progress = begun(ask.trajectory_id, ask.group_id, prompt_id, self._prompt_tokens(ask), entry, told)
        return self._predictor.predict(progress)

    def _prompt_tokens(self, ask: Ask) -> int:
        entry = self._ledger.get(ask.trajectory_id)
        known = entry.record.context_tokens if entry is not None else 0
        estimate = max(known, int(len(ask.body) / self._bytes_per_token))
        model = self._fleet.models().get(ask.model)
        limit = model.max_context_tokens if model is not None else None
        return min(estimate, limit) if limit else estimate

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

    def _counted(self, key: str) -> "_Counted":
        return _Counted(self._num_of_key, key, self._settings.max_turns_per_key)


class _Counted:
    """Counts a key's turns under way while it is entered. Raises Refused above the limit."""

    def __init__(self, counts: dict[str, int], key: str, limit: int) -> None:
        self._counts, self._key, self._limit = counts, key, limit

    def __enter__(self) -> None:
        num = self._counts.get(self._key, 0)
        if num >= self._limit:
            raise too_many_turns(self._limit)
        self._counts[self._key] = num + 1

    def __exit__(self, *_: object) -> None:
        self._counts[self._key] -= 1


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
