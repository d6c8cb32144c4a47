"""Puts the gateway process together, in one place."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.api.application import Health, build_api
from gateway.api.fleet import Engines
from gateway.api.openapi import declare_hot_routes
from gateway.api.tokens import Tokens
from gateway.api.trajectories import Trajectories
from gateway.api.weights import add_weights
from gateway.clock import Clock
from gateway.config import ConfigError, Settings
from gateway.demand import Demand, add_demand
from gateway.demand_stream import say_demand
from gateway.fleet.fleet import Fleet
from gateway.fleet.weight_record import WeightRecord
from gateway.front import Front
from gateway.http.access import Access
from gateway.kv.contexts import Contexts
from gateway.kv.moves import KvMoves
from gateway.messages.conversations import Conversations
from gateway.metrics import Metrics
from gateway.passthrough import Passthrough
from gateway.state.driver import Driver
from gateway.state.eventlog import EventLog
from gateway.state.ledger import Ledger
from gateway.tokens.book import StoredTokens
from gateway.tokens.partials import Partials
from gateway.turnlog import TurnLog
from gateway.turns.arrivals import Arrivals
from gateway.turns.endings import Endings
from gateway.turns.hot import HotTurns
from gateway.turns.kept_tokens import KeptTokens
from gateway.turns.legs import Legs
from gateway.turns.progress import ended
from gateway.turns.repeats import Repeats
from gateway.turns.request_reader import RequestReader
from gateway.turns.running import RunningTurns
from gateway.turns.staleness import Staleness
from gateway.turns.turns import Turns
from gateway.turns.weight_updates import Weights
from predictor.named import predictor_named
from predictor.progress import Predictor
from scheduling.policy import POLICIES
from scheduling.scheduler import Scheduler
from scheduling.types import Move, TrajectoryRecord
from store import DEMAND, Store, StoreAway, StoredTrajectory, StoreSettings, open_store, open_stream

_PREDICTOR_STATE = "predictor"
# What the predictor learned in the last seconds before a crash is learned again soon; its state can be megabytes.
_PREDICTOR_SAVE_S = 10.0
_STORE_RETRY_S = 0.5


@asynccontextmanager
async def gateway(settings: Settings) -> AsyncIterator[Front]:
    """The ASGI application of a gateway that is running: restored, and watching its engines.

    Raises:
        ConfigError: the event log cannot be written, or the predictor's model not read.
        StoreError: the store cannot be used, or is away for too long. Serving without it would lose its trajectories.
    """
    clock = Clock()
    try:
        event_log = EventLog(settings.event_log, settings.event_log_max_bytes)
    except OSError as error:
        raise ConfigError(f"cannot write the event log {settings.event_log}: {error.strerror}") from None
    store_settings = StoreSettings(max_turns_kept=settings.max_turns_kept, namespace=settings.store_namespace)
    store = open_store(settings.store, store_settings)
    await store.open()
    ledger = Ledger(store, settings.max_turns_kept)
    predictor = _predictor(settings)
    conversations = Conversations(settings.max_conversations)
    repeats = Repeats(settings.max_kept_answer_bytes, settings.max_stored_answer_bytes)
    metrics = Metrics()
    log = TurnLog()
    access = Access(settings.api_keys, settings.admin_key)
    stored = await _load(store, settings.store_start_timeout_s)
    records = ledger.restore(stored)
    book = StoredTokens(store, ledger, clock, settings.token_limits())
    await book.restore()
    for item in stored:
        if item.answer is not None:
            repeats.restore(item.trajectory_id, item.answer)
    if learned := await store.get_state(_PREDICTOR_STATE):
        with contextlib.suppress(ValueError):  # another kind of predictor wrote it: this one begins anew
            predictor.restore(learned)
    for entry in ledger:
        conversations.restore(entry.record.trajectory_id, entry.conversation)
    began_at, limits = clock(), settings.limits()
    can_preempt = settings.token_legs == "auto"
    scheduler = Scheduler(POLICIES[settings.policy], limits, records, began_at, can_preempt=can_preempt)
    event_log.begin(began_at, settings.policy, limits, records, can_preempt)

    def finished(record: TrajectoryRecord) -> None:
        predictor.ended(ended(record))
        kv.cancel(record.trajectory_id)
        contexts.forget(record.trajectory_id)

    def forgotten(trajectory_id: str) -> None:
        conversations.forget(trajectory_id)
        repeats.forget(trajectory_id)
        book.forget(trajectory_id)
        predictor.dropped(trajectory_id)
        kv.cancel(trajectory_id)
        contexts.forget(trajectory_id)

    def moved(move: Move) -> None:
        kv.begin(move)

    driver = Driver(scheduler, clock, ledger, event_log, finished, forgotten, moved)
    weight_record = WeightRecord(store)
    fleet = Fleet(settings, clock, driver.post, store, weight_record)
    contexts = Contexts(book, settings.max_kept_request_bytes)
    kv = KvMoves(settings, clock, fleet, contexts, metrics, scheduler.policy.is_sticky)
    staleness = Staleness(settings, weight_record, ledger)
    weights = Weights(settings, clock, fleet, store, weight_record, staleness, driver.live_turns)
    reader = RequestReader(settings, fleet, ledger, conversations, book)
    arrivals = Arrivals(fleet, ledger, predictor)
    before = {record.trajectory_id for record in records}
    kept_tokens = KeptTokens(book, Partials(store), clock, settings.save_tokens_s, before)
    endings = Endings(clock, driver, ledger, conversations, repeats, arrivals, kept_tokens, contexts, metrics, log)
    legs = Legs(settings, clock, driver, fleet, metrics, book, kept_tokens.save, staleness, kv)
    running = RunningTurns(settings, clock, driver, store, repeats, staleness, arrivals, legs, endings, metrics)
    hot = HotTurns(running, endings, legs, store, clock, settings, metrics)
    turns = Turns(settings, clock, reader, repeats, kept_tokens, running, hot, endings, metrics)
    passthrough = Passthrough(settings, fleet)
    metrics.watch(scheduler, fleet, ledger, store)
    api = build_api(
        Health(settings, driver, fleet, store, metrics, book),
        Trajectories(clock, driver, ledger, predictor),
        Engines(fleet, driver, event_log, kv, access, settings.heartbeat_s, settings.token_legs == "auto"),
        Tokens(ledger, book),
    )
    add_weights(api, weights, access)
    demand = Demand(clock, driver, ledger)
    add_demand(api, demand, access)
    declare_hot_routes(api, turns, passthrough)

    def rewrite() -> None:
        ledger.rewrite()
        book.rewrite()
        fleet.remember()
        weight_record.remember()
        store.put_state(_PREDICTOR_STATE, predictor.dump())

    store.on_loss(rewrite)
    await fleet.start()
    tasks = [asyncio.create_task(_keep_predictor(predictor, store.put_state))]
    if stream := open_stream(settings.store, DEMAND, store_settings):
        tasks.append(asyncio.create_task(say_demand(demand, stream, store.health, settings.demand_interval_s)))
    try:
        yield Front(settings, access, turns, passthrough, api, log, event_log.end_watches)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        store.put_state(_PREDICTOR_STATE, predictor.dump())
        driver.close()
        await weights.close()
        await kv.close()
        await fleet.stop()
        await store.close()
        event_log.close()


def _predictor(settings: Settings) -> Predictor:
    path = settings.predictor_model
    try:
        return predictor_named(settings.predictor_name, Path(path).read_bytes() if path else None)
    except OSError as error:
        raise ConfigError(f"cannot read the predictor's model {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no model of the predictor {settings.predictor_name!r}: {error}") from None


async def _load(store: Store, timeout_s: float) -> list[StoredTrajectory]:
    """What the store has; one that is away is waited for."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            return await store.load()
        except StoreAway:
            if asyncio.get_running_loop().time() >= deadline:
                raise
            await asyncio.sleep(_STORE_RETRY_S)


async def _keep_predictor(predictor: Predictor, put_state: Callable[[str, bytes], None]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(_PREDICTOR_SAVE_S)
            put_state(_PREDICTOR_STATE, predictor.dump())
