"""How commands fail: one line that names the mistake, and a nonzero exit status."""

import asyncio
import json
import socket
import tempfile
from pathlib import Path

import pytest

from heddle.cli import main
from heddle.demo import called_as
from tests.support.gateway import running_gateway

FLEET = '[fleet]\ngpus = 4\nprofile = "qwen3-14b-h100"\ntp = [1]\n'


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a trace and a fleet."""
    monkeypatch.chdir(tmp_path)
    turns = [{"new_tokens": 0, "output_tokens": 20, "tool_s": 0.1}] * 2
    lines = [{"trajectory_id": f"a-{n}", "group_id": "a", "context_tokens": 50, "turns": turns} for n in range(4)]
    Path("trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    Path("fleet.toml").write_text(FLEET)


def status_and_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit status of a command, and what it wrote to standard error."""
    try:
        status = main(arguments)
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        status = ended.code
    return status, capsys.readouterr().err


SIMULATE = ("simulate", "--trace", "trace.jsonl", "--fleet", "fleet.toml", "--policy", "heddle")
REPLAY = ("replay", "--base-url", "http://127.0.0.1:1/v1")
WRONG = [
    ((), "VERB"),
    (("simulte",), "did you mean simulate?"),
    (("serve", "--prot", "1"), "'--prot'"),
    (
        ("keep", "heddle", "serve", "--engine", "URL"),
        "'--engine'; the command to keep comes after --, as in `heddle keep --",
    ),
    (("keep", "--prot", "1", "--", "true"), "unknown argument '--prot'; see `heddle keep --help`"),
    (("serve", "--port", "abc"), "must be a port from 0 to 65535, not 'abc'"),
    (("sim-engine", "--seed", "x"), "argument --seed: must be a whole number from 0 to 2^63 - 1, not 'x'"),
    ((*REPLAY, "--law", "coding", "--seed", "-1"), "argument --seed: must be a whole number from 0 to 2^63 - 1"),
    (("import", "nowhere", "--out", "x.jsonl"), "heddle import: cannot open nowhere: No such file or directory"),
    (("sim-engine", "--port", "99999"), "must be a port from 0 to 65535, not '99999'"),
    (("sim-engine", "--slots", "0"), "must be a whole number from 1, not '0'"),
    (("sim-engine", "--speed-up", "nan"), "must be a number above 0, not 'nan'"),
    (("sim-engine", "--start-s", "-1"), "seconds from 0"),
    (("sim-engine", "--data-parallel-size", "0"), "must be a whole number from 1, not '0'"),
    (("sim-engine", "--data-parallel-size", "2", "--kv-transfer"), "several data-parallel ranks cannot transfer KV"),
    (("sim-engine", "--kv-tier", "trace.jsonl"), "heddle sim-engine: cannot open trace.jsonl: File exists"),
    (("sim-engine", "--profile", "qwen3-14b-h100-tp3"), "did you mean one of: qwen3-14b-h100"),
    (("profile", "http://127.0.0.1:1", "--out", "nowhere/file.toml"), "a file in an existing folder"),
    (("profile", "127.0.0.1:1"), "must be a base URL such as http://host:8000"),
    (("profile", "http://127.0.0.1:1/v1/"), "heddle profile: http://127.0.0.1:1: no connection"),
    (("sim-engine", "--profile", "absent:mine"), "cannot read engine profiles from absent: No such file"),
    (("trial", "http://127.0.0.1:1", "here"), "must be a base URL such as http://host:8000"),
    (("import", "trace.jsonl", "--out", "x.jsonl"), "Heddle's own format already"),
    (("predictor", "evaluate", "--trace", "trace.jsonl"), "fewer than 20 trajectories"),
    (("predictor", "evaluate", "--trace", "trace.jsonl", "--folds", "1"), "at least 2"),
    (("predictor", "train", "--trace", "trace.jsonl", "--out", "."), "a file in an existing folder"),
    (("demo", "--trajectories", "0"), "a whole number from 1"),
    (("demo", "--scale", "1e308"), "heddle demo: lengths and tool times can be multiplied by a million at most"),
    (("demo", "--work-dir", "trace.jsonl"), "trace.jsonl"),
    (("real", "--engines", "0"), "a whole number from 1"),
    ((*SIMULATE, "--trajectories", "-3"), "a whole number from 1"),
    ((*SIMULATE, "--policy", "hedle"), "did you mean heddle?"),
    ((*SIMULATE, "--json", "nowhere/x.json"), "a file in an existing folder"),
    (("simulate", "--trace", "nowhere", "--fleet", "fleet.toml"), "nowhere"),
    ((*REPLAY, "--law", "coding", "--speed-up", "x"), "must be a number above 0, not 'x'"),
    ((*REPLAY, "--law", "math", "--tool-scale", "1e7"), "by a million at most, not by 1e+07"),
    ((*REPLAY, "--trace", "trace.jsonl", "--scale", "1e308"), "by a million at most, not by 1e+308"),
    (("replay", "--base-url", "here", "--law", "coding"), "a URL such as http://127.0.0.1:8080/v1"),
    (("replay", "--base-url", "http://[::1/v1", "--law", "coding"), "a URL such as http://127.0.0.1:8080/v1"),
    (("replay", "--base-url", "http:///v1", "--law", "coding"), "a URL such as http://127.0.0.1:8080/v1"),
    (("replay", "--base-url", "http://host:99999/v1", "--law", "coding"), "a URL such as http://127.0.0.1:8080/v1"),
    (("fleet", "show", "--controller", "here"), "a URL such as http://127.0.0.1:8070"),
    (("fleet", "show", "more"), "show takes no arguments, such as 'more'"),
    (("fleet", "scale", "999999999xTP1"), "is not COUNTxTP"),
    (("fleet", "scale", "2xTP0"), "is not COUNTxTP"),
    (("fleet", "scale", "--empty", "0xTP0"), "'0xTP0' is not COUNTxTP"),
    (("fleet", "scale", "2xTP1", "--json", "2xTP0"), "'2xTP0' is not COUNTxTP"),
    (("fleet", "scale", "--emtpy", "0xTP1"), "unknown argument '--emtpy'"),
    (("fleet", "show", "--plans"), "--plans goes with scale"),
    (("fleet", "plan", "--empty"), "`heddle fleet plan 0xTP1 --empty`"),
    (("fleet", "scale", "--plans", "--empty"), "`heddle fleet scale 0xTP1 --empty`"),
    (("fleet", "drain", "--empty", "server"), "--empty goes with scale"),
    (("controller", "--fleet", "fleet.toml"), "fleet.toml"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_wrong_arguments_are_refused_with_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, no usage text, no traceback, and the name of what is wrong."""
    status, error = status_and_error(capsys, *arguments)
    assert status == 2
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("verb", ["profile", "trial"])
def test_a_default_file_that_cannot_be_written_is_reported_before_the_measurement(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine was measured for minutes, and then the result was lost. Here the engine is not even asked."""
    monkeypatch.chdir(tmp_path)
    Path("profile.toml").mkdir()
    assert main([verb, "http://127.0.0.1:1"]) == 2
    error = capsys.readouterr().err
    assert error == f"heddle {verb}: --out: must be a file in an existing folder, not 'profile.toml'\n"


def test_a_keeper_without_a_folder_for_temporary_files_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A container whose root is read-only has none; a traceback was shown."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    assert main(["keep", "--", "true"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("heddle keep: cannot open ") and error.count("\n") == 1


def test_a_port_in_use_is_reported_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """With the address, and at once, however long the engine would take to start."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, error = status_and_error(capsys, "sim-engine", "--port", str(port), "--start-s", "600")
    assert (status, error) == (2, f"heddle sim-engine: cannot listen on 127.0.0.1:{port}: Address already in use\n")


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[faults]\ndeaths_per_hour = -1", "deaths_per_hour: from 0"),
        ("[faults]\nleaving_share = 2", "leaving_share"),
        ("[reshape]\nevery_s = 0", "every_s: above 0"),
        ("[transfer]\nbytes_per_s = 0", "bytes_per_s above 0"),
        ("[features.speculation]\nspeed_up = 0", "speed_up: at least 0.01"),
        ("[limits]\nkv_watermark = 7", "limits.kv_watermark"),
        ("[limits]\nqueue_timeout_s = -1", "limits.queue_timeout_s: at least 0"),
        ("[workload]\nscale = nan", "scale: above 0"),
        ("[workload]\nmax_turns = 0", "max_turns: at least 1"),
        ("[workload]\nmax_tool_s = -1", "max_tool_s: from 0"),
    ],
)
def test_an_invalid_scenario_is_refused_with_one_line(
    toml: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of these was a traceback or ran forever; now the line names the file, the table and the allowed values."""
    Path("fleet.toml").write_text(FLEET + toml)
    status, error = status_and_error(capsys, *SIMULATE)
    assert status == 2
    assert "fleet.toml: " in error and message in error and error.count("\n") == 1


def test_a_trace_replaces_a_law_with_earlier_rollouts(capsys: pytest.CaptureFixture[str]) -> None:
    """`--trace` with a scenario that trains its predictor on earlier rollouts: a trace has none, and still runs."""
    law = 'earlier = 1\nepochs = 2\npolicies = ["heddle"]\n[workload]\nlaw = "coding"\ntrajectories = 8\n'
    Path("scenario.toml").write_text(law + FLEET)
    assert main(["simulate", "scenario.toml", "--trace", "trace.jsonl"]) == 0
    assert "4 trajectories" in capsys.readouterr().out


def test_a_server_that_is_not_a_controller_is_reported_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Something else listens on the port: status 1."""
    from tests.support.toy_chat import ToyChat, serve

    with serve(ToyChat()) as url:
        status, error = status_and_error(capsys, "fleet", "show", "--controller", url)
    assert status == 1
    assert error.startswith("heddle fleet: ") and error.count("\n") == 1


async def test_a_gateway_in_place_of_a_controller_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Their ports differ in one digit; the message was the gateway's, about a route that the user did not ask for."""
    async with running_gateway() as gateway:
        status = await asyncio.to_thread(main, ["fleet", "show", "--controller", gateway.url])
    said = f"heddle fleet: no controller at {gateway.url}, but a gateway; --controller names another address\n"
    assert (status, capsys.readouterr().err) == (1, said)


@pytest.mark.parametrize("key", ["s3cret-admin\n", " s3cret-admin", "clé-s3cret", "s3cr€t"])
def test_a_key_that_cannot_be_sent_is_named_and_not_shown(
    key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file or a secret often ends in a line end. It is not the controller that is missing."""
    monkeypatch.setenv("HEDDLE_ADMIN_KEY", key)
    status, error = status_and_error(capsys, "fleet", "show")
    said = "must be printable ASCII, without spaces or line ends around it"
    assert (status, error) == (2, f"heddle fleet: HEDDLE_ADMIN_KEY: {said}\n")


def test_a_clients_key_that_cannot_be_sent_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """It was shown, in the error of an encoder, as if the server's answer were wrong."""
    arguments = ("replay", "--base-url", "http://127.0.0.1:9/v1", "--law", "coding", "--api-key", "clé-s3cret")
    status, error = status_and_error(capsys, *arguments)
    assert status == 2 and "--api-key: must be printable ASCII" in error and "s3cret" not in error


def test_the_demo_names_a_command_that_a_shell_takes() -> None:
    """Also where the checkout is in a folder with a space; the command was two words there."""
    assert called_as("/my work/.venv/bin/heddle") == "'/my work/.venv/bin/heddle'"
    assert called_as("/my work/heddle/__main__.py").endswith(" -m heddle")


def test_version_prints_a_version(capsys: pytest.CaptureFixture[str]) -> None:
    """For a bug report."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip()[0].isdigit()
