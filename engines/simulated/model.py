"""A model server in virtual time: what it runs at any moment, and how many tokens each sequence has.

Pure: no clock, no sockets. Every method takes `at` in seconds, which never goes back. The HTTP server drives it in real
time, and a simulator in virtual time.

It follows vLLM's V1 scheduler, with a file for each part:
* `batching.py`: which sequences enter the batch, are preempted, or leave it;
* `batch.py`: which sequences run, and their progress; chunked prefill beside decoding, one token per step;
* `kv_memory.py`: whose KV is where; `prefix_cache.py`: what is cached, pinned or evictable, and a host tier behind it;
* `steps.py`: a step takes `EngineProfile.decode_step_s` plus the prefill time of its chunks;
* here: time. Between changes of the batch, steps are not simulated one by one (see `Steps`). With a host tier, evicted
  KV that is needed again is copied back, which takes engine time like prefill; with speculation, steps of small batches
  are shorter.

Cost: O(log B) per change of the batch, and O(pieces) per admission and end.
"""

from collections.abc import Sequence

from engines.simulated.batch import Batch
from engines.simulated.batching import Batching
from engines.simulated.features import PLAIN, Features
from engines.simulated.kv_memory import KvMemory
from engines.simulated.prefix_cache import Piece
from engines.simulated.sequence import EngineCounts, Order, PauseMode, SequenceEvent, SimulatedSequence
from engines.simulated.steps import Steps
from scheduling.cost import EngineProfile


class SimulatedEngine:
    """One engine with its queue, batch and KV cache.

    Args:
        order: how the queue is sorted; preemption starts at the other end.
        preempt_margin: a waiting sequence that finds no room replaces a running one whose priority number is higher by
            more than this (SGLang's rule; its default is 10). None: it waits (vLLM's rule).
        chunk_tokens: prompt tokens prefilled per step.
        block_tokens: prefix hits and evictions count in whole blocks.
        features: what it has beyond a plain engine.
    """

    def __init__(
        self,
        profile: EngineProfile,
        *,
        order: Order = "fcfs",
        preempt_margin: int | None = None,
        chunk_tokens: int = 8192,
        block_tokens: int = 16,
        features: Features = PLAIN,
    ) -> None:
        self.profile = profile
        self._kv = KvMemory(profile.kv_capacity_tokens, block_tokens, features.host_tier)
        self._batch = Batch(chunk_tokens)
        self._batching = Batching(profile, self._batch, self._kv, order, preempt_margin, features)
        self._held: dict[str, SimulatedSequence] = {}  # arrived during a pause that admits none
        self._paused: PauseMode | None = None
        self._now = 0.0
        self._run: Steps | None = None  # identical steps that follow until the batch changes

    # --- what comes from outside ----------------------------------------------------------------------------

    def submit(self, at: float, sequence: SimulatedSequence) -> None:
        """Takes a sequence into the queue.

        Raises:
            ValueError: it could never fit into the KV cache, or is empty; nothing changed.
        """
        total = sequence.num_prompt_tokens + sequence.num_output_tokens
        if sequence.num_prompt_tokens < 1 or sequence.num_output_tokens < 1:
            raise ValueError("a sequence needs at least one prompt token and one output token")
        if total > self.profile.kv_capacity_tokens:
            raise ValueError(f"{total} tokens exceed the KV capacity of {self.profile.kv_capacity_tokens}")
        assert not self.holds(sequence.id), f"sequence {sequence.id} is already here"
        self._run_until(at)
        if self._paused in ("abort", "wait"):
            self._held[sequence.id] = sequence
        elif self._batching.submit(at, sequence):
            self._change_batch()

    def abort(self, at: float, id: str) -> None:
        """Ends a sequence: a running one leaves the batch when the step ends. Unknown ids are ignored."""
        self._run_until(at)
        if self._batching.abort(at, id):
            self._change_batch()
        elif self._held.pop(id, None):
            self._batching.events.append(SequenceEvent(at, id, "aborted", 0))

    def pause(self, at: float, mode: PauseMode) -> None:
        """Stops taking sequences, and aborts those present, lets them finish (wait), or freezes them (keep)."""
        self._run_until(at)
        self._paused = mode
        if mode == "abort":
            for id in [*self._batching.waiting, *self._batch.running]:
                self.abort(at, id)
        self._change_batch()

    def resume(self, at: float) -> None:
        """Continues after a pause; sequences that came meanwhile queue after the others."""
        self._run_until(at)
        self._paused = None
        held, self._held = self._held, {}
        for sequence in held.values():
            if self._batching.submit(at, sequence):
                self._change_batch()
        self._change_batch()

    def retract(self, at: float) -> None:
        """Puts all running sequences back into the queue, to recompute their KV; between two steps of a `keep`
        pause.
        """
        self._run_until(at)
        assert self._run is None, "a step is under way"
        self._batching.preempt_all(at)

    # --- its KV cache ---------------------------------------------------------------------------------------

    def clear_prefix_cache(self, at: float) -> bool:
        """Drops all cached prefixes, unless sequences are running; returns whether it did."""
        self._run_until(at)
        if self._batch.running:
            return False
        self._kv.clear()
        return True

    def num_cached(self, at: float, pieces: Sequence[Piece]) -> int:
        """Tokens at the front of these pieces that are in its KV cache."""
        self._run_until(at)
        return self._kv.num_cached(pieces)

    def adopt(self, at: float, pieces: Sequence[Piece]) -> bool:
        """Adds KV that was computed elsewhere to the cache; False if running sequences leave no room for it."""
        self._run_until(at)
        return self._kv.adopt(pieces, self._num_made())

    def keep(self, at: float, pieces: Sequence[Piece]) -> bool:
        """Pins pieces until they are let go, because another engine will fetch them; False if there is no room."""
        self._run_until(at)
        made = self._num_made()
        if self._is_in_step():  # its tokens come before anything can be preempted for them
            made += self._batch.num_decoding
        is_kept = self._kv.keep(pieces, made)
        if is_kept:
            self._change_batch()
        return is_kept

    def let_go(self, at: float, pieces: Sequence[Piece]) -> None:
        """Unpins what was kept."""
        self._run_until(at)
        self._kv.let_go(pieces)
        self._change_batch()

    # --- what it reports ------------------------------------------------------------------------------------

    def advance(self, at: float) -> list[SequenceEvent]:
        """Runs until `at`; returns what happened since the last call, in order of time."""
        self._run_until(at)
        batching = self._batching
        events, batching.events = batching.events, []
        batching.has_ended_some = False
        return events

    @property
    def has_ended_some(self) -> bool:
        """Whether `advance` has the end of a sequence to report."""
        return self._batching.has_ended_some

    def next_event_at(self) -> float | None:
        """When the batch changes next, if nothing comes from outside; no event is earlier. None: it idles."""
        return self._run.end_at if self._run else None

    def next_step_at(self) -> float | None:
        """When the current step ends and the next tokens appear. None: it idles."""
        return self._run.next_at if self._run else None

    def num_generated(self, id: str) -> int:
        """The output tokens of a sequence that the engine holds."""
        progress = self._batch.running.get(id) or self._batching.waiting.get(id)
        return self._batch.num_generated(progress, self._num_done()) if progress else 0

    def holds(self, id: str) -> bool:
        """Whether the sequence is waiting or running."""
        return id in self._batch.running or id in self._batching.waiting or id in self._held

    @property
    def paused(self) -> PauseMode | None:
        return self._paused

    def counts(self) -> EngineCounts:
        """Gauges and totals at the time of the last timed call."""
        made, batching, num_unscheduled = self._num_made(), self._batching, self._batch.num_unscheduled
        return EngineCounts(
            num_running=len(self._batch.running) - num_unscheduled,
            num_waiting=len(batching.waiting) + len(self._held) + num_unscheduled,
            kv_usage=(self._kv.num_used + made) / self.profile.kv_capacity_tokens,
            num_preemptions=batching.num_preemptions,
            num_prompt_tokens=batching.num_prompt_tokens,
            num_cached_tokens=batching.num_cached_tokens,
            num_generated_tokens=self._batch.num_generated_tokens + made,
            num_prefix_queries=batching.num_prefix_queries,
            num_prefix_hits=batching.num_prefix_hits,
        )

    # --- time -----------------------------------------------------------------------------------------------

    def _run_until(self, at: float) -> None:
        assert at >= self._now, f"time went back from {self._now} to {at}"
        while self._run and self._run.pass_until(at):
            self._end_run(self._run)
            self._begin_run()
        self._now = at

    def _change_batch(self) -> None:
        """Lets the batch change when the current step ends; at once if the engine is between two steps."""
        run = self._run
        if run and self._is_in_step():
            run.num_steps = run.num_done + 1
            return
        if run:
            self._end_run(run)
        else:
            self._batching.remove_aborted(self._now)
        self._begin_run()

    def _end_run(self, run: Steps) -> None:
        self._now = run.done_at
        self._run = None
        self._batching.end(self._now, run.num_done)

    def _begin_run(self) -> None:
        if self._paused != "keep":
            self._run = self._batching.begin(self._now)

    def _is_in_step(self) -> bool:
        return self._run is not None and self._run.done_at < self._now

    def _num_done(self) -> int:
        return self._run.num_done if self._run else 0

    def _num_made(self) -> int:
        """Tokens that the running steps have made; they are not in the batch's counts yet."""
        return self._num_done() * self._batch.num_decoding
