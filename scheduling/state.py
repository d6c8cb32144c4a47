"""The scheduler's state of turns and trajectories, and the queue type. Only the scheduler's parts touch it."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter

from scheduling.order import TurnFacts
from scheduling.types import ACTIVE, Prediction, TrajectoryRecord, TrajectoryState, TurnArrived

Key = tuple[int, float, int]
"""The client's own priority, the policy's order, and the turn's number: lower is earlier."""

PartName = tuple[str, str]
"""The name of a part of a prompt: the model, because adapters of one engine share no KV, and the name in the event."""

PromptPart = tuple[PartName, int]
"""A part of a prompt, and its tokens."""

_key = attrgetter("key")


class TurnState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


WAITING, RUNNING, ENDED = TurnState.WAITING, TurnState.RUNNING, TurnState.ENDED

TRANSITIONS = {
    WAITING: {RUNNING, ENDED},
    RUNNING: {WAITING, ENDED},
    ENDED: set[TurnState](),
}


@dataclass(slots=True, eq=False)
class Turn:
    """One turn between its arrival and its end.

    Args:
        key: waiting turns are served in the order of their keys; no two are equal.
        queue: the queue that it waits in.
        queued_at: when its present or latest wait began.
        avoided: engines that failed it, each with the instant from which it may be tried again.
        kept_tokens: output of its earlier legs, from which its next leg goes on.
        claim_tokens: the KV that it will hold: its prompt, the output it has made, and its expected answer.
        num_faults: legs that engines failed; busy engines do not count.
        broken: engines that broke off one of its legs before they had made anything of it.
        began_at: when its running leg began.
        stop_asked_at: when its running leg was asked to stop, if it was.
    """

    turn_id: str
    trajectory: "Trajectory"
    model: str
    facts: TurnFacts
    key: Key
    queued_at: float
    state: TurnState = WAITING
    leg: int = 0
    queue: "Queue | None" = None
    avoided: dict[str, float] = field(default_factory=dict)
    kept_tokens: int = 0
    claim_tokens: int = 0
    num_faults: int = 0
    broken: set[str] = field(default_factory=set)
    began_at: float = 0.0
    stop_asked_at: float | None = None

    @property
    def context_tokens(self) -> int:
        """The context that its next leg begins with: its prompt and the output it has made."""
        return self.facts.prompt_tokens + self.kept_tokens

    def become(self, state: TurnState) -> None:
        """Change state, as the transition table allows."""
        assert state in TRANSITIONS[self.state], f"turn {self.turn_id}: {self.state} -> {state}"
        self.state = state


@dataclass(slots=True, eq=False)
class Trajectory:
    """One trajectory: the data of its record, its live turns, and the key of its last turn.

    Args:
        prompt: the parts of its first turn's prompt that others may hold as well, each with its tokens. Empty if they
            are unknown: no turn has been asked for yet, the first one came to an earlier process, or named none.
        first_prompt_tokens: the tokens of these parts.
    """

    trajectory_id: str
    ordinal: int
    group_id: str
    rollout_id: str | None
    created_at: float
    last_at: float
    prediction: Prediction
    state: TrajectoryState = ACTIVE
    home: str | None = None
    context_tokens: int = 0
    output_tokens: int = 0
    num_turns: int = 0
    prompt: tuple[PromptPart, ...] = ()
    first_prompt_tokens: int = 0
    key: Key = (0, 0.0, 0)
    turns: dict[str, Turn] = field(default_factory=dict)

    @classmethod
    def restored(cls, record: TrajectoryRecord, ordinal: int) -> "Trajectory":
        """A trajectory of an earlier process."""
        return cls(
            trajectory_id=record.trajectory_id,
            ordinal=ordinal,
            group_id=record.group_id,
            rollout_id=record.rollout_id,
            created_at=record.created_at,
            last_at=record.last_at,
            prediction=Prediction(record.predicted_tokens, record.predicted_tokens),
            state=record.state,
            home=record.home,
            context_tokens=record.context_tokens,
            output_tokens=record.output_tokens,
            num_turns=record.num_turns,
        )

    def note_first_prompt(self, asked: TurnArrived) -> None:
        """Note the parts of its first turn's prompt, as far as its tokens go."""
        parts, left = [], asked.prompt_tokens
        for name, tokens in asked.prompt_parts:
            if tokens > left:
                tokens = left
            if tokens > 0:
                parts.append(((asked.model, name), tokens))
                left -= tokens
        self.prompt = tuple(parts)
        self.first_prompt_tokens = asked.prompt_tokens - left

    def prompt_within(self, context_tokens: int) -> tuple[PromptPart, ...]:
        """The parts of its first prompt that a context of so many tokens holds.

        If that is less than the prompt, the estimate was too long, and each part is cut in proportion. If it is less
        than half, the agent has cut the context down, and no part is left.
        """
        if context_tokens >= self.first_prompt_tokens:
            return self.prompt
        if 2 * context_tokens < self.first_prompt_tokens:
            return ()
        return tuple([(name, tokens * context_tokens // self.first_prompt_tokens) for name, tokens in self.prompt])

    def cut_prompt(self, context_tokens: int) -> None:
        """Cut its first prompt to what a context of so many tokens holds, for good."""
        self.prompt = self.prompt_within(context_tokens)
        self.first_prompt_tokens = sum([tokens for _, tokens in self.prompt])

    def remaining_tokens(self) -> float:
        """Predicted output still to come; never less than one token while it is active."""
        if self.state is not ACTIVE:
            return 0.0
        remaining = self.prediction.total_tokens - self.output_tokens
        return remaining if remaining > 1.0 else 1.0

    def share(self, context_tokens: int) -> tuple[float, float, float]:
        """What it adds to an engine's work: remaining output, mean context, 90th percentile of remaining output."""
        made, prediction = self.output_tokens, self.prediction
        remaining = prediction.total_tokens - made if self.state is ACTIVE else 0.0
        if remaining < 1.0 and self.state is ACTIVE:
            remaining = 1.0
        p90 = prediction.p90_tokens - made
        return remaining, context_tokens + remaining / 2, p90 if p90 > remaining else remaining

    def record(self) -> TrajectoryRecord:
        """The record to save."""
        return TrajectoryRecord(
            self.trajectory_id,
            self.group_id,
            self.rollout_id,
            self.state,
            self.home,
            self.context_tokens,
            self.output_tokens,
            self.num_turns,
            self.prediction.total_tokens,
            self.created_at,
            self.last_at,
        )


class Queue:
    """Waiting turns, first key first. A sorted list: 20,000 pointers move in microseconds, and any turn can leave."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []

    def push(self, turn: Turn) -> None:
        insort(self._turns, turn, key=_key)
        turn.queue = self

    def remove(self, turn: Turn) -> None:
        del self._turns[bisect_left(self._turns, turn.key, key=_key)]
        turn.queue = None

    def head(self) -> Turn | None:
        return self._turns[0] if self._turns else None

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        return iter(self._turns)
