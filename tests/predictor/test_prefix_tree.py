"""The prefix trees: what they predict from chains of outcomes, how they weigh siblings, what they forget."""

import math
import random
import time
from statistics import fmean

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.prefix_tree import TreePredictor, TreeSettings
from predictor.progress import Progress

OK, BAD, SLOW = "bash:small:success", "bash:small:failure", "bash:large:timeout"


def at(
    name: str, made: int = 0, chain: tuple[str, ...] = (), group: str = "", turns: int | None = None, prompt: str = ""
) -> Progress:
    num_turns = len(chain) if turns is None else turns
    return Progress(name, group, prompt, output_tokens=made, num_turns=num_turns, outcomes=chain)


def teach(predictor: TreePredictor, name: str, outputs: list[int], chain: list[str], group: str = "") -> None:
    """Report a whole trajectory: a turn for each output, an outcome after each turn but the last."""
    for turn in range(len(outputs)):
        predictor.predict(at(name, sum(outputs[:turn]), tuple(chain[:turn]), group))
    predictor.ended(at(name, sum(outputs), tuple(chain), group, turns=len(outputs)))


def remaining(predictor: TreePredictor, chain: tuple[str, ...] = (), group: str = "", made: int = 0) -> float:
    prediction = predictor.predict(at("asked", made, chain, group))
    predictor.dropped("asked")
    return prediction.total_tokens - made


def test_without_data_the_prediction_is_the_prior() -> None:
    """Mean and 90th percentile of the assumed log-normal, on top of the output so far."""
    predictor = TreePredictor(TreeSettings(typical_tokens=1_000, spread=1.0))
    prediction = predictor.predict(at("a", made=70))
    assert prediction.total_tokens == pytest.approx(70 + 1_000 * math.exp(0.5))
    assert prediction.p90_tokens == pytest.approx(70 + 1_000 * math.exp(1.2816), rel=1e-3)


def test_outcomes_tell_long_trajectories_from_short_ones() -> None:
    """Trajectories continue after failures and end after a success, so one outcome moves the prediction most of the
    way."""
    predictor = TreePredictor()
    for n in range(60):
        teach(predictor, f"good{n}", [100, 100], [OK])
        teach(predictor, f"bad{n}", [100, *[1_000] * 8], [BAD] * 8)
    assert remaining(predictor, (OK,)) == pytest.approx(100, rel=0.4)
    assert remaining(predictor, (BAD,)) == pytest.approx(8_000, rel=0.4)
    blind = TreePredictor(TreeSettings(use_outcomes=False))
    for n in range(60):
        teach(blind, f"good{n}", [100, 100], [OK])
        teach(blind, f"bad{n}", [100, *[1_000] * 8], [BAD] * 8)
    assert remaining(blind, (OK,)) == remaining(blind, (BAD,)) > 500


def test_an_unseen_chain_is_predicted_as_its_parent() -> None:
    """An outcome that nobody had is no evidence."""
    predictor = TreePredictor()
    for n in range(30):
        teach(predictor, f"t{n}", [50, 2_000], [BAD])
    assert remaining(predictor, (BAD, SLOW, SLOW)) == remaining(predictor, (BAD,)) > 1_000


def test_one_sibling_moves_its_group_and_hardly_others() -> None:
    """The first sibling more than triples its group's prediction, and each further one raises it."""
    predictor = TreePredictor()
    for n in range(100):
        teach(predictor, f"t{n}", [round(1_000 * math.exp(random.Random(n).gauss(0, 0.9)))], [], group=f"g{n}")
    before = remaining(predictor, group="other")
    seen = []
    for n in range(4):
        teach(predictor, f"long{n}", [60_000], [], group="g")
        seen.append(remaining(predictor, group="g"))
        if n == 0:
            assert remaining(predictor, group="other") < 2 * before
    assert before * 3 < seen[0] < seen[1] < seen[3]


def test_a_prompt_that_is_told_at_the_first_turn_is_known_at_the_next_first_turn() -> None:
    """As the gateway tells it. In a later rollout the group has another id, and the prompt is the same."""
    predictor = TreePredictor()
    for n in range(100):
        teach(predictor, f"t{n}", [100, 100], [OK], group=f"g{n}")
    for n in range(8):
        predictor.predict(at(f"long{n}", group="first rollout", prompt="p"))
        predictor.predict(at(f"long{n}", 4_000, (OK,), group="first rollout"))
        predictor.ended(at(f"long{n}", 8_000, (OK,), group="first rollout", turns=2))
    for group in ("first rollout", "second rollout"):
        assert predictor.predict(at(group, group=group, prompt="p")).total_tokens > 4_000
        assert predictor.predict(at(group, 4_000, (OK,), group=group)).total_tokens > 6_000


def test_a_group_with_one_sibling_still_uses_the_global_tree() -> None:
    """Libra's tree would predict what the one sibling did. Here the global tree predicts a chain that the sibling never
    had."""
    predictor = TreePredictor()
    for n in range(60):
        teach(predictor, f"good{n}", [100, 100], [OK], group=f"g{n}")
        teach(predictor, f"bad{n}", [100, *[1_000] * 8], [BAD] * 8, group=f"g{n}")
    teach(predictor, "sibling", [100, 100], [OK], group="new")
    assert remaining(predictor, (BAD,), group="new") > 5 * remaining(predictor, (OK,), group="new")


def test_the_weight_of_siblings_is_learned() -> None:
    """If groups say nothing about lengths, a sibling counts little; if they determine lengths, it counts in full."""

    def after(within: float, between: float) -> float:
        rng = random.Random(3)
        predictor = TreePredictor()
        for n in range(150):
            level = rng.gauss(8, between)
            for k in range(4):
                teach(predictor, f"{n}-{k}", [round(math.exp(rng.gauss(level, within)))], [], group=f"g{n}")
        teach(predictor, "one", [60_000], [], group="g")
        return remaining(predictor, group="g")

    assert after(within=1.0, between=0.05) < 20_000
    assert after(within=0.1, between=1.0) == pytest.approx(60_000, rel=0.25)


def test_the_90th_percentile_is_calibrated() -> None:
    """With and without siblings, about nine in ten trajectories end below it."""
    rng = random.Random(5)
    predictor = TreePredictor()
    below: dict[int, list[bool]] = {0: [], 1: [], 4: []}
    for n in range(500):
        level = rng.gauss(8, 0.8)
        for k in range(6):
            total = round(math.exp(rng.gauss(level, 0.6)))
            prediction = predictor.predict(at(f"{n}-{k}", group=f"g{n}"))
            if k in below and n > 100:
                below[k].append(total <= prediction.p90_tokens)
            predictor.ended(at(f"{n}-{k}", total, group=f"g{n}"))
    assert all(0.84 < fmean(hits) < 0.96 for hits in below.values()), {k: fmean(v) for k, v in below.items()}


@pytest.mark.parametrize("num", [150, 64, 47, 32])
def test_the_90th_percentile_is_that_of_the_latest_64_totals(num: int) -> None:
    """It is interpolated between the logs of the two nearest totals, and relates to the mean of the same
    trajectories."""
    dice, predictor = random.Random(num), TreePredictor()
    totals = [round(dice.lognormvariate(7.0, 1.0)) + 1 for _ in range(num)]
    for number, total in enumerate(totals):
        teach(predictor, f"t{number}", [total], [])
    prediction, latest = predictor.predict(at("asked")), totals[-64:]
    p90 = math.exp(np.percentile(np.log(latest), 90))
    assert prediction.p90_tokens / prediction.total_tokens == pytest.approx(p90 / fmean(latest), rel=1e-5)


def test_a_dropped_or_evicted_trajectory_teaches_only_its_total() -> None:
    """The steps of trajectories whose end nobody reports are not kept forever."""
    plain, dropping, full = TreePredictor(), TreePredictor(), TreePredictor(TreeSettings(max_live=2))
    for predictor in (dropping, full):
        for turn in range(3):
            predictor.predict(at("a", 100 * turn, (OK,) * turn))
    dropping.dropped("a")
    for name in ("b", "c"):
        full.predict(at(name))
    for predictor in (plain, dropping, full):
        predictor.ended(at("a", 300, (OK, OK), turns=3))
    assert plain.dump() == dropping.dump() == full.dump()


def test_a_trajectory_of_a_thousand_turns_is_bounded() -> None:
    """The bounds hold for the nodes of its chain and for the weight of its turns."""
    predictor = TreePredictor(TreeSettings(max_depth=4, memory=10_000.0))
    teach(predictor, "a", [10] * 1_000, [OK] * 999)
    assert len(predictor) == 5
    assert sum(row[2] for row in orjson.loads(predictor.dump())["nodes"]) == 16


def test_predictions_follow_drift() -> None:
    """When trajectories grow from 500 to 8,000 tokens, predictions follow, also for a chain seen only before."""
    predictor = TreePredictor(TreeSettings(memory=50, half_life=50))
    for n in range(200):
        teach(predictor, f"old{n}", [250, 250], [BAD])
    early = remaining(predictor)
    for n in range(200):
        teach(predictor, f"late{n}", [4_000, 4_000], [OK])
    assert remaining(predictor) > 8 * early
    assert remaining(predictor, (BAD,)) > 4 * 250


def test_memory_is_bounded_and_the_least_recently_used_goes_first() -> None:
    """There are never more nodes than allowed, of prompts, chains or both. A prompt in use stays."""
    predictor = TreePredictor(TreeSettings(max_nodes=100, max_depth=5, max_live=10))
    for n in range(300):
        teach(predictor, f"{n}", [1] * 8, [f"{n}:small:success"] * 7, group=f"g{n}")
        teach(predictor, f"again{n}", [90_000], [], group="kept")
        predictor.predict(at(f"never ends {n}"))
        assert len(predictor) <= 100
    assert remaining(predictor, group="kept") > 2 * remaining(predictor, group="g3")
    assert remaining(predictor, group="g3") == remaining(predictor, group="never seen")
    assert len(predictor._live) <= 10


chains = st.lists(st.sampled_from([OK, BAD, SLOW]), max_size=6)
trajectories = st.lists(st.tuples(chains, st.integers(1, 5_000), st.sampled_from(["", "g", "h"])), max_size=12)


@given(trajectories, chains, st.integers(0, 10_000), st.sampled_from(["", "g", "new"]))
def test_every_prediction_is_finite_and_above_the_output_so_far(
    seen: list[tuple[list[str], int, str]], chain: list[str], made: int, group: str
) -> None:
    """This holds whatever was learned, and the 90th percentile is never below the mean."""
    predictor = TreePredictor(TreeSettings(sample=8, max_nodes=40, max_depth=4))
    for n, (outcomes, tokens, of_group) in enumerate(seen):
        teach(predictor, f"{n}", [tokens] * (len(outcomes) + 1), outcomes, of_group)
    prediction = predictor.predict(at("x", made, tuple(chain), group))
    assert made < prediction.total_tokens <= prediction.p90_tokens < math.inf


@given(trajectories, chains, st.sampled_from(["", "g", "new"]))
def test_a_restored_predictor_predicts_and_learns_the_same(
    seen: list[tuple[list[str], int, str]], chain: list[str], group: str
) -> None:
    """Its next predictions, what it learns later and what it forgets first equal those of the original."""
    settings = TreeSettings(sample=8, max_nodes=30, max_depth=4)
    first, second = TreePredictor(settings), TreePredictor(settings)
    for n, (outcomes, tokens, of_group) in enumerate(seen):
        teach(first, f"{n}", [tokens] * (len(outcomes) + 1), outcomes, of_group)
    second.restore(first.dump())
    for predictor in (first, second):
        teach(predictor, "more", [700, 10], [SLOW], "g")
    assert first.predict(at("x", 0, tuple(chain), group)) == second.predict(at("x", 0, tuple(chain), group))
    assert first.dump() == second.dump()


@pytest.mark.parametrize(
    "dumped",
    [
        b"",
        b"[]",
        b"{}",
        b'{"kind": "siblings"}',
        b'{"kind": "prefix-tree-1", "learned": [1, 1, 1, 1], "nodes": [[0, "", 1, 1, 1, 1, []]]}',
        b'{"kind": "prefix-tree-1", "learned": [1, 1, 1, 1], "nodes": [[-1, "", "x", 1, 1, 1, []]]}',
        b'{"kind": "prefix-tree-1", "learned": [1], "nodes": []}',
    ],
)
def test_a_malformed_dump_is_refused_and_changes_nothing(dumped: bytes) -> None:
    """`restore` raises ValueError, and what was learned stays."""
    predictor = TreePredictor()
    teach(predictor, "a", [77_000], [], "g")
    before = predictor.dump()
    with pytest.raises(ValueError):
        predictor.restore(dumped)
    assert predictor.dump() == before


def test_an_end_without_earlier_turns_is_learned() -> None:
    """After a restart only the total is known, and it counts. An end without output does not."""
    predictor = TreePredictor()
    predictor.ended(at("a", 50_000, group="g"))
    assert remaining(predictor, group="g") > 3 * remaining(predictor, group="other")
    before = predictor.dump()
    predictor.ended(at("b", 0, group="g"))
    assert predictor.dump() == before


def test_a_prediction_takes_under_100_us() -> None:
    """At 24 turns, in well-grown trees. The best of five rounds counts, in process time, because machines are busy."""
    rng = random.Random(7)
    predictor = TreePredictor()
    for n in range(300):
        chain = [rng.choice((OK, OK, OK, BAD)) for _ in range(24)]
        teach(predictor, f"{n}", [100] * 25, chain, f"g{n % 40}")
    asked = [at("x", 2_400, tuple(rng.choice((OK, OK, OK, BAD)) for _ in range(24)), f"g{n % 40}") for n in range(200)]

    def round_s() -> float:
        started = time.process_time()
        for progress in asked:
            predictor.predict(progress)
        return (time.process_time() - started) / len(asked)

    assert min(round_s() for _ in range(5)) < 100e-6
