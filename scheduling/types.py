"""The vocabulary of the core: what is known of engines and trajectories, events that happen, actions to perform.

All of it is data. Instants (`at`, `*_at`) are seconds on the driver's clock, and only ever grow.
"""

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum

from scheduling.cost import EngineProfile
from scheduling.values import value_class


@value_class(frozen=True, slots=True)
class Prediction:
    """Predicted output of a whole trajectory, in tokens; 0 < `total_tokens` <= `p90_tokens`."""

    total_tokens: float
    p90_tokens: float


class TrajectoryState(StrEnum):
    """`active` may send turns; a later turn reopens a `finished` one; turns of an `aborted` one are refused."""

    ACTIVE = "active"
    FINISHED = "finished"
    ABORTED = "aborted"


# For the hot path: looking up an enum member takes as long as a call.
ACTIVE, FINISHED, ABORTED = TrajectoryState.ACTIVE, TrajectoryState.FINISHED, TrajectoryState.ABORTED


@dataclass(slots=True, unsafe_hash=True)
class TrajectoryRecord:
    """What must outlive the process about one trajectory. Never changed, though not frozen: one is made at every turn,
    and a frozen one would take a microsecond more.

    Args:
        home: the engine that it entered last, where its KV may still be; whether it is resident there is not recorded.
        context_tokens: prompt and output of its last finished turn: the tokens that its KV holds.
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
    """What an engine is. A relaunched server is another engine with another `engine_id`.

    Args:
        models: names that it serves.
        slots: turns that it runs at once.
        kv_capacity_tokens: KV tokens that it holds; 0 if it does not report them, and then KV does not limit entry.
        profile: its timing; None if it was not measured.
        max_context_tokens: of the longest context that it can ever hold; 0: as many as its KV.
        slots_are_assumed: nobody said how many turns it runs at once, so that is searched for (slot_search.py).
        server_id: the same for all engines of one process, which fail together; "" if it has this one only.
    """

    engine_id: str
    models: Set[str]
    slots: int
    kv_capacity_tokens: int
    tp: int = 1
    profile: EngineProfile | None = None
    max_context_tokens: int = 0
    slots_are_assumed: bool = False
    server_id: str = ""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine reports about itself: turns running and waiting inside it, and KV tokens in use."""

    num_running: int = 0
    num_waiting: int = 0
    kv_used_tokens: int = 0


class Fault(StrEnum):
    """Why a leg ended before its turn was finished."""

    ENGINE = "engine"  # refused, reset, died, hung or answered wrongly: another engine may do better
    BUSY = "busy"  # the engine answered 429 or 503: it may do better later
    REQUEST = "request"  # the client's mistake: no engine can serve it
    CLIENT_LEFT = "client_left"
    CLOSED = "closed"  # its trajectory was aborted


# --- events -------------------------------------------------------------------------------------------------


@value_class(frozen=True, slots=True)
class TurnArrived:
    """A client asks for a turn.

    Args:
        prompt_tokens: estimated tokens of its whole prompt.
        prediction: the trajectory's total output, as predicted when this turn arrives.
        priority: the client's own; lower is earlier, and it outranks the prediction.
        prompt_parts: what its prompt consists of, as far as other prompts may begin with it, too: in order, each part
            with its tokens. A part's name stands for the prompt from its beginning to the part's end. Used only with a
            first turn.
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
    prompt_parts: tuple[tuple[str, int], ...] = ()


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
    """A leg of a turn ended early, or the turn's client left while it waited.

    Args:
        leg: the leg that failed; 0 if the turn was never dispatched.
        can_retry: whether nothing of this leg has reached the client.
        retry_after_s: how long a busy engine asks to be left alone; None if it does not say.
        broke_off: whether its engine broke off before it had made anything, as one does that this turn kills.
        has_made: whether its leg made tokens.
    """

    at: float
    turn_id: str
    leg: int
    fault: Fault
    can_retry: bool
    retry_after_s: float | None = None
    broke_off: bool = False
    has_made: bool = False


@dataclass(frozen=True, slots=True)
class TurnPaused:
    """A leg was stopped as Preempt asked. The turn has made `output_tokens`, which are kept, and goes on later.

    Events about its next leg count these tokens as output, too.
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
    """An engine is there. If not `accepting` (cordoned, draining), it only finishes what it runs.

    Args:
        load: what the engine says of itself at this moment; None if it was not asked anew.
    """

    at: float
    spec: EngineSpec
    load: EngineLoad | None = None
    accepting: bool = True


@dataclass(frozen=True, slots=True)
class EngineLeaving:
    """An engine that is not accepting will soon be gone: its residents in a tool call move while their KV is there."""

    at: float
    engine_id: str


@dataclass(frozen=True, slots=True)
class EngineLost:
    """An engine is gone, and its KV with it."""

    at: float
    engine_id: str


@dataclass(frozen=True, slots=True)
class ModelGone:
    """No engine serves this model any more, nor will: one that did came back without it."""

    at: float
    model: str


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
    | ModelGone
    | Tick
)


# --- actions ------------------------------------------------------------------------------------------------


@value_class(frozen=True, slots=True)
class Save:
    """Write this record down before what follows it is done."""

    record: TrajectoryRecord


@value_class(frozen=True, slots=True)
class Dispatch:
    """Send a turn to an engine.

    Args:
        leg: counts the turn's legs from 1; later events about the leg carry it.
        priority: the engine's own priority; lower is earlier.
        why: the reason in a few words, for people.
        send_at: not before then, so that it begins together with others (gathering.py); 0: at once.
    """

    turn_id: str
    leg: int
    engine_id: str
    priority: int
    why: str
    send_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop a running leg at its engine and report TurnFailed with this fault."""

    turn_id: str
    leg: int
    fault: Fault


@dataclass(frozen=True, slots=True)
class Preempt:
    """Stop a running leg, keep what it made, and report TurnPaused; or TurnFinished if that came first."""

    turn_id: str
    leg: int


class Refusal(StrEnum):
    """Why a turn is not served."""

    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    TRAJECTORY_ABORTED = "trajectory_aborted"
    ENGINE_FAILED = "engine_failed"
    ENGINES_KILLED = "engines_killed"
    MODEL_GONE = "model_not_found"
    DUPLICATE_TURN = "duplicate_turn"


@dataclass(frozen=True, slots=True)
class Reject:
    """Refuse the turn to its client. `retry_after_s` is None if trying again is useless."""

    turn_id: str
    refusal: Refusal
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class Move:
    """A trajectory in a tool call has a new home: bring its KV there from `source`, as far as possible."""

    trajectory_id: str
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Forget:
    """A trajectory's time is over: drop its records."""

    trajectory_id: str


Action = Save | Dispatch | Abort | Preempt | Move | Reject | Forget
