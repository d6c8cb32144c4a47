"""The virtual engine in real time: one timer wakes at the next due moment and serves every request whose tokens are
due.
"""

import asyncio
from array import array
from collections.abc import Sequence

from engines.simulated.answers import Answer
from engines.simulated.model import SimulatedEngine
from engines.simulated.prefix_cache import Piece
from engines.simulated.sequence import PauseMode, SequenceEvent, SimulatedSequence

_TICK_S = 0.001
"""Streams are served no more often than this: timers are no finer, and a high speed-up would leave time for nothing
else.
"""


class Signal:
    """Wakes the one coroutine that serves a request when any of its choices has news."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Returns at the next news, or at once if there was some since the last call."""
        if not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        self._is_set = False


class Generation:
    """One choice of a running request. Times are virtual seconds; None: not yet."""

    __slots__ = (
        "admitted_at",
        "answer",
        "cached_tokens",
        "ended_at",
        "first_token_at",
        "id",
        "is_aborted",
        "num_before",
        "num_done",
        "num_preemptions",
        "prompt_tokens",
        "signal",
        "submitted_at",
        "versions",
    )

    def __init__(self, id: str, answer: Answer, prompt_tokens: int, signal: Signal) -> None:
        self.id = id
        self.answer = answer
        self.prompt_tokens = prompt_tokens
        self.signal = signal
        self.submitted_at = 0.0
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self.num_done = 0
        self.num_before = 0  # tokens that earlier weights made
        self.versions: list[tuple[str, int]] = []  # of weights, each with its first token
        self.cached_tokens = 0
        self.num_preemptions = 0
        self.is_aborted = False

    def weight_versions(self) -> list[dict[str, object]]:
        """Which weights made its tokens so far: spans without gaps, as both engines report them."""
        ends = [start for _, start in self.versions[1:]] + [self.num_done]
        return [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(self.versions, ends, strict=True)
        ]


class LiveEngine:
    """Runs generations on a virtual engine at `speed_up` virtual seconds per real second."""

    def __init__(self, engine: SimulatedEngine, speed_up: float, chunk_interval_s: float, block_size: int) -> None:
        self.engine = engine
        self._speed_up = speed_up
        self._tick_s = max(chunk_interval_s, _TICK_S)
        self.block_size = block_size
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started_at = 0.0
        self._virtual_now = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._due_at: float | None = None
        self._generations: dict[str, Generation] = {}
        self._streams: dict[str, Generation] = {}
        self._served_at = 0.0

    def start(
        self, generation: Generation, prompt: Sequence[int], priority: int, cache_salt: str, is_stream: bool
    ) -> None:
        """Submits a generation; its signal is set when it ends and, for a stream, when it has new tokens.

        Raises:
            ValueError: it can never fit into the KV cache.
        """
        blocks = _Blocks(prompt, generation.answer.token_ids, self.block_size, cache_salt)
        sequence = SimulatedSequence(
            generation.id, len(prompt), len(generation.answer.token_ids), blocks.pieces, priority
        )
        generation.submitted_at = self.now()
        self.engine.submit(generation.submitted_at, sequence)
        self._generations[generation.id] = generation
        if is_stream:
            self._streams[generation.id] = generation
        self._arm()

    def go_on(self, generation: Generation, prompt: Sequence[int], priority: int, cache_salt: str) -> None:
        """Continues a generation whose answer was changed from `num_done` on. Its KV is unchanged."""
        made, old_id = generation.num_done, generation.id
        ids = generation.answer.token_ids
        generation.num_before, generation.id = made, f"{old_id}+"
        blocks = _Blocks([*prompt, *ids[:made]], ids[made:], self.block_size, cache_salt)
        sequence = SimulatedSequence(generation.id, len(prompt) + made, len(ids) - made, blocks.pieces, priority)
        del self._generations[old_id]
        self._generations[generation.id] = generation
        if self._streams.pop(old_id, None) is not None:
            self._streams[generation.id] = generation
        self.engine.abort(self.now(), old_id)
        self.engine.submit(self.now(), sequence)
        self._serve_due()

    def num_made(self, generation: Generation) -> int:
        """The tokens that a running generation has now."""
        return generation.num_before + self.engine.num_generated(generation.id)

    def abort(self, id: str) -> None:
        """Ends a generation early; ignores one that is already over."""
        if id in self._generations:
            self.engine.abort(self.now(), id)
            self._serve_due()

    def pause(self, mode: PauseMode) -> None:
        self.engine.pause(self.now(), mode)
        self._serve_due()

    def resume(self) -> None:
        self.engine.resume(self.now())
        self._serve_due()

    async def stilled(self) -> None:
        """Returns when the step that was running at a `keep` pause has ended."""
        while (due_at := self.engine.next_step_at()) is not None:
            await asyncio.sleep(max(due_at - self.now(), 0.0) / self._speed_up)
            self._virtual_now = max(self._virtual_now, due_at)
            self._serve_due()

    def retract(self) -> None:
        self.engine.retract(self.now())
        self._serve_due()

    def clear_prefix_cache(self) -> bool:
        return self.engine.clear_prefix_cache(self.now())

    def num_cached(self, pieces: Sequence[Piece]) -> int:
        """Tokens at the front of these pieces that are in the cache."""
        return self.engine.num_cached(self.now(), pieces)

    def adopt(self, pieces: Sequence[Piece]) -> bool:
        """Adds KV that was computed elsewhere to the cache; False if there is no room."""
        is_adopted = self.engine.adopt(self.now(), pieces)
        self._serve_due()
        return is_adopted

    def keep(self, pieces: Sequence[Piece]) -> bool:
        """Pins cached KV until it is let go; False if there is no room."""
        is_kept = self.engine.keep(self.now(), pieces)
        self._serve_due()
        return is_kept

    def let_go(self, pieces: Sequence[Piece]) -> None:
        """Unpins what was kept."""
        self.engine.let_go(self.now(), pieces)
        self._serve_due()

    def settle(self) -> None:
        """Brings the engine and its counts up to the present."""
        self._serve_due()

    def now(self) -> float:
        """Virtual seconds since the first call; never goes back."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._started_at = self._loop.time()
        self._virtual_now = max(self._virtual_now, (self._loop.time() - self._started_at) * self._speed_up)
        return self._virtual_now

    def _serve_due(self) -> None:
        for event in self.engine.advance(self.now()):
            self._note(event)
        for generation in self._streams.values():
            made = self.num_made(generation)
            if made > generation.num_done:
                generation.num_done = made
                generation.signal.set()
        self._served_at = self._virtual_now
        self._arm()

    def _note(self, event: SequenceEvent) -> None:
        generation = self._generations.get(event.id)
        if generation is None:  # it continues as another sequence
            return
        match event.kind:
            case "admitted":
                if generation.admitted_at is None:
                    generation.admitted_at = event.at
                    generation.cached_tokens = event.num_cached
            case "first_token":
                generation.first_token_at = generation.first_token_at or event.at
            case "preempted":
                generation.num_preemptions += 1
            case "finished" | "aborted":
                generation.num_done = generation.num_before + event.num_generated
                generation.is_aborted = event.kind == "aborted"
                generation.ended_at = event.at
                del self._generations[event.id]
                self._streams.pop(event.id, None)
                generation.signal.set()

    def _arm(self) -> None:
        """Sets the timer to the next moment at which a request gets something."""
        due_at = self.engine.next_event_at()
        if due_at is not None and self._streams:
            step_at = self.engine.next_step_at() or due_at
            due_at = min(due_at, max(step_at, self._served_at + self._tick_s * self._speed_up))
        if due_at == self._due_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_at = due_at
        if due_at is not None:
            assert self._loop is not None
            self._timer = self._loop.call_at(self._started_at + due_at / self._speed_up, self._wake)

    def _wake(self) -> None:
        assert self._due_at is not None
        # A timer may fire half a millisecond early: what it was set for is due all the same.
        self._virtual_now = max(self._virtual_now, self._due_at)
        self._due_at = None
        self._timer = None
        self._serve_due()


def blocks_of(prompt: Sequence[int], block_size: int, salt: str) -> Sequence[Piece]:
    """The whole blocks of a prompt in the prefix cache."""
    return _Blocks(prompt, (), block_size, salt).pieces(len(prompt))


class _Blocks:
    """The prefix-cache blocks of one sequence, keyed by a hash chain, made on demand."""

    __slots__ = ("_block_size", "_bytes", "_pieces")

    def __init__(self, prompt: Sequence[int], output: Sequence[int], block_size: int, salt: str) -> None:
        self._bytes = array("I", [*prompt, *output]).tobytes()
        self._block_size = block_size
        self._pieces: list[Piece] = [(hash(salt), 0)]

    def pieces(self, num_tokens: int) -> Sequence[Piece]:
        pieces, size = self._pieces, self._block_size
        num_blocks = num_tokens // size
        key = pieces[-1][0]
        for block in range(len(pieces) - 1, num_blocks):
            key = hash((key, self._bytes[block * size * 4 : (block + 1) * size * 4]))
            pieces.append((key, size))
        return pieces[1 : num_blocks + 1]
