"""C-MLFQ starts short and moves up when mean and P90 agree; heddle-buckets combines it with placement by estimate."""

from dataclasses import replace

from scheduling.buckets import least_finish_above_floor, lower_the_latest_above_floor, move_up, start_short
from scheduling.estimate import Work
from scheduling.order import TurnFacts
from scheduling.placement import UNMEASURED, EngineFacts
from scheduling.policy import CMLFQ
from scheduling.types import EngineReported, EngineSpec, Prediction, TurnArrived
from tests.scheduling.fleet import MODEL, Fleet
from tests.scheduling.plans import plus

TEN_SLOTS = replace(UNMEASURED, slots=10, kv_capacity_tokens=0)


def engine(tp: int, num_turns: int = 0, work: Work | None = None) -> EngineFacts:
    return EngineFacts(f"tp{tp}", TEN_SLOTS, num_turns, work or Work(), tp=tp)


def turn(mean: float, p90: float, made: int = 0, num_turns: int = 1) -> TurnFacts:
    return TurnFacts(0, 0, 0.0, 100, made, Prediction(mean + made, p90 + made), num_turns=num_turns)


FLEET = [engine(8), engine(2), engine(1), engine(4)]


def test_every_trajectory_starts_in_the_shortest_bucket() -> None:
    """Whatever is predicted, on the engine with the fewest turns there."""
    busier = EngineFacts("other", TEN_SLOTS, 3, Work(), tp=1)
    assert start_short(turn(90_000, 90_000, num_turns=0), [*FLEET, busier]).engine_id == "tp1"


def test_a_full_bucket_spills_over_to_the_next() -> None:
    """If all buckets are full, the shortest one queues."""
    full = [engine(1, 10), engine(2, 10), engine(4, 9)]
    assert start_short(turn(1, 1, num_turns=0), full).engine_id == "tp4"
    assert start_short(turn(1, 1, num_turns=0), [engine(1, 30), engine(2, 10)]).engine_id == "tp1"


def test_a_trajectory_that_lost_its_engine_starts_in_its_own_bucket() -> None:
    """If mean and P90 disagree, in the shortest. A full bucket spills over upwards, then downwards."""
    assert start_short(turn(9_000, 11_000), FLEET).engine_id == "tp2"
    assert start_short(turn(9_000, 13_000), FLEET).engine_id == "tp1"
    assert start_short(turn(9_000, 11_000), [engine(1), engine(2, 10), engine(4)]).engine_id == "tp4"
    assert start_short(turn(9_000, 11_000), [engine(1), engine(2, 10), engine(4, 10)]).engine_id == "tp1"


def test_a_trajectory_moves_up_only_if_mean_and_p90_agree() -> None:
    """The remaining output counts, not the total. A trajectory never moves down."""
    home, others = engine(2), [engine(1), engine(4), engine(8)]
    assert move_up(turn(20_000, 29_000), home, others, FLEET) is others[1]
    assert move_up(turn(20_000, 31_000), home, others, FLEET) is None
    assert move_up(turn(31_000, 90_000), home, others, FLEET) is others[2]
    assert move_up(turn(1_000, 2_000, made=30_000), home, others, FLEET) is None
    assert move_up(turn(9_000, 11_000), home, others, FLEET) is None


def test_a_move_up_skips_a_full_bucket() -> None:
    """Without another engine there is no move."""
    home = engine(1)
    assert move_up(turn(9_000, 11_000), home, [engine(2, 10), engine(8)], FLEET) == engine(8)
    assert move_up(turn(9_000, 11_000), home, [], FLEET) is None


def test_a_missing_tp_size_merges_its_bucket_with_the_next() -> None:
    """With only TP 1 and TP 8, 13,000 and 35,000 tokens fall into one bucket and therefore agree."""
    two = [engine(1), engine(8)]
    assert move_up(turn(13_000, 35_000), two[0], two[1:], two) is two[1]


def test_cmlfq_moves_a_trajectory_up_at_a_tool_return() -> None:
    """Through the scheduler: it starts at TP 1, stays while the prediction is vague, and then moves to TP 4 although TP
    1 is idle."""
    fleet = Fleet(CMLFQ)
    for tp in (1, 4):
        fleet.handle(EngineReported(0.0, EngineSpec(f"tp{tp}", {MODEL}, 4, 0, tp)))
    assert fleet.sent(fleet.arrive("t1", "t", predicted=90_000)) == [("t1", "tp1")]
    fleet.finish("t1")
    unsure = TurnArrived(0.0, "t2", "t", MODEL, 100, Prediction(3_000.0, 90_000.0))
    assert fleet.sent(fleet.handle(unsure)) == [("t2", "tp1")]
    fleet.finish("t2")
    assert fleet.sent(fleet.arrive("t3", "t", predicted=90_000)) == [("t3", "tp4")]


def test_heddle_buckets_places_by_estimate_above_the_floor() -> None:
    """Not in a bucket that is surely too small, even if the trajectory would end sooner there; in any bucket if no
    other is left."""
    busy = Work(50_000, 50_000, 0)
    fleet = [engine(1), engine(4, work=busy), engine(8, work=plus(busy, 9_000, 0))]
    assert least_finish_above_floor(turn(20_000, 25_000), fleet) is fleet[1]
    assert least_finish_above_floor(turn(20_000, 50_000), fleet) is fleet[0]
    assert least_finish_above_floor(turn(20_000, 25_000), fleet[:1]) is fleet[0]


def test_heddle_buckets_never_moves_below_the_floor() -> None:
    """A move that pays by the estimate is made unless it leads to a bucket that is surely too small."""
    late = engine(4, work=Work(25_000, 400_000, 0))
    late.without = lambda: Work(20_000, 380_000, 0)
    fleet = [engine(1), engine(8), late]
    assert lower_the_latest_above_floor(turn(20_000, 25_000), late, fleet[:2], fleet) is fleet[1]
    alike = replace(engine(4), engine_id="alike")
    assert lower_the_latest_above_floor(turn(20_000, 25_000), late, [alike], [*fleet, alike]) is alike
    assert lower_the_latest_above_floor(turn(20_000, 31_000), late, fleet[:2], fleet) is fleet[0]
