"""The batch of a simulated engine: which sequences run, their progress, and for how many steps nothing changes.

All running sequences make one token per step. A step also prefills up to `chunk_tokens` of uncached prompts, first
admitted first; the step that ends a prefill makes the sequence's first token. Steps are not simulated one by one: a
decoding sequence is represented by the step in which it would have made its token 0, and the step in which it finishes.
"""

import heapq
from collections import deque

from engines.simulated.kv_memory import Room
from engines.simulated.sequence import SimulatedSequence


class Progress:
    """The progress of one sequence, in the batch or in the queue."""

    __slots__ = (
        "born_step",
        "finish_step",
        "key",
        "num_generated",
        "prefill_left",
        "prefill_s_per_token",
        "room",
        "sequence",
    )

    def __init__(self, sequence: SimulatedSequence, key: tuple[int, float, int]) -> None:
        self.sequence = sequence
        self.key = key
        self.num_generated = 0  # exact unless it decodes; then it is the batch's step count minus born_step
        self.born_step = 0
        self.finish_step = -1  # -1: it does not decode
        self.room: Room | None = None  # None: it does not run
        self.prefill_left = 0
        self.prefill_s_per_token = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of its prompt and its output, while it does not decode."""
        return self.sequence.num_prompt_tokens + self.num_generated


class Batch:
    """All running sequences.

    Attributes:
        num_generated_tokens: made so far, by all sequences that ran.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self.running: dict[str, Progress] = {}
        self.num_decoding = 0
        self.decoding_kv_tokens = 0
        self.num_generated_tokens = 0
        self._chunk_tokens = chunk_tokens
        self._num_steps = 0
        self._prefills: deque[Progress] = deque()
        self._chunks: list[tuple[Progress, int]] = []  # what each of the steps under way prefills
        self._finishes: list[tuple[int, int, Progress]] = []  # heap; may contain some that already left

    def num_generated(self, progress: Progress, num_done: int = 0) -> int:
        """A sequence's output tokens, `num_done` steps after those already passed."""
        if progress.finish_step < 0:
            return progress.num_generated
        return self._num_steps + num_done - progress.born_step

    def enter(self, progress: Progress, num_tokens: int, prefill_s: float) -> None:
        """Add a sequence with this many tokens to prefill."""
        progress.prefill_left = num_tokens
        progress.prefill_s_per_token = prefill_s / num_tokens
        self._prefills.append(progress)
        self.running[progress.sequence.id] = progress

    def leave(self, progress: Progress) -> None:
        """Remove a sequence, between two steps."""
        if progress.finish_step < 0:
            self._prefills.remove(progress)
        else:
            progress.num_generated = self.num_generated(progress)
            progress.finish_step = -1
            self.num_decoding -= 1
            self.decoding_kv_tokens -= progress.num_tokens
        del self.running[progress.sequence.id]

    @property
    def num_unscheduled(self) -> int:
        """Sequences that are admitted and of whose prompt nothing was prefilled: engines count them as waiting."""
        return max(len(self._prefills) - len(self._chunks), 0)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens that each of the planned steps prefills."""
        return sum(tokens for _, tokens in self._chunks)

    # --- steps ----------------------------------------------------------------------------------------------

    def plan(self, num_free_tokens: int) -> tuple[int, float]:
        """For how many steps nothing changes, and how long the prefill in each of them takes, in seconds.

        Steps are alike until a sequence finishes, a prefill chunk differs, or the KV memory is full. 0 steps: nothing
        runs.
        """
        self._chunks, steps = self._next_chunks()
        if self.num_decoding:
            while self._finishes[0][2].finish_step != self._finishes[0][0]:
                heapq.heappop(self._finishes)
            until_finish = self._finishes[0][0] - self._num_steps
            until_full = num_free_tokens // self.num_decoding
            steps = min(steps or until_finish, until_finish, until_full)
        return steps, sum(tokens * progress.prefill_s_per_token for progress, tokens in self._chunks)

    def pass_steps(self, num_steps: int) -> int:
        """Pass this many of the planned steps; returns how many tokens the decoding sequences made in them."""
        made = num_steps * self.num_decoding
        self._num_steps += num_steps
        self.num_generated_tokens += made
        self.decoding_kv_tokens += made
        return made

    def end_prefills(self, num_steps: int) -> list[Progress]:
        """The sequences whose prefill ended with these steps; each made a token, and decodes from now on."""
        ended = []
        for progress, tokens in self._chunks if num_steps else ():
            progress.prefill_left -= tokens * num_steps
            if progress.prefill_left == 0:
                self._decode(progress)
                ended.append(progress)
        self._chunks = []
        return ended

    def next_finished(self) -> Progress | None:
        """A sequence that has made all its tokens and is still here."""
        while self._finishes and self._finishes[0][0] <= self._num_steps:
            finish_step, _, progress = heapq.heappop(self._finishes)
            if progress.finish_step == finish_step:
                return progress
        return None

    def _decode(self, progress: Progress) -> None:
        self._prefills.remove(progress)
        progress.num_generated += 1
        progress.born_step = self._num_steps - progress.num_generated
        progress.finish_step = progress.born_step + progress.sequence.num_output_tokens
        self.num_generated_tokens += 1
        self.num_decoding += 1
        self.decoding_kv_tokens += progress.num_tokens
        heapq.heappush(self._finishes, (progress.finish_step, progress.key[2], progress))

    def _next_chunks(self) -> tuple[list[tuple[Progress, int]], int]:
        """What the next step prefills, and for how many steps that stays the same (0: nothing to prefill)."""
        if not self._prefills:
            return [], 0
        head = self._prefills[0]
        if head.prefill_left >= self._chunk_tokens:
            return [(head, self._chunk_tokens)], head.prefill_left // self._chunk_tokens
        chunks, budget = [], self._chunk_tokens
        for progress in self._prefills:
            tokens = min(progress.prefill_left, budget)
            chunks.append((progress, tokens))
            budget -= tokens
            if budget == 0:
                break
        return chunks, 1
