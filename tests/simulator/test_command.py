"""`heddle simulate` from the command line: tables, JSON, logs, and what it says when it cannot."""

import json
from pathlib import Path

import pytest

from heddle.cli import main

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


def test_a_scenario_is_played_on_every_fleet_with_every_seed(
    scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has a line for each policy and fleet; the JSON has every run with columns that fit together."""
    out = tmp_path / "runs.json"
    assert main(["simulate", scenario, "--seed", "1", "--seed", "2", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("heddle", "verl", "2 x TP2", "1 x TP4", "No policy beats", "prefix hits"))
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


def test_options_take_the_place_of_what_the_scenario_says(scenario: str, tmp_path: Path) -> None:
    """Policies, degrees, number and predictor; a log of the run is replayed without a difference."""
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
    """Exit status 1, the line's number, and both actions."""
    log = tmp_path / "events.jsonl"
    assert main(["simulate", scenario, "--policy", "verl", "--tp", "2", "--log", str(log)]) == 0
    log.write_bytes(log.read_bytes().replace(b'"policy":"verl"', b'"policy":"slime"', 1))
    capsys.readouterr()
    assert main(["simulate", "replay", str(log)]) == 1
    printed = capsys.readouterr().out
    assert f"{log}, line " in printed and "differs" in printed
    assert printed.count('"kind":"event"') == 1 and printed.count('"kind":"action"') == 2


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a scenario"),
        (["nowhere.toml"], "nowhere.toml"),
        (["SCENARIO", "--policy", "magic"], "no policy 'magic'; there are: heddle"),
        (["SCENARIO", "--predictor", "crystal"], "no predictor 'crystal'"),
        (["SCENARIO", "--tp", "3"], "the fleet has no TP 3; it has 2, 4"),
        (["SCENARIO", "--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["SCENARIO", "other.jsonl"], "only `replay` takes a second file"),
        (["replay"], "replay: which log?"),
        (["replay", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    arguments: list[str], message: str, scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, no traceback."""
    assert main(["simulate", *(scenario if word == "SCENARIO" else word for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("heddle simulate: ") and message in error and error.count("\n") == 1


def test_engines_too_small_for_the_workload_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At once, with both numbers."""
    path = tmp_path / "tight.toml"
    path.write_text(SCENARIO.replace("14b", "32b").replace("[2, 4]", "[1]").replace("= 32", "= 640"))
    assert main(["simulate", str(path)]) == 2
    assert "the KV of qwen3-32b-h100-tp1 holds 17,000" in capsys.readouterr().err
