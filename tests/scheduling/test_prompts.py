"""Prompts that trajectories share on an engine: siblings' and preambles count once among its claims."""

from hypothesis import given
from hypothesis import strategies as st

from scheduling.limits import Limits
from scheduling.prompts import Prompts
from scheduling.state import Trajectory
from scheduling.types import Prediction, TrajectoryDeclared, TurnArrived
from tests.scheduling.fleet import Fleet, fleet_with_one_in_tool


def siblings(*prompts: int, kv: int = 100) -> Fleet:
    """Engine A with 8 slots; siblings `s0`, `s1` and so on in tool calls there, which answered with nothing yet."""
    fleet = Fleet(limits=Limits(answer_tokens=0, in_tool_lease_s=60, entry_patience_s=300))
    fleet.engine("A", slots=8, kv=kv)
    for number, prompt in enumerate(prompts):
        fleet.arrive(f"s{number}", prompt=prompt, group="g")
        fleet.finish(f"s{number}", prompt=prompt, output=5)
    return fleet


def test_the_prompt_of_siblings_is_held_once() -> None:
    """Three times 45 tokens of which 40 are the same prompt are 55 of 90: the fourth sibling enters, at 40 + 4 * 5."""
    fleet = siblings(40, 40, 40)
    engine = fleet.scheduler.engines["A"]
    assert (engine.kv_claimed, engine.kv_held) == (135, 55)
    assert fleet.sent(fleet.arrive("s3", prompt=40, group="g")) == [("s3", "A")]
    assert fleet.sent(fleet.arrive("other", prompt=35)) == [("other", "A")]
    assert fleet.arrive("another", prompt=1) == []


def test_prompts_of_other_groups_and_unlike_ones_are_held_each() -> None:
    """A group's name alone makes no prompt the same; nobody's group is nobody's sibling."""
    fleet = siblings(40)
    assert fleet.arrive("elsewhere", prompt=46, group="h") == []
    assert fleet.arrive("unlike", prompt=46, group="g") == []
    nameless = siblings()
    for name in ("a", "b"):
        nameless.arrive(name, prompt=40, preamble=("", 30))
    assert nameless.scheduler.engines["A"].kv_held == 80
    alone = fleet_with_one_in_tool()
    assert alone.arrive("b", prompt=41) == []


def test_a_preamble_of_many_groups_is_held_once() -> None:
    """Two groups of two, prompts of 40 of which 30 are system prompt and tools: 30 + 2 * 10 + 4 * 5 of 90. A third one
    needs 10 more, and one with another preamble 40, for which the first two must leave."""
    fleet = siblings()
    for number in range(4):
        fleet.arrive(f"t{number}", prompt=40, group=f"g{number // 2}", preamble=("p", 30))
        fleet.finish(f"t{number}", prompt=40, output=5)
    engine = fleet.scheduler.engines["A"]
    assert (engine.kv_claimed, engine.kv_held) == (180, 70)
    assert fleet.arrive("unlike", prompt=40, group="g9", preamble=("q", 30)) == []
    assert fleet.sent(fleet.arrive("alike", prompt=40, group="g8", preamble=("p", 30), priority=-1)) == [("alike", "A")]
    assert engine.kv_held == 80
    for name in ("t0", "t1", "t2", "t3"):
        fleet.close(name)
    assert set(fleet.claims("A")) == {"alike", "unlike"}
    assert engine.kv_held == 80 and engine.uncached_tokens == 10 + 40


def test_a_preamble_without_a_group_is_held_once_too() -> None:
    """Single trajectories, each with its own task behind the same 30 tokens. Who has but 20 of them has no more."""
    fleet = siblings()
    for number in range(3):
        fleet.arrive(f"t{number}", prompt=40, preamble=("p", 30))
    fleet.arrive("bare", prompt=20, group="g", preamble=("p", 30))
    engine = fleet.scheduler.engines["A"]
    assert (engine.kv_claimed, engine.kv_held) == (140, 20 + 3 * 20)


def test_a_preamble_of_no_tokens_is_none() -> None:
    """Behind one that has some, the same group goes on from elsewhere (found by the property below)."""
    fleet = siblings(kv=1_000)
    fleet.arrive("bare", prompt=200, group="g", preamble=("q", 0))
    fleet.arrive("behind", prompt=200, group="g", preamble=("q", 150))
    assert fleet.scheduler.engines["A"].kv_held == 400


def test_adapters_of_one_engine_share_no_prompt() -> None:
    """The same words under another model are other keys and values."""
    fleet = Fleet(limits=Limits(answer_tokens=0))
    fleet.engine("A", slots=8, kv=100, models=("x", "y"))
    for name, model in (("a", "x"), ("b", "y"), ("c", "y")):
        fleet.arrive(name, prompt=30, group="g", preamble=("p", 20), model=model)
    assert fleet.scheduler.engines["A"].kv_held == 60


def test_the_group_that_was_declared_is_that_of_the_prompt() -> None:
    """A client that declared its trajectory need not name its group again; one that did not may name it then."""
    fleet = siblings(40)
    fleet.declare("declared")  # of group g
    fleet.handle(TrajectoryDeclared(fleet.at, "named", Prediction(1_000.0, 1_000.0)))
    fleet.arrive("declared-1", "declared", prompt=40)
    fleet.arrive("named-1", "named", prompt=40, group="g")
    engine = fleet.scheduler.engines["A"]
    assert (engine.kv_claimed, engine.kv_held) == (125, 45)


def test_a_prompt_that_was_estimated_too_long_is_cut_in_proportion() -> None:
    """Engines count 36 where 40 were guessed, 30 of them preamble: 27 are what others find."""
    fleet = siblings()
    for name in ("a", "b"):
        fleet.arrive(name, prompt=40, group=name, preamble=("p", 30))
    fleet.finish("a", prompt=36, output=0)
    engine = fleet.scheduler.engines["A"]
    assert engine.kv_held == 36 + 40 - 27


def test_a_prompt_stays_until_its_last_holder_leaves() -> None:
    """Of two siblings one leaves: what it frees is its own part, and the other one frees the rest."""
    fleet = siblings(40, 40)
    engine = fleet.scheduler.engines["A"]
    assert engine.kv_held == 50
    fleet.close("s0")
    assert engine.kv_held == engine.kv_claimed == 45
    fleet.close("s1")
    assert engine.kv_held == engine.kv_claimed == 0


def test_siblings_that_give_way_free_only_what_is_their_own() -> None:
    """After their lease: an entrant of 45 needs 5 of s0 and then all that s1 has; one of their own keeps the prompt."""
    fleet = siblings(40, 40)
    fleet.tick(61)
    assert fleet.sent(fleet.arrive("b", prompt=45)) == [("b", "A")]
    assert fleet.claims("A") == {"s1": 45, "b": 45}
    fleet = siblings(80)
    fleet.tick(61)
    assert fleet.sent(fleet.arrive("s1", prompt=80, group="g")) == [("s1", "A")]
    assert fleet.scheduler.engines["A"].kv_held == 85


def test_contexts_that_outgrow_an_engine_count_their_prompt_once() -> None:
    """Four siblings claim 180 of 100 tokens and hold 60, so nobody leaves; at 101 the least urgent one does."""
    fleet = siblings(40, 40, 40, 40)
    assert len(fleet.claims("A")) == 4
    fleet.arrive("s0-1", "s0", prompt=80)
    assert len(fleet.claims("A")) == 4
    fleet.progress("s0-1", 1, 6)
    assert len(fleet.claims("A")) == 3 and fleet.scheduler.engines["A"].kv_held == 96


def test_a_prefill_waits_until_its_turn_has_grown_or_ended() -> None:
    """What a sibling's prompt brought is not prefilled again."""
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


def test_an_agent_that_cut_its_context_down_shares_no_prompt() -> None:
    """Half of it is gone: that is another context. A little less is an estimate that was too long, for all of them."""
    fleet = siblings(40, 40)
    engine = fleet.scheduler.engines["A"]
    fleet.arrive("s1-1", "s1", prompt=20)
    fleet.finish("s1-1", prompt=10, output=5)
    assert fleet.claims("A") == {"s0": 45, "s1": 15} and engine.kv_held == 60
    fleet = siblings(40, 40, 40)
    engine = fleet.scheduler.engines["A"]
    fleet.arrive("s1-1", "s1", prompt=36)
    fleet.finish("s1-1", prompt=31, output=5)
    assert fleet.claims("A") == {"s0": 45, "s1": 36, "s2": 45} and engine.kv_held == 36 + 9 + 9


@given(st.data())
def test_siblings_claim_their_prompt_once_and_free_it_with_the_last(data: st.DataObject) -> None:
    """Whoever comes, grows, is cut down and goes, in any order: against a count of each prompt from the beginning."""
    prompts, residents = Prompts(), {}
    for number in range(data.draw(st.integers(1, 25))):
        if residents and data.draw(st.booleans()):
            name = data.draw(st.sampled_from(sorted(residents)))
            trajectory, context = residents[name]
            if data.draw(st.booleans()):
                prompts.remove(name)
                del residents[name]
            else:
                context = data.draw(st.integers(1, 300))
                prompts.fit(name, context)
                residents[name] = trajectory, min(context, residents[name][1])
        else:
            name = f"t{number}"
            trajectory = Trajectory(name, number, "", None, 0.0, 0.0, Prediction(1.0, 1.0))
            tokens = data.draw(st.sampled_from([0, 96, 99, 100, 101, 200, 203]))
            group = data.draw(st.sampled_from(["", "g", "h"]))
            preamble = data.draw(st.sampled_from([("", 0), ("p", 50), ("p", 55), ("q", 150), ("", 10), ("q", 0)]))
            asked = TurnArrived(0.0, name, name, "model", tokens, Prediction(1.0, 1.0), group, None, 0, *preamble)
            trajectory.note_first_prompt(asked, group)
            found = prompts.found_by(trajectory)
            assert 0 <= found <= trajectory.first_prompt_tokens <= tokens
            before = prompts.shared_tokens
            prompts.add(trajectory)
            assert prompts.shared_tokens - before <= found, "what others hold of a part may turn out to be less"
            residents[name] = trajectory, trajectory.first_prompt_tokens
        claims = [context for _, context in residents.values()]
        assert 0 <= prompts.shared_tokens <= sum(claims) - max(claims, default=0)
        alone = {name for name, (one, _) in residents.items() if not one.prompt}
        assert not any(prompts.left_by(alone))
    leaving = data.draw(st.permutations(sorted(residents)))
    for name, left in zip(leaving, list(prompts.left_by(leaving)), strict=True):
        before = prompts.shared_tokens
        prompts.remove(name)
        assert before - prompts.shared_tokens == left
    assert prompts.shared_tokens == 0
