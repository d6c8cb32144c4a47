"""Every metric of the gateway process. Names end in their unit; no ids in labels."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate, product
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.fleet.fleet import Fleet
from gateway.fleet.server import EngineState
from gateway.http.errors import Api
from gateway.state.ledger import Ledger
from gateway.tokens.book import TokenBook
from gateway.version import VERSION
from gateway.workers.pool import WorkerPool
from predictor.background import BackgroundCounts
from scheduling.scheduler import Scheduler
from store.port import Store

_ByLabels = dict[tuple[str, ...], int]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OUTCOMES = ("finished", "failed", "refused", "left", "aborted", "stopped")
_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Metrics:
    """Counts events; what others know or count is read from them when the page is made."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        build = Gauge("heddle_build_info", "1, with the gateway's version.", ["version"], registry=self.registry)
        build.labels(VERSION).set(1)
        self._turns = _Counts("heddle_turns", "Turns that ended, by API and outcome.", ("api", "outcome"))
        # A rate is that of a series: one that began with a burst of failures would not show it.
        self._turns.counts.update(dict.fromkeys(product(get_args(Api), _OUTCOMES), 0))
        self._tokens = _Counts("heddle_tokens", "Tokens of finished turns, by kind.", ("kind",))
        self._tokens.counts.update({("prompt",): 0, ("cached",): 0, ("output",): 0})
        self._turn_seconds = _Times("heddle_turn_seconds", "Time from a turn's arrival to its end.")
        self._queued_seconds = _Times("heddle_turn_queued_seconds", "Time from a turn's arrival to its first leg.")
        self._first_token_seconds = _Times(
            "heddle_turn_first_token_seconds", "Time from a turn's arrival to the first byte of its answer."
        )
        self.hot_turns = _Counts("heddle_hot_turns", "Turns served by callbacks, by how that ended.", ("until",))
        self.lent_streams = _Counts(
            "heddle_lent_streams", "Streams lent to a byte worker, by why they came back.", ("until",)
        )
        times = (self._turn_seconds, self._queued_seconds, self._first_token_seconds)
        for metric in (self._turns, self.hot_turns, self.lent_streams, self._tokens, *times):
            self.registry.register(metric)
        self.joined_turns = Counter(
            "heddle_joined_turns",
            "Repeated requests that were given the answer of an earlier turn.",
            registry=self.registry,
        )
        self.refused = Counter(
            "heddle_refused_requests",
            "Requests to turn routes that were answered with an error, by status.",
            ["status"],
            registry=self.registry,
        )
        self.retried_legs = Counter(
            "heddle_retried_legs", "Failed legs whose turn continued.", ["fault"], registry=self.registry
        )
        self._kv_moves = _Counts("heddle_kv_moves", "Moves of a trajectory's KV to a new home.", ("outcome",))
        self._kv_moved_tokens = _Counts(
            "heddle_kv_moved_tokens", "KV tokens at the new home after a move.", ("outcome",)
        )
        self._kv_move_seconds = _Times("heddle_kv_move_seconds", "Duration of a move.")
        self._kv_moves.counts.update({("fetched",): 0, ("loaded",): 0, ("prefilled",): 0, ("failed",): 0})
        for moves in (self._kv_moves, self._kv_moved_tokens, self._kv_move_seconds):
            self.registry.register(moves)

    def turn_ended(self, api: str, outcome: str, total_s: float) -> None:
        """A turn of this API ended, as one of the outcomes."""
        self._turns.counts[api, outcome] += 1
        self._turn_seconds.observe(total_s)

    def turn_timed(self, queued_s: float, first_token_s: float) -> None:
        """A turn began to answer."""
        self._queued_seconds.observe(queued_s)
        self._first_token_seconds.observe(first_token_s)

    def tokens(self, prompt: int, cached: int, output: int) -> None:
        """A turn finished with these tokens."""
        counts = self._tokens.counts
        counts["prompt",] += prompt
        counts["cached",] += cached
        counts["output",] += output

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all finished turns."""
        return self._tokens.counts["output",]

    def kv_moved(self, outcome: str, num_tokens: int, seconds: float) -> None:
        """KV was `fetched` from its old home, `loaded` from a tier, or `prefilled` in a tool call; or the move
        `failed`.
        """
        self._kv_moves.counts[outcome,] += 1
        self._kv_moved_tokens.counts[outcome,] += num_tokens
        self._kv_move_seconds.observe(seconds)

    def watch(self, state: "State") -> None:
        """Also show this."""
        self.registry.register(state)

    def page(self) -> bytes:
        """The page for Prometheus."""
        return generate_latest(self.registry)


# What every turn counts is kept in plain numbers: prometheus_client's own metrics take four times as long, because they
# lock.


class _Counts(Collector):
    """A counter by labels."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        self.counts: defaultdict[tuple[str, ...], int] = defaultdict(int)
        self._name, self._text, self._labels = name, text, labels

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Its current values."""
        yield _counter(self._name, self._text, self._labels, self.counts)


class _Times(Collector):
    """A histogram of seconds."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(_SECONDS, seconds)] += 1
        self._sum_s += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Its current values."""
        bounds = [*map(str, _SECONDS), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum_s)


class State(Collector):
    """What the gateway's parts know and count themselves; `texts` is None if no text predictor runs."""

    def __init__(
        self,
        scheduler: Scheduler,
        fleet: Fleet,
        ledger: Ledger,
        store: Store,
        worker_pool: WorkerPool,
        book: TokenBook,
        texts: BackgroundCounts | None,
    ) -> None:
        self._scheduler, self._fleet, self._ledger, self._store = scheduler, fleet, ledger, store
        self._worker_pool, self._book, self._texts = worker_pool, book, texts

    def collect(self) -> list[Metric]:
        """The current gauges and counters."""
        health = self._store.health()
        members = self._fleet.members()
        running = sum(len(engine.running) for engine in self._scheduler.engines.values())
        gauges = [
            _gauge("heddle_waiting_turns", "Turns that wait in the queue.", self._scheduler.num_waiting),
            _gauge("heddle_running_turns", "Turns that run on engines.", running),
            _gauge("heddle_trajectories", "Trajectories in the gateway's memory.", len(self._ledger)),
            _gauge("heddle_store_ok", "1 while puts reach the store.", float(health.ok)),
            _gauge("heddle_store_fenced", "1 once another gateway has taken it over.", float(self._store.is_fenced)),
            _gauge("heddle_store_pending_records", "Records not yet written to the store.", health.num_pending),
            _gauge("heddle_store_lag_seconds", "Age of the oldest pending record.", health.lag_s),
            _gauge("heddle_store_dropped_records", "Records dropped since the start.", health.num_dropped),
            _gauge("heddle_store_losses", "How often the store lacked what was put.", health.num_losses),
        ]
        engines = GaugeMetricFamily("heddle_engines", "Engines in each state.", labels=["state"])
        for state in EngineState:
            engines.add_metric([state.value], sum(member.server.state is state for member in members))
        lent = GaugeMetricFamily(
            "heddle_byte_worker_streams", "Streams that a byte worker passes on.", labels=["worker"]
        )
        for number, num_lent in enumerate(self._worker_pool.num_lent):
            lent.add_metric([str(number)], num_lent)
        return [*gauges, engines, lent, *self._per_engine(), *self._counters()]

    def _per_engine(self) -> list[GaugeMetricFamily]:
        up = GaugeMetricFamily("heddle_engine_up", "1 while the engine is ready.", labels=["engine"])
        legs = GaugeMetricFamily("heddle_engine_legs", "Legs of this gateway on the engine.", labels=["engine"])
        claimed = GaugeMetricFamily(
            "heddle_engine_kv_claimed_tokens", "KV tokens of its residents, shared prompts once.", labels=["engine"]
        )
        used = GaugeMetricFamily(
            "heddle_engine_kv_used_ratio", "Share of KV in use, as the engine reports it.", labels=["engine"]
        )
        transit = GaugeMetricFamily(
            "heddle_engine_transit_seconds", "Time of a leg outside its steps, there and back.", labels=["engine"]
        )
        for member in self._fleet.members():
            # The address, not the id: a relaunched server continues the same series.
            rank = f"@{member.rank}" if member.rank else ""
            name = [member.server.settings.url.partition("://")[2] + rank]
            engine = self._scheduler.engines.get(member.engine_id)
            up.add_metric(name, float(member.server.state is EngineState.READY))
            legs.add_metric(name, member.num_legs)
            claimed.add_metric(name, engine.kv_held if engine is not None else 0)
            used.add_metric(name, member.observation.kv_used_share if member.observation else 0.0)
            transit.add_metric(name, engine.transit.leg_s if engine is not None else 0.0)
        return [up, legs, claimed, used, transit]

    def _counters(self) -> Iterator[CounterMetricFamily]:
        text = "Trajectories of which something was dropped before its time: their tokens, or all."
        dropped: _ByLabels = {("tokens",): self._book.num_dropped, ("all",): self._scheduler.num_forgotten_early}
        yield _counter("heddle_dropped_trajectories", text, ("part",), dropped)
        if self._texts is not None:
            text = "Conversations read by the text predictor in tool calls, by outcome."
            outcomes: _ByLabels = {("in_time",): self._texts.num_in_time, ("late",): self._texts.num_late}
            outcomes |= {("failed",): self._texts.num_failed, ("refused",): self._texts.num_refused}
            yield _counter("heddle_text_predictions", text, ("outcome",), outcomes)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, labels: tuple[str, ...], counts: _ByLabels) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in counts.items():
        family.add_metric(values, count)
    return family
