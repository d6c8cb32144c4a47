"""Prompts that trajectories share on an engine: those of siblings and preambles count once among its claims."""

from hypothesis import given
from hypothesis import strategies as st

from scheduling.limits import Limits
from scheduling.prompts import Prompts
from scheduling.state import PartName, Trajectory
from scheduling.types import Fault, Prediction, TurnArrived
from tests.scheduling.fleet import Fleet, fleet_with_one_in_tool


def siblings(*prompts: int, kv: int = 100) -> Fleet:
    """Engine A with 8 slots; siblings `s0`, `s1` and so on are in tool calls there, each after an answer of 5
    tokens."""
    fleet = Fleet(limits=Limits(answer_tokens=0, in_tool_lease_s=60, entry_patience_s=300))
    fleet.engine("A", slots=8, kv=kv)
    for number, prompt in enumerate(prompts):
        fleet.arrive(f"s{number}", prompt=prompt, group="g")
        fleet.finish(f"s{number}", prompt=prompt, output=5)
    return fleet


def test_the_prompt_of_siblings_is_held_once() -> None:
    """Three claims of 45 tokens, 40 of them the same prompt, hold 55 of 90. A fourth sibling enters and holds no more
    until it answers."""
    fleet = siblings(40, 40, 40)
    engine = fleet.scheduler.engines["A"]
    assert (engine.kv_claimed, engine.kv_held) == (135, 55)
    assert fleet.sent(fleet.arrive("s3", prompt=40, group="g")) == [("s3", "A")]
    assert fleet.sent(fleet.arrive("other", prompt=35)) == [("other", "A")]
    assert fleet.arrive("another", prompt=1) == []


def test_other_prompts_are_not_shared() -> None:
    """The name of a group does not make prompts the same."""
    fleet = siblings(40)
    assert fleet.arrive("elsewhere", prompt=46, group="h") == []
    assert fleet.arrive("unlike", prompt=46, group="g", parts=(("another", 46),)) == []
    nameless = siblings()
    for name in ("a", "b"):
        nameless.arrive(name, prompt=40)
    assert nameless.scheduler.engines["A"].kv_held == 80
    alone = fleet_with_one_in_tool()
    assert alone.arrive("b", prompt=41) == []


def test_an_engine_expects_fewer_waves_if_its_residents_share_a_prompt() -> None:
    """Its estimate counts the KV that they hold, not the sum of their contexts; so does that without one of them."""
    fleet = Fleet()
    fleet.engine("A", slots=8, kv=10_000)
    for number in range(3):
        fleet.arrive(f"t{number}", group="g", prompt=3_000)
    engine = fleet.scheduler.engines["A"]
    held_share = engine.kv_held / engine.kv_claimed
    assert engine.kv_held < 4_000 < engine.kv_claimed
    assert engine.facts(0.0).work.room_share == engine.work_without("t0").room_share == held_share
    for number in range(3):
        fleet.finish(f"t{number}", prompt=3_000)
        fleet.close(f"t{number}")
    assert engine.work.room_share == 1


def test_a_preamble_shared_by_groups_is_held_once() -> None:
    """Two groups of two, with prompts of 40 tokens of which 30 are system prompt and tools, hold 30 + 2 * 10 + 4 * 5 of
    90. A third group needs 10 more. One with another preamble needs 40, for which the first two groups must leave."""
    fleet = siblings()
    for number in range(4):
        fleet.arrive(f"t{number}", prompt=40, parts=(("p", 30), (f"p{number // 2}", 10)))
        fleet.finish(f"t{number}", prompt=40, output=5)
    engine = fleet.scheduler.engines["A"]
    assert (engine.kv_claimed, engine.kv_held) == (180, 70)
    assert fleet.arrive("unlike", prompt=40, parts=(("q", 30), ("q9", 10))) == []
    alike = fleet.arrive("alike", prompt=40, parts=(("p", 30), ("p8", 10)), priority=-1)
    assert fleet.sent(alike) == [("alike", "A")]
    assert engine.kv_held == 80
    for name in ("t0", "t1", "t2", "t3"):
        fleet.close(name)
    assert set(fleet.claims("A")) == {"alike", "unlike"}
    assert engine.kv_held == 80 and engine.uncached_tokens == 10 + 40


def test_branches_hold_what_they_have_in_common_once() -> None:
    """A conversation of 40 tokens that three others continue, one of them a second one: 40, 40 + 20, 40 + 20 + 10,
    40 + 15. Each that leaves frees what it alone had."""
    fleet = siblings(kv=1_000)
    fleet.arrive("root", prompt=40, parts=(("a", 40),))
    fleet.arrive("left", prompt=60, parts=(("a", 40), ("ab", 20)))
    fleet.arrive("leaf", prompt=70, parts=(("a", 40), ("ab", 20), ("abc", 10)))
    fleet.arrive("right", prompt=55, parts=(("a", 40), ("ad", 15)))
    engine = fleet.scheduler.engines["A"]
    assert (engine.kv_claimed, engine.kv_held) == (225, 40 + 20 + 10 + 15)
    assert engine.uncached_tokens == 85
    for name, prompt, held in (("root", 40, 85), ("leaf", 70, 75), ("right", 55, 60)):
        fleet.finish(name, prompt=prompt, output=0)
        fleet.close(name)
        assert engine.kv_held == held, name


def test_a_branch_enters_where_the_conversation_is() -> None:
    """Of its 70 tokens an engine with a room of 55 has 40 already; a stranger of 60 tokens waits."""
    fleet = siblings()
    fleet.arrive("root", prompt=40, parts=(("a", 40),))
    assert fleet.arrive("stranger", prompt=60, parts=(("x", 60),)) == []
    branch = fleet.arrive("branch", prompt=70, parts=(("a", 40), ("ab", 30)), priority=-1)
    assert fleet.sent(branch) == [("branch", "A")]


def test_a_preamble_is_held_once_whatever_follows_it() -> None:
    """Single trajectories, each with its own task behind the same 30 tokens. Parts end with the prompt: one of only 20
    tokens shares no more than those, which the engine holds within the 30, and parts without tokens do not count."""
    fleet = siblings()
    for number in range(3):
        fleet.arrive(f"t{number}", prompt=40, parts=(("p", 30),))
    fleet.arrive("bare", prompt=20, parts=(("", 0), ("p", 30), ("pg", 9)))
    engine = fleet.scheduler.engines["A"]
    assert (engine.kv_claimed, engine.kv_held) == (140, 30 + 3 * 10)


def test_adapters_of_one_engine_share_no_prompt() -> None:
    """Under another model the same words have other keys and values."""
    fleet = Fleet(limits=Limits(answer_tokens=0))
    fleet.engine("A", slots=8, kv=100, models=("x", "y"))
    for name, model in (("a", "x"), ("b", "y"), ("c", "y")):
        fleet.arrive(name, prompt=30, parts=(("p", 20), ("pg", 10)), model=model)
    assert fleet.scheduler.engines["A"].kv_held == 60


def test_a_prompt_estimated_too_long_is_cut_in_proportion() -> None:
    """The engine counts 36 tokens where 40 were estimated, 30 of them preamble: others find 27."""
    fleet = siblings()
    for name in ("a", "b"):
        fleet.arrive(name, prompt=40, parts=(("p", 30), (f"p{name}", 10)))
    fleet.finish("a", prompt=36, output=0)
    engine = fleet.scheduler.engines["A"]
    assert engine.kv_held == 36 + 40 - 27


def test_a_prompt_stays_until_its_last_holder_leaves() -> None:
    """The first of two siblings frees its own part, the second one the rest."""
    fleet = siblings(40, 40)
    engine = fleet.scheduler.engines["A"]
    assert engine.kv_held == 50
    fleet.close("s0")
    assert engine.kv_held == engine.kv_claimed == 45
    fleet.close("s1")
    assert engine.kv_held == engine.kv_claimed == 0


def test_siblings_that_give_way_free_only_their_own_part() -> None:
    """After the lease, s0 frees 5 tokens for an entrant of 45, because s1 still holds the prompt. An entrant that is a
    sibling finds the prompt, so no claim gives way."""
    fleet = siblings(40, 40)
    fleet.tick(61)
    assert fleet.sent(fleet.arrive("b", prompt=45)) == [("b", "A")]
    assert fleet.claims("A") == {"s1": 45, "b": 45}
    fleet = siblings(80)
    fleet.tick(61)
    assert fleet.sent(fleet.arrive("s1", prompt=80, group="g")) == [("s1", "A")]
    assert fleet.scheduler.engines["A"].kv_held == 85


def test_contexts_that_outgrow_an_engine_count_their_prompt_once() -> None:
    """Four siblings claim 180 of 100 tokens but hold 60, so none leaves. At 101 the least urgent one does."""
    fleet = siblings(40, 40, 40, 40)
    assert len(fleet.claims("A")) == 4
    fleet.arrive("s0-1", "s0", prompt=80)
    assert len(fleet.claims("A")) == 4
    fleet.progress("s0-1", 1, 6)
    assert len(fleet.claims("A")) == 3 and fleet.scheduler.engines["A"].kv_held == 96


def test_a_prefill_counts_until_its_turn_progresses_or_ends() -> None:
    """A prompt that a sibling brought is not prefilled again."""
    fleet = siblings()
    engine = fleet.scheduler.engines["A"]
    fleet.arrive("s0", prompt=40, group="g")
    assert engine.uncached_tokens == 40
    fleet.arrive("s1", prompt=41, group="g")
    fleet.arrive("other", prompt=10, group="h")
    assert engine.uncached_tokens == 40 + 1 + 10
    fleet.progress("s0", 1, 6)
    assert engine.uncached_tokens == 1 + 10
    fleet.finish("s1", prompt=41, output=5)
    assert engine.uncached_tokens == 10
    fleet.finish("other", prompt=10, output=5)
    assert engine.uncached_tokens == 0


def test_a_context_cut_below_half_of_the_prompt_shares_none() -> None:
    """Less than half is another context. A little less means that the estimate was too long; what is left of it lies
    within the prompt that its siblings hold."""
    fleet = siblings(40, 40)
    engine = fleet.scheduler.engines["A"]
    fleet.arrive("s1-1", "s1", prompt=20)
    fleet.finish("s1-1", prompt=10, output=5)
    assert fleet.claims("A") == {"s0": 45, "s1": 15} and engine.kv_held == 60
    fleet = siblings(40, 40, 40)
    engine = fleet.scheduler.engines["A"]
    fleet.arrive("s1-1", "s1", prompt=36)
    fleet.finish("s1-1", prompt=31, output=5)
    assert fleet.claims("A") == {"s0": 45, "s1": 36, "s2": 45} and engine.kv_held == 40 + 5 + 5


def some_trajectory(data: st.DataObject, name: str) -> Trajectory:
    """One whose first prompt goes down a tree of parts."""
    trajectory = Trajectory(name, 0, "", None, 0.0, 0.0, Prediction(1.0, 1.0))
    tokens = data.draw(st.sampled_from([0, 96, 99, 100, 101, 200, 203]))
    path = data.draw(st.text("ab", max_size=4))
    parts = tuple((path[:end], data.draw(st.integers(0, 60))) for end in range(len(path) + 1))
    trajectory.note_first_prompt(
        TurnArrived(0.0, name, name, "model", tokens, Prediction(1.0, 1.0), prompt_parts=parts)
    )
    assert trajectory.first_prompt_tokens <= tokens
    return trajectory


@given(st.data())
def test_shared_tokens_are_those_beside_the_longest_of_each_part(data: st.DataObject) -> None:
    """Trajectories come, are cut down and leave in any order. Each entrant adds what was foretold, and each one that
    leaves frees it, also if an entrant comes that wants some of it."""
    prompts, residents = Prompts(), dict[str, Trajectory]()
    for number in range(data.draw(st.integers(1, 25))):
        context = data.draw(st.integers(1, 300))
        if residents and data.draw(st.booleans()):
            name = data.draw(st.sampled_from(sorted(residents)))
            prompts.remove(name)
            if data.draw(st.booleans()):
                del residents[name]
            else:
                residents[name].cut_prompt(context)
                prompts.add(residents[name])
        else:
            trajectory = some_trajectory(data, f"t{number}")
            found = prompts.found_by(trajectory.prompt_within(context))
            assert 0 <= found <= min(context, trajectory.first_prompt_tokens)
            trajectory.cut_prompt(context)
            before = prompts.shared_tokens
            prompts.add(trajectory)
            assert prompts.shared_tokens - before == found
            residents[trajectory.trajectory_id] = trajectory
        lengths: dict[PartName, list[int]] = {}
        for trajectory in residents.values():
            assert trajectory.first_prompt_tokens == sum(tokens for _, tokens in trajectory.prompt)
            for part, tokens in trajectory.prompt:
                lengths.setdefault(part, []).append(tokens)
        assert prompts.shared_tokens == sum(sum(some) - max(some) for some in lengths.values())
        claims = [trajectory.first_prompt_tokens for trajectory in residents.values()]
        assert 0 <= prompts.shared_tokens <= sum(claims) - max(claims, default=0)
        assert not any(prompts.left_by(name for name, one in residents.items() if not one.prompt))
    entrant = some_trajectory(data, "entrant")
    leaving = data.draw(st.permutations(sorted(residents)))
    foretold = list(prompts.left_by(leaving, entrant.prompt))
    prompts.add(entrant)
    for name, left in zip(leaving, foretold, strict=True):
        before = prompts.shared_tokens
        prompts.remove(name)
        assert before - prompts.shared_tokens == left
    prompts.remove("entrant")
    assert prompts.shared_tokens == 0


def test_an_entrant_whose_context_is_shorter_than_its_prompt_finds_no_more_than_it_holds() -> None:
    """A resident of 91 tokens holds a prompt of 22. A second turn of another trajectory with that prompt, of one token
    and an answer of 20, would find 21 of them, and exceed the watermark by one."""
    fleet = Fleet(limits=Limits(answer_tokens=20))
    part = (("q", 100),)
    fleet.arrive("long", "t2", prompt=22, parts=part)
    fleet.arrive("short", "t2", prompt=1)
    fleet.fail("long", 0, Fault.CLIENT_LEFT)
    fleet.arrive("first", "t0", prompt=22, parts=part, priority=-1)
    fleet.engine("A", slots=1, kv=100)
    assert fleet.sent(fleet.finish("first", prompt=91, output=0)) == []
    assert fleet.claims("A") == {"t0": 91}


def test_a_prompt_that_was_estimated_too_long_is_cut_once() -> None:
    """Its context grows from there on, but the prompt stays what it was found to be, and a sibling finds all of it."""
    fleet = Fleet()
    fleet.engine("A", slots=8, kv=1_000)
    fleet.arrive("a1", "a", prompt=100, group="g")
    fleet.finish("a1", prompt=60)
    fleet.arrive("a2", "a", prompt=80, group="g")
    fleet.arrive("b", prompt=70, group="g")
    assert fleet.claims("A") == {"a": 80, "b": 70} and fleet.scheduler.engines["A"].kv_held == 80
