"""One agent of a simulated rollout: its position in its trajectory, and the time its turns have taken so far."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from engines.simulated.prefix_cache import Piece
from predictor.outcomes import UNKNOWN_TOOL
from predictor.outcomes import outcome as tool_outcome
from predictor.progress import Progress
from predictor.status import TIMEOUT
from scheduling.types import Dispatch, Prediction
from simulator.outcome import PREDICTED_TURNS, Ending, PredictionMade, TrajectoryOutcome
from workloads.trajectories import Trajectory, Turn

UNKNOWN_STATUS = "?"
CHARACTERS_PER_TOKEN = 4
Part = tuple[str, int]
"""A part of a first prompt that others may begin with as well: its name and its tokens."""

# An engine's work for a turn grows with the pieces of its context; groups with prompts of this many lengths are rare.
_MAX_PROMPT_PARTS = 32


def shared_prompts(trajectories: Collection[Trajectory]) -> dict[str, tuple[Part, ...]]:
    """For each group, the prompt that its siblings share, as far as the shorter one goes.

    First comes the preamble, which other groups have as well; the part of it that not all siblings of a group have
    counts as the group's own. The prompt is cut at the lengths that siblings have, or at some of them if there are
    many, so that a short one's prompt consists of whole parts of a longer one's.
    """
    lengths: dict[str, set[int]] = {}
    for trajectory in trajectories:
        lengths.setdefault(trajectory.group_id, set()).add(trajectory.context_tokens)
    preambles = shared_preambles(trajectories)
    return {group_id: _parts(group_id, preambles[group_id], sorted(ends)) for group_id, ends in lengths.items()}


def shared_preambles(trajectories: Collection[Trajectory]) -> dict[str, int]:
    """For each group, the tokens of the preamble that all its siblings have."""
    preambles: dict[str, int] = {}
    for trajectory in trajectories:
        preamble = preambles.get(trajectory.group_id, trajectory.preamble_tokens)
        preambles[trajectory.group_id] = min(preamble, trajectory.preamble_tokens)
    return preambles


def _parts(group_id: str, preamble_tokens: int, ends: Sequence[int]) -> tuple[Part, ...]:
    some = ends[:: -(-len(ends) // _MAX_PROMPT_PARTS)]
    cuts = [preamble_tokens, *[end for end in some if end > preamble_tokens]]
    own = [(f"{group_id}/{index}", end - begin) for index, (begin, end) in enumerate(pairwise(cuts))]
    # Within a workload, preambles of one length are the same.
    return ((f"preamble of {preamble_tokens}", preamble_tokens), *own) if preamble_tokens else tuple(own)


@dataclass(slots=True, eq=False)
class Agent:
    """A running trajectory.

    Args:
        prompt: its group's, as `shared_prompts` cuts it.
        turn: index of the turn that it asks for or, while a tool runs, of the next one.
        context_tokens: prompt of that turn.
        made_tokens: output of the finished turns.
        leg: of the turn, as the scheduler counts; 0 until it is dispatched.
        engine_id: where the turn runs; between turns, where the last one ran.
        priority: of the turn at its engine.
        is_asking: a turn of it is waiting or running.
        is_on_engine: the turn was submitted to an engine.
        is_admitted: the engine runs it.
        arrives_at: when its request reaches the engine's front end, and then, when that and any KV in transfer reach
            the engine.
        kv_arrives_at: when the KV in transfer does; 0 if there is none.
        brings: the pieces whose KV is in transfer to the engine, as far as its old engine holds them.
        since: when its current wait, or its current run on an engine, began.
        rested_at: when its last turn ended, or this one was paused: the time by which all its KV existed.
        num_retries: how often it asked for this turn again.
        is_pausing: its leg is being stopped, and its output is kept.
        kept_tokens: output of earlier legs of this turn.
    """

    trajectory: Trajectory
    prompt: Sequence[Part]
    turn: int = 0
    context_tokens: int = 0
    made_tokens: int = 0
    leg: int = 0
    engine_id: str | None = None
    priority: int = 0
    is_asking: bool = False
    is_on_engine: bool = False
    is_admitted: bool = False
    arrives_at: float | None = None
    kv_arrives_at: float = 0.0
    brings: Sequence[Piece] = ()
    since: float = 0.0
    rested_at: float = 0.0
    num_retries: int = 0
    is_pausing: bool = False
    kept_tokens: int = 0
    num_pauses: int = 0
    ending: Ending | None = None
    ended_at: float = 0.0
    queued_s: float = 0.0
    engine_s: float = 0.0
    tool_s: float = 0.0
    num_legs: int = 0
    num_moves: int = 0
    tool_outcomes: list[str] = field(default_factory=list)
    predictions: list[PredictionMade] = field(default_factory=list)

    @property
    def turn_id(self) -> str:
        return f"{self.trajectory.trajectory_id}/{self.turn}"

    @property
    def has_leg(self) -> bool:
        """Whether an engine has the turn, or the turn is on its way to one."""
        return self.is_on_engine or self.arrives_at is not None

    @property
    def now_asks(self) -> Turn:
        """The turn that it asks for."""
        return self.trajectory.turns[self.turn]

    def pieces(self, num_tokens: int) -> Sequence[Piece]:
        """The pieces that the first `num_tokens` tokens of its context fill: as much of the group's prompt as it has,
        then its own.

        Its own is one piece that grows: one piece per turn would cost the square of the turns.
        """
        pieces: list[Piece] = []
        left = num_tokens
        for piece in self.prompt_parts(min(num_tokens, self.trajectory.context_tokens)):
            pieces.append(piece)
            left -= piece[1]
        if left:
            # Not the id alone: a trajectory may be named like a group, above all like its own.
            pieces.append(((self.trajectory.group_id, self.trajectory.trajectory_id), left))
        return pieces

    def prompt_parts(self, num_tokens: int) -> Iterator[Part]:
        """The parts of the group's prompt that are whole within its first `num_tokens` tokens."""
        for part in self.prompt:
            num_tokens -= part[1]
            if num_tokens < 0:
                return
            yield part

    def take_prompt(self, at: float) -> None:
        """Ask for the next turn: the tool's output, or at first the prompt, joins the context."""
        self.context_tokens += self.now_asks.new_tokens if self.turn else self.trajectory.context_tokens
        self.is_asking = True
        self.since = at if self.turn else 0.0
        self.num_retries = 0

    def ask(self) -> None:
        """Begin the turn, or begin it again after it was rejected."""
        self.leg = 0
        self.kept_tokens = 0

    def begin_leg(self, dispatch: Dispatch) -> None:
        """Send the turn to an engine."""
        self.num_moves += self.engine_id is not None and self.engine_id != dispatch.engine_id
        self.num_legs += 1
        self.leg = dispatch.leg
        self.engine_id = dispatch.engine_id
        self.priority = dispatch.priority

    def admit(self, at: float) -> None:
        """Note that the engine begins to run the turn."""
        self.queued_s += at - self.since
        self.since = at
        self.is_admitted = True

    def interrupt(self, at: float) -> None:
        """Note that the turn waits again, here or in its engine's queue, or is over."""
        if self.is_admitted:
            self.engine_s += at - self.since
        else:
            self.queued_s += at - self.since
        self.since = at
        self.is_admitted = False

    def pause(self, at: float, num_generated: int) -> int:
        """Stop the leg after `num_generated` tokens. Returns the tokens kept over all legs."""
        self.is_pausing = self.is_on_engine = False
        self.rested_at = at
        self.arrives_at = None
        self.num_pauses += 1
        self.kept_tokens += num_generated
        return self.kept_tokens

    def finish_turn(self, at: float, timed_out_s: float | None) -> float:
        """Finish the turn: its answer joins the context.

        Args:
            timed_out_s: the tool hangs, and ends after this long.

        Returns:
            Seconds of the tool call that follows.
        """
        turn = self.now_asks
        self.context_tokens += turn.output_tokens
        self.made_tokens += turn.output_tokens
        self.turn += 1
        self.rested_at = at
        self.is_asking = self.is_on_engine = self.is_pausing = False
        if self.turn == len(self.trajectory.turns):
            return 0.0
        # A simulated tool has only the size of its result, and whether it timed out.
        characters = self.now_asks.new_tokens * CHARACTERS_PER_TOKEN
        status = UNKNOWN_STATUS if timed_out_s is None else TIMEOUT
        self.tool_outcomes.append(tool_outcome(UNKNOWN_TOOL, characters, status))
        tool_s = turn.tool_s if timed_out_s is None else timed_out_s
        self.tool_s += tool_s
        return tool_s

    def progress(self, tells_outcomes: bool) -> Progress:
        """What a predictor is told before the turn, and at the end; tool outcomes only if it reads them."""
        return Progress(
            trajectory_id=self.trajectory.trajectory_id,
            group_id=self.trajectory.group_id,
            prompt_id=self.trajectory.prompt_id,
            prompt_tokens=self.trajectory.context_tokens,
            context_tokens=self.context_tokens,
            output_tokens=self.made_tokens,
            last_output_tokens=self.trajectory.turns[self.turn - 1].output_tokens if self.turn else 0,
            num_turns=self.turn,
            outcomes=tuple(self.tool_outcomes) if tells_outcomes else (),
        )

    def note_prediction(self, prediction: Prediction) -> None:
        """Record the prediction made before this turn was first asked for, if reports show this turn."""
        if self.turn in PREDICTED_TURNS and not self.num_retries:
            self.predictions.append(
                PredictionMade(self.turn, self.made_tokens, prediction.total_tokens, prediction.p90_tokens)
            )

    def outcome(self) -> TrajectoryOutcome:
        """The trajectory's outcome."""
        assert self.ending is not None
        return TrajectoryOutcome(
            trajectory_id=self.trajectory.trajectory_id,
            group_id=self.trajectory.group_id,
            ending=self.ending,
            ended_at=self.ended_at,
            num_turns=self.turn,
            output_tokens=self.made_tokens,
            context_tokens=self.context_tokens,
            queued_s=self.queued_s,
            engine_s=self.engine_s,
            tool_s=self.tool_s,
            num_legs=self.num_legs,
            num_moves=self.num_moves,
            engine_id=self.engine_id,
            num_pauses=self.num_pauses,
            predictions=tuple(self.predictions),
        )
