"""What each order puts first."""

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scheduling.limits import Limits
from scheduling.order import (
    TurnFacts,
    first_come_first_served,
    least_attained_first,
    longest_remaining_first,
    longest_total_first,
    oldest_trajectory_first,
    shortest_context_first,
    shortest_first,
    weightiest_first,
)
from scheduling.state import Trajectory
from scheduling.types import Prediction, TrajectoryState

Order = Callable[[TurnFacts, Limits], float]

# A new, long trajectory, and an older, shorter one that has generated most of its output.
YOUNG = TurnFacts(5, 4, 3.0, 900, 100, Prediction(9_000.0, 9_000.0), num_turns=0)
OLD = TurnFacts(4, 1, 4.0, 8_000, 5_000, Prediction(6_000.0, 6_000.0), num_turns=9)


@pytest.mark.parametrize(
    ("order", "first"),
    [
        (weightiest_first, YOUNG),
        (longest_total_first, YOUNG),
        (longest_remaining_first, YOUNG),
        (least_attained_first, YOUNG),
        (first_come_first_served, YOUNG),
        (shortest_first, OLD),
        (oldest_trajectory_first, OLD),
        (shortest_context_first, OLD),
    ],
)
def test_each_order_puts_the_expected_turn_first(order: Order, first: TurnFacts) -> None:
    """The turn with the lower key goes first."""
    other = OLD if first is YOUNG else YOUNG
    assert order(first, Limits()) < order(other, Limits())


def test_remaining_work_is_the_prediction_minus_the_output_so_far() -> None:
    """9,000 in total with 100 made leaves more than 10,000 with 2,000 made. Ordered by total, the other one goes
    first."""
    further = TurnFacts(6, 6, 3.0, 10, 2_000, Prediction(10_000.0, 10_000.0))
    assert longest_remaining_first(YOUNG, Limits()) < longest_remaining_first(further, Limits())
    assert longest_total_first(YOUNG, Limits()) > longest_total_first(further, Limits())


def new(predicted: float, context: int, at: float = 0.0) -> TurnFacts:
    """A trajectory's first turn."""
    return TurnFacts(0, 0, at, context, 0, Prediction(predicted, predicted))


def test_weightiest_first_weighs_total_output_above_context() -> None:
    """Twice the total outweighs almost eight times the context: total ** 4 / (context * remaining). At equal totals the
    smaller context goes first."""
    key = {name: weightiest_first(turn, Limits()) for name, turn in {
        "small": new(1_000, 1_000), "large": new(1_000, 7_900), "long": new(2_000, 7_900), "longer": new(2_000, 8_100),
    }.items()}  # fmt: skip
    assert key["long"] < key["small"] < key["longer"] < key["large"]


@given(st.floats(0, 10**9), st.floats(0, 10), st.integers(0, 10**6), st.integers(0, 3))
@example(1.0, 0.5, 0, 1)
@example(1.0, 0.0, 1, 1)
@example(1.6, 2.220446049250313e-16, 14664, 0)
def test_longer_totals_and_smaller_contexts_never_go_later(total: float, more: float, context: int, wider: int) -> None:
    """A total or a context below one token counts as one. Totals that differ by a bit or two may be rounded the other
    way, by less than a billionth of a token of urgency."""
    limits = Limits()
    assert weightiest_first(new(total + more, context), limits) <= weightiest_first(new(total, context), limits) + 1e-9
    assert weightiest_first(new(total, context), limits) <= weightiest_first(new(total, context + wider), limits)
    assert weightiest_first(new(0.5, 0), limits) == weightiest_first(new(1.0, 1), limits) == 0.0


@given(st.floats(0, 10**5), st.floats(0, 10**5), st.integers(0, 10**5), st.integers(0, 10**5))
@example(7.0, 9.0, 7, 1)
def test_a_turn_and_its_trajectory_agree_on_the_remaining_work(
    total: float, p90: float, made: int, prompt: int
) -> None:
    """At least one token remains, and half of the remainder is part of the mean context. A finished trajectory has none
    left."""
    turn = TurnFacts(0, 0, 0.0, prompt, made, Prediction(total, p90))
    trajectory = Trajectory("t", 0, "", None, 0.0, 0.0, Prediction(total, p90), output_tokens=made)
    remaining = max(total - made, 1.0)
    assert turn.remaining_tokens() == trajectory.remaining_tokens() == remaining
    assert turn.share() == (remaining, prompt + remaining / 2, p90 - made)
    assert trajectory.share(prompt) == (remaining, prompt + remaining / 2, max(p90 - made, remaining))
    trajectory.state = TrajectoryState.FINISHED
    assert trajectory.remaining_tokens() == trajectory.share(prompt)[0] == 0


def test_ageing_eventually_outweighs_urgency() -> None:
    """At 100 tokens a second, 40 s make up for e times the room."""
    waited, came_later = new(1_000, 2_718, at=0.0), [new(1_000, 1_000, at=at) for at in (39.0, 41.0)]
    sooner, later = (weightiest_first(turn, Limits()) for turn in came_later)
    assert sooner < weightiest_first(waited, Limits()) < later


def test_each_level_of_attained_service_is_first_come_first_served() -> None:
    """Levels double: 0 to 511 tokens, to 1,023, to 2,047, and so on."""

    def key(attained: int, at: float) -> float:
        return least_attained_first(TurnFacts(0, 0, at, 10, attained, Prediction(1.0, 1.0)), Limits())

    assert key(511, 1.0) < key(0, 2.0) < key(512, 0.0) < key(1_023, 3.0) < key(1_024, 0.0) == key(2_047, 0.0)


def test_shortest_context_first_resumes_old_trajectories_before_new() -> None:
    """Among those that have begun, the shorter context goes first."""
    short = TurnFacts(7, 7, 9.0, 10, 10, Prediction(1.0, 1.0), num_turns=1)
    assert [shortest_context_first(turn, Limits()) for turn in (short, OLD, YOUNG)] == [10, 8_000, 900 + 1e9]
