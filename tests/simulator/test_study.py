"""The study: which runs it makes in which order, what it keeps, and what the page reports."""

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from engines.profiles import load_profile
from predictor.siblings import SiblingPredictor
from scheduling.limits import Limits
from scheduling.policy import HEDDLE, POLICIES, VERL
from simulator.comparison import Choice, Results, ablation_ratios
from simulator.experiments import Cache, Size, Study, play, read_cases, run_all, source_hash
from simulator.planned_fleets import MIXED, PLANNED, planned_fleet
from simulator.predictors import Oracle
from simulator.results_page import write_page
from simulator.rollout import Rollout
from simulator.scenario import load_scenario
from simulator.study import (
    BLIND,
    CLAIRVOYANT,
    MAIN,
    MECHANISMS,
    Case,
    Job,
    Row,
    ablations,
    baselines,
    best_tp,
    jobs,
    leaders,
    policy_named,
    variants,
)
from workloads.laws import draw, law_named

FIRST = Case(MAIN[0], "d", (1, 4), 16, 4)
OTHER = Case("another", "d", (1, 4), 16, 4)
SEEDS = (1, 2)


def row(job: Job, makespan_s: float) -> Row:
    return Row(job, "source", "abc1234", makespan_s, 50.0, 40.0, {"num_trajectories": 16, "num_finished": 16}, 1.0)


def invented_makespan_s(job: Job) -> float:
    """TP 1 takes twice as long as TP 4, Heddle a tenth less, ThunderAgent comes next, and slime is by far the
    slowest."""
    makespan_s = {0: 95.0, 1: 200.0, 4: 100.0}[job.tp] + job.seed
    factors = {HEDDLE.name: 0.8 if job.predictor == CLAIRVOYANT else 0.9, "thunderagent": 0.98, "slime": 1.5}
    return makespan_s * factors.get(job.policy, 1.0)


def all_jobs(cases: tuple[Case, ...]) -> dict[Job, float]:
    """Every job that the study asks for, with its makespan, until it asks for nothing more."""
    done: dict[Job, float] = {}
    while missing := [job for job in jobs(cases, SEEDS, done) if job not in done]:
        done[missing[0]] = invented_makespan_s(missing[0])
    return done


def test_every_policy_is_heddle_a_baseline_or_a_variant() -> None:
    """Exactly one of these; a variant is Heddle with one thing changed."""
    assert sorted((HEDDLE.name, *baselines(), *variants())) == sorted(POLICIES)
    assert {"verl", "slime", "heddle-paper"} <= set(baselines()) and "fcfs" in variants()


@pytest.mark.parametrize("name", BLIND)
def test_a_blind_baseline_ignores_predictions(name: str) -> None:
    """Otherwise the study would have to run it with true lengths, too. KV binds here, so that residency matters."""
    fleet = [replace(load_profile("qwen3-14b-h100-tp1"), slots=8, kv_capacity_tokens=64_000)] * 2
    workload = draw(law_named("coding"), 32, 1)
    limits = Limits(queue_timeout_s=1e6)
    learned, truth = (
        Rollout(workload, fleet, POLICIES[name], limits, predictor).run()
        for predictor in (SiblingPredictor(), Oracle(workload.trajectories))
    )
    assert [one.ended_at for one in learned.trajectories] == [one.ended_at for one in truth.trajectories]


def test_ablations_switch_one_mechanism_and_nothing_else() -> None:
    """Heddle without the mechanism differs from Heddle in one field; the mechanism alone, from held sticky round
    robin."""
    assert len(ablations()) == 2 * len(MECHANISMS)
    for name, field in MECHANISMS.items():
        without, alone = policy_named(f"without {name}"), policy_named(f"{name} alone")
        assert replace(without, name=HEDDLE.name, **{field: getattr(HEDDLE, field)}) == HEDDLE != without
        base = replace(VERL, holds_turns=True)
        assert replace(alone, name=VERL.name, **{field: getattr(VERL, field)}) == base
        assert getattr(alone, field) == getattr(HEDDLE, field)


def test_main_cases_come_before_ablations_and_those_before_other_cases() -> None:
    """Heddle first; mechanisms when the main table is full; last, more seeds for baselines that are behind."""
    order = list(all_jobs((FIRST, OTHER)))
    assert order[0] == Job(FIRST, HEDDLE.name, 1, 1)
    compared = (HEDDLE.name, "thunderagent", "verl")
    in_table = [job for job in order if job.case == FIRST and job.policy in compared and not job.fleet]
    first_ablation = min(order.index(job) for job in order if job.policy in ablations())
    first_other = min(order.index(job) for job in order if job.case == OTHER)
    first_variant = min(order.index(job) for job in order if job.policy in variants())
    behind = order.index(Job(FIRST, "slime", 4, 2))
    assert max(map(order.index, in_table)) < first_ablation < first_other < first_variant < behind


def test_leaders_are_the_baselines_near_the_best_once_all_ran() -> None:
    """slime takes half as long again, so it is not one. Until every baseline has run, there are none."""
    done = all_jobs((FIRST,))
    assert set(leaders(FIRST, done)) == set(baselines()) - {"slime"}
    untried = {job: s for job, s in done.items() if (job.policy, job.tp) != ("slime", 1)}
    assert leaders(FIRST, untried) == ()


def test_other_seeds_run_on_fleets_that_may_be_best_and_on_the_worst() -> None:
    """TP 1 takes twice as long with the first seed, so it does not run again, except for the slowest baseline."""
    again = [job for job in all_jobs((FIRST,)) if job.seed == 2 and job.policy in baselines()]
    assert {(job.policy, job.tp) for job in again} == {("slime", 1), *((policy, 4) for policy in baselines())}


def test_the_best_fleet_has_the_least_mean_over_common_seeds() -> None:
    """Of two candidates, the one that wins with the first seed loses over both."""
    done = {Job(FIRST, "verl", tp, seed): s for (tp, seed), s in {(1, 1): 100, (4, 1): 105, (4, 2): 90}.items()}
    assert best_tp(FIRST, "verl", {k: v for k, v in done.items() if k.tp == 1}) is None
    assert best_tp(FIRST, "verl", done) == 1
    assert best_tp(FIRST, "verl", {**done, Job(FIRST, "verl", 1, 2): 120.0}) == 4


def results() -> Results:
    return Results({job: row(job, makespan_s) for job, makespan_s in all_jobs((FIRST,)).items()})


def test_ratios_are_paired_by_seed_and_bounds_are_those_of_the_best_fleet() -> None:
    """ThunderAgent takes 0.98 and Heddle 0.9 of the same makespan with each seed; Heddle's 0.9 x 101 s compare with a
    bound of 40."""
    study_results = results()
    ours, best = study_results.best(FIRST, HEDDLE.name), study_results.best_baseline(FIRST)
    assert (ours, best) == (Choice(HEDDLE.name, 4), Choice("thunderagent", 4))
    ratio = study_results.ratio(FIRST, best, ours)
    assert ratio is not None and (ratio.mean, ratio.low, ratio.high) == pytest.approx((0.98 / 0.9,) * 3)
    assert ratio.num == 2
    assert study_results.worst_baseline(FIRST) == Choice("slime", 1) and study_results.slowest_policy(FIRST) == Choice(
        "slime", 4
    )
    to_bound = study_results.to_bound(FIRST, ours)
    assert to_bound is not None and to_bound.low == pytest.approx(101 * 0.9 / 40)
    assert ablation_ratios(study_results, FIRST)["residency"]["without"].mean == pytest.approx(1 / 0.9)


def test_planned_fleets_are_measured_against_the_best_homogeneous_one() -> None:
    """Heddle takes 0.9 of 101 s and 102 s on TP 4, and of 96 s and 97 s on planned fleets. No other policy plays
    those."""
    done = all_jobs((FIRST, OTHER))
    results = Results({job: replace(row(job, makespan_s), fleet="2 x TP 2") for job, makespan_s in done.items()})
    assert {(job.case, job.policy) for job in done if job.fleet} == {(FIRST, HEDDLE.name)}
    gain = results.gain_of_plan(FIRST, MIXED)
    assert gain is not None and (gain.num, gain.low, gain.high) == pytest.approx((2, 102 / 97, 101 / 96))
    assert results.gain_of_plan(OTHER, MIXED) is None


def test_the_page_names_what_does_not_pay(tmp_path: Path) -> None:
    """A mechanism whose removal helps, one that has no effect, and a case that is lost, each with its figures."""
    done = all_jobs((FIRST,))
    for job in done:
        if job.policy == "without order":
            done[job] = 0.8 * invented_makespan_s(replace(job, policy=HEDDLE.name))
        if job.policy == "without migration":
            done[job] = invented_makespan_s(replace(job, policy=HEDDLE.name))
        if job.policy == "verl" and job.tp == 4:
            done[job] = 0.5 * invented_makespan_s(replace(job, policy=HEDDLE.name))
    write_page({job: row(job, s) for job, s in done.items()}, (FIRST,), tmp_path, tmp_path / "page.md", "make it")
    page = (tmp_path / "page.md").read_text()
    assert "- Heddle loses coding-14b: the best baseline, verl, TP4, takes only 0.50 of its makespan" in page
    assert "- Order costs; the makespan without it: coding-14b x0.80 (0.80 to 0.80)." in page
    assert "- Migration makes no difference; the makespan without it: coding-14b x1.00" in page
    assert "**x0.50 [4]**" in page
    assert "Residency" not in page.partition("## Where it does not pay")[2].partition("\n## ")[0]
    kinds = ("Heddle", "baselines", "the clairvoyant", "variants of Heddle")
    caption = f"*`make it`, seeds 1, 2; commits: {'; '.join(f'{kind} abc1234' for kind in kinds)}*"
    assert page.count(caption) == 1
    assert "(plots/ablation.svg)" in page and (tmp_path / "plots" / "ablation.svg").exists()


def test_the_page_says_nothing_of_mechanisms_that_were_not_measured(tmp_path: Path) -> None:
    """It said that each is needed."""
    done = {
        job: s for job, s in all_jobs((FIRST,)).items() if "without" not in job.policy and "alone" not in job.policy
    }
    write_page({job: row(job, s) for job, s in done.items()}, (FIRST,), tmp_path, tmp_path / "page.md", "make it")
    said = (tmp_path / "page.md").read_text().partition("## Where it does not pay")[2].partition("\n#")[0]
    assert "In nothing that was measured." in said and "mechanism" not in said


SCENARIO = """
[workload]
law = "coding"
trajectories = 64
scale = 0.05

[fleet]
profile = "qwen3-14b-h100"
gpus = 8
tp = [1, 4]
slots_per_gpu = 100
"""


@pytest.fixture
def study(tmp_path: Path) -> Study:
    scenarios = tmp_path / "scenarios"
    scenarios.mkdir()
    (scenarios / "coding-14b.toml").write_text(SCENARIO)
    size = Size(shrink=2)
    return Study(tuple(read_cases(scenarios, size)), (1,), size, scenarios, tmp_path, "source")


def test_a_scenario_is_a_case_that_is_played_in_the_studys_size(study: Study) -> None:
    """Half of the trajectories on half of the GPUs. A scenario with other content is another case."""
    (case,) = study.cases
    assert (case.name, case.tps, case.num_trajectories, case.gpus) == ("coding-14b", (1, 4), 32, 4)
    played = play(Job(case, HEDDLE.name, 4, 1), study, "abc1234")
    assert played.makespan_s >= played.bound_s > 0
    assert played.figures["num_finished"] == played.figures["num_trajectories"] == 32
    path = study.scenarios / "coding-14b.toml"
    path.write_text(f'about = "the same"\n{SCENARIO}')
    assert read_cases(study.scenarios, study.size) == [case]
    path.write_text(f"{SCENARIO}\n[faults]\ndeaths_per_hour = 1.0\n")
    assert read_cases(study.scenarios, study.size) != [case]


def test_a_scenario_shrinks_to_one_gpu_at_least(study: Study) -> None:
    """With as many trajectories for each GPU as before."""
    (case,) = read_cases(study.scenarios, Size(shrink=1_000))
    assert (case.tps, case.num_trajectories, case.gpus) == ((1,), 8, 1)


def test_a_scenario_shrinks_to_whole_engines(study: Study) -> None:
    """A third of 8 GPUs are 2, of which no engine of TP 4 can be made."""
    path = study.scenarios / "coding-14b.toml"
    path.write_text(SCENARIO.replace("tp = [1, 4]", "tp = [4]"))
    (case,) = read_cases(study.scenarios, Size(shrink=3))
    assert (case.tps, case.num_trajectories, case.gpus) == ((4,), 32, 4)


def test_a_fleet_may_be_reshaped_in_a_study(study: Study) -> None:
    """Such a scenario is played with every TP size that has a profile, as `heddle simulate` plays it."""
    path = study.scenarios / "coding-14b.toml"
    path.write_text(f"{SCENARIO}\n[reshape]\nevery_s = 0.5\nrelaunch_s = 0.1\n")
    (case,) = read_cases(study.scenarios, study.size)
    assert play(Job(case, HEDDLE.name, 1, 1), study, "abc1234").figures["num_finished"] == 32


def test_the_page_plots_the_runs_that_were_kept_whole(study: Study) -> None:
    """The curves are Heddle, the best and the slowest baseline, and true lengths. While one of them is missing there is
    no plot."""
    (case,) = study.cases
    done = {job: row(job, makespan_s) for job, makespan_s in all_jobs(study.cases).items()}
    page = study.folder / "page.md"
    write_page(done, study.cases, study.folder, page, "make it")
    assert "completion" not in page.read_text()
    shown = [Job(case, name, 4, 1) for name in (HEDDLE.name, "thunderagent", "slime")]
    for job in (*shown, Job(case, HEDDLE.name, 4, 1, CLAIRVOYANT)):
        play(job, study, "abc1234")
    write_page(done, study.cases, study.folder, page, "make it")
    for kind in ("completion", "timeline", "calibration"):
        assert f"(plots/coding-14b-{kind}.svg)" in page.read_text()
        svg = (study.folder / "plots" / f"coding-14b-{kind}.svg").read_text()
        ElementTree.fromstring(svg)
        assert "coding-14b, 32 trajectories on 4 GPUs, seed 1" in svg
    curves = (study.folder / "plots" / "coding-14b-completion.svg").read_text()
    assert all(f"{name}, TP4" in curves for name in (HEDDLE.name, "thunderagent", "slime"))
    assert "true lengths" in curves


def test_a_stopped_study_continues_without_mixing_sources(study: Study) -> None:
    """With no time nothing runs. Rows in the file do not run again unless they come from another source."""
    cache = Cache(study.folder, "source")
    num_missing = run_all(study, cache, budget_s=0.0)
    assert num_missing >= 2 * (1 + len(baselines())) and not cache.rows
    for job in jobs(study.cases, study.seeds, {}):
        cache.add(row(job, 100.0))
    (study.folder / "rows.jsonl").open("a").write('{"job": {"case"')
    again = Cache(study.folder, "source")
    assert again.rows == cache.rows and again.makespans
    assert not Cache(study.folder, "other").rows
    assert Cache(study.folder, None).rows == cache.rows


def test_missing_runs_are_played_and_kept(study: Study) -> None:
    """Two of many rollouts are not in the file. Both run, in other processes; then none is missing."""
    (case,) = study.cases
    missing = {Job(case, HEDDLE.name, 4, 1), Job(case, "without residency", 4, 1)}
    cache = Cache(study.folder, "source")
    for job, makespan_s in all_jobs(study.cases).items():
        if job not in missing:
            cache.add(row(job, makespan_s))
    assert run_all(study, cache, budget_s=60.0) == 0
    assert all(cache.rows[job].bound_s != 50.0 for job in missing)
    assert Cache(study.folder, "source").rows == cache.rows


def test_the_source_hash_covers_only_what_results_depend_on(tmp_path: Path) -> None:
    """The scheduler counts, the page does not."""
    for name in ("scheduling/order.py", "simulator/results_page.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("1")
    before = source_hash(tmp_path)
    (tmp_path / "simulator/results_page.py").write_text("2")
    assert source_hash(tmp_path) == before
    (tmp_path / "scheduling/order.py").write_text("2")
    assert source_hash(tmp_path) != before


def test_a_planned_fleet_uses_all_gpus_and_needs_an_earlier_rollout(tmp_path: Path) -> None:
    """It is planned for the earlier rollout. If there is none, the message names what is missing."""
    path = tmp_path / "small.toml"
    text = Path("scenarios/coding-14b.toml").read_text().replace("6400", "640")
    path.write_text(text)
    for kind in (PLANNED, MIXED):
        assert planned_fleet(load_scenario(path), kind, 1).gpus == 64
    path.write_text(text.replace("earlier = 1", "earlier = 0"))
    with pytest.raises(ValueError, match="earlier"):
        planned_fleet(load_scenario(path), PLANNED, 1)
