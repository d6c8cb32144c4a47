"""What an engine without a measured profile learns about its own speed, and what follows from it."""

from math import isclose, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.profiles import load_profile
from scheduling.limits import Limits
from scheduling.placement import UNMEASURED
from scheduling.policy import HEDDLE
from scheduling.slowness import LARGEST, LEARNS_EVERY_S, Slowness
from tests.scheduling.fleet import Fleet

PROMPT, OUTPUT = 1_000, 100


def turn(fleet: Fleet, turn_id: str, took_s: float, trajectory_id: str | None = None, output: int = OUTPUT) -> str:
    """Plays a turn by itself; returns the engine that it ran on."""
    ((_, engine_id),) = fleet.sent(fleet.arrive(turn_id, trajectory_id, prompt=PROMPT))
    fleet.at += took_s
    fleet.finish(turn_id, prompt=PROMPT, output=output)
    return engine_id


def slowness(fleet: Fleet, engine_id: str = "A") -> float:
    return fleet.scheduler.engines[engine_id].slowness.ratio


def assumed_s(output: int = OUTPUT) -> float:
    """What the first turn of a trajectory takes by itself on the assumed engine. Its claim grows only at its end."""
    return output * UNMEASURED.decode_step_s(1, PROMPT) + UNMEASURED.prefill_s(PROMPT)


@pytest.mark.parametrize("times", [0.2, 1.0, 5.0])
def test_an_engine_without_a_profile_learns_how_slow_it_is(times: float) -> None:
    """From turns that all take a multiple of what they would take on the assumed engine, to 10 %."""
    fleet = Fleet()
    fleet.engine("A")
    for number in range(60):
        turn(fleet, f"t{number}", times * assumed_s(output=2_000), output=2_000)
    assert slowness(fleet) == pytest.approx(times, rel=0.1)


def test_an_engine_whose_profile_is_known_learns_nothing() -> None:
    """A measured profile is believed, also once it replaces an assumed one."""
    fleet = Fleet()
    fleet.engine("A", profile=UNMEASURED)
    turn(fleet, "a", 5 * assumed_s())
    assert slowness(fleet) == 1
    fleet.engine("A")
    turn(fleet, "b", 5 * assumed_s())
    assert (learned := slowness(fleet)) > 1
    measured = load_profile("qwen3-14b-h100-tp4")
    fleet.engine("A", profile=measured)
    turn(fleet, "c", 50 * assumed_s())
    assert slowness(fleet) == learned
    assert fleet.scheduler.engines["A"].facts(fleet.at).profile.prefill_s(PROMPT) == measured.prefill_s(PROMPT)


def test_an_engine_learns_at_most_from_one_turn_every_two_seconds() -> None:
    """That tells enough; the other turns cost one comparison."""
    fleet = Fleet()
    fleet.engine("A", slots=2)
    turn(fleet, "a", took_s=5.0)
    learned = slowness(fleet)
    fleet.arrive("late", prompt=PROMPT)
    turn(fleet, "b", took_s=LEARNS_EVERY_S / 2)
    assert slowness(fleet) == learned
    fleet.at += LEARNS_EVERY_S / 2
    fleet.finish("late", prompt=PROMPT, output=OUTPUT)
    assert slowness(fleet) != learned


def test_time_in_queues_does_not_count() -> None:
    """A turn that waited for an engine tells the same as one that did not."""
    ratios = []
    for waits_s in (0.0, 60.0):
        fleet = Fleet()
        fleet.arrive("a", prompt=PROMPT)
        fleet.at += waits_s
        fleet.engine("A")
        fleet.at += 5.0
        fleet.finish("a", prompt=PROMPT, output=OUTPUT)
        ratios.append(slowness(fleet))
    assert ratios[0] == ratios[1] > 1


def test_only_what_a_leg_itself_made_counts() -> None:
    """A preempted turn keeps its output; its next leg makes the rest."""
    fleet = Fleet(can_preempt=True)
    fleet.engine("A")
    fleet.arrive("a", prompt=PROMPT)
    fleet.at += 100.0
    fleet.pause("a", output=900)
    fleet.at += assumed_s()
    fleet.finish("a", leg=2, prompt=PROMPT, output=900 + OUTPUT)
    assert slowness(fleet) == pytest.approx(1, rel=0.02)


def test_a_context_that_was_there_is_not_prefilled() -> None:
    """Only what a turn's prompt adds to its trajectory's context counts."""
    fleet = Fleet()
    fleet.engine("A")
    context, added = 60_000, 20_000
    fleet.arrive("a0", "a", prompt=context)
    fleet.at += UNMEASURED.prefill_s(context)
    fleet.finish("a0", prompt=context, output=0)
    fleet.arrive("a1", "a", prompt=context + added)
    fleet.at += UNMEASURED.prefill_s(added, context)
    fleet.finish("a1", prompt=context + added, output=0)
    assert slowness(fleet) == pytest.approx(1, rel=0.01)


def test_reading_a_long_context_takes_time_on_the_assumed_engine_too() -> None:
    """A turn that takes exactly as long as there says that the engine is as fast."""
    fleet, prompt, output = Fleet(), 100_000, 2_000
    fleet.engine("A")
    fleet.arrive("a", prompt=prompt)
    fleet.at += output * UNMEASURED.decode_step_s(1, prompt) + UNMEASURED.prefill_s(prompt)
    fleet.finish("a", prompt=prompt, output=output)
    assert slowness(fleet) == pytest.approx(1.0)


def test_turns_wait_for_the_prefills_of_those_beside_them() -> None:
    """Two long prompts that arrive together are prefilled one after the other, and both turns take as long."""
    fleet = Fleet()
    fleet.engine("A", slots=2)
    prompt = 100_000
    for turn_id in ("a", "b"):
        fleet.arrive(turn_id, prompt=prompt)
    fleet.at += 2 * UNMEASURED.prefill_s(prompt)
    fleet.finish("a", prompt=prompt, output=1)
    assert slowness(fleet) == pytest.approx(1, rel=0.02)


def test_less_output_than_was_kept_is_none() -> None:
    """An engine that counts only its last leg's tokens teaches nothing absurd."""
    fleet = Fleet(can_preempt=True)
    fleet.engine("A")
    turn(fleet, "a0", 0.1, "a")
    fleet.at += LEARNS_EVERY_S
    before = slowness(fleet)
    fleet.arrive("a1", "a", prompt=PROMPT)
    fleet.pause("a1", output=100_000)
    fleet.at += 0.1
    fleet.finish("a1", leg=2, prompt=PROMPT, output=OUTPUT)
    assert slowness(fleet) == pytest.approx(before, rel=0.02)


def test_a_trajectory_enters_the_faster_of_two_engines_without_profiles() -> None:
    """Engine B is five times as slow, and each has the same work. Before anything ran, the first of the two is as good;
    then the faster one is."""
    fleet = Fleet(HEDDLE, answer_tokens=500)
    for engine_id in ("B", "A"):
        fleet.engine(engine_id, slots=8)
    assert fleet.sent(fleet.arrive("b", prompt=PROMPT)) == [("b", "B")]
    assert fleet.sent(fleet.arrive("a", prompt=PROMPT)) == [("a", "A")]
    fleet.at += assumed_s()
    fleet.finish("a", prompt=PROMPT, output=OUTPUT)
    fleet.at += 4 * assumed_s()
    fleet.finish("b", prompt=PROMPT, output=OUTPUT)
    assert slowness(fleet, "B") > 2 * slowness(fleet, "A")
    assert fleet.sent(fleet.arrive("c", prompt=PROMPT)) == [("c", "A")]


@pytest.mark.parametrize("times", [1, 20])
def test_the_lease_is_as_long_as_the_engine_is_slow(times: int) -> None:
    """Without a profile, the lease is the prefill time of the assumed engine, times the engine's slowness."""
    fleet = Fleet(limits=Limits(entry_patience_s=1_000))
    fleet.engine("A", slots=4, kv=10_000)
    for number in range(50):
        fleet.close(f"a{number - 1}")
        turn(fleet, f"a{number}", times * assumed_s(output=7_000), output=7_000)
    lease_s = times * UNMEASURED.prefill_s(8_000)
    assert fleet.arrive("b", prompt=5_000) == fleet.sent(fleet.tick(0.8 * lease_s)) == []
    assert fleet.sent(fleet.tick(0.3 * lease_s)) == [("b", "A")]


samples = st.tuples(st.floats(0, 1e6), st.floats(0, 1e6))


@given(st.lists(samples, max_size=200))
def test_the_ratio_is_bounded(taken: list[tuple[float, float]]) -> None:
    """However long turns take, and however short they should be, none at all included."""
    learned = Slowness()
    for took_s, assumed in taken:
        learned.learn(took_s, assumed)
        assert learned.ratio * (1 + 1e-9) >= 1 / LARGEST and learned.ratio <= LARGEST * (1 + 1e-9)


@given(st.floats(1 / LARGEST, LARGEST), st.floats(1 / LARGEST, LARGEST), st.lists(st.floats(1, 100), min_size=1))
def test_the_ratio_lies_between_those_of_its_turns_and_is_forgotten(
    old: float, new: float, lengths: list[float]
) -> None:
    """It begins with 1. After many turns at another speed, less than a tenth of the old one is left."""
    learned = Slowness()
    for assumed in lengths:
        learned.learn(old * assumed, assumed)
        assert min(1, old) <= learned.ratio * (1 + 1e-9) and learned.ratio <= max(1, old) * (1 + 1e-9)
    for _ in range(200):
        learned.learn(new * 100, 100)
    assert isclose(log(learned.ratio), log(new), abs_tol=0.1)


def test_the_time_of_an_engines_work_can_be_looked_at() -> None:
    """Without a change of what later decisions see, as a replay of its log would lack the look."""
    fleet = Fleet()
    fleet.engine("A")
    engine = fleet.scheduler.engines["A"]
    assert engine.finish_s == 0
    fleet.arrive("long", predicted=5_000)
    alone_s = engine.finish_s
    fleet.arrive("short", predicted=100)
    assert 0 < alone_s <= engine.finish_s == engine.facts(fleet.at).finish_s
    fleet.at += 10
    fleet.finish("long")
    fleet.close("long")
    stale_s = engine.finish_s
    assert stale_s == engine.finish_s > engine.facts(fleet.at).finish_s


def rollout(fleet: Fleet, number: int, took_s: dict[str, float]) -> set[str]:
    """Six trajectories of one turn, all at once; returns the engines that they ran on."""
    names = [f"{number}-{index}" for index in range(6)]
    homes = {name: fleet.sent(fleet.arrive(name, name, prompt=PROMPT))[0][1] for name in names}
    began_at = fleet.at
    for name in sorted(names, key=lambda name: took_s[homes[name]]):
        fleet.at = began_at + took_s[homes[name]]
        fleet.finish(name, prompt=PROMPT, output=OUTPUT)
        fleet.close(name)
    return set(homes.values())


def two_engines(took_s: dict[str, float]) -> Fleet:
    """A fleet that has played one turn on each of two engines, which took this long."""
    fleet = Fleet()
    for engine_id in took_s:
        fleet.engine(engine_id, slots=8)
    homes = {fleet.sent(fleet.arrive(name, name, prompt=PROMPT))[0][1]: name for name in ("one", "other")}
    for engine_id in sorted(took_s, key=took_s.__getitem__):
        fleet.at = took_s[engine_id]
        fleet.finish(homes[engine_id], prompt=PROMPT, output=OUTPUT)
        fleet.close(homes[engine_id])
    return fleet


@pytest.mark.parametrize("times", [0.2, 1.0, 5.0])
def test_an_engine_that_seemed_slow_gets_another_chance(times: float) -> None:
    """Its first turn waited for a compiler, so that the next rollout does not use it, and learns nothing of it. The one
    after that does, and then it counts as fast as it is, however fast the fleet is."""
    took_s = dict.fromkeys("AB", times * assumed_s())
    fleet = two_engines(took_s | {"A": 60.0})
    assert [rollout(fleet, number, took_s) for number in range(2)] == [{"B"}, {"A", "B"}]
    assert slowness(fleet, "A") == pytest.approx(slowness(fleet, "B"), rel=0.2)


def test_an_engine_that_is_slow_gets_ever_fewer_chances() -> None:
    """Each time that it proves slow again, twice as many rollouts pass without it. Once it is fast, most use it."""
    took_s = {"A": 30 * assumed_s(), "B": assumed_s()}
    fleet = two_engines(took_s)
    used = [number for number in range(32) if "A" in rollout(fleet, number, took_s)]
    assert used == [1, 4, 9, 18]
    took_s["A"] = took_s["B"]
    assert sum("A" in rollout(fleet, number, took_s) for number in range(32, 80)) > 36
    assert slowness(fleet, "A") == pytest.approx(slowness(fleet, "B"), rel=0.2)
