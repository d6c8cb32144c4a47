"""What it is worth that legs are sent ahead (scheduling/transit.py): `python -m tests.bench.ahead [SEEDS]`, simulated,
or `python -m tests.bench.ahead --real VENV`, on a vLLM server of that environment on the CPU.

Turns are short and wait for slots, not for KV. The simulated engine takes 10 ms for a request beside its steps, and
prefills cost others nothing. Round-robin sends every turn to the engine, in whose own queue no slot is ever empty.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean, median

from rich.console import Console

from engines.local_vllm import LocalVllm, launch
from engines.profiles import load_profile
from engines.tiny_model import make_tiny_model
from heddle import profile as profiling
from heddle.real import clear_prefix_cache
from heddle.rollouts import local_gateway, play
from heddle.trial import simulated_makespan_s
from loadtest.replayer import ReplaySettings
from scheduling.limits import Limits
from simulator.conditions import PLAIN, Conditions
from workloads.laws import draw, law_named

# Slots, lengths and trajectories.
CASES = ((4, 0.03, 64), (16, 0.1, 128), (64, 0.1, 512), (256, 0.3, 1024))
OFF = Limits(sends_ahead=False)
UNTOLD = Conditions(tells_profiles=False)
# Policy, `sends_ahead`, and whether the gateway knows the engine's profile.
_MODES = {
    "ahead": ("heddle", "true", False),
    "ahead, measured": ("heddle", "true", True),
    "not ahead": ("heddle", "false", False),
    "round-robin": ("round-robin", "true", False),
}
_REPEATS = 3


def simulated(seeds: range) -> None:
    print("| slots, lengths, agents | Heddle | without a profile | not ahead | round-robin |\n|---|---|---|---|---|")
    for slots, scale, number in CASES:
        profile = replace(load_profile("qwen3-8b-h100-tp1"), slots=slots, request_ms=10.0, kv_capacity_tokens=10**7)
        workloads = [draw(law_named("coding"), number, seed, scale=scale) for seed in seeds]
        ahead = [simulated_makespan_s(workload, [profile], "heddle", 0.0) for workload in workloads]
        cells = [f"{geometric_mean(ahead):.1f} s"]
        for policy, limits, how in (("heddle", Limits(), UNTOLD), ("heddle", OFF, PLAIN), ("round-robin", OFF, PLAIN)):
            others = [simulated_makespan_s(workload, [profile], policy, 0.0, limits, how) for workload in workloads]
            ratios = [other / base for other, base in zip(others, ahead, strict=True)]
            cells.append(f"x{geometric_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        print(f"| {slots}, {scale}, {number} | {' | '.join(cells)} |", flush=True)


async def real(venv: Path, work: Path) -> None:
    """Seeds 1 and 2 on 4 slots, in turns, each from an empty cache."""
    console, makespans = Console(quiet=True), dict[tuple[int, str], list[float]]()
    spec = LocalVllm(make_tiny_model(work / "tiny"), max_model_len=16_384, num_kv_blocks=2_048, venv=venv)
    async with launch(spec, work / "vllm.log") as server:
        options = argparse.ArgumentParser()
        profiling.add_options(options)
        parsed = options.parse_args(["--name", "tiny-cpu-tp1", "--quick"])
        fitted, _ = await profiling.measure(server.url, parsed, console)
        profiling.write(fitted.profile, work / "profile.toml")
        print(f"{fitted.profile.request_ms:.1f} ms a request")
        for repeat in range(_REPEATS):
            for seed in (1, 2):
                workload = draw(law_named("coding"), 64, seed, scale=0.03)
                for name in list(_MODES)[:: -1 if repeat % 2 else 1]:
                    policy, os.environ["HEDDLE_SENDS_AHEAD"], is_measured = _MODES[name]
                    await clear_prefix_cache(server.url)
                    profile = f"{work / 'profile.toml'}:tiny-cpu-tp1" if is_measured else None
                    async with local_gateway([server.url], policy, work, profile=profile) as gateway:
                        settings = ReplaySettings(f"{gateway}/v1", stream_share=0.0, client="raw")
                        result = await play(workload, name, settings, console)
                    makespans.setdefault((seed, name), []).append(result.makespan_s)
                    print(f"seed {seed}, {name}: {result.makespan_s:.1f} s", flush=True)
    for (seed, name), them in sorted(makespans.items()):
        ratio = median(them) / median(makespans[seed, "ahead"])
        print(f"| {seed} | {name} | {', '.join(f'{one:.1f}' for one in them)} s | x{ratio:.2f} |")


def main() -> None:
    if sys.argv[1:2] == ["--real"]:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(real(Path(sys.argv[2]), Path(folder)))
    else:
        simulated(range(1, 1 + (int(sys.argv[1]) if sys.argv[1:] else 5)))


if __name__ == "__main__":
    main()
