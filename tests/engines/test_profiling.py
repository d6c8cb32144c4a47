"""What `heddle profile` measures and fits, on engines whose profile is known."""

import argparse
import asyncio
import dataclasses
import random
import resource
import sys
from collections.abc import Awaitable, Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import orjson
import pytest
from rich.console import Console

from engines.profiles import load_profile
from engines.profiling import GAPS_MS, Batch, Measurement, fit, plan, simulated_s, to_toml
from engines.simulated.model import SimulatedEngine
from engines.simulated.sequence import SimulatedSequence
from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from heddle import profile as command
from heddle.cli import main
from scheduling.cost import EngineProfile
from tests.support.engine import Asked, Script, recorded_engine

TRUTHS = ["qwen3-14b-h100-tp1", "qwen3-32b-a100-tp2", "qwen2.5-7b-a100-tp1"]


def arguments(url: str, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args([url, *more])


def measured(truth: EngineProfile, noise: float = 0.0, request_s: float = 0.0, seed: int = 0) -> list[Measurement]:
    """The full plan on a simulated engine, with multiplicative noise and a fixed time besides the engine's."""
    dice = random.Random(seed)
    return [
        Measurement(batch, (seconds + request_s) * dice.gauss(1.0, noise)) for batch, seconds in simulated_plan(truth)
    ]


@cache
def simulated_plan(truth: EngineProfile) -> list[tuple[Batch, float]]:
    batches = plan(truth.slots, truth.kv_capacity_tokens, 32_768, is_quick=False)
    return [(batch, simulated_s(truth, [batch])[0]) for batch in batches]


def step_errors(fitted: EngineProfile, truth: EngineProfile) -> list[float]:
    """Relative errors of decode steps and prefills, at the corners of what the engine may run."""
    steps = [
        fitted.decode_step_s(num, num * tokens) / truth.decode_step_s(num, num * tokens) - 1
        for num in (1, truth.slots // 2, truth.slots)
        for tokens in (100, truth.kv_capacity_tokens // truth.slots)
    ]
    prefills = [fitted.prefill_s(tokens) / truth.prefill_s(tokens) - 1 for tokens in (1_000, 16_000)]
    return [abs(error) for error in (*steps, *prefills)]


@pytest.mark.parametrize("name", TRUTHS)
def test_a_fit_to_exact_batches_recovers_the_profile(name: str) -> None:
    """The columns are the simulator's own, so without noise there is no residual."""
    truth = load_profile(name)
    found = fit(measured(truth, request_s=0.005), dataclasses.replace(truth, decode_base_ms=0.0))
    assert found.mape < 1e-6
    assert found.profile.request_ms == pytest.approx(5.0, rel=1e-3)
    assert max(step_errors(found.profile, truth)) < 1e-4


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", TRUTHS)
def test_a_fit_to_noisy_batches_is_within_a_few_percent(name: str, seed: int) -> None:
    """With 3 % of noise on each wall time."""
    truth = load_profile(name)
    found = fit(measured(truth, noise=0.03, request_s=0.005, seed=seed), truth)
    assert 0 < found.mape < 0.05
    assert max(step_errors(found.profile, truth)) < 0.06


@pytest.mark.parametrize(("step_ms", "request_ms"), [(0.0, 22.0), (22.0, 0.0), (15.0, 7.0)])
@pytest.mark.parametrize("is_quick", [False, True])
def test_what_a_prefill_costs_others_is_told_from_what_it_waits(
    step_ms: float, request_ms: float, is_quick: bool
) -> None:
    """A single request shows only their sum. On an H200, a prefill of 64 tokens took 29 ms beside steps of 5.5 ms."""
    truth = dataclasses.replace(load_profile("qwen3-8b-h100-tp1"), slots=64, prefill_step_ms=step_ms)
    batches = plan(truth.slots, 60_000, 32_768, is_quick=is_quick)
    dice = random.Random(1)
    walls = [(simulated_s(truth, [batch])[0] + request_ms / 1000) * dice.gauss(1.0, 0.01) for batch in batches]
    found = fit([Measurement(batch, wall_s) for batch, wall_s in zip(batches, walls, strict=True)], truth).profile
    assert found.prefill_step_ms == pytest.approx(step_ms, abs=2.0)
    assert found.request_ms == pytest.approx(request_ms, abs=3.0)


def test_a_prefill_holds_up_whoever_decodes() -> None:
    """Each of the steps in which the later request is prefilled takes longer for the earlier one."""
    plain = load_profile("qwen3-8b-h100-tp1")

    def ends_at(profile: EngineProfile) -> float:
        engine = SimulatedEngine(profile, chunk_tokens=1_000)
        engine.submit(0.0, SimulatedSequence("first", 64, 100, lambda _: []))
        engine.submit(0.5, SimulatedSequence("second", 2_500, 1, lambda _: []))
        ended = []
        while (at := engine.next_event_at()) is not None:
            ended += [event.at for event in engine.advance(at) if event.id == "first" and event.kind == "finished"]
        return float(ended[0])

    slow = dataclasses.replace(plain, prefill_step_ms=20.0)
    assert ends_at(slow) - ends_at(plain) == pytest.approx(4 * 0.02)  # one step of its own, three of the other's


def test_a_short_prefill_takes_as_long_as_the_least_tokens() -> None:
    """That counts all prompts of a step together: it is filled up once."""
    plain = load_profile("qwen3-8b-h100-tp1")
    least = dataclasses.replace(plain, prefill_least_tokens=1_000)

    def prefilled_at(profile: EngineProfile, *lengths: int) -> float:
        engine = SimulatedEngine(profile)
        for number, length in enumerate(lengths):
            engine.submit(0.0, SimulatedSequence(str(number), length, 1, lambda _: []))
        return float(engine.next_event_at() or 0.0)

    missing_s = least.prefill_per_ktoken_ms / 1000
    assert prefilled_at(least, 100) - prefilled_at(plain, 100) == pytest.approx(0.9 * missing_s)
    assert prefilled_at(least, 100, 300) - prefilled_at(plain, 100, 300) == pytest.approx(0.6 * missing_s)
    assert prefilled_at(least, 1_000) == prefilled_at(plain, 1_000)


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize("least_tokens", [0, 512, 1_024])
def test_a_fit_finds_the_least_tokens_of_a_prefill(least_tokens: int, is_quick: bool) -> None:
    """With 1 % of noise; what a prefill of 32 or 1,000 tokens takes from others is right, whatever explains it."""
    truth = dataclasses.replace(load_profile("qwen3-8b-h100-tp1"), slots=64, prefill_least_tokens=least_tokens)
    batches = plan(truth.slots, 60_000, 32_768, is_quick=is_quick)
    dice = random.Random(1)
    walls = [(simulated_s(truth, [batch])[0] + 0.005) * dice.gauss(1.0, 0.01) for batch in batches]
    found = fit([Measurement(batch, wall_s) for batch, wall_s in zip(batches, walls, strict=True)], truth).profile
    for tokens in (32, 1_000):
        taken_s = found.prefill_s(tokens) + found.prefill_launch_s(tokens)
        assert taken_s == pytest.approx(truth.prefill_s(tokens) + truth.prefill_launch_s(tokens), rel=0.1, abs=0.001)


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize("gap_ms", [0.0, 1.0, 2.0, 4.0])
def test_a_fit_finds_how_far_apart_requests_come(gap_ms: float, is_quick: bool) -> None:
    """With 1 % of noise, to within the next smaller or larger value that is tried; the other numbers do not suffer."""
    truth = dataclasses.replace(
        load_profile("qwen3-8b-h100-tp1"), slots=64, prefill_least_tokens=1_024, request_gap_ms=gap_ms
    )
    batches = plan(truth.slots, 60_000, 32_768, is_quick=is_quick)
    dice = random.Random(1)
    walls = [(simulated_s(truth, [batch])[0] + 0.005) * dice.gauss(1.0, 0.01) for batch in batches]
    other = dataclasses.replace(truth, request_gap_ms=6.0)  # which a fit replaces, as everything else
    found = fit([Measurement(batch, wall_s) for batch, wall_s in zip(batches, walls, strict=True)], other)
    gaps_ms = (0.0, *GAPS_MS)
    at = gaps_ms.index(gap_ms)
    assert found.profile.request_gap_ms in gaps_ms[max(0, at - 1) : at + 2]
    assert found.mape < 0.03
    assert found.profile.decode_step_s(32, 20_000) == pytest.approx(truth.decode_step_s(32, 20_000), rel=0.05)


def test_outliers_do_not_bend_the_fit() -> None:
    """Every sixth batch takes twice as long, as on a busy machine; the others determine the fit."""
    truth = load_profile("qwen3-14b-h100-tp1")
    clean = measured(truth, request_s=0.005)
    spoilt = [Measurement(one.batch, one.wall_s * (2 if number % 6 == 3 else 1)) for number, one in enumerate(clean)]
    assert max(step_errors(fit(spoilt, truth).profile, truth)) < 0.02


def test_no_coefficient_is_negative_for_odd_measurements() -> None:
    """A step that gets faster with more sequences would let the simulator's time run backwards."""
    truth = load_profile("qwen3-14b-h100-tp1")
    odd = [Measurement(one.batch, one.wall_s / one.batch.num_sequences) for one in measured(truth)]
    found = fit(odd, truth).profile
    assert found.decode_per_sequence_ms == 0.0
    assert min(found.decode_base_ms, found.decode_per_kv_ktoken_ms, found.prefill_per_ktoken_ms) >= 0
    assert found.prefill_per_ktoken2_ms >= 0


def test_too_few_batches_are_refused() -> None:
    """Six unknowns need at least six equations; where others visited, there are seven."""
    one = Measurement(Batch(1, 100, 10), 1.0)
    with pytest.raises(ValueError, match="6 different batches"):
        fit([one] * 20, load_profile("toy-cpu-tp1"))
    visited = [Measurement(Batch(1, 100, 10 + n, num_visits=n), 1.0) for n in range(6)]
    with pytest.raises(ValueError, match="7 different batches"):
        fit(visited, load_profile("toy-cpu-tp1"))


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize("slots", [1, 3, 256])
@pytest.mark.parametrize("kv_tokens", [2_000, 60_000])
def test_planned_batches_fit_the_engine(slots: int, kv_tokens: int, is_quick: bool) -> None:
    """Otherwise they would be refused, preempted or queued, which is another experiment."""
    batches = plan(slots, kv_tokens, 8_192, is_quick=is_quick)
    assert len(set(batches)) > 5
    for batch in batches:
        assert batch.num_sequences <= slots
        assert batch.prompt_tokens + batch.output_tokens <= 8_192
        assert batch.num_sequences * (batch.prompt_tokens + batch.output_tokens) <= kv_tokens


def test_an_engine_too_small_to_measure_is_refused() -> None:
    """With nothing to vary, a fit would be a guess."""
    with pytest.raises(ValueError, match="100 tokens"):
        plan(4, 100, 8_192, is_quick=True)


def test_a_written_profile_is_read_back(tmp_path: Path) -> None:
    """Including slots that no number of GPUs divides, quotes in names, and tiny coefficients."""
    truth = load_profile("qwen3-14b-h100-tp8")
    given = dataclasses.replace(
        truth,
        name="my.model-b200-tp8",
        gpu="b200",
        model='a "model"',
        slots=100,
        prefill_per_ktoken2_ms=1.25e-7,
        request_ms=8.5,
        request_gap_ms=1.5,
        prefill_step_ms=21.5,
        prefill_least_tokens=768,
    )
    file = tmp_path / "mine.toml"
    file.write_text(to_toml("my.model", given), encoding="utf-8")
    assert load_profile(f"{file}:my.model-b200-tp8") == given


@pytest.mark.alone
async def test_measuring_running_engines_recovers_their_profile() -> None:
    """Simulated vLLM and SGLang engines over HTTP, twice as fast as their profile says.

    Only within a third, because a test machine may be busy; the tests above check how exact a fit is.
    """
    truth = dataclasses.replace(load_profile("qwen3-32b-h100-tp2"), slots=16, prefill_step_ms=60.0)

    async def measure(dialect: Literal["vllm", "sglang"]) -> None:
        settings = SimulatedEngineSettings(dialect=dialect, profile=truth, speed_up=2.0, max_model_len=8_192)
        async with serve_engine(settings) as url:
            parsed = arguments(url, "--name", "qwen3-32b-h100-tp2", "--quick")
            found, measurements = await command.measure(url, parsed, Console(quiet=True))
        assert (found.profile.slots, found.profile.kv_capacity_tokens, found.profile.tp) == (16, 284_000, 2)
        assert len(measurements) > 6
        for tokens in (100, 4_000):
            for num in (1, 16):
                expected_s = truth.decode_step_s(num, num * tokens) / 2
                assert found.profile.decode_step_s(num, num * tokens) == pytest.approx(expected_s, rel=0.33)
            assert found.profile.prefill_s(tokens) == pytest.approx(truth.prefill_s(tokens) / 2, rel=0.33, abs=0.01)
        assert found.profile.prefill_step_ms == pytest.approx(30.0, rel=0.33)

    await asyncio.gather(measure("vllm"), measure("sglang"))


@pytest.mark.parametrize(
    ("details", "problem"),
    [({}, "turn on its prefix cache"), ({"prompt_tokens_details": {"cached_tokens": 4_080}}, "ignore_eos")],
)
async def test_a_prompt_that_is_asked_again_is_cached(details: dict[str, Any], problem: str) -> None:
    """By the engine's word or by its times. A fast engine's times, on a busy machine, denied what it reported.

    This one takes longer each time, and its one token ends the measurement after the check.
    """
    pauses_s = [0.8, 0.4, 0.2, 0.1, 0.05]
    body = orjson.dumps({"usage": {"completion_tokens": 1, **details}})

    async def play(_: Asked, write: Callable[[bytes], Awaitable[None]]) -> None:
        await asyncio.sleep(pauses_s.pop() if pauses_s else 0.0)
        await write(body)

    async with recorded_engine(SimulatedEngineSettings()) as engine:
        engine.scripts["/v1/completions"] = Script(play, headers=((b"content-type", b"application/json"),))
        with pytest.raises(command.ProfilingError, match=problem):
            await command.measure(engine.url, arguments(engine.url, "--quick"), Console(quiet=True))


async def test_an_unreachable_engine_is_reported(tmp_path: Path) -> None:
    """Nothing listens at this address."""
    with pytest.raises(command.ProfilingError, match="no connection"):
        await command.measure("http://127.0.0.1:1", arguments("http://127.0.0.1:1"), Console(quiet=True))


async def test_more_slots_than_files_that_may_be_open_are_reported() -> None:
    """vLLM on an H100 runs 1,024 turns at once, and as many files may usually be open: it ended with a traceback."""
    words = (sys.executable, "-m", "heddle", "profile", "--quick", "--slots", "64")
    few = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (48, 48))
    async with serve_engine(SimulatedEngineSettings(speed_up=1_000.0)) as url:
        process = await asyncio.create_subprocess_exec(*words, url, preexec_fn=few, stderr=asyncio.subprocess.PIPE)
        _, told = await process.communicate()
    assert process.returncode == 2, told
    assert told.decode().startswith(f"heddle profile: {url}: no more file descriptors") and told.count(b"\n") == 1


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--model", "nope"], "no model 'nope' there; it serves: simulated"),
        (["--name", "qwen"], "--name 'qwen' is not MODEL-GPU-tpN"),
    ],
)
async def test_a_wrong_argument_is_reported(more: list[str], problem: str) -> None:
    """Before anything is measured."""
    async with serve_engine(SimulatedEngineSettings()) as url:
        with pytest.raises(command.ProfilingError, match=problem):
            await command.measure(url, arguments(url, *more), Console(quiet=True))


def test_the_command_fails_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """With exit status 2, like a wrong flag."""
    assert main(["profile", "http://127.0.0.1:1"]) == 2
    problem = capsys.readouterr().err
    assert problem.startswith("heddle profile: http://127.0.0.1:1: no connection") and problem.count("\n") == 1
