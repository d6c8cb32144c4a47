"""Where: which engine a trajectory enters, and when a move to another one at a tool return pays.

Engines are compared by the additive cost of estimate.py.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, hypot, inf
from typing import Protocol

from scheduling.cost import EngineProfile
from scheduling.estimate import Work, estimate_finish_s
from scheduling.order import TurnFacts

# For engines without a measured profile: Qwen3-14B on one H100 (performance model). Such an engine learns how many
# times as slow it is (slowness.py).
UNMEASURED = EngineProfile(
    name="unmeasured",
    model="",
    gpu="",
    tp=1,
    slots=100,
    kv_capacity_tokens=247_000,
    kv_bytes_per_token=163_840,
    decode_base_ms=12.18,
    decode_per_sequence_ms=0.0428,
    decode_per_kv_ktoken_ms=0.0601,
    prefill_per_ktoken_ms=38.4,
    prefill_per_ktoken2_ms=0.65,
    source="Qwen3-14B, H100 SXM, TP 1: aiconfigurator kernel tables",
)

# Engines within this share of the latest finish all count as setting the makespan, the latest most (a soft maximum).
# More of them do if the latest one's finish is a guess (GUESS_SHARE).
NEAR_LATEST_SHARE = 0.1
# How much of that guess counts. With all of it, an engine keeps its trajectories beside an idle one for long; with none
# of it, a first coding rollout ends 1.5 % later, because more is moved by chance.
GUESS_SHARE = 0.3
# A move must lower that maximum by as much as if the latest engine ended this many of those shares sooner: 0.5 % of the
# makespan. Between 0.02 and 0.1 only the number of moves changes.
LEAST_GAIN = 0.05
# If a trajectory is too small a part of its engine's work for that, the move may burden the new home with no more than
# this share of what it relieves the old one of; that holds if the new home ends a quarter sooner. Otherwise each of 800
# trajectories on one engine beside an idle one would stay. At 0.5, long contexts are prefilled again for little (3 to
# 5 % of a makespan).
LARGEST_BURDEN = 0.1

# How much later an engine may be if it has a new trajectory's prompt in its cache (prompt_worth_s), for each trajectory
# that prefilling the prompt elsewhere would delay. At 40, rollouts with long prompts end .8 % later.
PROMPT_WORTH = 60
# But no more than so many count. Without this, and at 30, a first coding rollout ends 1.4 % later.
MOST_DELAYED = 10
# And an engine may be later by at most this share of the earliest finish. At 0.2, mean trajectories end 1 % later.
LARGEST_LATENESS = 0.5

# Bounds leave this share for rounding, so that they rule out no engine that would be chosen.
ROUNDING = 1e-9

UNKNOWN_S = -1.0

GOLDEN_RATIO_32 = 0x9E3779B1
"""2**32 divided by the golden ratio."""


@dataclass(slots=True)
class EngineFacts:
    """A placement's live view of one engine, to read and not to keep.

    Args:
        profile: its timing; slots and KV capacity are the engine's own.
        num_turns: turns that run there or wait for it.
        without: gives its work if the trajectory in question left; set only for a home that it may move from.
        finish_s: estimated seconds until its present work is finished.
        added_s: the part of these seconds that its tokens and their KV reads add to the steps; UNKNOWN_S until it is
            asked for.
        is_stale: its longest trajectory has left or changed since, so it may finish sooner than that.
        num_trajectories: its residents, those in a tool call included.
        kv_claimed: their KV tokens.
        uncached_tokens: the tokens of their contexts that it must prefill first.
        prompts: groups whose prompt may be in its cache, each with the tokens of the longest one.
        ranks: the part of all trajectories, longest remaining output first, that a partition gives to this engine:
            start and end, as shares of their number. Empty without a partition.
    """

    engine_id: str
    profile: EngineProfile
    num_turns: int
    work: Work
    tp: int = 1
    num_trajectories: int = 0
    kv_claimed: int = 0
    uncached_tokens: int = 0
    prompts: Mapping[str, int] = field(default_factory=dict)
    ranks: tuple[float, float] = (0.0, 0.0)
    without: Callable[[], Work] | None = None
    is_stale: bool = False
    finish_s: float = field(init=False)
    added_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.estimate_finish()

    def estimate_finish(self) -> None:
        """Update `finish_s` after its work has changed."""
        self.finish_s, self.added_s = estimate_finish_s(self.profile, self.work), UNKNOWN_S

    def note_added(self) -> float:
        """Compute `added_s`, which few decisions need."""
        profile, work = self.profile, self.work
        self.added_s = (
            profile.decode_per_sequence_ms * work.total_tokens
            + profile.decode_per_kv_ktoken_ms * work.token_context_products / 1000
        ) / 1000
        return self.added_s

    @property
    def kv_share(self) -> float:
        """Claimed KV as a share of the engine's; if its KV capacity is unknown, the claimed tokens."""
        return self.kv_claimed / (self.profile.kv_capacity_tokens or 1)


Placement = Callable[[TurnFacts, Sequence[EngineFacts]], EngineFacts]
"""The engine that a turn goes to, of those that could run it now."""


class Candidates(Protocol):
    """Engines that could run a turn now, each checked, and its view refreshed, only when it is asked for."""

    def __iter__(self) -> Iterator[EngineFacts]: ...

    def __contains__(self, engine: object, /) -> bool: ...


Move = Callable[[TurnFacts, EngineFacts, Candidates, Sequence[EngineFacts]], EngineFacts | None]
"""Where a trajectory goes from its home at a tool return, or None to stay.

Args: its turn; its home; the other engines that could run the turn now; all engines that serve its model.
"""


def least_estimated_finish(turn: TurnFacts, engines: Sequence[EngineFacts]) -> EngineFacts:
    """The engine that would finish soonest with this trajectory on it; of equals, the one with fewer turns.

    Waiting prefills count. An engine that has the turn's prompt in its cache may finish later, by `prompt_worth_s`.
    Of engines that are equal in all that, any one, by `_any_of`.
    """
    remaining, context, p90 = turn.share()
    finishes_s = [
        estimate_finish_s(engine.profile, engine.work, remaining, context, p90)
        + engine.profile.prefill_per_ktoken_ms * engine.uncached_tokens / 1e6
        for engine in engines
    ]
    most_s = LARGEST_LATENESS * min(finishes_s)
    num_delayed = min([MOST_DELAYED, *(engine.num_trajectories for engine in engines)])

    best: list[EngineFacts] = []
    least = inf, 0
    for engine, finish_s in zip(engines, finishes_s, strict=True):
        rank = finish_s - min(prompt_worth_s(turn, engine, num_delayed), most_s), engine.num_turns
        if rank < least:
            best, least = [engine], rank
        elif rank == least:
            best.append(engine)
    return _any_of(best, turn.trajectory_ordinal)


def _any_of(engines: Sequence[EngineFacts], ordinal: int) -> EngineFacts:
    """One of equal engines, by Fibonacci hashing (Knuth, The Art of Computer Programming, 6.4).

    Always the first one is no choice: trajectories are then dealt in turns, and if every fourth is long, one of four
    engines has all of those. Multiples of the golden ratio spread every such pattern evenly, which a random choice does
    only on average.
    """
    return engines[(ordinal * GOLDEN_RATIO_32 % 2**32) * len(engines) >> 32]


def prompt_worth_s(turn: TurnFacts, engine: EngineFacts, num_delayed: int) -> float:
    """Seconds by which an engine may finish later than another one because a sibling's prompt is in its cache.

    A prompt that is on every engine is prefilled on each, delays all trajectories there and takes KV, and later
    trajectories can even engines out. But siblings are alike in length, and an engine that has a long group is late,
    the more so the more they answer. So the saved prefill counts `PROMPT_WORTH` times for each trajectory that it would
    delay, scaled by its share of the time that the trajectory takes there. Beside an idle engine it is worth nothing.

    Args:
        num_delayed: the trajectories on the least crowded engine, up to `MOST_DELAYED`.
    """
    cached_tokens = engine.prompts.get(turn.group_id)
    if turn.num_turns or cached_tokens is None:
        return 0.0
    profile = engine.profile
    saved_s = profile.prefill_s(cached_tokens if cached_tokens < turn.prompt_tokens else turn.prompt_tokens)
    remaining, context, _ = turn.share()
    per_token_ms = profile.decode_per_sequence_ms + profile.decode_per_kv_ktoken_ms * context / 1000
    return PROMPT_WORTH * num_delayed * saved_s * saved_s / (saved_s + per_token_ms * remaining / 1000)


def lower_the_latest(
    turn: TurnFacts, home: EngineFacts, candidates: Container[EngineFacts], fleet: Sequence[EngineFacts]
) -> EngineFacts | None:
    """Where a trajectory should move so that the last engine of the fleet ends sooner; None to stay.

    The sum of exp(finish / temperature) over the engines is lowered. It falls when the latest engine gives work to any
    earlier one. It also falls when one of many late engines does, which would not change the maximum itself.

    The temperature is the difference that certainly sets engines apart: a share of the latest finish, and a part of
    that finish that is only a guess about the latest engine's longest trajectory. In a first rollout nothing is known,
    and a few predictions stand out by chance; moves that believe them cost their prefills and gain nothing. So as far
    as that finish is a guess, every engine is assumed to have a trajectory that lasts as long, and only the sum of the
    work is left to even out.
    """
    assert home.without is not None
    if len(fleet) < 2:
        return None
    remaining, context, p90 = turn.share()
    without = home.without()
    home_s = estimate_finish_s(home.profile, without, remaining, context, p90)
    latest, latest_s = home, home_s
    for engine in fleet:
        if engine.finish_s > latest_s:
            latest, latest_s = engine, engine.finish_s
    guessed_s = latest.profile.decode_base_ms * latest.work.vague_tokens / 1000
    temperature = hypot(NEAR_LATEST_SHARE * latest_s, GUESS_SHARE * guessed_s)

    if guessed_s:
        home_s = estimate_finish_s(
            home.profile, without, remaining, context, _longest_tokens(home.profile, guessed_s, p90)
        )
        if home_s > latest_s:
            latest_s = home_s
    if home_s < latest_s - 3 * temperature:
        return None  # its weight is under 5 %: no move from it can gain enough
    left_s = estimate_finish_s(home.profile, without, 0.0, 0.0, _longest_tokens(home.profile, guessed_s))
    relief = exp((home_s - latest_s) / temperature) - exp((left_s - latest_s) / temperature)
    least_gain = (1 - LARGEST_BURDEN) * relief
    if least_gain > LEAST_GAIN:
        least_gain = LEAST_GAIN
    best, least_burden = None, relief - least_gain
    for engine in _not_ruled_out(fleet, turn, home_s, least_burden, latest_s, temperature, guessed_s):
        if engine not in candidates:
            continue
        longest = _longest_tokens(engine.profile, guessed_s, p90)
        with_it_s = estimate_finish_s(engine.profile, engine.work, remaining, context, longest)
        with_it_s += engine.profile.prefill_s(turn.prompt_tokens)
        if with_it_s >= home_s:
            continue
        before_s = engine.finish_s
        if guessed_s:
            longest = _longest_tokens(engine.profile, guessed_s)
            before_s = estimate_finish_s(engine.profile, engine.work, 0.0, 0.0, longest)
        burden = exp((with_it_s - latest_s) / temperature) - exp((before_s - latest_s) / temperature)
        if burden < least_burden:
            best, least_burden = engine, burden
    return best


def _longest_tokens(profile: EngineProfile, guessed_s: float, p90_tokens: float = 0.0) -> float:
    """A 90th percentile, or the tokens that take `guessed_s` on this engine, if they are more."""
    guess_tokens = 1000 * guessed_s / profile.decode_base_ms
    return p90_tokens if p90_tokens > guess_tokens else guess_tokens


def _not_ruled_out(
    fleet: Sequence[EngineFacts],
    turn: TurnFacts,
    home_s: float,
    least_burden: float,
    latest_s: float,
    temperature: float,
    guessed_s: float,
) -> Iterator[EngineFacts]:
    """The engines that may finish before `home_s` and be burdened with less than `least_burden`, by lower bounds.

    To check an engine and to estimate its finishes takes many times as long. Steps are no fewer than guessed, and no
    fewer with the trajectory than without it, which adds its tokens, their KV reads and its prefill. A burden is no
    less than the time that is added times the slope of the weight.
    """
    tokens, context, _ = turn.share()
    ktokens, kproducts, kprompt = tokens / 1000, tokens * context / 1e6, turn.prompt_tokens / 1e6
    most_s, most_burden = home_s * (1 + ROUNDING), (least_burden + ROUNDING) * temperature
    for engine in fleet:
        if engine.is_stale:
            yield engine
            continue
        before_s = guessed_s + (engine.note_added() if engine.added_s == UNKNOWN_S else engine.added_s)
        if engine.finish_s > before_s:
            before_s = engine.finish_s
        if before_s > most_s:
            continue
        profile = engine.profile
        added_s = (
            profile.decode_per_sequence_ms * ktokens
            + profile.decode_per_kv_ktoken_ms * kproducts
            + profile.prefill_per_ktoken_ms * kprompt
        )
        if exp((before_s - latest_s) / temperature) * added_s <= most_burden:
            yield engine
