"""`heddle replay` as a user meets it: arguments in, table and JSON and exit code out."""

import argparse
import json
from pathlib import Path

import pytest

from heddle.replay import add_arguments, run
from tests.support.toy_chat import Faults, ToyChat, serve

SMALL = ["--law", "math", "--trajectories", "3", "--scale", "0.01"]


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser("heddle replay")
    add_arguments(parser)
    return parser.parse_args(arguments)


async def test_a_replay_prints_its_table_and_writes_its_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0, the makespan on standard output, and the file holds every turn."""
    with serve(ToyChat()) as url:
        out = tmp_path / "out.json"
        assert await run(parse("--base-url", f"{url}/v1", *SMALL, "--json", str(out))) == 0
    assert "makespan" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert len(written["trajectories"]) == 3
    tokens = sum(turn["output_tokens"] for t in written["trajectories"] for turn in t["turns"])
    assert written["output_tokens"] == tokens > 0


async def test_a_failed_turn_is_a_failed_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, and the reason is shown."""
    with serve(ToyChat(faults=Faults(short_by=1))) as url:
        assert await run(parse("--base-url", f"{url}/v1", *SMALL, "--no-stream")) == 1
    assert "asked for" in capsys.readouterr().out


async def test_a_trace_is_cut_and_fitted_as_asked(tmp_path: Path) -> None:
    """The arguments of a trace reach it: turns, number and context of what the server sees."""
    lines = []
    for n in range(4):
        turns = [{"new_tokens": 100 if k else 0, "output_tokens": 50, "tool_s": 0.0} for k in range(6)]
        trajectory = {"trajectory_id": f"t{n}", "group_id": f"g{n}", "context_tokens": 5_000, "turns": turns}
        lines.append(json.dumps(trajectory))
    trace = tmp_path / "t.jsonl"
    trace.write_text("\n".join(lines))
    app = ToyChat()
    with serve(app) as url:
        cut = ["--limit", "2", "--max-turns", "3", "--max-context-tokens", "600"]
        args = parse("--base-url", f"{url}/v1", "--trace", str(trace), *cut, "--identity", "path")
        assert await run(args) == 0
    turns_seen = [(path, body) for path, _, body in app.seen if "calibration" not in path]
    assert len(turns_seen) == 6
    for _, body in turns_seen:
        chars = sum(len(message["content"]) for message in body["messages"])
        assert chars / 4 + body["max_tokens"] <= 600


async def test_a_dead_address_is_named_before_it_is_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    """With what happens next, for clients ask again in silence; then the end, with the reason."""
    assert await run(parse("--base-url", "http://127.0.0.1:9/v1", *SMALL, "--max-retries", "1")) == 2
    said = capsys.readouterr().err
    told = "heddle replay: cannot connect to http://127.0.0.1:9/v1: "
    assert told in said and "retrying up to 1 times, for at most 1 s" in said
    assert said.index(told) < said.index("no answer")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--law", "cooking"], "no law 'cooking'"),
        (["--trace", "/nowhere.jsonl"], "nowhere.jsonl"),
        (["--law", "coding", "--max-context-tokens", "300"], "set max_turns"),
    ],
)
async def test_wrong_arguments_end_with_one_clear_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 before anything is sent, with what is wrong on one line."""
    assert await run(parse("--base-url", "http://127.0.0.1:9/v1", *arguments)) == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0
    assert message in error


@pytest.mark.parametrize("client", ["sdk", "raw"])
async def test_a_server_that_is_not_there_is_told(client: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody listens on the discard port: exit code 2, no traceback."""
    args = parse("--base-url", "http://127.0.0.1:9/v1", *SMALL, "--client", client, "--max-retries", "0")
    assert await run(args) == 2
    assert "heddle replay: " in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` ends with commands that parse."""
    with pytest.raises(SystemExit):
        parse("--help")
    assert "heddle replay --base-url" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        parse("--base-url", "http://h/v1", "--law", "coding", "--trace", "t.jsonl")
