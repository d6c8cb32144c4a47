"""`heddle trial` on simulated engines, whose profile is known."""

import argparse
import asyncio
import dataclasses
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from engines.children import LaunchError, child, free_port
from engines.http import HttpClient
from engines.profiles import load_profile
from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from engines.vllm import Vllm
from heddle.real import clear_prefix_cache, counted, warm_up
from heddle.rollouts import START_TIMEOUT_S
from heddle.track import EngineGone, Track
from heddle.trial import (
    PROBE,
    Trial,
    add_arguments,
    as_played,
    comparison,
    crowd,
    overhead_of,
    run,
    simulated_makespan_s,
    with_gap,
)
from loadtest.results import RolloutResult, TrajectoryResult, TurnResult
from tests.support.engine import fixed, recorded_engine
from tests.support.gateway import eventually, running_gateway
from workloads.traces import load_trace
from workloads.trajectories import Trajectory, Turn, Workload

SMALL = ("--trajectories", "16", "--scale", "0.02", "--profile", "toy-cpu-tp1")


def parse(folder: Path, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser("heddle trial")
    add_arguments(parser)
    return parser.parse_args([*arguments, "--work-dir", str(folder), "--json", str(folder / "trial.json")])


def engine(**more: Any) -> SimulatedEngineSettings:
    return SimulatedEngineSettings(profile=load_profile("toy-cpu-tp1"), **more)


async def test_policies_are_played_and_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each policy once with each seed, also if it is given twice; what is simulated depends on profile,
    policy and seed alone."""
    async with serve_engine(engine()) as first, serve_engine(engine()) as second:
        policies = ("--policy", "round-robin", *("--policy", "heddle") * 2, "--seed", "1", "--seed", "2")
        assert await run(parse(tmp_path, first, second, *SMALL, *policies)) == 0
    written = json.loads((tmp_path / "trial.json").read_bytes())
    gap_ms = written["profile"]["request_gap_ms"]
    assert written["profile"] == dataclasses.asdict(load_profile("toy-cpu-tp1")) | {"request_gap_ms": gap_ms}
    trials = written["trials"]
    assert [(trial["policy"], trial["seed"]) for trial in trials] == [
        (policy, seed) for seed in (1, 2) for policy in ("round-robin", "heddle")
    ]
    assert all(trial["num_failed_turns"] == 0 for trial in trials)
    assert all(trial["measured_s"] > 0.5 * trial["simulated_s"] > 0 for trial in trials)
    assert trials[0]["simulated_s"] != trials[2]["simulated_s"]
    kept = load_trace(tmp_path / "played-heddle-2.jsonl")
    assert sum(turn.output_tokens for one in kept.trajectories for turn in one.turns) == kept.output_tokens > 0
    assert kept.trajectories[0].trajectory_id.startswith("coding-2-")
    shown = capsys.readouterr().out
    assert "round-robin" in shown and f"{trials[-1]['measured_s']:.1f}" in shown


async def test_a_profile_is_measured_where_none_is_given(tmp_path: Path) -> None:
    """It is written where `heddle profile` would write it, and used."""
    async with serve_engine(engine(dialect="sglang")) as url:
        small = ("--trajectories", "2", "--scale", "0.02", "--policy", "heddle", "--quick", "--name", "toy-cpu-tp1")
        assert await run(parse(tmp_path, url, *small, "--out", str(tmp_path / "mine.toml"))) == 0
    used = json.loads((tmp_path / "trial.json").read_bytes())["profile"]
    kept = load_profile(f"{tmp_path}/mine.toml:toy-cpu-tp1")
    assert used["slots"] == kept.slots and used["decode_base_ms"] == pytest.approx(kept.decode_base_ms, rel=1e-4)


@pytest.mark.parametrize("gap_ms", [0.0, 1.5, 4.0])
@pytest.mark.parametrize("request_ms", [0.0, 10.0])
def test_a_crowd_shows_how_far_apart_requests_reach_an_engine(gap_ms: float, request_ms: float) -> None:
    """Where a prefill costs a launch, as on an H200, and beside 5 ms of each turn that are outside."""
    plain = dataclasses.replace(load_profile("qwen3-8b-h100-tp1"), slots=64, prefill_least_tokens=1024)
    truth = dataclasses.replace(plain, request_ms=request_ms, request_gap_ms=gap_ms)
    together = crowd(truth)
    probe_s = simulated_makespan_s(PROBE, [truth], "heddle", 0.005)
    crowd_s = simulated_makespan_s(together, [truth], "round-robin", 0.005)
    told = dataclasses.replace(plain, request_ms=request_ms)
    found = with_gap(told, together, crowd_s, probe_s)
    assert found.request_gap_ms == gap_ms
    if gap_ms <= request_ms:
        assert overhead_of(probe_s, found) == pytest.approx(0.005, rel=0.03)


def test_a_crowd_fits_a_small_engine() -> None:
    """Its turns must not be preempted, which would be another experiment."""
    small = dataclasses.replace(load_profile("toy-cpu-tp1"), slots=64, kv_capacity_tokens=3_000)
    together = crowd(small)
    assert 1 < len(together.trajectories) < 64
    assert sum(one.total_tokens for one in together.trajectories) < 3_000


@pytest.mark.parametrize("body", [b"", b'{"success":true}'])
async def test_a_cleared_prefix_cache_is_recognised(body: bytes) -> None:
    """vLLM 0.25 says nothing, vLLM 0.32 that it succeeded."""
    async with recorded_engine(engine()) as recorded:
        recorded.scripts["/reset_prefix_cache"] = fixed(200, body)
        await clear_prefix_cache(recorded.url)
    assert [asked.path for asked in recorded.seen] == ["/reset_prefix_cache"]


async def test_a_server_without_a_route_to_clear_its_cache_is_reported() -> None:
    """With what to do about it: vLLM has the route in its development mode only."""
    async with recorded_engine(engine()) as recorded:
        recorded.scripts["/reset_prefix_cache"] = fixed(404, b"")
        with pytest.raises(LaunchError, match="VLLM_SERVER_DEV_MODE=1"):
            await clear_prefix_cache(recorded.url)


def test_the_simulation_has_the_prompts_that_engines_counted() -> None:
    """An answer of 10 tokens came back as 25; what failed keeps what it was to have."""
    turns = (Turn(5, 10, 0.0), Turn(7, 10, 0.0), Turn(7, 10, 0.0), Turn(7, 10, 0.0))
    workload = Workload("w", (Trajectory("t", "g", 100, turns),))

    def turn(index: int, prompt_tokens: int, error: str | None = None) -> TurnResult:
        return TurnResult("t", index, 10, 0.0, None, 1.0, prompt_tokens, 0, 10, 0, None, error)

    played = (turn(0, 108), turn(1, 140), turn(2, 0, "lost"), turn(3, 190))
    result = RolloutResult("heddle", "r", 1.0, (TrajectoryResult("t", "g", 4, 0.0, 1.0, played),))
    (seen,) = as_played(workload, result).trajectories
    assert seen.context_tokens == 103
    assert [one.new_tokens for one in seen.turns] == [5, 22, 7, 7]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("http://127.0.0.1:1", "--profile", "toy-cpu-tp1"), "heddle trial: http://127.0.0.1:1: no connection"),
        (("http://127.0.0.1:1", "--profile", "toy-cpu"), "heddle trial: unknown engine profile 'toy-cpu'"),
        (("http://127.0.0.1:1", "--policy", "hedle"), "did you mean heddle"),
    ],
)
async def test_what_cannot_be_played_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], problem: str
) -> None:
    """And exit status 2."""
    assert await run(parse(tmp_path, *arguments)) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1


async def test_a_rollout_that_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before its engines are used."""
    async with serve_engine(engine()) as url:
        assert await run(parse(tmp_path, url, "--profile", "toy-cpu-tp1", "--scale", "2")) == 2
    error = capsys.readouterr().err
    assert "tokens, and the KV of toy-cpu-tp1 holds 16,384: give a smaller --scale" in error and error.count("\n") == 1


@pytest.mark.parametrize("profile", [(), ("--profile", "toy-cpu-tp1")])
async def test_a_model_that_is_not_served_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], profile: tuple[str, ...]
) -> None:
    """Whether its engine is measured or its profile is given."""
    async with serve_engine(engine()) as url:
        assert await run(parse(tmp_path, url, *profile, "--model", "nope")) == 2
    assert capsys.readouterr().err == f"heddle trial: {url}: no model 'nope' there; it serves: simulated\n"


async def test_engines_without_a_model_in_common_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Turns would go to one of them only. It says which serves which."""
    async with serve_engine(engine(model="small")) as first, serve_engine(engine(model="large")) as second:
        assert await run(parse(tmp_path, first, second, "--profile", "toy-cpu-tp1")) == 2
    served = f"{first} serves small; {second} serves large"
    assert capsys.readouterr().err == f"heddle trial: no model is served by all engines: {served}\n"


@pytest.mark.parametrize(("wanted", "asked"), [((), "simulated"), (("--model", "adapter"), "adapter")])
async def test_a_rollout_asks_for_the_model_that_was_chosen(
    tmp_path: Path, wanted: tuple[str, ...], asked: str
) -> None:
    """By default for the first that all engines serve, which need not be the first that one of them lists."""
    few = ("--trajectories", "1", "--scale", "0.02", "--profile", "toy-cpu-tp1", "--policy", "heddle")
    async with recorded_engine(engine()) as first, recorded_engine(engine()) as second:
        first.scripts["/v1/models"] = fixed(200, models("other", "simulated", "adapter"))
        second.scripts["/v1/models"] = fixed(200, models("adapter", "simulated"))
        await run(parse(tmp_path, first.url, second.url, *few, *wanted))
    turns = [turn.json for one in (first, second) for turn in one.turns if turn.path == "/v1/chat/completions"]
    assert {turn["model"] for turn in turns} == {asked}


def models(*names: str) -> bytes:
    """A list of models as vLLM gives it."""
    cards = [{"id": name, "owned_by": "vllm", "max_model_len": 16_384} for name in names]
    return json.dumps({"data": cards}).encode()


def test_a_seed_that_json_cannot_hold_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the rollout: its figures could not be written after it."""
    with pytest.raises(SystemExit):
        parse(tmp_path, "http://127.0.0.1:1", "--seed", "99999999999999999999999")
    assert "argument --seed: must be a whole number" in capsys.readouterr().err


async def test_a_server_with_ranks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One engine would be simulated in place of two."""
    async with recorded_engine(engine(data_parallel_size=2)) as recorded:
        assert await run(parse(tmp_path, recorded.url, "--profile", "toy-cpu-tp1")) == 2
    error = capsys.readouterr().err
    assert "has data-parallel ranks" in error and error.count("\n") == 1


@pytest.mark.parametrize("profile", [(), ("--profile", "toy-cpu-tp1")])
async def test_a_gateway_is_no_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], profile: tuple[str, ...]
) -> None:
    """Whether it is measured or played on: it says which URL is wanted."""
    async with serve_engine(engine()) as url, running_gateway(url) as gateway:
        assert await run(parse(tmp_path, gateway.url, *profile)) == 2
    wish = f"heddle trial: {gateway.url}: this is a Heddle gateway; an engine's URL is wanted\n"
    assert capsys.readouterr().err == wish


@pytest.mark.parametrize("profile", [(), ("--profile", "toy-cpu-tp1")])
async def test_an_unknown_server_brings_no_advice_that_cannot_be_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], profile: tuple[str, ...]
) -> None:
    """No option names a server's kind."""
    async with recorded_engine(engine()) as recorded:
        recorded.scripts["/v1/models"] = fixed(200, b'{"data":[{"id":"m","owned_by":"acme"}]}')
        assert await run(parse(tmp_path, recorded.url, *profile)) == 2
    assert capsys.readouterr().err.endswith("neither vLLM nor SGLang (models owned by ['acme'])\n")


@pytest.mark.timeout(180)
async def test_an_engine_that_dies_ends_the_trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its name and the reason, and with no process left. The first rollout's turns waited for it half an hour."""
    url = f"http://127.0.0.1:{free_port()}"
    slow = ("--profile", "toy-cpu-tp1", "--speed-up", "0.1", "--port", url.rpartition(":")[2])
    http = HttpClient(url)
    async with child((sys.executable, "-m", "heddle", "sim-engine", *slow), tmp_path / "engine.log") as dying:
        await dying.until_ready("engine", [f"{url}/health"], START_TIMEOUT_S)

        async def has_begun() -> bool:
            (seen,) = await Vllm().observe(http, START_TIMEOUT_S)
            return seen.work_counter > 0

        trial = asyncio.create_task(run(parse(tmp_path, url, *SMALL)))
        await eventually(has_begun)
        http.close()
        dying.send_signal(signal.SIGKILL)
        assert await trial == 2
    error = capsys.readouterr().err
    assert error.startswith(f"heddle trial: {url} was lost during a rollout: ") and error.count("\n") == 1


@pytest.mark.timeout(180)
async def test_an_engine_that_dies_while_a_gateway_starts_ends_the_trial_at_once(tmp_path: Path) -> None:
    """With its name. Its gateway was waited for, two minutes, and named in its place."""

    async def clear_and_die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        server.close()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(clear_and_die, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    track = Track([url], "simulated", "toy-cpu-tp1", tmp_path, Console(quiet=True))
    with pytest.raises(EngineGone, match=f"^{re.escape(url)} was lost while a gateway started: no connection"):
        await track.played(PROBE, "heddle")


async def test_an_engine_that_is_gone_between_rollouts_is_named() -> None:
    """When its counters are read."""
    with pytest.raises(LaunchError, match=r"^http://127\.0\.0\.1:1: no connection"):
        await counted(["http://127.0.0.1:1"])


async def test_an_engine_that_dies_before_it_is_warm_is_named() -> None:
    """By `heddle real`, in one line. It was a traceback."""
    with pytest.raises(LaunchError, match=r"^http://127\.0\.0\.1:1: no connection"):
        await warm_up("http://127.0.0.1:1")


def test_a_rollout_with_failed_turns_is_compared_with_nothing() -> None:
    """Its makespan lacks what failed. Nor is another compared with it; the simulations played all turns."""

    def trial(policy: str, measured_s: float, num_failed: int) -> Trial:
        return Trial(policy, 1, measured_s, 4.0, 1.0, num_failed, None, None, 9)

    def rows(*trials: Trial) -> list[tuple[Any, ...]]:
        return list(zip(*(column.cells for column in comparison(trials).columns), strict=True))

    whole, partial, other = trial("a", 8.0, 0), trial("b", 2.0, 3), trial("c", 4.0, 0)
    assert rows(whole, partial, other)[1:] == [
        ("b", "1", "2.0", "-", "4.0", "1.00", "-", "3"),
        ("c", "1", "4.0", "2.00", "4.0", "1.00", "+0.0%", "0"),
    ]
    assert rows(partial, other)[1] == ("c", "1", "4.0", "-", "4.0", "1.00", "+0.0%", "0")
