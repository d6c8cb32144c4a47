"""Totals over finished requests, and the Prometheus text format."""

from bisect import bisect_left
from collections import Counter

from engines.simulated.live import Generation

_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0, 300.0),
)


class Histogram:
    """Counts of seconds by upper bound, in Prometheus's form."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(_BOUNDS, value)] += 1
        self.total += value


class Totals:
    """Statistics of finished requests; all times are virtual seconds."""

    def __init__(self) -> None:
        self.num_finished: Counter[str] = Counter()
        self.num_rejected = 0
        self.time_to_first_token = Histogram()
        self.inter_token = Histogram()
        self.end_to_end = Histogram()
        self.queue_time = Histogram()
        self.prefill_time = Histogram()
        self.decode_time = Histogram()

    def count(self, generation: Generation) -> None:
        """Counts a generation that is over: it ended, or its client left."""
        cut_off = generation.is_aborted or generation.ended_at is None
        reason = "abort" if cut_off else generation.answer.finish_reason
        self.num_finished[reason] += 1
        admitted_at, first_at, ended_at = generation.admitted_at, generation.first_token_at, generation.ended_at
        if ended_at is None or admitted_at is None or first_at is None:
            return
        self.time_to_first_token.observe(first_at - generation.submitted_at)
        self.end_to_end.observe(ended_at - generation.submitted_at)
        self.queue_time.observe(admitted_at - generation.submitted_at)
        self.prefill_time.observe(first_at - admitted_at)
        self.decode_time.observe(ended_at - first_at)
        if generation.num_done > 1:
            self.inter_token.observe((ended_at - first_at) / (generation.num_done - 1))


class Exposition:
    """Prometheus text, family by family; `labels` are on every sample."""

    def __init__(self, labels: str) -> None:
        self._labels = labels
        self._lines: list[str] = []

    def gauge(self, name: str, value: float, labels: str = "") -> None:
        self._lines.append(f"# TYPE {name} gauge")
        self._sample(name, value, labels)

    def gauges(self, name: str, label: str, values: dict[str, int]) -> None:
        self._lines.append(f"# TYPE {name} gauge")
        for key, value in values.items():
            self._sample(name, value, f'{label}="{key}"')

    def of_process(self, name: str, value: float) -> None:
        """A gauge of the process, without labels."""
        self._lines += [f"# TYPE {name} gauge", f"{name} {value}"]

    def counter(self, name: str, value: float) -> None:
        self._lines.append(f"# TYPE {name} counter")
        self._sample(f"{name}_total", value)

    def counters(self, name: str, label: str, values: dict[str, int]) -> None:
        self._lines.append(f"# TYPE {name} counter")
        for key, value in values.items():
            self._sample(f"{name}_total", value, f'{label}="{key}"')

    def histogram(self, name: str, histogram: Histogram) -> None:
        self._lines.append(f"# TYPE {name} histogram")
        running = 0
        for bound, count in zip([*_BOUNDS, "+Inf"], histogram.counts, strict=True):
            running += count
            self._sample(f"{name}_bucket", running, f'le="{bound}"')
        self._sample(f"{name}_count", running)
        self._sample(f"{name}_sum", histogram.total)

    def text(self) -> bytes:
        return ("\n".join(self._lines) + "\n").encode()

    def _sample(self, name: str, value: float, labels: str = "") -> None:
        labels = ",".join(part for part in (self._labels, labels) if part)
        self._lines.append(f"{name}{{{labels}}} {float(value)}")
