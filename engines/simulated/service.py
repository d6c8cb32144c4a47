"""What every route of a simulated engine uses: the live engine, the tokenizer, the totals, and admission.

It does not know HTTP; the dialects do. `begin` is the only way to start a request's choices.
"""

import os
import time
from collections.abc import Sequence

from engines.simulated.answers import Wish, answer
from engines.simulated.exchange import ApiError, Exchange
from engines.simulated.kv_tier import KvTier
from engines.simulated.kv_transfer import KvTransfer
from engines.simulated.live import Generation, LiveEngine, Signal
from engines.simulated.metrics import Totals
from engines.simulated.model import SimulatedEngine
from engines.simulated.running import Asked, Running
from engines.simulated.settings import SimulatedEngineSettings
from engines.simulated.text import Tokenizer

_SGLANG_PREEMPT_MARGIN = 10  # its default: a request replaces a running one that is less urgent by more than this


class EngineService:
    """One simulated engine and everything around it."""

    def __init__(self, settings: SimulatedEngineSettings, rank: int) -> None:
        profile = settings.profile
        is_sglang = settings.dialect == "sglang"
        engine = SimulatedEngine(
            profile,
            order=settings.scheduling_policy,
            preempt_margin=_SGLANG_PREEMPT_MARGIN if is_sglang else None,
            block_tokens=settings.block_size,
        )
        self.settings = settings
        self.rank = rank  # among the engines of its server
        self.max_model_len = min(settings.max_model_len, profile.kv_capacity_tokens)
        self.tokenizer = Tokenizer()
        self.live = LiveEngine(engine, settings.speed_up, settings.chunk_interval_s, settings.block_size)
        self.kv = KvTransfer(self.live, settings.speed_up, settings.kv_lease_s) if settings.kv_transfer else None
        folder = settings.kv_tier
        self.tier = KvTier(self.live, folder, settings.model, settings.speed_up) if folder else None
        self.totals = Totals()
        self.running: dict[str, Running] = {}
        self.weight_version = settings.weight_version
        self.weights = settings.weight_version
        self.served_name = settings.model
        self.sleep_level: int | None = None
        self.started_at = time.time()

    def check_queue(self) -> None:
        """Check that the queue has room.

        Raises:
            ApiError: 503, the queue is full.
        """
        limit = self.settings.max_num_queued
        counts = self.live.engine.counts()
        if limit is not None and counts.num_running + counts.num_waiting >= limit:
            self.totals.num_rejected += 1
            raise ApiError(503, "The request queue is full.", "Service Unavailable")

    def answer_limit(self, prompt: Sequence[int], wanted: int | None) -> int:
        """How many tokens the answer may have: as requested, in vLLM cut to what fits; all that fits if not requested.

        Raises:
            ApiError: 400, prompt and answer do not fit.
        """
        size, context = len(prompt), self.max_model_len
        room = context - size
        if not prompt:
            raise ApiError(400, "The prompt must not be empty.", param="prompt")
        if self.settings.dialect == "sglang" and room < 1:
            raise ApiError(
                400, f"The input ({size} tokens) is longer than the model's context length ({context} tokens)."
            )
        if self.settings.dialect == "sglang" and (wanted or 1) > room:
            raise ApiError(
                400, f"Requested token count exceeds the model's maximum context length of {context} tokens."
            )
        if room < 1:
            problem = (
                f"This model's maximum context length is {context} tokens. However, your prompt contains at least "
            )
            raise ApiError(400, f"{problem}{context + 1} input tokens.", param="input_tokens")
        if wanted is not None and wanted > context:
            problem = f"max_tokens={wanted} cannot be greater than max_model_len={context}."
            raise ApiError(400, problem, param="max_tokens")
        return min(wanted or room, room)

    def chunks(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The pieces in which a stream sends these tokens of a choice: one each, or one if chunks have an interval."""
        if self.settings.chunk_interval_s and begin < end:
            return [(begin, end)]
        return [(at, at + 1) for at in range(begin, end)]

    def begin(self, asked: Asked, exchange: Exchange) -> Running:
        """Starts the choices; if the client leaves, they are aborted.

        Raises:
            ApiError: 400, the prompt contains an id that is not a token.
        """
        signal = Signal()
        generations = []
        unique = os.urandom(4).hex()
        mean_tokens = self.settings.mean_output_tokens
        for number, (prompt, wish) in enumerate(zip(asked.prompts, asked.wishes, strict=True)):
            try:
                made = answer(prompt, wish, self.tokenizer, self.weights, mean_tokens)
            except ValueError as error:
                raise ApiError(400, str(error), param="prompt") from error
            id = f"{asked.id}-{number}-{unique}"
            generations.append(Generation(id, made, len(prompt), signal))
            generations[-1].versions.append((self.weight_version, 0))
        running = Running(asked, generations, signal)
        self.running[asked.id] = running
        for generation, prompt in zip(generations, asked.prompts, strict=True):
            self.live.start(generation, prompt, asked.priority, asked.cache_salt, asked.is_stream)
        exchange.on_disconnect(lambda: self.abort(running))
        return running

    def load_weights(self, weights: str) -> None:
        """Load other weights: running generations continue under them from their next token. Only in a pause."""
        self.weights = weights
        self.live.settle()
        for asked, generation, prompt, wish in self._under_way():
            num_made = generation.num_done = self.live.num_made(generation)
            mean_tokens, before = self.settings.mean_output_tokens, generation.answer
            generation.answer = answer(prompt, wish, self.tokenizer, weights, mean_tokens, before, num_made)
            self.live.go_on(generation, prompt, asked.priority, asked.cache_salt)

    def name_weights(self, version: str) -> None:
        """Set the version that answers report from the next token on."""
        self.weight_version = version
        self.live.settle()
        for _, generation, _, _ in self._under_way():
            num_made = self.live.num_made(generation)
            earlier = [span for span in generation.versions if span[1] < num_made]
            generation.versions = [*earlier, (version, num_made)]

    def _under_way(self) -> list[tuple[Asked, Generation, list[int], Wish]]:
        return [
            (running.asked, generation, prompt, wish)
            for running in self.running.values()
            for generation, prompt, wish in zip(
                running.generations, running.asked.prompts, running.asked.wishes, strict=True
            )
            if generation.ended_at is None
        ]

    def finish(self, running: Running) -> None:
        """Counts a request that is over."""
        if self.running.get(running.asked.id) is running:  # clients may use an id twice
            del self.running[running.asked.id]
        running.over.set()
        if self.tier is not None and not running.is_kept:
            self.tier.keep(running)
        for generation in running.generations:
            self.totals.count(generation)

    def abort(self, running: Running) -> int:
        """Aborts a request's choices; returns how many still ran."""
        alive = [generation for generation in running.generations if generation.ended_at is None]
        for generation in alive:
            self.live.abort(generation.id)
        return len(alive)

    async def drained(self) -> None:
        """Returns when everything that runs now has ended."""
        for running in list(self.running.values()):
            await running.over.wait()
