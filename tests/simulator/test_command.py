"""`heddle simulate` on the command line: tables, JSON, logs and error messages."""

import json
import os
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from engines.profiles import load_profile
from engines.profiling import to_toml
from heddle.cli import main
from heddle.simulate import SCENARIOS

SCENARIO = """
name = "small"
policies = ["heddle", "verl"]
[workload]
law = "coding"
trajectories = 32
[fleet]
profile = "qwen3-14b-h100"
gpus = 4
tp = [2, 4]
"""


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO)
    return str(path)


def test_a_scenario_that_comes_with_heddle_is_named_without_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever Heddle was installed to; an unknown name is answered with those that there are."""
    monkeypatch.chdir(tmp_path)
    few = ("--tp", "4", "--policy", "heddle", "--seed", "1", "--trajectories", "16")
    assert main(["simulate", "coding-light-14b", *few]) == 0
    assert main(["simulate", "coding-light"]) == 2
    assert "coding-light is neither a file nor a scenario that comes with Heddle: " in capsys.readouterr().err
    packaged = tomllib.loads((SCENARIOS.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "scenarios" in packaged["packages"] and packaged["package-data"]["scenarios"] == ["*.toml"]


def test_a_scenario_is_played_on_every_fleet_with_every_seed(
    scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has a line for each policy and fleet; the JSON has every run, with columns that fit together."""
    out = tmp_path / "runs.json"
    assert main(["simulate", scenario, "--seed", "1", "--seed", "2", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert all(
        word in printed for word in ("heddle", "verl", "2 x TP2", "1 x TP4", "No policy ends all", "prefix hits")
    )
    written = json.loads(out.read_bytes())
    assert (written["format"], written["scenario"], written["trace"]) == (1, "small", None)
    assert {(run["policy"], run["fleet"], run["seed"]) for run in written["runs"]} == {
        (policy, fleet, seed) for policy in ("heddle", "verl") for fleet in ("2 x TP2", "1 x TP4") for seed in (1, 2)
    }
    for run in written["runs"]:
        columns = run["trajectories"]
        assert {len(column) for column in columns.values()} == {32}
        assert run["makespan_s"] == pytest.approx(max(columns["ended_at"]), abs=1e-3)
        assert run["regret"] == pytest.approx(run["makespan_s"] / run["bound_s"]) and run["regret"] >= 1
        assert run["best_fleet_bound_s"] <= run["bound_s"]
        assert len({len(column) for column in run["predictions"].values()}) == 1
        assert set(columns["engine"]) <= set(range(len(run["engines"])))


def test_options_override_the_scenario(scenario: str, tmp_path: Path) -> None:
    """Policies, TP sizes, number of trajectories and predictor. A log of the run replays without a difference."""
    out, log = tmp_path / "runs.json", tmp_path / "events.jsonl"
    options = ["--policy", "slime", "--tp", "4", "--trajectories", "16", "--predictor", "oracle"]
    assert main(["simulate", scenario, *options, "--json", str(out), "--log", str(log)]) == 0
    [run] = json.loads(out.read_bytes())["runs"]
    assert (run["policy"], run["fleet"], run["predictor"], run["num_trajectories"]) == (
        "slime",
        "1 x TP4",
        "oracle",
        16,
    )
    assert main(["simulate", "replay", str(log)]) == 0


def test_a_replay_that_differs_shows_where_and_fails(
    scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1, the line number, and both actions."""
    log = tmp_path / "events.jsonl"
    assert main(["simulate", scenario, "--policy", "verl", "--tp", "2", "--log", str(log)]) == 0
    log.write_bytes(log.read_bytes().replace(b'"policy":"verl"', b'"policy":"slime"', 1))
    capsys.readouterr()
    assert main(["simulate", "replay", str(log)]) == 1
    printed = capsys.readouterr().out
    assert f"{log}, line " in printed and "differs" in printed
    assert printed.count('"kind":"event"') == 1 and printed.count('"kind":"action"') == 2


def test_a_replay_says_that_it_skipped_a_cut_line(
    scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log was copied while it was written: exit status 0. A broken line in the middle is an error."""
    log = tmp_path / "events.jsonl"
    assert main(["simulate", scenario, "--policy", "verl", "--tp", "2", "--log", str(log)]) == 0
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines)[:-9])
    capsys.readouterr()
    assert main(["simulate", "replay", str(log)]) == 0
    assert f"{log}, line {len(lines)}, the last, is cut off and was skipped.\n" in capsys.readouterr().out
    log.write_bytes(b"".join([*lines[:7], lines[7][:-9] + b"\n", *lines[8:]]))
    assert main(["simulate", "replay", str(log)]) == 2
    assert f"{log}, line 8: not JSON: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "slime"], "line 1: the log's policy is verl, and a replay can have no other"),
        (["--policy", "magic"], "line 1: the log's policy is verl, and a replay can have no other"),
        (["--policy", "verl", "--policy", "slime"], "a replay has one policy"),
        (["--trace", "none.jsonl", "--max-context-tokens", "9"], "leave out --trace, --max-context-tokens"),
        (["--fleet", "none.toml", "--tp", "2"], "leave out --fleet, --tp"),
        (["--seed", "9", "--predictor", "oracle", "--trajectories", "5"], "leave out --seed, --predictor, --traj"),
        (["--json", "runs.json", "--log", "again.jsonl"], "leave out --log, --json"),
    ],
)
def test_a_replay_refuses_options_that_it_would_ignore(
    options: list[str],
    message: str,
    scenario: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`replay LOG --policy slime` of another policy's log said that all decisions were the same."""
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", scenario, "--policy", "verl", "--tp", "2", "--log", "events.jsonl"]) == 0
    assert main(["simulate", "replay", "events.jsonl", "--policy", "verl"]) == 0
    capsys.readouterr()
    assert main(["simulate", "replay", "events.jsonl", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("heddle simulate: ") and message in error and error.count("\n") == 1


def test_a_trace_is_played_on_a_fleet(scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Agents from one file, engines from another."""
    trace = tmp_path / "agents.jsonl"
    turns = [{"new_tokens": 0, "output_tokens": 50, "tool_s": 1.0}, {"new_tokens": 9, "output_tokens": 5, "tool_s": 7}]
    lines = [
        json.dumps({"trajectory_id": f"t{n}", "group_id": "g", "context_tokens": 100, "turns": turns}) for n in range(5)
    ]
    trace.write_text("\n".join(lines))
    out = tmp_path / "runs.json"
    assert main(["simulate", "--trace", str(trace), "--fleet", scenario, "--tp", "4", "--json", str(out)]) == 0
    written = json.loads(out.read_bytes())
    assert written["trace"] == str(trace)
    assert [run["num_trajectories"] for run in written["runs"]] == [5, 5]
    assert "5 trajectories" in capsys.readouterr().out


def test_what_a_fleet_file_sets_beside_its_engines_is_told_if_a_scenario_replaces_it(
    scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else its features seem to make no difference. With a trace they count."""
    fleet, trace = tmp_path / "fleet.toml", tmp_path / "trace.jsonl"
    fleet.write_text(
        '[fleet]\nprofile = "qwen3-14b-h100"\ngpus = 2\ntp = [2]\n'
        "[features.speculation]\n[limits]\nkv_watermark = 0.5\n"
    )
    trace.write_text('{"trajectory_id":"t","context_tokens":9,"turns":[{"new_tokens":0,"output_tokens":9,"tool_s":0}]}')
    told = f"{fleet}: only its [fleet] counts beside a scenario; left out: limits, features.\n"
    assert main(["simulate", scenario, "--fleet", str(fleet), "--policy", "verl"]) == 0
    assert told in capsys.readouterr().out
    assert main(["simulate", "--trace", str(trace), "--fleet", str(fleet), "--policy", "verl"]) == 0
    assert "left out" not in capsys.readouterr().out


def test_a_fleet_of_a_measured_profile_whose_base_is_0_can_be_played(tmp_path: Path) -> None:
    """`heddle profile` may write such a one. A tool return beside a second engine ended in a division by zero."""
    measured = replace(load_profile("toy-cpu-tp1"), name="mine-gpu-tp1", gpu="gpu", decode_base_ms=0.0)
    (tmp_path / "mine.toml").write_text(to_toml("mine", measured))
    fleet, out = tmp_path / "fleet.toml", tmp_path / "runs.json"
    fleet.write_text(
        f'policies = ["heddle"]\n[workload]\nlaw = "coding"\ntrajectories = 16\nscale = 0.1\n'
        f'[fleet]\nprofile = "{tmp_path}/mine.toml:mine-gpu"\ngpus = 2\ntp = [1]\n'
    )
    assert main(["simulate", str(fleet), "--json", str(out)]) == 0
    [run] = json.loads(out.read_bytes())["runs"]
    assert run["num_finished"] == 16 and run["regret"] >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a scenario, or --trace and --fleet"),
        (["nowhere.toml"], "nowhere.toml"),
        (["SCENARIO", "--policy", "magic"], "no policy 'magic'; there are: heddle"),
        (["SCENARIO", "--predictor", "crystal"], "no predictor 'crystal'"),
        (["SCENARIO", "--predictor", ""], "no predictor ''"),
        (["SCENARIO", "--tp", "3"], "the fleet has no TP 3; it has 2, 4"),
        (["LISTED", "--tp", "2"], "--tp chooses among the sizes of `tp`; this fleet lists its engines"),
        (["SCENARIO", "--trace", ""], "cannot open .: Is a directory"),
        (["SCENARIO", "--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["SCENARIO", "other.jsonl"], "a second file goes with `replay` only"),
        (["replay"], "replay needs an event log: heddle simulate replay EVENTS.jsonl"),
        (["replay", "nowhere.jsonl"], "nowhere.jsonl"),
        (["replay", "SCENARIO"], "line 2: not JSON: "),
        (["replay", os.devnull], "no event in it"),
    ],
)
def test_invalid_arguments_are_reported_in_one_line(
    arguments: list[str], message: str, scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, no traceback."""
    listed = tmp_path / "listed.toml"
    listed.write_text(SCENARIO.partition("[fleet]")[0] + '[[fleet.engines]]\nprofile = "toy-cpu-tp2"\n')
    files = {"SCENARIO": scenario, "LISTED": str(listed)}
    assert main(["simulate", *(files.get(word, word) for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("heddle simulate: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize("seed", [2**63, -1])
def test_a_seed_that_json_cannot_hold_or_below_0_is_refused(
    seed: int, scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the start: the runs would be lost when they are written, or -1 would count the runs of 1 again."""
    with pytest.raises(SystemExit) as ended:
        main(["simulate", scenario, "--seed", str(seed)])
    assert ended.value.code == 2 and "--seed: must be a whole number from 0 to 2^63 - 1" in capsys.readouterr().err


def test_a_policy_a_seed_or_a_tp_size_given_twice_is_played_once(scenario: str, tmp_path: Path) -> None:
    """A mean would count the same run twice."""
    out = tmp_path / "runs.json"
    twice = ("--policy", "slime", "--policy", "slime", "--seed", "2", "--seed", "2", "--tp", "4", "--tp", "4")
    assert main(["simulate", scenario, *twice, "--json", str(out)]) == 0
    assert len(json.loads(out.read_bytes())["runs"]) == 1


def test_the_table_is_printed_even_if_the_json_cannot_be_written(
    scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk is found out after hours of work."""
    assert main(["simulate", scenario, "--tp", "4", "--policy", "slime", "--json", "/dev/full"]) == 2
    printed = capsys.readouterr()
    assert "No policy ends all trajectories before" in printed.out and "No space left on device" in printed.err


def test_engines_too_small_for_the_workload_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At once, with both sizes and the number of trajectories that are too long."""
    path = tmp_path / "tight.toml"
    path.write_text(SCENARIO.replace("14b", "32b").replace("[2, 4]", "[1]").replace("= 32", "= 640"))
    assert main(["simulate", str(path)]) == 2
    error = capsys.readouterr().err
    assert "of 640 trajectories" in error and "the KV of qwen3-32b-h100-tp1 holds 17,000" in error


def test_only_the_fleets_that_are_too_small_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The others are played, and the output names the fleets left out before any run starts."""
    path, trace, out = tmp_path / "tight.toml", tmp_path / "agents.jsonl", tmp_path / "runs.json"
    path.write_text(SCENARIO.replace("[2, 4]", "[1, 4]"))
    turn = {"new_tokens": 0, "output_tokens": 50, "tool_s": 0}
    agents = [{"trajectory_id": f"t{size}", "context_tokens": size, "turns": [turn]} for size in (100, 300_000)]
    trace.write_text("\n".join(map(json.dumps, agents)))
    assert main(["simulate", str(path), "--trace", str(trace), "--json", str(out)]) == 0
    assert {run["fleet"] for run in json.loads(out.read_bytes())["runs"]} == {"1 x TP4"}
    printed = " ".join(capsys.readouterr().out.split())
    assert "4 x TP1 is left out: 1 of 2 trajectories" in printed and "holds 247,000" in printed


def crowd_on_one_engine(tmp_path: Path, more: str) -> list[str]:
    """Arguments that play 60 like trajectories one after the other, so that the last waits for almost two hours."""
    fleet, trace = tmp_path / "fleet.toml", tmp_path / "agents.jsonl"
    fleet.write_text(f'[fleet]\nprofile = "qwen3-14b-h100"\ngpus = 1\ntp = [1]\nslots_per_gpu = 1\n{more}')
    turn = {"new_tokens": 0, "output_tokens": 10_000, "tool_s": 0}
    trace.write_text(
        "\n".join(
            json.dumps({"trajectory_id": f"t{number}", "context_tokens": 9, "turns": [turn]}) for number in range(60)
        )
    )
    return ["simulate", "--trace", str(trace), "--fleet", str(fleet), "--json", str(tmp_path / "runs.json")]


def test_no_trajectory_of_a_trace_is_lost_by_waiting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A fleet file without limits must not end trajectories by a queue timeout."""
    assert main(crowd_on_one_engine(tmp_path, "")) == 0
    runs = json.loads((tmp_path / "runs.json").read_bytes())["runs"]
    assert {run["num_finished"] for run in runs} == {60} and min(run["makespan_s"] for run in runs) > 6_600
    assert "lost" not in capsys.readouterr().out.split("makespan")[0]


def test_a_run_reports_lost_trajectories_beside_its_makespan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a regret: it may take less than the bound, which counts the turns that it refused."""
    assert main(crowd_on_one_engine(tmp_path, "[limits]\nqueue_timeout_s = 600")) == 0
    runs = {run["policy"]: run for run in json.loads((tmp_path / "runs.json").read_bytes())["runs"]}
    num_lost = 60 - runs["heddle"]["num_finished"]
    assert num_lost > 0 == 60 - runs["verl"]["num_finished"]
    printed = capsys.readouterr().out
    line_of = {line.partition(",")[0]: line for line in printed.splitlines() if "seed 1: " in line}
    assert line_of["heddle"].endswith(f" s; {num_lost} of 60 trajectories lost")
    assert line_of["verl"].endswith("times the bound")
    assert runs["heddle"]["regret"] is None and runs["verl"]["regret"] >= 1
    [row, *_] = [line.split() for line in printed.splitlines() if line.startswith(" heddle")]
    assert "-" in row
    assert "No policy ends all trajectories before " in " ".join(printed.split())


def test_a_policy_that_refuses_turns_is_not_the_faster_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its makespan is that of the rest. It has no ratio and gives nobody one, and the best fleet is one that loses the
    fewest."""
    scenario = tmp_path / "s.toml"
    scenario.write_text(
        'policies = ["heddle", "verl"]\n[workload]\nlaw = "coding"\ntrajectories = 60\nscale = 0.2\n'
        '[fleet]\ngpus = 2\nprofile = "qwen3-14b-h100"\ntp = [1, 2]\nslots_per_gpu = 2\n'
        "[limits]\nqueue_timeout_s = 10\n[faults]\nturn_retries = 0\n"
    )
    assert main(["simulate", str(scenario), "--json", str(tmp_path / "runs.json")]) == 0
    runs = json.loads((tmp_path / "runs.json").read_bytes())["runs"]
    failed = {run["fleet"]: run["trajectories"]["state"].count("failed") for run in runs if run["policy"] == "heddle"}
    assert min(failed.values()) > 0 and len(set(failed.values())) == 2
    rows = [line.split() for line in capsys.readouterr().out.split("ratio")[1].splitlines() if " x TP" in line][:4]
    assert [row[-3] for row in rows] == ["-"] * 4
    [best] = [" ".join(row[1:4]) for row in rows if row[0] == "heddle" and "*" in row]
    assert best == min(failed, key=lambda fleet: failed[fleet])


def test_a_rollout_whose_turns_are_all_refused_at_once_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes no time, and has no tokens and no ratio."""
    scenario = tmp_path / "s.toml"
    scenario.write_text(
        'policies = ["heddle", "verl"]\n[workload]\nlaw = "coding"\ntrajectories = 4\n'
        '[fleet]\ngpus = 1\nprofile = "qwen3-14b-h100"\ntp = [1]\n'
        "[limits]\nmax_waiting_turns = 0\n[faults]\nturn_retries = 0\nslow_start_s = 9\n"
    )
    assert main(["simulate", str(scenario), "--json", str(tmp_path / "runs.json")]) == 0
    heddle = json.loads((tmp_path / "runs.json").read_bytes())["runs"][0]
    assert (heddle["makespan_s"], heddle["tokens_per_s"], heddle["num_finished"]) == (0, 0, 0)
    assert "heddle, 1 x TP1, seed 1: 0.000 s; 4 of 4 trajectories lost" in capsys.readouterr().out


def test_each_run_is_reported_when_it_ends(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The progress of a scenario is visible, in a terminal or out of one."""
    assert main(["simulate", scenario, "--seed", "7"]) == 0
    printed = capsys.readouterr().out
    before_the_table = printed[: printed.index("makespan")]
    for policy in ("heddle", "verl"):
        for fleet in ("2 x TP2", "1 x TP4"):
            assert before_the_table.count(f"{policy}, {fleet}, seed 7: ") == 1


def test_names_with_brackets_are_printed_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets are not markup: they vanished, and a closing one ended the program."""
    path = tmp_path / "named.toml"
    path.write_text(SCENARIO.replace("small", "small[red]").replace("policies", 'about = "see [/docs]"\npolicies'))
    assert main(["simulate", str(path), "--policy", "verl"]) == 0
    assert "small[red]: see [/docs]" in capsys.readouterr().out


def test_a_narrow_console_shows_whole_names_and_significant_digits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """80 columns, the longest names there are, and makespans of five digits and of less than two."""
    monkeypatch.setenv("COLUMNS", "80")
    path, trace = tmp_path / "wide.toml", tmp_path / "agents.jsonl"
    path.write_text(SCENARIO.replace("verl", "attained-service").replace("gpus = 4", "gpus = 64"))
    for tool_s, shown in ((20_000.0, "20,000."), (0.0, "0.0")):
        turns = [
            {"new_tokens": 0, "output_tokens": 5, "tool_s": tool_s},
            {"new_tokens": 0, "output_tokens": 5, "tool_s": 0},
        ]
        trace.write_text(json.dumps({"trajectory_id": "a", "context_tokens": 9, "turns": turns}))
        assert main(["simulate", str(path), "--trace", str(trace)]) == 0
        printed = capsys.readouterr().out
        rows = [line.split() for line in printed.splitlines() if line.startswith(" attained-service ")]
        assert (
            len(rows) == 3 * 2
            and {row[0] for row in rows} == {"attained-service"}
            and {row[3] for row in rows} == {"TP2", "TP4"}
        )
        best = next(row for row in rows if row[3:5] == ["TP4", "*"])
        assert best[5].startswith(shown) and float(best[5].replace(",", "")) > 0
        assert max(map(len, printed[printed.index("makespan") : printed.index("* its best")].splitlines())) <= 80


@pytest.mark.parametrize("columns", [80, 125, 130, 140])
def test_a_table_that_is_too_wide_is_divided(
    columns: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside long makespans and their spreads the fleets had no column, and names and figures ended in dots."""
    monkeypatch.setenv("COLUMNS", str(columns))
    path, trace = tmp_path / "wide.toml", tmp_path / "agents.jsonl"
    path.write_text(SCENARIO.replace("verl", "attained-service"))
    turns = [{"new_tokens": 0, "output_tokens": 5, "tool_s": tool_s} for tool_s in (20_000.0, 0.0)]
    trace.write_text(json.dumps({"trajectory_id": "a", "context_tokens": 9, "turns": turns}))
    assert main(["simulate", str(path), "--trace", str(trace), "--seed", "1", "--seed", "2"]) == 0
    table = capsys.readouterr().out
    table = table[table.index(" policy ") : table.index("* its best")]
    rows = [line.split() for line in table.splitlines() if line.startswith((" heddle ", " attained-service "))]
    assert [row[1:4] for row in rows] == [["2", "x", "TP2"], ["1", "x", "TP4"]] * 2 * (len(rows) // 4)
    assert "20,000.1 ±0" in table and " lost" in table and "…" not in table
    assert max(map(len, table.splitlines())) <= columns


def test_a_short_rollout_shows_its_spread_over_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole seconds were ±0 beside 0.300 s, whatever the seeds did."""
    monkeypatch.setenv("COLUMNS", "200")
    path, out = tmp_path / "short.toml", tmp_path / "runs.json"
    for scale, digits in ((0.01, 3), (0.1, 1), (1.0, 0)):
        path.write_text(SCENARIO.replace("= 32", f"= 32\nscale = {scale}").replace("tp = [2, 4]", "tp = 2"))
        assert main(["simulate", str(path), "--seed", "1", "--seed", "2", "--json", str(out)]) == 0
        shown = [word for word in capsys.readouterr().out.split() if "±" in word]
        seconds = [run["makespan_s"] for run in json.loads(out.read_bytes())["runs"]]
        halves = [abs(first - second) / 2 for first, second in zip(seconds[:2], seconds[2:], strict=True)]
        assert shown == [f"±{half:.{digits}f}" for half in halves] and float(shown[0][1:]) > 0
