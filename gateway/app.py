"""Builds the gateway process, in one place."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from gateway.api.application import Health, build_api
from gateway.api.fleet import Engines
from gateway.api.parts import with_parts
from gateway.api.tokens import Tokens
from gateway.api.trajectories import Trajectories
from gateway.clock import started_clock
from gateway.config import ConfigError, Settings
from gateway.dashboard.overview import Overview
from gateway.demand import Demand
from gateway.demand_stream import publish_demand
from gateway.descriptors import DescriptorStore
from gateway.fleet.fleet import Fleet
from gateway.front import Front
from gateway.http.access import Access
from gateway.kv.contexts import Contexts
from gateway.kv.moves import KvMoves
from gateway.memory import load_predictor, restored
from gateway.messages.prompt_groups import PromptGroups
from gateway.metrics import Metrics, State
from gateway.passes import Passes
from gateway.passthrough import Passthrough
from gateway.state.driver import Driver
from gateway.state.eventlog import EventLog
from gateway.tokens.partials import Partials
from gateway.turnlog import LOGGER, TurnLog
from gateway.turns.arrivals import Arrivals
from gateway.turns.endings import Endings
from gateway.turns.hot import HotTurns
from gateway.turns.kept_legs import KeptLegs
from gateway.turns.kept_tokens import KeptTokens
from gateway.turns.legs import Legs
from gateway.turns.lending import Lending
from gateway.turns.request_reader import RequestReader
from gateway.turns.running import RunningTurns
from gateway.turns.text_predictions import TextPredictions, load_text_predictions
from gateway.turns.turns import Turns
from gateway.weights.staleness import Staleness
from gateway.weights.updates import WeightUpdates
from gateway.workers.pool import LoanLimits, WorkerPool
from predictor.progress import Predictor
from scheduling.policy import POLICIES
from scheduling.scheduler import Scheduler
from scheduling.types import Move, TrajectoryRecord
from store import DEMAND, Store, StoreSettings, Stream, open_store, open_stream


@asynccontextmanager
async def gateway(settings: Settings, descriptors: DescriptorStore | None = None) -> AsyncIterator[Front]:
    """The ASGI application of a running gateway: restored from its store, and watching its engines.

    Everything it opened is closed again, also if its start fails.

    Args:
        descriptors: those that outlive this process; None if nothing keeps them.

    Raises:
        ConfigError: the event log cannot be written, or the predictor's model cannot be read.
        StoreError: the store cannot be used, or is away for too long. Serving without it would lose its trajectories.
    """
    async with AsyncExitStack() as opened:
        event_log = _event_log(settings)
        opened.callback(event_log.close)
        # A store is claimed when it is opened, and a Redis taken from the gateway that had it: a start that fails by
        # its settings must have failed by then.
        predictor = load_predictor(settings)
        texts = load_text_predictions(settings.text_predictor, predictor) if settings.text_predictor else None
        if texts is not None:
            opened.callback(texts.close)
        store_settings = StoreSettings(max_turns_kept=settings.max_turns_kept, namespace=settings.store_namespace)
        store = open_store(settings.store, store_settings)
        await store.open()
        opened.push_async_callback(_close, store)
        stream = open_stream(settings.store, DEMAND, store_settings)
        serving = _serving(settings, descriptors, event_log, store, stream, predictor, texts)
        yield await opened.enter_async_context(serving)


@asynccontextmanager
async def _serving(
    settings: Settings,
    descriptors: DescriptorStore | None,
    event_log: EventLog,
    store: Store,
    stream: Stream | None,
    predictor: Predictor,
    texts: TextPredictions | None,
) -> AsyncIterator[Front]:
    """All parts of the gateway, given an open log and store, and predictors; demand is published on `stream`, if there
    is one.
    """
    clock = started_clock()
    memory = await restored(settings, store, clock, predictor)
    ledger, book, repeats, conversations = memory.ledger, memory.book, memory.repeats, memory.conversations
    metrics = Metrics()
    log = TurnLog()
    access = Access(settings.api_keys, settings.agent_keys, settings.admin_key)
    began_at, limits = clock(), settings.limits()
    by_tokens = settings.has_token_legs
    scheduler = Scheduler(POLICIES[settings.policy], limits, memory.records, began_at, can_preempt=by_tokens)
    event_log.begin(began_at, settings.policy, limits, memory.records, by_tokens)

    def left(trajectory_id: str) -> None:
        if texts is not None:
            texts.dropped(trajectory_id)
        kv.cancel(trajectory_id)
        contexts.forget(trajectory_id)

    def closed(record: TrajectoryRecord) -> None:
        memory.closed(record)
        left(record.trajectory_id)

    def forgotten(trajectory_id: str) -> None:
        memory.forget(trajectory_id)
        left(trajectory_id)

    def moved(move: Move) -> None:
        kv.begin(move)

    driver = Driver(scheduler, clock, ledger, event_log, closed, forgotten, moved)
    fleet = Fleet(settings, clock, driver.post, memory.processes, memory.weights)
    contexts = Contexts(book, settings.max_kept_request_bytes, fleet.kv_tier)
    kv = KvMoves(settings, clock, fleet, contexts, metrics, scheduler.policy.is_sticky)
    staleness = Staleness(settings, memory.weights, ledger)
    weights = WeightUpdates(settings, clock, fleet, store, memory.weights, staleness, driver.live_turns)
    groups = PromptGroups(record.group_id for record in memory.records if record.group_id)
    reads_all = memory.predictor.reads_outcomes or texts is not None
    reader = RequestReader(settings, fleet, ledger, conversations, groups, book, reads_all)
    arrivals = Arrivals(fleet, ledger, groups, memory.predictor, texts)
    before = {record.trajectory_id for record in memory.records}
    kept_legs = KeptLegs(settings, descriptors, fleet, store.settle) if descriptors and by_tokens else None
    if descriptors is not None:
        descriptors.drop_found()  # such as those of token legs, without which nobody takes them up
        if not by_tokens:
            LOGGER.warning("connections to engines are not kept", extra={"fields": {"token_legs": settings.token_legs}})
    kept_tokens = KeptTokens(book, Partials(store), kept_legs, clock, settings.save_tokens_s, before)
    endings = Endings(clock, driver, ledger, conversations, repeats, arrivals, kept_tokens, kv, metrics, log, texts)
    worker_pool = WorkerPool(
        settings.byte_workers,
        settings.byte_worker_turns,
        driver.num_live,
        LoanLimits(settings.byte_worker_loan_bytes, settings.byte_worker_timeout_s),
    )
    lending = Lending(worker_pool, metrics)
    legs = Legs(settings, clock, driver, fleet, metrics, book, kept_tokens, staleness, kv, lending)
    running = RunningTurns(settings, clock, driver, store, repeats, staleness, arrivals, legs, endings, metrics)
    hot = HotTurns(running, endings, legs, store, clock, settings, metrics)
    turns = Turns(settings, clock, fleet, reader, repeats, kept_tokens, running, hot, endings, metrics)
    passthrough = Passthrough(settings, fleet)
    counts = texts.counts if texts is not None else None
    metrics.watch(State(scheduler, fleet, ledger, store, worker_pool, book, counts))
    passes = Passes()
    demand = Demand(clock, driver, ledger, passes)
    overview = Overview(clock, driver, ledger, metrics, passes)
    health = Health(settings, driver, fleet, store, metrics, book)
    trajectories = Trajectories(settings, clock, driver, ledger, store, memory.predictor, passes)
    engines = Engines(fleet, driver, event_log, kv, settings.heartbeat_s, by_tokens)
    tokens = Tokens(settings, scheduler, ledger, store, book, passes)
    parts = (access, health, trajectories, engines, tokens, weights, demand, overview)
    api = with_parts(build_api(), parts)
    store.on_loss(memory.rewrite)
    await fleet.start()
    watches = (
        memory.keep_predictor(),
        memory.watch_store(running.refuse_waiting),
        repeats.keep_in_bounds(),
        engines.keep_draining(),
        overview.keep_samples(),
    )
    tasks = [asyncio.create_task(watch) for watch in watches]
    if stream is not None:
        tasks.append(asyncio.create_task(publish_demand(demand, stream, store.health, settings.demand_interval_s)))
    try:
        yield Front(settings, access, turns, passthrough, api, metrics, log, store, event_log.end_watches)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        memory.save_predictor()
        driver.close()
        await worker_pool.close()
        await weights.close()
        await kv.close()
        if kept_legs is not None:
            await kept_legs.close()
        await fleet.stop()


async def _close(store: Store) -> None:
    """Close the store, and log if it could not write everything: nobody else can report that any more."""
    await store.close()
    health = store.health()
    if not health.ok and (health.num_pending or health.num_dropped):
        fields = {"detail": health.detail, "num_pending": health.num_pending, "num_dropped": health.num_dropped}
        LOGGER.error("records are lost", extra={"fields": fields})


def _event_log(settings: Settings) -> EventLog:
    """Raises ConfigError."""
    try:
        return EventLog(settings.event_log, settings.event_log_max_bytes)
    except OSError as error:
        raise ConfigError(f"cannot write the event log {settings.event_log}: {error.strerror}") from None
