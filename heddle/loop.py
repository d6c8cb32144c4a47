"""`python -m heddle.loop`: what reshaping the fleet is worth in the whole loop, against the simulator's promise.

The same rollout is played twice, each time with its own gateway, controller and engines, all separate processes: once
with the first fleet throughout, once with the controller's plans carried out during the rollout. Only the engines' work
is simulated. The simulator plays both in virtual time. It is told only what the controller expected a relaunch to cost
from its measurements so far, how long the relaunch took, and when plans were made.

Trust the result only if the first rollout takes about as long as the simulator says: if it takes clearly longer, this
machine was too slow for the speed-up, and nothing follows from the second.
"""

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import uvloop
from rich.console import Console

from engines.children import LaunchError
from heddle.arguments import seed
from heddle.loop_rollout import MIN_GAIN_SHARE, PREDICTOR, Loop, Seen, rollout
from simulator import runs
from simulator.conditions import Reshape
from simulator.scenario import Scenario, load_scenario
from workloads.trajectories import Workload

FIXED, PLANNED = "fixed fleet", "plans carried out"
# The error that the simulator is allowed.
TOLERANCE = 0.15


def main() -> int:
    """Play both, predict both; 1 if a turn failed or the prediction was off by more than the tolerance."""
    parser = argparse.ArgumentParser(prog="heddle.loop", description=__doc__)
    parser.add_argument("--scenario", type=Path, default=Path("scenarios/coding-14b-1600.toml"))
    parser.add_argument("--trajectories", type=int, help="fewer than the scenario has")
    parser.add_argument("--gpus", type=int, help="fewer than the scenario has; whole nodes of 8")
    parser.add_argument("--seed", type=seed, default=1)
    parser.add_argument("--speed-up", type=float, default=1.0, help="virtual seconds per second")
    parser.add_argument("--interval-s", type=float, default=30.0, help="virtual seconds between plans")
    parser.add_argument("--start-s", type=float, default=10.8, help="virtual seconds that an engine takes to start")
    parser.add_argument(
        "--sleep-s", type=float, help="virtual seconds to fall asleep and to wake: engines of all sizes sleep"
    )
    parser.add_argument("--token-legs", choices=("auto", "off"), default="off")
    parser.add_argument("--work-dir", type=Path, default=Path(".work/loop"), help="for logs, stores and the journal")
    parsed = parser.parse_args()
    try:
        return uvloop.run(_run(parsed))
    except (LaunchError, ValueError, OSError) as error:
        print(f"heddle.loop: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


async def _run(parsed: argparse.Namespace) -> int:
    console = Console(highlight=False)
    scenario = _scenario(parsed)
    workload = scenario.workloads(parsed.seed)[-1]
    console.print(
        f"{len(workload.trajectories):,} trajectories of {scenario.name}, {workload.num_turns:,} turns, "
        f"{workload.output_tokens:,} output tokens, seed {parsed.seed}, on {scenario.fleet.gpus} simulated GPUs, "
        f"{parsed.speed_up:g} times as fast as real ones, on {os.cpu_count()} cores."
    )
    loop = Loop(
        scenario,
        parsed.seed,
        parsed.speed_up,
        parsed.interval_s,
        parsed.start_s,
        parsed.sleep_s,
        parsed.token_legs,
        parsed.work_dir,
    )
    seen = {}
    for name in (FIXED, PLANNED):
        seen[name] = await rollout(loop, workload, name, name == PLANNED, console)
        console.print(_line(name, seen[name]), soft_wrap=True)
    counted_s, took_s = seen[PLANNED].counted_s, seen[PLANNED].relaunch_s
    relaunch_s = counted_s if took_s is None else took_s
    planned_at_s = seen[PLANNED].planned_at_s
    first_s = None if planned_at_s is None else planned_at_s % parsed.interval_s
    reshape = Reshape(parsed.interval_s, relaunch_s, MIN_GAIN_SHARE, expected_s=counted_s, first_s=first_s)
    said = {
        FIXED: _simulated_s(scenario, workload, parsed.seed),
        PLANNED: _simulated_s(replace(scenario, reshape=reshape), workload, parsed.seed),
    }
    gain, promise = (times[FIXED] / times[PLANNED] for times in ({n: s.makespan_s for n, s in seen.items()}, said))
    error = gain / promise - 1
    console.print(
        f"Simulator: {said[FIXED]:.1f} s, with plans {said[PLANNED]:.1f} s (relaunch {relaunch_s:.1f} s, "
        f"{counted_s:.1f} s counted).\n"
        f"Gain: x{gain:.2f}; the simulator said x{promise:.2f}: {error:+.1%}, {TOLERANCE:.0%} are allowed.\n"
        f"The fixed fleet took {seen[FIXED].makespan_s / said[FIXED]:.2f} of the simulator's time; far above 1, this "
        "machine was too slow.",
        soft_wrap=True,
    )
    is_as_said = abs(error) <= TOLERANCE and not any(one.num_failed for one in seen.values())
    return 0 if is_as_said else 1


def _scenario(parsed: argparse.Namespace) -> Scenario:
    scenario = load_scenario(parsed.scenario)
    if parsed.trajectories:
        scenario = replace(scenario, workload=replace(scenario.workload, trajectories=parsed.trajectories))
    if parsed.gpus:
        scenario = replace(scenario, fleet=replace(scenario.fleet, gpus=parsed.gpus))
    if scenario.fleet.gpus is None or scenario.fleet.gpus % 8:
        raise ValueError(f"{parsed.scenario}: the fleet must be whole nodes: gpus, profile and tp")
    return scenario


def _simulated_s(scenario: Scenario, workload: Workload, seed: int) -> float:
    fleet = scenario.fleets()[0]
    bounds = runs.bounds_of(scenario, fleet, workload, seed)
    run = runs.play(scenario, "heddle", fleet, PREDICTOR, seed, [workload], bounds)
    return run.outcome.makespan_s


def _line(name: str, seen: Seen) -> str:
    agents, gateway, engines = seen.cpu_s
    words = (
        f"{name}: {seen.makespan_s:.1f} s, {seen.num_failed} failed turns, cores {seen.busy_share:.0%} busy; CPU: "
        f"agents {agents:.0f} s, gateway {gateway:.0f} s, engines {engines:.0f} s"
    )
    if seen.planned_at_s is not None:
        took = "did not end" if seen.relaunch_s is None else f"took {seen.relaunch_s:.1f} s"
        words += f", after {seen.planned_at_s:.1f} s a relaunch {took}"
    return "; then ".join([words, *seen.fleets])


if __name__ == "__main__":
    began_at = time.monotonic()
    status = main()
    print(f"{time.monotonic() - began_at:.0f} s in all")
    sys.exit(status)
