"""Counts how trajectories' KV was brought to new homes."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

OUTCOMES = ("fetched", "prefilled", "failed")


class MoveCounts(Collector):
    """`fetched` from the old home, `prefilled` at the new one in a tool call, or `failed`: the turn computed it."""

    def __init__(self) -> None:
        self._moves = dict.fromkeys(OUTCOMES, 0)
        self._tokens = dict.fromkeys(OUTCOMES, 0)
        self._seconds = dict.fromkeys(OUTCOMES, 0.0)

    def ended(self, outcome: str, num_tokens: int, seconds: float) -> None:
        """A move ended so."""
        self._moves[outcome] += 1
        self._tokens[outcome] += num_tokens
        self._seconds[outcome] += seconds

    def view(self) -> dict[str, int]:
        """How many ended in which way, since the start."""
        return dict(self._moves)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Their values now."""
        families = (
            ("heddle_kv_moves", "Trajectories whose KV was to be brought to a new home.", self._moves),
            ("heddle_kv_moved_tokens", "Tokens of KV that were there then.", self._tokens),
            ("heddle_kv_move_seconds", "Time that these took, one after the other.", self._seconds),
        )
        for name, text, counts in families:
            family = CounterMetricFamily(name, text, labels=["outcome"])
            for outcome, count in counts.items():
                family.add_metric([outcome], count)
            yield family
