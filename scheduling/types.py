"""The words of the core: what is known of engines and trajectories, events that happen, actions to perform.

All of it is data. Instants (`at`, `*_at`) are seconds on whatever clock the driver uses, and only ever grow.
"""

from collections.abc import Set
from dataclasses import dataclass, field
from enum import StrEnum

from scheduling.cost import EngineProfile
from scheduling.values import value_class


@value_class(frozen=True, slots=True)
class Prediction:
    """Predicted output of a whole trajectory, in tokens; 0 < `total_tokens` <= `p90_tokens`."""

    total_tokens: float
    p90_tokens: float


class TrajectoryState(StrEnum):
    """`active` may send turns; a later turn opens a `finished` one again; those of an `aborted` one are refused."""

    ACTIVE = "active"
    FINISHED = "finished"
    ABORTED = "aborted"


# For where a turn passes: to look a member up in its enumeration takes as long as a call.
ACTIVE, FINISHED, ABORTED = TrajectoryState.ACTIVE, TrajectoryState.FINISHED, TrajectoryState.ABORTED


@dataclass(slots=True, unsafe_hash=True)
class TrajectoryRecord:
    """What must outlive the process about one trajectory: never changed, though not frozen, for one is made at every
    turn, and a frozen one would take a microsecond more.

    Args:
        home: the engine that it entered last, where its KV may still be; whether it is resident there is not written.
        context_tokens: prompt and output of its last finished turn: what its KV holds.
        output_tokens: all tokens that its finished turns made.
        num_turns: its finished turns.
        predicted_tokens: its last predicted total output.
    """

    trajectory_id: str
    group_id: str
    rollout_id: str | None
    state: TrajectoryState
    home: str | None
    context_tokens: int
    output_tokens: int
    num_turns: int
    predicted_tokens: float
    created_at: float
    last_at: float


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is. A relaunched server is another engine and has another `engine_id`.

    Args:
        models: names that it serves.
        slots: turns that it runs at once.
        kv_capacity_tokens: KV tokens that it holds; 0 when it does not say, and then KV does not limit entry.
        profile: how long it takes; None when nobody measured it.
    """

    engine_id: str
    models: Set[str]
    slots: int
    kv_capacity_tokens: int
    tp: int = 1
    profile: EngineProfile | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine says of itself: turns running and waiting inside it, and KV tokens in use."""

    num_running: int = 0
    num_waiting: int = 0
    kv_used_tokens: int = 0


class Fault(StrEnum):
    """Why a leg ended without its turn being finished."""

    ENGINE = "engine"  # refused, reset, died, hung or answered nonsense: another engine may do better
    BUSY = "busy"  # the engine said 429 or 503: it may do better later
    REQUEST = "request"  # the client's mistake: no engine can serve it
    CLIENT_LEFT = "client_left"
    CLOSED = "closed"  # its trajectory was aborted


# --- events -------------------------------------------------------------------------------------------------


@value_class(frozen=True, slots=True)
class TurnArrived:
    """A client asks for a turn.

    Args:
        prompt_tokens: estimated tokens of its whole prompt.
        prediction: the trajectory's total output, predicted now.
        priority: the client's own hint, lower is earlier; it outranks the prediction.
        preamble_id, preamble_tokens: what its prompt begins with and prompts of other groups begin with, too (system
            prompt and tools), by a name, and how much of `prompt_tokens` that is. Looked at with a first turn.
    """

    at: float
    turn_id: str
    trajectory_id: str
    model: str
    prompt_tokens: int
    prediction: Prediction
    group_id: str = ""
    rollout_id: str | None = None
    priority: int = 0
    preamble_id: str = ""
    preamble_tokens: int = 0


@value_class(frozen=True, slots=True)
class TurnProgressed:
    """A running turn has made `output_tokens` so far."""

    at: float
    turn_id: str
    leg: int
    output_tokens: int


@value_class(frozen=True, slots=True)
class TurnFinished:
    """A turn is complete: its prompt had `prompt_tokens`, and it made `output_tokens`."""

    at: float
    turn_id: str
    leg: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class TurnFailed:
    """A turn's leg ended early, or its client left while it waited.

    Args:
        leg: the leg that failed; 0 for a turn that was never dispatched.
        can_retry: nothing of this leg has reached the client.
        retry_after_s: how long a busy engine asks to be left alone; None when it does not say.
    """

    at: float
    turn_id: str
    leg: int
    fault: Fault
    can_retry: bool
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class TurnPaused:
    """A leg was stopped as Preempt asked: the turn has made `output_tokens`, which are kept, and goes on later.

    What is said of its next leg counts these tokens as output too.
    """

    at: float
    turn_id: str
    leg: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class TrajectoryDeclared:
    """A client announces a trajectory before its first turn."""

    at: float
    trajectory_id: str
    prediction: Prediction
    group_id: str = ""
    rollout_id: str | None = None


@dataclass(frozen=True, slots=True)
class TrajectoryClosed:
    """A trajectory ended; with `abort` its turns are stopped and later ones refused."""

    at: float
    trajectory_id: str
    abort: bool = False


@dataclass(frozen=True, slots=True)
class EngineReported:
    """An engine is there. With `accepting` false (cordoned, draining) it only ends what it runs.

    Args:
        load: for whoever reads the event log; the scheduler goes by its own counts, which are newer.
    """

    at: float
    spec: EngineSpec
    load: EngineLoad = field(default_factory=EngineLoad)
    accepting: bool = True


@dataclass(frozen=True, slots=True)
class EngineLeaving:
    """An engine that is not accepting will soon be gone: who lives there in a tool call moves while its KV is there."""

    at: float
    engine_id: str


@dataclass(frozen=True, slots=True)
class EngineLost:
    """An engine is gone, and its KV with it."""

    at: float
    engine_id: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: `next_wakeup()` asked for it."""

    at: float


Event = (
    TurnArrived
    | TurnProgressed
    | TurnFinished
    | TurnFailed
    | TurnPaused
    | TrajectoryDeclared
    | TrajectoryClosed
    | EngineReported
    | EngineLeaving
    | EngineLost
    | Tick
)


# --- actions ------------------------------------------------------------------------------------------------


@value_class(frozen=True, slots=True)
class Save:
    """Write this record down, before what follows it is done."""

    record: TrajectoryRecord


@value_class(frozen=True, slots=True)
class Dispatch:
    """Send a turn to an engine.

    Args:
        leg: counts the turn's legs from 1; what is later said of the leg carries it.
        priority: the engine's own priority, lower is earlier.
        why: the reason in a few words, for people.
    """

    turn_id: str
    leg: int
    engine_id: str
    priority: int
    why: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop a running leg at its engine and say TurnFailed with this fault."""

    turn_id: str
    leg: int
    fault: Fault


@dataclass(frozen=True, slots=True)
class Preempt:
    """Stop a running leg, keep what it made, and say TurnPaused; or TurnFinished, if that came first."""

    turn_id: str
    leg: int


class Refusal(StrEnum):
    """Why a turn is not served."""

    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    TRAJECTORY_ABORTED = "trajectory_aborted"
    ENGINE_FAILED = "engine_failed"
    DUPLICATE_TURN = "duplicate_turn"


@dataclass(frozen=True, slots=True)
class Reject:
    """Tell the client no. `retry_after_s` is None where trying again is useless."""

    turn_id: str
    refusal: Refusal
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class Move:
    """A trajectory in a tool call has another home: bring its KV there from `source`, as far as that can be done."""

    trajectory_id: str
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Forget:
    """A trajectory's time is over: drop its records."""

    trajectory_id: str


Action = Save | Dispatch | Abort | Preempt | Move | Reject | Forget
