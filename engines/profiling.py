"""Fits an engine profile to measured batches: what to measure, what the simulated engine predicts, and the fit.

Pure: no clock, no sockets; `heddle profile` measures. The wall time of a batch is linear in the profile's coefficients
as long as the same steps have the same requests. So the simulated engine itself, played with dual numbers, gives the
columns of the least-squares problem: a fit inverts the simulator, including chunked prefill and shrinking
batches. Two numbers are no coefficients, and the best of several is taken: the least tokens of a prefill, and the gap
between requests. If they come one after the other, the coefficients decide which step a request meets, so the fit is
repeated from where it led (Gauss and Newton), for the gaps that explain most after the first round.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from math import sqrt
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from engines.dual import slopes_of, variables
from engines.simulated.model import SimulatedEngine
from engines.simulated.prefix_cache import Piece
from engines.simulated.sequence import SimulatedSequence
from scheduling.cost import EngineProfile

BLOCK_TOKENS = 16  # of the prefix cache
NUM_COEFFICIENTS = 6  # of decode: base, per sequence, per KV; of prefill: linear, quadratic, per step
_PER_STEP = 5
LEAST_TOKENS = (0, 128, 256, 384, 512, 768, 1024, 1536, 2048)  # an H200 with a model of 8B has about 1,000
GAPS_MS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # vLLM on an H200's machine has about 2
_NUM_ROUNDS = 3  # of a fit with a gap; later ones go back and forth
_NUM_FOLLOWED = 3  # of the gaps, after the first round
_LITTLE_MS = 1e-9  # instead of a coefficient of 0, which the engine may leave out
_SOON_S = 1e-6  # A batch's other requests come while the first one is prefilled.
VISIT_TOKENS = 32
_NUM_VISITS = 12
_NUM_REWEIGHTINGS = 20
_SMALL_RESIDUAL = 1e-3  # Relative errors below one per mille all get the same weight.
_LITTLE_GAIN = 1e-9  # the cosine of a column and a residual, for rounding
Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Identical requests sent at once. An idle engine takes the first as it comes, and the others after its step.

    Args:
        is_cached: their prompts were sent just before, so that hardly anything is prefilled; otherwise they are new.
        num_visits: so many requests of `VISIT_TOKENS` new tokens and one token of answer came and went, one after the
            other, while it ran. They show how long a prefill holds up the decoding of others, which is not how long it
            takes: that has the time of a request beside the steps.
    """

    num_sequences: int
    prompt_tokens: int
    output_tokens: int
    is_cached: bool = False
    num_visits: int = 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """A batch, and the seconds from its sending to the end of its last answer."""

    batch: Batch
    wall_s: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A profile, and how well it explains the measurements.

    Args:
        predicted_s: for each measurement, in their order.
        mape: mean absolute error of the predictions, as a share of the measured times.
    """

    profile: EngineProfile
    predicted_s: tuple[float, ...]
    mape: float


def plan(slots: int, kv_capacity_tokens: int, max_context_tokens: int, *, is_quick: bool) -> list[Batch]:
    """Batches that distinguish the coefficients, to be measured in this order.

    First single prefills of several lengths; then, at several batch sizes and contexts, a prefill and answers to the
    same prompts. If those prompts were new, a large batch would be nearly all prefill, and show little of the cost of
    its KV. Last, answers that others visit: alone, and in a batch of half of the slots.

    Raises:
        ValueError: the engine holds too little to vary anything.
    """
    output_tokens = 64 if is_quick else 128
    room = min(max_context_tokens, kv_capacity_tokens)
    if room < 8 * output_tokens:
        raise ValueError(f"the engine holds contexts of {room} tokens: too little to fit a profile to")
    longest = min(room - output_tokens, 4096 if is_quick else 16_384)
    batches = [Batch(1, tokens, 1) for tokens in _spread(64, longest, 4 if is_quick else 6)]
    for num_sequences in _spread(1, slots, 3 if is_quick else 5):
        # Nine tenths: the engine may round blocks up, and must not preempt.
        share = min(room, kv_capacity_tokens * 9 // 10 // num_sequences)
        answers = [(tokens, output_tokens) for tokens in _spread(64, min(longest, share - output_tokens), 3)]
        # A longer answer separates the cost of a step from that of a request.
        answers.append((64, 4 * output_tokens))
        for prompt_tokens, num_tokens in answers:
            if 64 <= prompt_tokens <= share - num_tokens:
                batches.append(Batch(num_sequences, prompt_tokens, 1))
                batches.append(Batch(num_sequences, prompt_tokens, num_tokens, is_cached=True))
    if slots > 1:  # else visits would wait for the slot
        for num_sequences in sorted({1, slots // 2}):
            if 64 + 4 * output_tokens <= min(room, (kv_capacity_tokens * 9 // 10 - VISIT_TOKENS) // num_sequences):
                batches.append(Batch(num_sequences, 64, 1))
                batches.append(Batch(num_sequences, 64, 4 * output_tokens, is_cached=True, num_visits=_NUM_VISITS))
    return batches


def fit(measurements: Sequence[Measurement], engine: EngineProfile) -> Fit:
    """The non-negative coefficients with the least mean absolute relative error.

    Absolute, not squared, so that a batch spoilt by a busy machine counts no more than any other.

    Args:
        engine: gives name, slots, capacity and source; everything else is replaced.

    Raises:
        ValueError: there are too few different batches to distinguish the coefficients.
    """
    # Where nothing was visited, a prefill's step and the rest of its request cannot be told apart: all is the latter's.
    are_visited = any(measurement.batch.num_visits for measurement in measurements)
    num_unknown = NUM_COEFFICIENTS + are_visited
    if len({measurement.batch for measurement in measurements}) < num_unknown:
        raise ValueError(f"a fit needs {num_unknown} different batches, not {len(measurements)}")
    together = replace(_with_coefficients(engine, [1.0] * NUM_COEFFICIENTS), request_gap_ms=0.0)
    fits = [_fit(measurements, replace(together, prefill_least_tokens=n), are_visited, 1) for n in LEAST_TOKENS]
    at_once = min(fits, key=_mape).profile
    apart = [_fit(measurements, replace(at_once, request_gap_ms=ms), are_visited, 1) for ms in GAPS_MS]
    apart.sort(key=_mape)
    further = [_fit(measurements, one.profile, are_visited, _NUM_ROUNDS - 1) for one in apart[:_NUM_FOLLOWED]]
    return min((*fits, *apart, *further), key=_mape)


def _fit(measurements: Sequence[Measurement], start: EngineProfile, are_visited: bool, num_rounds: int) -> Fit:
    """The best fit with the `prefill_least_tokens` and `request_gap_ms` of where it starts."""
    walls = np.array([measurement.wall_s for measurement in measurements])
    batches = [measurement.batch for measurement in measurements]
    fits = list[Fit]()
    for _ in range(num_rounds):
        known_s, columns = _linear(start, batches)
        columns[:, _PER_STEP] *= are_visited
        columns = np.column_stack((columns, np.full(len(batches), 1e-3)))
        # Dividing by the wall time gives a second of a long batch the same weight as a millisecond of a short one.
        *coefficients, request_ms = _least_absolute(columns / walls[:, None], (walls - known_s) / walls).tolist()
        start = replace(_with_coefficients(start, coefficients), request_ms=request_ms)
        predicted = np.array(simulated_s(start, batches)) + request_ms / 1000
        mape = fmean(abs(float(error)) for error in predicted / walls - 1)
        fits.append(Fit(start, tuple(map(float, predicted)), mape))
    return min(fits, key=_mape)


def _mape(one: Fit) -> float:
    return one.mape


def _linear(profile: EngineProfile, batches: Sequence[Batch]) -> tuple[Matrix, Matrix]:
    """The seconds of each batch as a linear function of the coefficients, by the simulated engine: those that none of
    them causes, and those that each adds when it is larger by 1."""
    values = [coefficient or _LITTLE_MS for coefficient in _coefficients(profile)]
    simulated = simulated_s(_with_coefficients(profile, variables(values)), batches)
    columns = np.array([slopes_of(seconds, NUM_COEFFICIENTS) for seconds in simulated])
    return np.array([float(seconds) for seconds in simulated]) - columns @ values, columns


def simulated_s(profile: EngineProfile, batches: Sequence[Batch]) -> list[float]:
    """How long each batch takes on a simulated engine of this profile. A visit is prefilled in one of the batch's
    steps, and makes it longer. What a request takes beside the steps is not in it, but for the gaps between requests.

    Equal batches are played once, and cached ones on an engine that new ones have just left.
    """
    gap_s = profile.request_gap_ms / 1000
    visit_s = profile.prefill_s(VISIT_TOKENS) + profile.prefill_launch_s(VISIT_TOKENS)
    played = [replace(batch, num_visits=0) for batch in batches]
    took_s: dict[Batch, float] = {}
    left: dict[Batch, tuple[SimulatedEngine, float]] = {}
    for batch in sorted(set(played), key=lambda batch: (batch.is_cached, batch.output_tokens)):
        prompts = replace(batch, output_tokens=1, is_cached=False)
        engine, began_at = SimulatedEngine(profile), 0.0
        if batch.is_cached:
            engine, began_at = left.get(prompts) or (engine, _play(engine, 0.0, prompts, 0.0))
        ended_at = _play(engine, began_at, batch, gap_s)
        took_s[batch], left[prompts] = ended_at - began_at, (engine, ended_at)
    return [took_s[one] + batch.num_visits * visit_s for one, batch in zip(played, batches, strict=True)]


def to_toml(short_name: str, profile: EngineProfile) -> str:
    """The profile as a file that `engines.profiles.load_profile` reads, under `short_name-gpu-tpN`."""
    decode = [profile.decode_base_ms, profile.decode_per_sequence_ms, profile.decode_per_kv_ktoken_ms]
    prefill = [profile.prefill_per_ktoken_ms, profile.prefill_per_ktoken2_ms]
    return f"""\
# Measured end to end: the engine's overhead is in kernel_ms. For the fields see engines/profiles/h100.toml.
gpu = {_text(profile.gpu)}
slots_per_gpu = {profile.slots / profile.tp}
source = {_text(profile.source)}

[overhead_ms]
base = 0.0
per_sequence = 0.0

[models.{_text(short_name)}]
model = {_text(profile.model)}
kv_bytes_per_token = {profile.kv_bytes_per_token}
engines = [
    {{ tp = {profile.tp}, kernel_ms = {_numbers(decode)}, prefill_ms = {_numbers(prefill)}, \
kv_capacity_tokens = {profile.kv_capacity_tokens}, request_ms = {_number(profile.request_ms)}, \
request_gap_ms = {_number(profile.request_gap_ms)}, \
prefill_step_ms = {_number(profile.prefill_step_ms)}, prefill_least_tokens = {profile.prefill_least_tokens} }},
]
"""


def _play(engine: SimulatedEngine, at: float, batch: Batch, gap_s: float) -> float:
    """When a batch that begins `at` ends; the n-th prompts of all batches have the same tokens."""

    kept_tokens = batch.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS

    def pieces(number: int, num_tokens: int) -> list[Piece]:
        return [((number,), kept_tokens)] if num_tokens >= kept_tokens else []

    for number in range(batch.num_sequences):
        sequence = SimulatedSequence(
            f"{number}/{batch.output_tokens}", batch.prompt_tokens, batch.output_tokens, partial(pieces, number)
        )
        engine.submit(at + number * gap_s + (_SOON_S if number else 0.0), sequence)
    while (due_at := engine.next_event_at()) is not None:
        engine.advance(due_at)
        at = due_at
    return at


def _coefficients(profile: EngineProfile) -> list[float]:
    return [
        profile.decode_base_ms,
        profile.decode_per_sequence_ms,
        profile.decode_per_kv_ktoken_ms,
        profile.prefill_per_ktoken_ms,
        profile.prefill_per_ktoken2_ms,
        profile.prefill_step_ms,
    ]


def _with_coefficients(engine: EngineProfile, coefficients: Sequence[float]) -> EngineProfile:
    base, per_sequence, per_kv, linear, quadratic, per_step = coefficients
    return replace(
        engine,
        decode_base_ms=base,
        decode_per_sequence_ms=per_sequence,
        decode_per_kv_ktoken_ms=per_kv,
        prefill_per_ktoken_ms=linear,
        prefill_per_ktoken2_ms=quadratic,
        prefill_step_ms=per_step,
    )


def _spread(least: int, most: int, count: int) -> list[int]:
    """At most `count` different whole numbers from `least` to `most`, evenly spread on a logarithmic scale."""
    if most <= least:
        return [most]
    return sorted({round(least * (most / least) ** (step / (count - 1))) for step in range(count)})


def _least_absolute(columns: Matrix, wanted: Matrix) -> Matrix:
    """The non-negative solution with the least absolute residuals: least squares, reweighted in each iteration."""
    weights = np.ones(len(wanted))
    for _ in range(_NUM_REWEIGHTINGS):
        solution = _non_negative_least_squares(columns * weights[:, None], wanted * weights)
        residuals = np.abs(columns @ solution - wanted)
        weights = 1 / np.sqrt(np.maximum(residuals, _SMALL_RESIDUAL))
    return solution


def _non_negative_least_squares(columns: Matrix, wanted: Matrix) -> Matrix:
    """The best solution without negative numbers: of all subsets of the seven columns, the large ones first, until no
    column that is left out would make it better (Karush, Kuhn and Tucker)."""
    num_columns = columns.shape[1]
    sizes = np.linalg.norm(columns, axis=0)
    best, least = np.zeros(num_columns), float(wanted @ wanted)
    for num_chosen in range(num_columns, 0, -1):
        for chosen in map(list, combinations(range(num_columns), num_chosen)):
            solution = np.linalg.lstsq(columns[:, chosen], wanted, rcond=None)[0]
            if (solution < 0).any():
                continue
            residual = wanted - columns[:, chosen] @ solution
            if float(residual @ residual) < least:
                least = float(residual @ residual)
                best = np.zeros(num_columns)
                best[chosen] = solution
            gains = columns.T @ residual
            gains[chosen] = 0.0
            if (gains <= _LITTLE_GAIN * sizes * sqrt(least)).all():
                return best
    return best


def _text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _numbers(values: Sequence[float]) -> str:
    return "[" + ", ".join(map(_number, values)) + "]"


def _number(value: float) -> str:
    return repr(float(f"{value:.6g}"))
