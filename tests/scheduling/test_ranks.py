"""The Heddle paper's policy: each engine has a range of ranks, and trajectories follow their rank."""

from dataclasses import replace

from scheduling.estimate import Work
from scheduling.order import TurnFacts
from scheduling.placement import UNMEASURED, EngineFacts
from scheduling.policy import HEDDLE_PAPER, RANK_FOLLOWING
from scheduling.ranks import follow_rank, in_rank_group
from scheduling.types import Dispatch, Prediction
from tests.scheduling.fleet import Fleet

TEN_SLOTS = replace(UNMEASURED, slots=10, kv_capacity_tokens=0)


def engine(engine_id: str, first: float, end: float) -> EngineFacts:
    return EngineFacts(engine_id, TEN_SLOTS, 0, Work(), ranks=(first, end))


def turn(rank: float) -> TurnFacts:
    return TurnFacts(0, 0, 0.0, 100, 0, Prediction(500.0, 500.0), rank=rank)


ENGINES = [engine("long", 0.0, 0.1), engine("middle", 0.1, 0.4), engine("short", 0.4, 1.0)]


def test_a_rank_belongs_to_one_engine() -> None:
    """A range includes its first rank but not its end. Without that engine, the rank belongs to the nearest one."""
    owners = [in_rank_group(turn(rank), ENGINES).engine_id for rank in (0.0, 0.1, 0.39, 0.4, 1.0)]
    assert owners == ["long", "middle", "middle", "short", "short"]
    assert in_rank_group(turn(0.2), [ENGINES[0], ENGINES[2]]).engine_id == "long"


def test_a_trajectory_follows_its_rank_if_there_is_room() -> None:
    """It goes to exactly that engine, or nowhere."""
    home, *others = ENGINES
    assert follow_rank(turn(0.5), home, others, ENGINES) is ENGINES[2]
    assert follow_rank(turn(0.5), home, others[:1], ENGINES) is None
    assert follow_rank(turn(0.05), home, others, ENGINES) is None


def declared_rollout(num_short: int) -> Fleet:
    """Two like engines of one slot; one long trajectory and some short ones are declared before they begin."""
    fleet = Fleet(HEDDLE_PAPER)
    fleet.engine("A")
    fleet.engine("B")
    fleet.declare("long", predicted=20_000)
    for number in range(num_short):
        fleet.declare(f"short{number}", predicted=1_000 + number)
    return fleet


def test_the_longest_trajectory_has_an_engine_to_itself() -> None:
    """The paper's cost isolates it. The others wait for the engine of their rank, although another one is free."""
    fleet = declared_rollout(3)
    assert fleet.sent(fleet.arrive("s1", "short1", predicted=1_001)) == [("s1", "B")]
    assert fleet.arrive("s2", "short2", predicted=1_002) == []
    assert fleet.sent(fleet.arrive("l1", "long", predicted=20_000)) == [("l1", "A")]
    assert fleet.sent(fleet.finish("s1")) == [("s2", "B")]


def test_a_trajectory_that_turns_out_long_waits_at_its_new_rank() -> None:
    """Its new prediction makes it the longest; at its tool return it queues at the engine of the longest."""
    fleet = declared_rollout(3)
    fleet.arrive("l1", "long", predicted=20_000)
    fleet.arrive("s1", "short1", predicted=1_001)
    fleet.finish("s1")
    assert fleet.arrive("s2", "short1", predicted=90_000) == []
    assert fleet.home("short1") == "A"
    assert fleet.sent(fleet.finish("l1")) == [("s2", "A")]


def test_ranks_are_those_of_the_remaining_trajectories() -> None:
    """When the longest has ended, the next longest has its rank."""
    fleet = declared_rollout(3)
    fleet.arrive("l1", "long", predicted=20_000)
    fleet.arrive("s1", "short1", predicted=1_001)
    fleet.finish("l1")
    fleet.close("long")
    fleet.close("short2")
    fleet.finish("s1")
    (dispatch,) = fleet.arrive("s2", "short1", predicted=2_000)
    assert isinstance(dispatch, Dispatch) and dispatch.engine_id == "A"


def test_an_aborted_trajectory_has_no_rank_though_its_turn_still_runs() -> None:
    """Nor has one that is finished. The next longest has it at once."""
    fleet = declared_rollout(3)
    fleet.arrive("l1", "long", predicted=20_000)
    fleet.arrive("s1", "short1", predicted=1_001)
    fleet.close("long", abort=True)
    fleet.close("short2")
    fleet.finish("s1")
    assert fleet.arrive("s2", "short1", predicted=2_000) == []
    assert fleet.home("short1") == "A"


def test_later_turns_follow_a_trajectory_to_its_first_engine() -> None:
    """Its first turn waited until there was an engine; a later engine does not become its home."""
    fleet = Fleet(HEDDLE_PAPER)
    fleet.arrive("t1", "t")
    fleet.arrive("u1", "u")
    assert fleet.sent(fleet.engine("A")) == [("t1", "A")]
    fleet.arrive("t2", "t")
    fleet.engine("B")
    assert fleet.home("t") == "A"


def test_a_waiting_turn_follows_a_later_turn_to_its_engine() -> None:
    """It waited because no engine had its model."""
    fleet = Fleet(HEDDLE_PAPER)
    fleet.engine("A", slots=2, models=("x",))
    fleet.arrive("t1", "t", model="y")
    fleet.arrive("t2", "t", model="x")
    assert fleet.sent(fleet.engine("A", slots=2, models=("x", "y"))) == [("t1", "A")]


def test_a_turn_whose_trajectory_is_declared_finished_still_runs() -> None:
    """Elsewhere, too, if its engine fails it. No trajectory has a rank then."""
    fleet = Fleet(HEDDLE_PAPER)
    fleet.engine("A")
    fleet.arrive("t")
    fleet.close("t")
    fleet.engine("B")
    assert fleet.sent(fleet.fail("t")) == [("t", "B")]


def test_rank_following_respects_residency() -> None:
    """A variation of the default: a trajectory does not follow its rank to an engine without room for its KV."""
    fleet = Fleet(RANK_FOLLOWING)
    fleet.engine("A", slots=4, kv=100)
    fleet.engine("B", slots=4, kv=100)
    for number, name in enumerate("abcd"):
        fleet.declare(name, predicted=1_000 * (number + 1))
    fleet.arrive("d1", "d", predicted=4_000, prompt=80)
    fleet.arrive("a1", "a", predicted=1_000, prompt=40)
    assert (fleet.home("d"), fleet.home("a")) == ("A", "B")
    fleet.finish("a1", prompt=40)
    assert fleet.sent(fleet.arrive("a2", "a", predicted=50_000, prompt=50)) == [("a2", "B")]
    fleet.finish("a2", prompt=50)
    fleet.finish("d1", prompt=10)
    fleet.close("d")
    assert fleet.sent(fleet.arrive("a3", "a", predicted=50_000, prompt=60)) == [("a3", "A")]


def test_each_of_three_engines_gets_its_part_of_the_ranks() -> None:
    """Nine trajectories of nearly one length: three for each engine, in the order of their lengths."""
    fleet = Fleet(HEDDLE_PAPER)
    for engine_id in "ABC":
        fleet.engine(engine_id, slots=9)
    for number in range(9):
        fleet.declare(f"t{number}", predicted=9_000 - number)
    for number in range(9):
        fleet.arrive(f"turn{number}", f"t{number}", predicted=9_000 - number)
    homes = [fleet.home(f"t{number}") for number in range(9)]
    assert homes == sorted(homes) and [homes.count(engine_id) for engine_id in "ABC"] == [3, 3, 3]
