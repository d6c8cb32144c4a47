"""Scenarios: the files that come with Heddle, what a file may contain, and how errors in it are reported."""

from dataclasses import replace
from pathlib import Path

import pytest

from engines.profiles import load_profile
from engines.profiling import to_toml
from predictor.progress import Progress
from scheduling.policy import POLICIES
from simulator.runs import bounds_of, experienced, play, predictor_named
from simulator.scenario import Scenario, load_scenario

SCENARIOS = sorted((Path(__file__).parents[2] / "scenarios").glob("*.toml"))


def read(tmp_path: Path, text: str) -> Scenario:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return load_scenario(path)


FLEET = '[fleet]\nprofile = "toy-cpu"\ngpus = 2\ntp = [1, 2]\n'


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_scenario_that_ships_can_be_played(path: Path) -> None:
    """Its profiles, policies and predictor exist, and its engines have room for long contexts."""
    scenario = load_scenario(path)
    assert scenario.name == path.stem and scenario.about
    assert set(scenario.policies) <= set(POLICIES)
    predictor_named(scenario.predictor, (), 0)
    smallest = min(profile.kv_capacity_tokens for fleet in scenario.fleets() for profile in fleet.profiles)
    assert smallest > 100_000
    listed = sum(load_profile(engines.profile).tp * engines.count for engines in scenario.fleet.engines)
    assert all(fleet.gpus == (scenario.fleet.gpus or listed) for fleet in scenario.fleets())


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    """Some editors begin a file with one."""
    assert read(tmp_path, f"\ufeff{FLEET}").fleet.gpus == 2


def test_slots_are_counted_per_gpu(tmp_path: Path) -> None:
    """An engine over two GPUs has twice the slots, in the fleet and in its family."""
    scenario = read(tmp_path, FLEET + "slots_per_gpu = 7")
    fleets = scenario.fleets()
    assert [(len(fleet.profiles), fleet.profiles[0].slots) for fleet in fleets] == [(2, 7), (1, 14)]
    assert sorted(profile.slots for profile in fleets[0].family) == [7, 14]


def test_a_fleet_may_be_a_list_of_engines(tmp_path: Path) -> None:
    """Engines may differ. If they differ only in TP size, the fleet has a short name."""
    text = '[[fleet.engines]]\nprofile = "toy-cpu-tp2"\n[[fleet.engines]]\nprofile = "toy-cpu-tp1"\ncount = 3\n'
    [fleet] = read(tmp_path, text).fleets()
    assert [profile.tp for profile in fleet.profiles] == [2, 1, 1, 1]
    assert fleet.gpus == 5 and fleet.name == "1 x TP2 + 3 x TP1"
    unlike = text.replace("toy-cpu-tp2", "qwen3-8b-a100-tp2").replace("toy-cpu-tp1", "qwen3-8b-h100-tp1")
    [fleet] = read(tmp_path, unlike).fleets()
    assert fleet.name == "1 x qwen3-8b-a100-tp2 + 3 x qwen3-8b-h100-tp1"


def test_a_fleet_of_two_models_is_refused(tmp_path: Path) -> None:
    """It was played as if either model could take any turn, and trajectories moved between them."""
    engines = "".join(f'[[fleet.engines]]\nprofile = "qwen3-{size}-h100-tp1"\n' for size in ("14b", "8b"))
    with pytest.raises(ValueError, match=r"all agents ask for one model, .* Qwen/Qwen3-14B and Qwen/Qwen3-8B"):
        read(tmp_path, engines).fleets()


def test_turns_have_no_queue_timeout_unless_the_file_sets_one(tmp_path: Path) -> None:
    """A gateway's queue timeout would end trajectories only under policies that hold turns in its queue."""
    assert read(tmp_path, FLEET).limits.queue_timeout_s >= 1e9
    other = read(tmp_path, FLEET + "[limits]\nkv_watermark = 0.5").limits
    assert other.kv_watermark == 0.5 and other.queue_timeout_s >= 1e9 and other.max_waiting_turns >= 10**9
    assert read(tmp_path, FLEET + "[limits]\nqueue_timeout_s = 60").limits.queue_timeout_s == 60


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "fleet: missing"),
        ("limits = 3\n" + FLEET, "limits: must be a table, not 3"),
        ("fleet = 3", "fleet: must be a table, not 3"),
        ("[fleet", "mine.toml"),
        ("[fleet]\ngpus = 8", "fleet: either engines, or gpus, profile and tp"),
        ('[fleet]\nprofile = "toy-cpu"\ngpus = 8\ntp = [3]', "fleet: tp 3 does not divide 8 GPUs"),
        (FLEET.replace("gpus", "gpu"), "fleet.gpu: unknown; did you mean gpus?"),
        (FLEET.replace("gpus = 2", "gpus = 2.5"), "fleet.gpus: must be a whole number, not 2.5"),
        (FLEET + "[limits]\nkv_watermark = true", "limits.kv_watermark: must be a number, not True"),
        (FLEET + "[limits]\nnonsense = 1", "limits.nonsense: unknown"),
        (FLEET + '[workload]\nlaw = "coding"', "workload: a law needs a number of trajectories"),
        (FLEET + '[workload]\nlaw = "coding"\ntrace = "x"\n', "workload: a law or a trace, not both"),
        (
            FLEET + '[workload]\nlaw = "coding"\ntrajectories = 4\nmax_turns = 2',
            "workload: max_context_tokens, max_turns and max_tool_s are for traces, not for a law",
        ),
        ("epochs = 2\n" + FLEET + '[workload]\ntrace = "x"\n', "epochs need a law"),
        (
            FLEET + "[features.speculation]\nspeedup = 2",
            "features.speculation.speedup: unknown; did you mean speed_up?",
        ),
        (FLEET + "[features.host_tier]\n", "features.host_tier.capacity_tokens: missing"),
        (FLEET.replace("gpus = 2", "gpus = 100_000_000_000"), "fleet: gpus: at least 1, 100,000 at most"),
        (
            '[[fleet.engines]]\nprofile = "toy-cpu-tp2"\ncount = 100_001',
            "engines: a count of at least 1, 100,000 at most",
        ),
        ("seeds = [9_223_372_036_854_775_808]\n" + FLEET, "seeds: from 0 to 9223372036854775807"),
        ("seeds = [1, -1]\n" + FLEET, "seeds: from 0 to 9223372036854775807"),
        ("seeds = [1, 2, 1]\n" + FLEET, "seeds: 1 is there twice"),
        ('policies = ["heddle", "verl", "heddle"]\n' + FLEET, "policies: heddle is there twice"),
        (FLEET.replace("tp = [1, 2]", "tp = [1, 2, 1]"), "fleet: tp: 1 is there twice"),
        (FLEET + "[reshape]\nevery_s = 1e-300", "reshape: every_s: above 0, at least 0.01"),
        (FLEET + "[reshape]\nmin_gain_share = nan", "reshape: min_gain_share: from 0"),
        (FLEET + "[reshape]\nrelaunch_s = inf", "reshape: relaunch_s: from 0, and finite"),
        (
            FLEET + "[features.speculation]\nspeed_up = 1e-9",
            "features.speculation: speed_up: at least 0.01, and finite",
        ),
        ("seeds = []\n" + FLEET, "policies and seeds: at least one of each"),
        (FLEET + "[limits]\nqueue_timeout_s = inf", "limits.queue_timeout_s: at least 0, and finite"),
        (FLEET + "[workload]\npreamble_tokens = -1", "workload: preamble_tokens: from 0, a million at most"),
        (FLEET + "[workload]\nscale = 1e308", "workload: scale: above 0, a million at most"),
        (FLEET + "[workload]\ntool_scale = 1e308", "workload: tool_scale: from 0, a million at most"),
    ],
)
def test_an_error_in_a_file_is_reported_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    """It names the key and states what is expected."""
    with pytest.raises(ValueError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value) and "mine.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fleet", "message"),
    [
        (FLEET + "[reshape]\ngpus_per_node = 1", "reshape: toy-cpu-tp2 does not fit a node of 1 GPU"),
        (
            '[[fleet.engines]]\nprofile = "toy-cpu-tp1"\n[[fleet.engines]]\nprofile = "qwen3-8b-h100-tp2"\n[reshape]',
            "reshape: all engines must be of one model and GPU, not of toy-cpu and qwen3-8b-h100",
        ),
    ],
)
def test_a_fleet_that_cannot_be_reshaped_is_refused(fleet: str, message: str, tmp_path: Path) -> None:
    """Before any run starts: an engine must fit its node and be able to become any other."""
    with pytest.raises(ValueError, match=message):
        read(tmp_path, fleet).fleets()


@pytest.mark.parametrize("table", ["[transfer]", "[features.host_tier]\ncapacity_tokens = 1000"])
def test_kv_of_unknown_size_cannot_be_transferred(table: str, tmp_path: Path) -> None:
    """Engines do not report the bytes of a token, so a measured profile may state 0, and transfers would cost
    nothing."""
    measured = replace(load_profile("toy-cpu-tp1"), name="mine-gpu-tp1", gpu="gpu", kv_bytes_per_token=0)
    (tmp_path / "mine-profile.toml").write_text(to_toml("mine", measured))
    fleet = f'[fleet]\nprofile = "{tmp_path}/mine-profile.toml:mine-gpu"\ngpus = 2\ntp = [1]\n'
    assert len(read(tmp_path, fleet).fleets()) == 1
    with pytest.raises(ValueError, match="mine-gpu-tp1 does not say its kv_bytes_per_token"):
        read(tmp_path, fleet + table).fleets()


def unlike_engines_of_one_name(tmp_path: Path) -> str:
    """A fleet of two profiles from two files under the name that `heddle profile` gives by default."""
    one = replace(load_profile("toy-cpu-tp1"), name="model-gpu-tp1", gpu="gpu")
    for name, profile in (("slow", one.slower(10.0)), ("fast", one)):
        (tmp_path / f"{name}.toml").write_text(to_toml("model", profile))
    return "".join(
        f'[[fleet.engines]]\nprofile = "{tmp_path}/{name}.toml:model-gpu-tp1"\n' for name in ("fast", "slow")
    )


def test_the_best_fleet_may_consist_of_any_engine_of_the_fleet(tmp_path: Path) -> None:
    """Of profiles under one name, only the last one listed counted, and runs beat the bound of every fleet."""
    scenario = read(tmp_path, '[workload]\nlaw = "coding"\ntrajectories = 4\n' + unlike_engines_of_one_name(tmp_path))
    [fleet], [workload] = scenario.fleets(), scenario.workloads(1)
    assert set(fleet.family) == set(fleet.profiles) and len(fleet.family) == 2
    bounds = bounds_of(scenario, fleet, workload, 1)
    run = play(scenario, "heddle", fleet, "tabular", 1, [workload], bounds)
    assert bounds.best_fleet_s <= bounds.fleet_s <= run.outcome.makespan_s


def test_a_fleet_with_two_profiles_of_one_size_cannot_be_reshaped(tmp_path: Path) -> None:
    """Which of them a relaunched engine has would be chance."""
    fleet = unlike_engines_of_one_name(tmp_path)
    assert len(read(tmp_path, fleet).fleets()) == 1
    with pytest.raises(ValueError, match="reshape: all engines of one TP size must have one profile"):
        read(tmp_path, fleet + "[reshape]").fleets()


def test_a_scenario_scales_output_and_tools_of_a_law(tmp_path: Path) -> None:
    """Each by its own factor; the same trajectories otherwise."""
    plain, scaled = (
        read(tmp_path, FLEET + '[workload]\nlaw = "coding"\ntrajectories = 16\n' + scales).workloads(1)[0].trajectories
        for scales in ("", "scale = 0.5\ntool_scale = 3.0\n")
    )
    assert [one.tool_s for one in scaled] == pytest.approx([3.0 * one.tool_s for one in plain])
    tokens = [sum(one.output_tokens for one in trajectories) for trajectories in (scaled, plain)]
    assert tokens[0] == pytest.approx(0.5 * tokens[1], rel=0.02)


def test_the_bound_allows_for_tools_that_time_out_early(tmp_path: Path) -> None:
    """A timeout may be shorter than the tool call that hangs would have been."""
    asked = '[workload]\nlaw = "coding"\ntool_scale = 1000.0\ntrajectories = 4\n'
    scenario = read(tmp_path, asked + FLEET + "[faults]\ntool_timeout_share = 1.0\ntool_timeout_s = 0.5")
    fleet, workloads = scenario.fleets()[0], scenario.workloads(1)
    run = play(scenario, "verl", fleet, "tabular", 1, workloads, bounds_of(scenario, fleet, workloads[-1], 1))
    assert run.regret is not None and run.regret >= 1


def test_the_bound_counts_no_turns_that_a_client_left(tmp_path: Path) -> None:
    """It was for all turns, and rollouts that clients left ended before it. If all leave at their first turn, there is
    no regret."""
    asked = '[workload]\nlaw = "coding"\ntrajectories = 16\n[faults]\nleaving_share = 1.0\n'
    scenario = read(tmp_path, asked + '[fleet]\nprofile = "qwen3-14b-h100"\ngpus = 1\ntp = [1]\n')
    fleet, [workload] = scenario.fleets()[0], scenario.workloads(1)
    run = play(scenario, "heddle", fleet, "tabular", 1, [workload], bounds_of(scenario, fleet, workload, 1))
    assert run.outcome.num_finished < 16
    assert run.regret is not None and run.regret >= 1
    one_turn = workload.with_max_turns(1)
    run = play(scenario, "heddle", fleet, "tabular", 1, [one_turn], bounds_of(scenario, fleet, one_turn, 1))
    assert run.regret is None


def test_later_epochs_teach_the_predictor(tmp_path: Path) -> None:
    """The figures are those of the last epoch, whose prompts a predictor that remembers prompts knows."""
    agents = '[workload]\nlaw = "coding"\ntrajectories = 160\n'
    fleet_text = '[fleet]\nprofile = "qwen3-14b-h100"\ngpus = 4\ntp = [4]\n'
    errors = {}
    for epochs in (1, 2):
        scenario = read(tmp_path, f"epochs = {epochs}\n{agents}{fleet_text}")
        [fleet] = scenario.fleets()
        workloads = scenario.workloads(1)
        bounds = bounds_of(scenario, fleet, workloads[-1], 1)
        run = play(scenario, "heddle", fleet, "tabular", 1, workloads, bounds)
        assert run.labels.epoch == epochs - 1
        assert len(run.outcome.trajectories) == 160
        assert run.regret is not None and run.regret >= 1
        first = [result.predictions[0].total_tokens / result.output_tokens for result in run.outcome.trajectories]
        errors[epochs] = sum(abs(ratio - 1) for ratio in first)
    assert errors[2] < errors[1]


def test_an_experienced_predictor_has_learned_the_law_from_other_prompts(tmp_path: Path) -> None:
    """Before the first turn it knows how long trajectories are, but nothing of these groups."""
    table = FLEET + '[workload]\nlaw = "coding"\ntrajectories = 320\n'
    scenario = read(tmp_path, 'predictor = "tabular"\nearlier = 1\n' + table)
    workloads = scenario.workloads(1)
    earlier = scenario.earlier_workloads(1)
    assert not {t.group_id for t in workloads[0].trajectories} & {t.group_id for t in earlier[0].trajectories}
    first = Progress("t", "nobody's group")
    mean = sum(t.output_tokens for t in earlier[0].trajectories) / 320
    expected_tokens = experienced(scenario, "tabular", workloads, 1).predict(first).total_tokens
    assert expected_tokens == pytest.approx(mean, rel=0.25)
    assert experienced(scenario, "tabular", workloads, 1).predict(first).total_tokens == expected_tokens
    assert predictor_named("tabular", [], 1).predict(first).total_tokens != expected_tokens
