"""`heddle replay` as a user sees it: arguments in; a table, JSON and an exit code out."""

import argparse
import json
import math
import shlex
from pathlib import Path

import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from heddle.replay import add_arguments, run
from loadtest.clients import INITIAL_BACKOFF_S, MAX_BACKOFF_S, backoff_s, patience_s
from tests.support.gateway import running_gateway
from tests.support.toy_chat import Faults, ToyChat, serve

SMALL = ["--law", "math", "--trajectories", "3", "--scale", "0.01"]


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser("heddle replay")
    add_arguments(parser)
    return parser.parse_args(arguments)


async def test_a_replay_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0, the makespan on standard output, and the file has every turn."""
    with serve(ToyChat()) as url:
        out = tmp_path / "out.json"
        assert await run(parse("--base-url", f"{url}/v1", *SMALL, "--json", str(out))) == 0
    assert "makespan" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert len(written["trajectories"]) == 3
    tokens = sum(turn["output_tokens"] for t in written["trajectories"] for turn in t["turns"])
    assert written["output_tokens"] == tokens > 0


async def test_a_failed_turn_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, and the reason is shown."""
    with serve(ToyChat(faults=Faults(short_by=1))) as url:
        assert await run(parse("--base-url", f"{url}/v1", *SMALL, "--no-stream")) == 1
    assert "asked for" in capsys.readouterr().out


async def test_a_trace_is_limited_by_its_arguments(tmp_path: Path) -> None:
    """Number of trajectories, turns and context tokens, as the server sees them."""
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


async def test_a_dead_address_is_reported_before_retries(capsys: pytest.CaptureFixture[str]) -> None:
    """With what happens next, because clients retry in silence; at the end, the reason."""
    assert await run(parse("--base-url", "http://127.0.0.1:9/v1", *SMALL, "--max-retries", "1")) == 2
    error = capsys.readouterr().err
    problem = "heddle replay: cannot connect to http://127.0.0.1:9/v1: "
    assert problem in error and "retrying up to 1 times, for at most 1 s" in error
    assert error.index(problem) < error.index("no answer")


@pytest.mark.parametrize(
    ("num_retries", "most_s"), [(0, 0), (3, 4), (4, 8), (8, 40), (10**9, 7_999_999_976), (10**400, 7_999_999_999_976)]
)
def test_the_patience_that_is_told_is_that_of_the_client(num_retries: int, most_s: int) -> None:
    """However many retries: to wait forever, some give a million. From a thousand on it was a traceback, and again from
    10^308 on."""
    assert math.ceil(patience_s(num_retries)) == most_s
    slowest_s = [min(MAX_BACKOFF_S, INITIAL_BACKOFF_S * 2.0**retry) for retry in range(min(num_retries, 100))]
    assert all(0.75 * slowest <= backoff_s(retry) <= slowest for retry, slowest in enumerate(slowest_s))
    assert 0.75 * MAX_BACKOFF_S <= backoff_s(10**9) <= MAX_BACKOFF_S


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--law", "cooking"], "no law 'cooking'"),
        (["--trace", "/nowhere.jsonl"], "nowhere.jsonl"),
        (["--law", "coding", "--max-context-tokens", "300"], "set max_turns"),
    ],
)
async def test_wrong_arguments_end_with_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 before anything is sent, and one line that names what is wrong."""
    assert await run(parse("--base-url", "http://127.0.0.1:9/v1", *arguments)) == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0
    assert message in error


@pytest.mark.parametrize("client", ["sdk", "raw"])
async def test_an_unreachable_server_is_reported(client: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing listens on the discard port: exit code 2, no traceback."""
    args = parse("--base-url", "http://127.0.0.1:9/v1", *SMALL, "--client", client, "--max-retries", "0")
    assert await run(args) == 2
    assert "heddle replay: " in capsys.readouterr().err


async def test_a_gateway_that_lists_no_model_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """The base URL lacks its /v1, or no engine is ready: both were a model that is to be named."""
    async with running_gateway() as gateway:
        assert await run(parse("--base-url", gateway.url, *SMALL)) == 2
        without_v1 = capsys.readouterr().err
        assert await run(parse("--base-url", f"{gateway.url}/v1", *SMALL)) == 2
    assert "HTTP 404: Unknown route: GET /models. Did you mean /v1/models? Then the client's base" in without_v1
    assert "the server lists no model: no engine is ready there" in capsys.readouterr().err


@pytest.mark.parametrize("client", ["sdk", "raw"])
async def test_a_server_without_a_list_of_models_is_named_with_its_answer(
    client: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as one of another kind."""
    with serve(ToyChat()) as url:
        assert await run(parse("--base-url", f"{url}/other/v1", *SMALL, "--client", client)) == 2
    error = capsys.readouterr().err
    assert "heddle replay: the server does not list its models: HTTP 404: " in error and "no such route" in error


@pytest.mark.parametrize(("model", "status"), [((), 2), (("--model", "simulated"), 1)])
async def test_a_base_url_that_lacks_its_v1_brings_advice(
    model: tuple[str, ...], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unlike a gateway, an engine says only that there is nothing, to the first request or to every turn."""
    async with serve_engine(SimulatedEngineSettings(speed_up=50.0)) as url:
        assert await run(parse("--base-url", url, *SMALL, *model)) == status
    assert capsys.readouterr().err.endswith(f" (give the base URL with its /v1: --base-url {url}/v1)\n")


def test_the_examples_in_help_parse(capsys: pytest.CaptureFixture[str]) -> None:
    """A law together with a trace does not."""
    with pytest.raises(SystemExit):
        parse("--help")
    _, *examples = capsys.readouterr().out.partition("examples:")[2].partition("\n\n")[0].split("heddle replay ")
    assert len(examples) > 1
    for example in examples:
        parse(*shlex.split(example.replace("\\\n", " "), comments=True))
    with pytest.raises(SystemExit):
        parse("--base-url", "http://h/v1", "--law", "coding", "--trace", "t.jsonl")
