"""`heddle trial`: the same rollout on running engines under one policy after the other, and each in virtual time.

The first engine is measured as by `heddle profile`, unless a profile is given. Then each seed's workload is played
behind a gateway of its own, which knows the profile, from empty prefix caches. And it is simulated: with the prompts as
long as the engines counted them, because an answer that comes back as text may be more tokens than it was. What gateway
and agent take of a turn is measured by one trajectory of tiny turns, and extends the simulated tool calls. A crowd of
such trajectories shows how far apart requests reach the engine: a chat takes its front end longer than the prompts
of `heddle profile`. The workload so played is kept as `played-POLICY-SEED.jsonl`, for `heddle simulate --trace`.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from engines.children import LaunchError
from engines.profiles import load_profile
from engines.profiling import GAPS_MS
from heddle import profile as profiling
from heddle.arguments import count, out_file, positive, why
from heddle.arguments import seed as seed_number
from heddle.equal_engines import UnfitEngine, common_model
from heddle.real import counted
from heddle.track import EngineGone, Track
from loadtest.clients import RequestFailed
from loadtest.results import RolloutResult, TurnResult
from loadtest.rivalry import Counts
from predictor.tabular import TabularPredictor
from scheduling.cost import EngineProfile
from scheduling.limits import Limits
from simulator.conditions import PLAIN, Conditions
from simulator.rollout import Rollout
from simulator.runs import policy_named
from workloads.laws import LAWS, draw, law_named
from workloads.result_files import write_whole
from workloads.trajectories import TEMPLATE_TOKENS_PER_TURN, Trajectory, Turn, Workload

NUM_PROBES = 40


def tiny(name: str, num_turns: int) -> Trajectory:
    """Turns of one token, one after the other: what they take is gateway, agent and a request's cost in the engine."""
    return Trajectory(name, name, 64, (Turn(0, 1, 0.0), *[Turn(24, 1, 0.0)] * num_turns))


PROBE = Workload("probe", (tiny("probe", NUM_PROBES),))
_GAPS_MS = (0.0, *GAPS_MS, 8.0, 10.0, 12.0, 16.0)  # a chat takes longer, and gateway and agent may take the same cores
_CROWD_TURNS = 9
_CROWD_KV_TOKENS = 512  # of each of its trajectories, with room for a template
_PROBLEMS = (EngineGone, LaunchError, profiling.ProfilingError, RequestFailed, UnfitEngine, OSError, ValueError)
_EPILOG = """examples:
  heddle trial http://10.0.0.5:8000 --name qwen3-14b-h100-tp1 --slots 64
  heddle trial http://10.0.0.5:8000 http://10.0.0.6:8000 --profile qwen.toml:qwen3-14b-h100-tp2 \\
      --policy vllm-router --policy thunderagent --policy heddle --seed 1 --seed 2

vLLM clears its prefix cache only in its development mode (VLLM_SERVER_DEV_MODE=1); SGLang always does.
"""


@dataclass(frozen=True, slots=True)
class Trial:
    """One rollout, measured and simulated.

    Args:
        preemptions: running turns whose KV the engines took, as vLLM counts them; None on other engines.
        computed_tokens: prompt tokens that were in no prefix cache when their turn began, counted likewise.
        prompt_tokens: of all turns.
    """

    policy: str
    seed: int
    measured_s: float
    simulated_s: float
    mean_trajectory_s: float
    num_failed_turns: int
    preemptions: int | None
    computed_tokens: int | None
    prompt_tokens: int

    @property
    def error(self) -> float:
        """Of the simulation, relative; positive where it is slower than the real rollout."""
        return self.simulated_s / self.measured_s - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "engines",
        nargs="+",
        type=profiling.base_url,
        metavar="ENGINE",
        help="equal vLLM or SGLang servers' URLs, without /v1",
    )
    parser.add_argument("--profile", metavar="FILE:NAME", help="the engines' profile; without it, one is measured:")
    profiling.add_options(parser)
    parser.add_argument("--policy", action="append", help="repeatable (default: round-robin, then heddle)")
    parser.add_argument("--seed", type=seed_number, action="append", help="repeatable (default: 1)")
    parser.add_argument("--law", choices=sorted(LAWS), default="coding", help="what agents are like")
    parser.add_argument("--trajectories", type=count, default=128, metavar="N", help="of each rollout")
    parser.add_argument("--scale", type=positive, default=0.2, help="of the law's lengths and tool times")
    parser.add_argument("--json", type=out_file, metavar="FILE", help="write all figures")
    parser.add_argument(
        "--work-dir", type=Path, default=Path(".work/trial"), help="for logs, stores and workloads as played"
    )


async def run(parsed: argparse.Namespace) -> int:
    """Play all; 1 if a turn failed."""
    console = Console(markup=False, highlight=False)
    try:
        policies = [policy_named(name).name for name in dict.fromkeys(parsed.policy or ("round-robin", "heddle"))]
        parsed.work_dir.mkdir(parents=True, exist_ok=True)
        trials = await _run(parsed, policies, console)
    except _PROBLEMS as error:
        print(f"heddle trial: {why(error)}", file=sys.stderr)
        return 2
    console.print(comparison(trials))
    return 1 if any(trial.num_failed_turns for trial in trials) else 0


async def _run(parsed: argparse.Namespace, policies: Sequence[str], console: Console) -> list[Trial]:
    engines: list[str] = parsed.engines
    trials: list[Trial] = []
    if parsed.profile is None:
        out = profiling.checked_out(parsed)  # before any engine is asked
        model = await common_model(engines, parsed.model)
        profile = await _measured(parsed, model, out, console)
    else:
        profile = load_profile(parsed.profile)
        model = await common_model(engines, parsed.model)
    named = parsed.profile or f"{parsed.out}:{profile.name}"
    workloads = {seed: _drawn(parsed, seed, profile) for seed in parsed.seed or [1]}
    track = Track(engines, model, named, parsed.work_dir, console)
    probe = await track.played(PROBE, "heddle")
    together = crowd(profile)
    crowded = await replace(track, engines=engines[:1]).played(together, "round-robin")
    profile = with_gap(profile, together, crowded.makespan_s, probe.makespan_s)
    overhead_s = overhead_of(probe.makespan_s, profile)
    console.print(
        f"{1e3 * overhead_s:.1f} ms of a turn are outside the engine. Turns that are sent together reach it "
        f"{profile.request_gap_ms:.1f} ms apart."
    )
    for seed, workload in workloads.items():
        for policy in policies:
            before = await _counted(engines)
            result = await track.played(workload, policy)
            after = await _counted(engines)
            counted = None if before is None or after is None else after - before
            played = as_played(workload, result)
            trial = Trial(
                policy=policy,
                seed=seed,
                measured_s=result.makespan_s,
                simulated_s=simulated_makespan_s(played, [profile] * len(engines), policy, overhead_s),
                mean_trajectory_s=result.mean_trajectory_s,
                num_failed_turns=result.num_failed_turns,
                preemptions=None if counted is None else counted.preemptions,
                computed_tokens=None if counted is None else counted.computed_tokens,
                prompt_tokens=sum(turn.prompt_tokens for turn in result.turns),
            )
            trials.append(trial)
            lines = b"".join(orjson.dumps(one) + b"\n" for one in played.trajectories)
            (parsed.work_dir / f"played-{policy}-{seed}.jsonl").write_bytes(lines)
            for error in result.errors[:3]:
                print(f"{policy}: {error}", file=sys.stderr)
            console.print(f"{policy}, seed {seed}: {trial.measured_s:.1f} s, simulated {trial.simulated_s:.1f} s")
            if parsed.json is not None:  # after each: what was measured is not lost with what comes
                figures = {"profile": asdict(profile), "overhead_s": overhead_s, "trials": [asdict(t) for t in trials]}
                write_whole(parsed.json, orjson.dumps(figures, option=orjson.OPT_INDENT_2))
    return trials


def _drawn(parsed: argparse.Namespace, seed: int, profile: EngineProfile) -> Workload:
    """Refused before it is played, not after: a GPU costs money."""
    workload = draw(law_named(parsed.law), parsed.trajectories, seed, scale=parsed.scale)
    longest = max(one.total_tokens + TEMPLATE_TOKENS_PER_TURN * len(one.turns) for one in workload.trajectories)
    if longest > profile.kv_capacity_tokens:
        raise ValueError(
            f"with seed {seed} a trajectory comes to {longest:,} tokens, and the KV of {profile.name} holds "
            f"{profile.kv_capacity_tokens:,}: give a smaller --scale"
        )
    return workload


async def _measured(parsed: argparse.Namespace, model: str, out: Path, console: Console) -> EngineProfile:
    """The profile of the first engine's `model`, as `heddle profile` writes it."""
    options = argparse.Namespace(**vars(parsed) | {"model": model})
    fitted, measurements = await profiling.measure(parsed.engines[0], options, console)
    profiling.show(fitted, measurements, console)
    profiling.write(fitted.profile, out)
    console.print(f"Wrote {out}:{fitted.profile.name}", soft_wrap=True)
    return fitted.profile


async def _counted(engines: Sequence[str]) -> Counts | None:
    """What vLLM servers count in all; None of others."""
    try:
        return await counted(engines)
    except (KeyError, ValueError):
        return None


def overhead_of(probe_s: float, profile: EngineProfile) -> float:
    """Seconds of a turn outside the engine, from those that the rollout of `PROBE` took."""
    return max(0.0, (probe_s - simulated_makespan_s(PROBE, [profile], "heddle", 0.0)) / (NUM_PROBES + 1))


def crowd(profile: EngineProfile) -> Workload:
    """As many tiny trajectories as one engine runs at once."""
    number = min(profile.slots, max(1, profile.kv_capacity_tokens // _CROWD_KV_TOKENS))
    return Workload("crowd", tuple(tiny(f"crowd-{index}", _CROWD_TURNS) for index in range(number)))


def with_gap(profile: EngineProfile, together: Workload, crowd_s: float, probe_s: float) -> EngineProfile:
    """The profile with the gap between requests at which the simulated crowd takes most nearly as long.

    Args:
        crowd_s: what it took under `round-robin`.
        probe_s: what the rollout of `PROBE` took.
    """

    def error_s(one: EngineProfile) -> float:
        overhead_s = overhead_of(probe_s, one)
        return abs(simulated_makespan_s(together, [one], "round-robin", overhead_s) - crowd_s)

    return min((replace(profile, request_gap_ms=gap_ms) for gap_ms in _GAPS_MS), key=error_s)


def as_played(workload: Workload, result: RolloutResult) -> Workload:
    """The workload with the prompts that the engines counted. Turns that failed keep theirs."""
    turns_of = {trajectory.trajectory_id: trajectory.turns for trajectory in result.trajectories}
    return replace(
        workload,
        trajectories=tuple(_as_played(one, turns_of[one.trajectory_id]) for one in workload.trajectories),
    )


def _as_played(trajectory: Trajectory, played: Sequence[TurnResult]) -> Trajectory:
    first, *later = trajectory.turns
    turns, context_tokens, known = [first], trajectory.context_tokens, {turn.index: turn for turn in played}
    if (begun := known.get(0)) is not None and begun.error is None:
        context_tokens = max(1, begun.prompt_tokens - first.new_tokens)
    for index, turn in enumerate(later, 1):
        before, now = known.get(index - 1), known.get(index)
        if before is not None and now is not None and before.error is None and now.error is None:
            new_tokens = now.prompt_tokens - before.prompt_tokens - before.output_tokens
            turn = replace(turn, new_tokens=max(0, new_tokens))
        turns.append(turn)
    return replace(trajectory, context_tokens=context_tokens, turns=tuple(turns))


def simulated_makespan_s(
    workload: Workload,
    profiles: Sequence[EngineProfile],
    policy: str,
    overhead_s: float,
    limits: Limits = Limits(),  # noqa: B008 - it is frozen
    conditions: Conditions = PLAIN,
) -> float:
    """A rollout in virtual time. The time of a turn outside the engine extends its tool call."""

    def longer(turn: Turn) -> Turn:
        return replace(turn, tool_s=turn.tool_s + overhead_s)

    trajectories = tuple(replace(t, turns=tuple(map(longer, t.turns))) for t in workload.trajectories)
    slowed = replace(workload, trajectories=trajectories)
    rollout = Rollout(slowed, list(profiles), policy_named(policy), limits, TabularPredictor(), conditions=conditions)
    return rollout.run().makespan_s


def comparison(trials: Sequence[Trial]) -> Table:
    """A row for each rollout. One with failed turns lacks their time: it is compared with nothing."""
    table = Table("policy", title="Makespans. x: times as fast as the first policy")
    for name in ("seed", "real s", "x", "sim. s", "x", "error", "failed"):
        table.add_column(name, justify="right")
    first = {trial.seed: trial for trial in reversed(trials)}
    for trial in trials:
        base = first[trial.seed]
        are_whole = not (trial.num_failed_turns or base.num_failed_turns)
        table.add_row(
            trial.policy,
            str(trial.seed),
            f"{trial.measured_s:.1f}",
            f"{base.measured_s / trial.measured_s:.2f}" if are_whole else "-",
            f"{trial.simulated_s:.1f}",
            f"{base.simulated_s / trial.simulated_s:.2f}",
            "-" if trial.num_failed_turns else f"{trial.error:+.1%}",
            str(trial.num_failed_turns),
        )
    return table
