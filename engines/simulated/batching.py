"""Continuous batching: which sequence enters the batch, is preempted, or leaves it, between two steps.

* A sequence enters if a slot and KV for its whole prompt are free; while the first one in the queue does not fit, none
  enters. Its prompt counts as cached from then on; if it leaves before its prefill ends, the rest no longer does.
* If the running sequences cannot grow by one token, the least urgent is preempted: its KV becomes evictable, it queues
  again, and it recomputes those of its tokens that are no longer cached.
"""

import heapq
from typing import Literal

from engines.simulated.batch import Batch, Progress
from engines.simulated.features import Features
from engines.simulated.kv_memory import KvMemory
from engines.simulated.sequence import EventKind, Order, SequenceEvent, SimulatedSequence
from engines.simulated.steps import Steps
from scheduling.cost import EngineProfile


class Batching:
    """Fills the batch from the queue.

    Args:
        order, preempt_margin: as in `SimulatedEngine`.

    Attributes:
        waiting: sequences in the queue.
        events: what happened, in order of time; the owner takes them.
        has_ended_some: they include the end of a sequence that ran.
    """

    def __init__(
        self,
        profile: EngineProfile,
        batch: Batch,
        kv: KvMemory,
        order: Order,
        preempt_margin: int | None,
        features: Features,
    ) -> None:
        self.waiting: dict[str, Progress] = {}
        self.events: list[SequenceEvent] = []
        self.has_ended_some = False
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self._profile = profile
        self._batch = batch
        self._kv = kv
        self._order = order
        self._preempt_margin = preempt_margin
        self._speculation = features.speculation
        self._host_tier = features.host_tier
        self._queue: list[tuple[tuple[int, float, int], Progress]] = []  # heap; may contain some that already left
        self._doomed: list[Progress] = []  # aborted, but in the batch until the step ends
        self._serial = 0
        self._now = 0.0

    # --- the queue ------------------------------------------------------------------------------------------

    def submit(self, at: float, sequence: SimulatedSequence) -> bool:
        """Put a sequence into the queue; returns whether it may enter at the next boundary."""
        self._serial += 1
        priority = sequence.priority if self._order == "priority" else 0
        self._push(Progress(sequence, (priority, at, self._serial)))
        return len(self._batch.running) < self._profile.slots or self._preempt_margin is not None

    def abort(self, at: float, id: str) -> bool:
        """End a waiting sequence now, or a running one when the step ends; False if there is none."""
        self._now = at
        if progress := self.waiting.pop(id, None):
            self._record("aborted", progress)
            return True
        if (progress := self._batch.running.get(id)) and progress not in self._doomed:
            self._doomed.append(progress)
            return True
        return False

    def _push(self, progress: Progress) -> None:
        self.waiting[progress.sequence.id] = progress
        heapq.heappush(self._queue, (progress.key, progress))

    # --- the end of steps -----------------------------------------------------------------------------------

    def end(self, at: float, num_steps: int) -> None:
        """Credit finished steps to everything in the batch, and remove finished and aborted sequences."""
        self._now = at
        self._kv.grow(self._batch.pass_steps(num_steps))
        for progress in self._batch.end_prefills(num_steps):
            if progress.num_generated == 1:
                self._record("first_token", progress)
        while (finished := self._batch.next_finished()) is not None:
            self._leave(finished, "finished")
        self.remove_aborted(at)

    def remove_aborted(self, at: float) -> None:
        """Remove sequences that were aborted while they ran."""
        self._now = at
        for progress in self._doomed:
            if progress.sequence.id in self._batch.running:
                self._leave(progress, "aborted")
        self._doomed = []

    def preempt_all(self, at: float) -> None:
        """Put all running sequences back into the queue."""
        self._now = at
        for progress in list(self._batch.running.values()):
            self._preempt(progress)

    def _leave(self, progress: Progress, kind: Literal["preempted", "finished", "aborted"]) -> None:
        """Take a sequence out of the batch; what it computed of its pieces remains as cache."""
        room, progress.room = progress.room, None
        assert room is not None
        is_in_prefill = progress.finish_step < 0
        self._batch.leave(progress)
        if is_in_prefill:
            self._kv.leave_early(room, progress.num_tokens + 1, progress.num_tokens - progress.prefill_left)
        else:
            self._kv.leave(room, progress.num_tokens, progress.sequence.pieces(progress.num_tokens))
        self.has_ended_some = self.has_ended_some or kind != "preempted"
        self._record(kind, progress)

    # --- the beginning of steps -----------------------------------------------------------------------------

    def begin(self, at: float) -> Steps | None:
        """Decide the batch, and how many identical steps follow; None if nothing runs.

        A step that preempts admits nothing, unless the batch would be empty and the engine would stand still.
        """
        self._now = at
        preempted = self._preempt_for_growth()
        if self._queue and (not preempted or not self._batch.running):
            self._admit()
        steps = self._steps()
        if preempted and steps:
            steps.num_steps = 1
        return steps

    def _steps(self) -> Steps | None:
        batch, profile = self._batch, self._profile
        num_steps, prefill_s = batch.plan(self._kv.num_free)
        if not num_steps:
            return None
        num_decoding = batch.num_decoding
        decode_s = profile.decode_step_s(num_decoding, batch.decoding_kv_tokens)
        growth_s = profile.decode_per_kv_ktoken_ms * num_decoding / 1e6
        if self._speculation is not None and 0 < num_decoding <= self._speculation.max_batch:
            decode_s /= self._speculation.speed_up
            growth_s /= self._speculation.speed_up
        if batch.num_prefill_tokens:
            prefill_s += profile.prefill_launch_s(batch.num_prefill_tokens)
        return Steps(self._now, num_steps, decode_s + prefill_s, growth_s)

    def _preempt_for_growth(self) -> bool:
        """Preempt the least urgent until every decoding sequence can make one more token; returns whether any was
        preempted.
        """
        preempted = False
        while self._batch.num_decoding and self._kv.num_free < self._batch.num_decoding:
            self._preempt(max(self._batch.running.values(), key=_urgency))
            preempted = True
        return preempted

    def _admit(self) -> None:
        while self._queue:
            progress = self._queue[0][1]
            left_already = self.waiting.get(progress.sequence.id) is not progress
            if left_already or self._enter(progress):
                heapq.heappop(self._queue)
            elif not self._preempt_for(progress):
                return

    def _enter(self, progress: Progress) -> bool:
        """Put a waiting sequence into the batch if there is a slot, and its KV fits."""
        if len(self._batch.running) >= self._profile.slots:
            return False
        length = progress.num_tokens
        room = self._kv.enter(progress.sequence.pieces(length), length, self._batch.num_decoding)
        if room is None:
            return False
        progress.room, cached = room, room.num_cached
        prefill_s = self._profile.prefill_s(length - cached, cached) + self._copy_s(room.num_copied)
        self._batch.enter(progress, length - cached, prefill_s)
        del self.waiting[progress.sequence.id]
        if progress.num_generated == 0:
            self.num_prompt_tokens += length
            self.num_cached_tokens += cached
        self.num_prefix_queries += length
        self.num_prefix_hits += cached
        self._record("admitted", progress, cached)
        return True

    def _copy_s(self, num_tokens: int) -> float:
        """Seconds to copy KV back from the host."""
        if self._host_tier is None:
            return 0.0
        return num_tokens * self._profile.kv_bytes_per_token / self._host_tier.bytes_per_s

    def _preempt_for(self, progress: Progress) -> bool:
        if self._preempt_margin is None or not self._batch.running:
            return False
        victim = max(self._batch.running.values(), key=_urgency)
        if victim.key[0] - progress.key[0] <= self._preempt_margin:
            return False
        self._preempt(victim)
        return True

    def _preempt(self, progress: Progress) -> None:
        self.num_preemptions += 1
        self._leave(progress, "preempted")
        self._push(progress)

    def _record(self, kind: EventKind, progress: Progress, num_cached: int = 0) -> None:
        num_generated = self._batch.num_generated(progress)
        self.events.append(SequenceEvent(self._now, progress.sequence.id, kind, num_generated, num_cached))


def _urgency(progress: Progress) -> tuple[int, float, int]:
    return progress.key
