"""The simulated engine in the simplest and slowest way: one loop turn per step, everything counted from scratch."""

from collections.abc import Sequence

from engines.simulated.prefix_cache import Piece
from engines.simulated.sequence import SimulatedSequence
from scheduling.cost import EngineProfile


class _Sequence:
    def __init__(self, sequence: SimulatedSequence, key: tuple[int, float, int]) -> None:
        self.sequence = sequence
        self.key = key
        self.num_generated = 0
        self.pinned: Sequence[Piece] = ()
        self.num_present = 0  # of the pinned tokens, when it entered
        self.prefill_left = 0
        self.prefill_s_per_token = 0.0

    @property
    def kv_tokens(self) -> int:
        own = self.sequence.num_prompt_tokens + self.num_generated + (1 if self.prefill_left else 0)
        return own - sum(size for _, size in self.pinned)


class ReferenceEngine:
    """Runs a whole script of submissions and aborts, step by step; vLLM's order and no preemption on admission."""

    def __init__(self, profile: EngineProfile, *, by_priority: bool, chunk_tokens: int, block_tokens: int) -> None:
        self.profile = profile
        self.by_priority = by_priority
        self.chunk_tokens = chunk_tokens
        self.block_tokens = block_tokens
        self.now = 0.0
        self.waiting: list[_Sequence] = []
        self.running: list[_Sequence] = []
        self.aborting: list[_Sequence] = []  # aborted while a step runs
        self.serial = 0
        self.cache: dict[object, int] = {}  # key -> tokens; the first is the least recently used
        self.events: list[tuple[float, str, str, int, int]] = []

    def run(self, script: list[tuple[float, SimulatedSequence | str]]) -> None:
        """Script entries in order of time: a sequence to submit, or the id of one to abort."""
        script = list(script)
        while script or self.waiting or self.running:
            duration = self._step()
            if duration is None:
                self.now = script[0][0] if script else self.now
                if script:
                    self._take(script.pop(0)[1])
                continue
            end = self.now + duration
            while script and script[0][0] < end:  # it comes before the step ends
                at, what = script.pop(0)
                during_step = at > self.now
                if during_step:
                    self._take(what, at)
                else:
                    self._take(what)
                    duration = self._step()
                    end = self.now + (duration or 0.0)
            self.now = end
            self._end_step()

    def _take(self, what: SimulatedSequence | str, during_step_at: float | None = None) -> None:
        at = self.now if during_step_at is None else during_step_at
        if isinstance(what, SimulatedSequence):
            self.serial += 1
            priority = what.priority if self.by_priority else 0
            self.waiting.append(_Sequence(what, (priority, at, self.serial)))
            return
        for sequence in [s for s in self.waiting if s.sequence.id == what]:
            self.waiting.remove(sequence)
            self._record(sequence, "aborted", at=at)
        self.aborting += [s for s in self.running if s.sequence.id == what]
        if during_step_at is None:
            self._remove_aborting()

    def _step(self) -> float | None:
        """Decides the step's batch and returns its duration."""
        decoding = [s for s in self.running if not s.prefill_left]
        preempted = False
        while decoding and self._free() < len(decoding):
            victim = max(self.running, key=lambda s: s.key)
            self._leave(victim, "preempted")
            self.waiting.append(victim)
            decoding = [s for s in self.running if not s.prefill_left]
            preempted = True
        while not preempted and self.waiting and len(self.running) < self.profile.slots:
            if not self._enter(min(self.waiting, key=lambda s: s.key), len(decoding)):
                break
        kv_tokens = sum(s.sequence.num_prompt_tokens + s.num_generated for s in decoding)
        duration = self.profile.decode_step_s(len(decoding), kv_tokens)
        self.chunks, budget = [], self.chunk_tokens
        for sequence in self.running:
            tokens = min(sequence.prefill_left, budget)
            if tokens:
                self.chunks.append((sequence, tokens))
                budget -= tokens
                duration += tokens * sequence.prefill_s_per_token
        self.decoding = decoding
        return duration if self.running else None

    def _enter(self, entering: _Sequence, num_decoding: int) -> bool:
        length = entering.sequence.num_prompt_tokens + entering.num_generated
        pieces = entering.sequence.pieces(length)
        pinned = self._pinned_keys()
        present = 0
        for key, size in pieces:
            present += min(self.cache.get(key, 0), size)
            if self.cache.get(key, 0) < size:
                break
        needed = length + 1 - sum(size for _, size in pieces)
        for key, size in pieces:
            held = self.cache.get(key, 0)
            needed += max(size - held, 0) if key in pinned else size
        if needed + num_decoding > self._free():
            return False
        cached = min(present, length - 1) // self.block_tokens * self.block_tokens
        entering.pinned, entering.num_present = pieces, present
        self._store(pieces, pinned)
        entering.prefill_left = length - cached
        entering.prefill_s_per_token = self.profile.prefill_s(length - cached, cached) / (length - cached)
        self.waiting.remove(entering)
        self.running.append(entering)
        self._evict()
        self._record(entering, "admitted", num_cached=cached)
        return True

    def _end_step(self) -> None:
        for sequence in self.decoding:
            sequence.num_generated += 1
        self._evict()
        for sequence, tokens in self.chunks:
            sequence.prefill_left -= tokens
            if sequence.prefill_left == 0:
                sequence.num_generated += 1
                if sequence.num_generated == 1:
                    self._record(sequence, "first_token")
        for sequence in sorted(self.running, key=lambda s: s.key[2]):
            if sequence.num_generated == sequence.sequence.num_output_tokens:
                self._leave(sequence, "finished")
        self._remove_aborting()

    def _remove_aborting(self) -> None:
        for sequence in self.aborting:
            if sequence in self.running:
                self._leave(sequence, "aborted")
        self.aborting = []

    def _leave(self, sequence: _Sequence, kind: str) -> None:
        """Removes a sequence from the batch. The beginning of what no sequence uses any more becomes the most recently
        used."""
        self.running.remove(sequence)
        if not sequence.prefill_left:
            filled = sequence.sequence.pieces(sequence.sequence.num_prompt_tokens + sequence.num_generated)
            in_use = self._pinned_keys() | {key for key, _ in sequence.pinned}
            self._store(filled, in_use)
            self._touch(filled, in_use)
        self._touch(sequence.pinned, self._pinned_keys())
        if sequence.prefill_left:
            computed = sequence.sequence.num_prompt_tokens + sequence.num_generated - sequence.prefill_left
            self._drop(sequence.pinned, max(computed, sequence.num_present))
        sequence.pinned = ()
        sequence.prefill_left = 0
        self._record(sequence, kind)

    def _store(self, pieces: Sequence[Piece], pinned: set[object]) -> None:
        for key, size in pieces:
            self.cache[key] = max(self.cache.get(key, 0), size) if key in pinned else size

    def _touch(self, pieces: Sequence[Piece], still_used: set[object]) -> None:
        for key, _ in reversed(pieces):
            if key not in still_used:
                self.cache[key] = self.cache.pop(key)

    def _drop(self, pieces: Sequence[Piece], num_kept: int) -> None:
        """Drops all but the first tokens of pieces that no sequence uses."""
        for key, size in pieces:
            if num_kept < size and key not in self._pinned_keys():
                self.cache[key] = num_kept
                if not num_kept:
                    del self.cache[key]
            num_kept = max(num_kept - size, 0)

    def _pinned_keys(self) -> set[object]:
        return {key for s in self.running for key, _ in s.pinned}

    def _free(self) -> int:
        pinned = sum(self.cache[key] for key in self._pinned_keys())
        return self.profile.kv_capacity_tokens - pinned - sum(s.kv_tokens for s in self.running)

    def _evict(self) -> None:
        overdraft = sum(self.cache.values()) + sum(s.kv_tokens for s in self.running)
        overdraft -= self.profile.kv_capacity_tokens
        wanted = -(-overdraft // self.block_tokens) * self.block_tokens
        pinned = self._pinned_keys()
        for key in [key for key in self.cache if key not in pinned]:
            if wanted <= 0:
                return
            taken = min(wanted, self.cache[key])
            wanted -= taken
            self.cache[key] -= taken
            if not self.cache[key]:
                del self.cache[key]

    def _record(self, sequence: _Sequence, kind: str, *, at: float | None = None, num_cached: int = 0) -> None:
        at = self.now if at is None else at
        self.events.append((at, sequence.sequence.id, kind, sequence.num_generated, num_cached))
