"""A model server in virtual time: what it runs at any moment, and how many tokens each sequence has.

Pure: no clock, no sockets. Every method takes `at` in seconds, which never goes back. The HTTP server drives it
in real time, and a simulator in virtual time.

Rules, after vLLM's V1 scheduler:
* Continuous batching. All running sequences make one token per step, which takes `EngineProfile.decode_step_s`.
* Chunked prefill, first admitted first: a step also prefills up to `chunk_tokens` of the prompts that are not
  cached, and their prefill time is added to it. The step that ends a prefill makes the sequence's first token.
* A sequence enters at the beginning of a step, if a slot and KV for its whole prompt are free; while the first one
  in the queue does not fit, nobody enters. Its prompt counts as cached from then on.
* With a host tier, evicted KV that is wanted again is copied back, which takes engine time like prefill.
* With speculation, steps of small batches are shorter.
* When the running sequences cannot grow by one token, the least urgent of them is preempted: its KV becomes
  evictable, it queues again and computes its tokens anew, except for those that are still cached.

Between changes of the batch nothing is stepped through (see `Steps`). Cost: O(log B) per change of the batch, and
O(pieces) per admission and end.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Literal

from engines.simulated.features import PLAIN, Features
from engines.simulated.prefix_cache import Piece, PrefixCache
from engines.simulated.sequence import (
    EngineCounts,
    EventKind,
    Order,
    PauseMode,
    SequenceEvent,
    SimulatedSequence,
)
from engines.simulated.steps import Steps
from scheduling.cost import EngineProfile


class _State:
    """Where one sequence stands."""

    __slots__ = (
        "born_step",
        "finish_step",
        "key",
        "num_generated",
        "pinned",
        "pinned_tokens",
        "prefill_left",
        "prefill_s_per_token",
        "sequence",
    )

    def __init__(self, sequence: SimulatedSequence, key: tuple[int, float, int]) -> None:
        self.sequence = sequence
        self.key = key
        self.num_generated = 0  # exact unless it decodes; then it is the engine's step count minus born_step
        self.born_step = 0
        self.finish_step = -1  # -1: it does not decode
        self.pinned: Sequence[Piece] = ()
        self.pinned_tokens = 0
        self.prefill_left = 0
        self.prefill_s_per_token = 0.0


class SimulatedEngine:
    """One engine with its queue, batch and KV cache.

    Args:
        order: how the queue is sorted, and who is preempted first (the other end).
        preempt_margin: a waiting sequence that finds no room takes the place of a running one whose priority
            number is higher by more than this (SGLang's rule; its default is 10). None: it waits (vLLM's rule).
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
        self._order = order
        self._preempt_margin = preempt_margin
        self._chunk_tokens = chunk_tokens
        self._block_tokens = block_tokens
        self._speculation = features.speculation
        self._host_tier = features.host_tier
        self._cache = PrefixCache(features.host_tier.capacity_tokens if features.host_tier else 0)
        self._now = 0.0
        self._paused: PauseMode | None = None
        self._events: list[SequenceEvent] = []
        self._has_ended_some = False
        self._serial = 0

        self._waiting: dict[str, _State] = {}
        self._queue: list[tuple[tuple[int, float, int], _State]] = []  # heap; may hold some that left already
        self._held: dict[str, SimulatedSequence] = {}  # came during a pause that takes nobody
        self._running: dict[str, _State] = {}
        self._prefills: deque[_State] = deque()
        self._finishes: list[tuple[int, int, _State]] = []  # heap; may hold some that left already
        self._doomed: list[_State] = []  # aborted, but in the batch until the step ends

        self._num_decoding = 0
        self._decoding_kv_tokens = 0
        self._private_tokens = 0  # KV of running sequences beside what they pin in the prefix cache
        self._num_steps = 0

        self._run: Steps | None = None  # like steps that follow until the batch changes
        self._run_prefills: list[tuple[_State, int]] = []

        self._num_preemptions = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_generated_tokens = 0
        self._num_prefix_queries = 0
        self._num_prefix_hits = 0

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
            return
        self._enqueue(at, sequence)

    def abort(self, at: float, id: str) -> None:
        """Ends a sequence: one that runs leaves the batch when the step ends. Unknown ids are ignored."""
        self._run_until(at)
        if state := self._waiting.pop(id, None):
            self._record("aborted", state)
            self._change_batch()
        elif (state := self._running.get(id)) and state not in self._doomed:
            self._doomed.append(state)
            self._change_batch()
        elif self._held.pop(id, None):
            self._events.append(SequenceEvent(at, id, "aborted", 0))

    def pause(self, at: float, mode: PauseMode) -> None:
        """Stops taking sequences, and aborts those it has, lets them finish (wait), or freezes them (keep)."""
        self._run_until(at)
        self._paused = mode
        if mode == "abort":
            for id in [*self._waiting, *self._running]:
                self.abort(at, id)
        self._change_batch()

    def resume(self, at: float) -> None:
        """Goes on after a pause, with the sequences that came meanwhile behind the others."""
        self._run_until(at)
        self._paused = None
        held, self._held = self._held, {}
        for sequence in held.values():
            self._enqueue(at, sequence)
        self._change_batch()

    def retract(self, at: float) -> None:
        """Takes all that runs back into the queue, to compute its KV anew; between two steps of a pause that keeps."""
        self._run_until(at)
        assert self._run is None, "a step is under way"
        for state in list(self._running.values()):
            self._preempt(state)

    def clear_prefix_cache(self, at: float) -> bool:
        """Forgets all cached prefixes, unless a running sequence uses some; says whether it did."""
        self._run_until(at)
        if self._running:
            return False
        self._cache.clear()
        return True

    def num_cached(self, at: float, pieces: Sequence[Piece]) -> int:
        """Tokens at the front of these pieces that its KV cache has."""
        self._run_until(at)
        return self._cache.probe(pieces)[0]

    def adopt(self, at: float, pieces: Sequence[Piece]) -> None:
        """Take KV that was computed elsewhere into the cache; dropped where running sequences leave no room for it."""
        self._run_until(at)
        made = self._num_done() * self._num_decoding
        if self._cache.probe(pieces)[1] > self._free_tokens() - made:
            return
        self._cache.pin(pieces)
        self._cache.unpin(pieces)
        self._evict_overdraft()

    def keep(self, at: float, pieces: Sequence[Piece]) -> bool:
        """Pin pieces until they are let go, for another engine is to fetch them; False where there is no room."""
        self._run_until(at)
        made = self._num_done() * self._num_decoding
        if self._cache.probe(pieces)[1] > self._free_tokens() - made:
            return False
        self._cache.pin(pieces)
        self._evict_overdraft()
        self._change_batch()
        return True

    def let_go(self, at: float, pieces: Sequence[Piece]) -> None:
        """Unpin what was kept."""
        self._run_until(at)
        self._cache.unpin(pieces)
        self._change_batch()

    def advance(self, at: float) -> list[SequenceEvent]:
        """Runs until `at`; gives what happened since the last call, in order of time."""
        self._run_until(at)
        events, self._events = self._events, []
        self._has_ended_some = False
        return events

    def next_event_at(self) -> float | None:
        """When the batch changes next, if nothing comes from outside; no event is earlier. None: it idles."""
        return self._run.end_of(self._run.num_steps) if self._run else None

    @property
    def has_ended_some(self) -> bool:
        """Whether `advance` has the end of a sequence to tell."""
        return self._has_ended_some

    def next_step_at(self) -> float | None:
        """When the current step ends, and with it the next tokens appear. None: it idles."""
        return self._run.end_of(self._run.num_done + 1) if self._run else None

    def num_generated(self, id: str) -> int:
        """Output tokens that a sequence has which the engine holds."""
        state = self._running.get(id) or self._waiting.get(id)
        return self._num_generated(state) if state else 0

    def holds(self, id: str) -> bool:
        """Whether the sequence is waiting or running."""
        return id in self._running or id in self._waiting or id in self._held

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting and not self._held

    @property
    def paused(self) -> PauseMode | None:
        return self._paused

    def counts(self) -> EngineCounts:
        """Gauges and totals at the time of the last call that had one."""
        made = self._num_done() * self._num_decoding
        return EngineCounts(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + len(self._held),
            kv_usage=(self._used_tokens() + made) / self.profile.kv_capacity_tokens,
            num_preemptions=self._num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens + made,
            num_prefix_queries=self._num_prefix_queries,
            num_prefix_hits=self._num_prefix_hits,
        )

    # -- time ----------------------------------------------------------------------------------------

    def _run_until(self, at: float) -> None:
        assert at >= self._now, f"time went back from {self._now} to {at}"
        while self._run and self._run.pass_until(at):
            self._end_run(self._run)
            self._begin_run()
        self._now = at

    # -- changes of the batch ------------------------------------------------------------------------

    def _change_batch(self) -> None:
        """Lets the batch change when the current step ends, which is now if the engine stands between two steps."""
        run = self._run
        if run and run.end_of(run.num_done) < self._now:
            run.num_steps = run.num_done + 1
            return
        if run:
            self._end_run(run)
        self._remove_doomed()
        self._begin_run()

    def _end_run(self, run: Steps) -> None:
        """Credits the steps that are over to everyone in the batch, and ends what is finished."""
        steps = run.num_done
        self._now = run.end_of(steps)
        self._run = None
        made = steps * self._num_decoding
        self._num_steps += steps
        self._num_generated_tokens += made
        self._decoding_kv_tokens += made
        self._private_tokens += made
        self._evict_overdraft()
        for state, tokens in self._run_prefills if steps else ():
            state.prefill_left -= tokens * steps
            if state.prefill_left == 0:
                self._end_prefill(state)
        self._run_prefills = []
        while self._finishes and self._finishes[0][0] <= self._num_steps:
            finish_step, _, state = heapq.heappop(self._finishes)
            if state.finish_step == finish_step:
                self._leave(state, "finished")
        self._remove_doomed()

    def _end_prefill(self, state: _State) -> None:
        """The sequence makes its first token since it was admitted, and decodes from now on."""
        self._prefills.remove(state)
        state.num_generated += 1
        state.born_step = self._num_steps - state.num_generated
        state.finish_step = state.born_step + state.sequence.num_output_tokens
        self._num_generated_tokens += 1
        self._num_decoding += 1
        self._decoding_kv_tokens += state.sequence.num_prompt_tokens + state.num_generated
        heapq.heappush(self._finishes, (state.finish_step, state.key[2], state))
        if state.num_generated == 1:
            self._record("first_token", state)

    def _remove_doomed(self) -> None:
        for state in self._doomed:
            if state.sequence.id in self._running:
                self._leave(state, "aborted")
        self._doomed = []

    def _leave(self, state: _State, kind: Literal["preempted", "finished", "aborted"]) -> None:
        """Takes a sequence out of the batch; its full pieces stay behind as cache."""
        state.num_generated = self._num_generated(state)
        num_tokens = state.sequence.num_prompt_tokens + state.num_generated
        if state.finish_step >= 0:
            self._num_decoding -= 1
            self._decoding_kv_tokens -= num_tokens
            self._private_tokens -= num_tokens - state.pinned_tokens
            filled = state.sequence.pieces(num_tokens)
            self._cache.pin(filled)
            self._cache.unpin(filled)
        else:
            self._prefills.remove(state)
            self._private_tokens -= num_tokens + 1 - state.pinned_tokens
        state.finish_step = -1
        self._cache.unpin(state.pinned)
        state.pinned = ()
        del self._running[state.sequence.id]
        self._has_ended_some = self._has_ended_some or kind != "preempted"
        self._record(kind, state)

    def _evict_overdraft(self) -> None:
        overdraft = self._cache.num_tokens + self._private_tokens - self.profile.kv_capacity_tokens
        if overdraft > 0:
            self._cache.evict(overdraft, self._block_tokens)

    # -- scheduling ----------------------------------------------------------------------------------

    def _begin_run(self) -> None:
        """Decides the batch at a boundary between two steps, and how many like steps follow.

        A step that preempts admits nobody, unless the batch would be empty and the engine stand still.
        """
        if self._paused == "keep":
            return
        preempted = self._preempt_for_growth()
        if self._queue and (not preempted or not self._running):
            self._admit()
        self._plan_run()
        if preempted and self._run:
            self._run.num_steps = 1

    def _preempt_for_growth(self) -> bool:
        """Preempts the least urgent until everyone who decodes can make one more token; says whether it had to."""
        preempted = False
        while self._num_decoding and self._free_tokens() < self._num_decoding:
            self._preempt(max(self._running.values(), key=_urgency))
            preempted = True
        return preempted

    def _admit(self) -> None:
        while self._queue:
            state = self._queue[0][1]
            left_already = self._waiting.get(state.sequence.id) is not state
            if left_already or self._enter(state):
                heapq.heappop(self._queue)
            elif not self._preempt_for(state):
                return

    def _enter(self, state: _State) -> bool:
        """Puts a waiting sequence into the batch if there is a slot, and its KV fits."""
        if len(self._running) >= self.profile.slots:
            return False
        length = state.sequence.num_prompt_tokens + state.num_generated
        pieces = state.sequence.pieces(length)
        in_pieces = sum(size for _, size in pieces)
        present, pin_growth = self._cache.probe(pieces)
        private = length + 1 - in_pieces  # and the KV of the first token it will make
        if pin_growth + private + self._num_decoding > self._free_tokens():
            return False
        copied = 0
        if self._host_tier is not None:
            present, copied = self._cache.probe_host(pieces)
        # The last token is always computed, for its output is the next one.
        cached = min(present, length - 1) // self._block_tokens * self._block_tokens
        self._cache.pin(pieces)
        state.pinned, state.pinned_tokens = pieces, in_pieces
        self._private_tokens += private
        self._evict_overdraft()
        state.prefill_left = length - cached
        prefill_s = self.profile.prefill_s(length - cached, cached) + self._copy_s(copied)
        state.prefill_s_per_token = prefill_s / (length - cached)
        self._prefills.append(state)
        self._running[state.sequence.id] = state
        del self._waiting[state.sequence.id]
        if state.num_generated == 0:
            self._num_prompt_tokens += length
            self._num_cached_tokens += cached
        self._num_prefix_queries += length
        self._num_prefix_hits += cached
        self._record("admitted", state, cached)
        return True

    def _copy_s(self, num_tokens: int) -> float:
        """Seconds to copy KV back from the host."""
        if self._host_tier is None:
            return 0.0
        return num_tokens * self.profile.kv_bytes_per_token / self._host_tier.bytes_per_s

    def _preempt_for(self, state: _State) -> bool:
        if self._preempt_margin is None or not self._running:
            return False
        victim = max(self._running.values(), key=_urgency)
        if victim.key[0] - state.key[0] <= self._preempt_margin:
            return False
        self._preempt(victim)
        return True

    def _preempt(self, state: _State) -> None:
        self._num_preemptions += 1
        self._leave(state, "preempted")
        self._push(state)

    def _plan_run(self) -> None:
        """Steps are alike until someone finishes, a prefill chunk differs, or the KV cache is full."""
        self._run_prefills, steps = self._next_chunks()
        if self._num_decoding:
            while self._finishes[0][2].finish_step != self._finishes[0][0]:
                heapq.heappop(self._finishes)
            until_finish = self._finishes[0][0] - self._num_steps
            until_full = self._free_tokens() // self._num_decoding
            steps = min(steps or until_finish, until_finish, until_full)
        if steps:
            decode_s = self.profile.decode_step_s(self._num_decoding, self._decoding_kv_tokens)
            prefill_s = sum(tokens * state.prefill_s_per_token for state, tokens in self._run_prefills)
            growth_s = self.profile.decode_per_kv_ktoken_ms * self._num_decoding / 1e6
            if self._speculation is not None and 0 < self._num_decoding <= self._speculation.max_batch:
                decode_s /= self._speculation.speed_up
                growth_s /= self._speculation.speed_up
            self._run = Steps(self._now, steps, decode_s + prefill_s, growth_s)

    def _next_chunks(self) -> tuple[list[tuple[_State, int]], int]:
        """What the next step prefills, and for how many steps that stays the same (0: nothing to prefill)."""
        if not self._prefills:
            return [], 0
        head = self._prefills[0]
        if head.prefill_left >= self._chunk_tokens:
            return [(head, self._chunk_tokens)], head.prefill_left // self._chunk_tokens
        chunks, budget = [], self._chunk_tokens
        for state in self._prefills:
            tokens = min(state.prefill_left, budget)
            chunks.append((state, tokens))
            budget -= tokens
            if budget == 0:
                break
        return chunks, 1

    # -- small things --------------------------------------------------------------------------------

    def _enqueue(self, at: float, sequence: SimulatedSequence) -> None:
        self._serial += 1
        priority = sequence.priority if self._order == "priority" else 0
        state = _State(sequence, (priority, at, self._serial))
        self._push(state)
        if len(self._running) < self.profile.slots or self._preempt_margin is not None:
            self._change_batch()

    def _push(self, state: _State) -> None:
        self._waiting[state.sequence.id] = state
        heapq.heappush(self._queue, (state.key, state))

    def _num_generated(self, state: _State) -> int:
        if state.finish_step < 0:
            return state.num_generated
        return self._num_steps + self._num_done() - state.born_step

    def _num_done(self) -> int:
        return self._run.num_done if self._run else 0

    def _used_tokens(self) -> int:
        return self._cache.num_pinned_tokens + self._private_tokens

    def _free_tokens(self) -> int:
        """KV tokens that are free, or cached and evictable."""
        return self.profile.kv_capacity_tokens - self._used_tokens()

    def _record(
        self,
        kind: EventKind,
        state: _State,
        num_cached: int = 0,
    ) -> None:
        self._events.append(SequenceEvent(self._now, state.sequence.id, kind, self._num_generated(state), num_cached))


def _urgency(state: _State) -> tuple[int, float, int]:
    return state.key
