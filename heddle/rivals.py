"""`python -m heddle.rivals`: a rollout on real vLLM servers behind Heddle, and behind the routers that others use.

Two servers of the tiny model on the CPU, and 48 trajectories of the coding law at 0.35 of its lengths: three groups of
16, contexts that end with 2,000 to 5,000 tokens in the median and with up to 15,000, tools of 0.14 s. Once with so
little KV that the contexts of all would take two to three times what there is (as of Qwen3-32B on H100), and once with
more than all can fill. An engine runs 16 turns at once. A repeat is another seed, that is another workload, and each
server plays all of them, agents alike: raw HTTP, streams, and `X-Session-ID`, which all of these servers know. Between
two runs the engines' prefix caches are emptied, and every run has a new process of its server, which so has learned
nothing yet.

Heddle has its defaults. vllm-router has those of each policy; with program scheduling it is told the engines' KV and
what their steps take, as `heddle profile` measures it before the first run.
"""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import orjson
import uvloop
from rich.console import Console

from engines.children import LaunchError, child, free_port
from engines.local_vllm import DEFAULT_VENV, LocalEngine, LocalVllm, launch_all
from engines.tiny_model import make_tiny_model
from heddle import profile
from heddle.arguments import count
from heddle.processors import cpu_s
from heddle.real import clear_prefix_cache, counted, warm_up
from heddle.rollouts import START_TIMEOUT_S, local_gateway
from loadtest.bench.peers import PROGRAMS, ROUTERS, STICKY, router
from loadtest.display import RolloutProgress
from loadtest.replayer import ReplaySettings, replay
from loadtest.rivalry import Run, order, run_of, table
from scheduling.cost import EngineProfile
from workloads.laws import draw, law_named
from workloads.trajectories import Workload

LAW, NUM_TRAJECTORIES, SCALE = "coding", 48, 0.35
NUM_ENGINES, SLOTS, BLOCK_TOKENS = 2, 16, 32
# KV of an engine in blocks: 24,576 tokens, in which the longest trajectory that the law can draw fits, and 262,144,
# more than all trajectories have together.
CASES = {"binds": 768, "plenty": 8_192}
# vLLM does not start where one request as long as this would not fit beside the block that it keeps for itself.
MAX_CONTEXT_TOKENS = 24_000
HEDDLE = "Heddle"
PROFILED = "--name", "tiny-cpu-tp1", "--quick"

# From the engines' URLs, a folder and the engines' profile to the URL of a server before them.
Start = Callable[[list[str], Path, EngineProfile], AbstractAsyncContextManager[str]]


def workload(seed: int) -> Workload:
    """What every server plays in the repeat of this seed."""
    return draw(law_named(LAW), NUM_TRAJECTORIES, seed, scale=SCALE)


def program_scheduling(engine: EngineProfile) -> str:
    """vllm-router's settings, as its manual wants them measured; its other ones are its defaults."""
    return orjson.dumps(
        {
            "program_scheduling_enable_key": "auto",  # X-Session-ID names a program
            "global_queue": True,  # what its manual recommends
            "token_capacity_per_target": engine.kv_capacity_tokens,
            "prefill_cost_model": {
                "intercept_seconds": engine.request_ms / 1e3 + engine.prefill_launch_s(0),
                "linear_seconds_per_1k_tokens": max(0.0, engine.prefill_per_ktoken_ms) / 1e3,
                "quadratic_seconds_per_1k_tokens_squared": max(0.0, engine.prefill_per_ktoken2_ms) / 1e3,
            },
            "decode_throughput_model": {
                "fixed_step_seconds": max(1e-4, engine.decode_base_ms / 1e3),
                "batch_step_seconds_per_request": max(0.0, engine.decode_per_sequence_ms) / 1e3,
                "context_step_seconds_per_token": max(0.0, engine.decode_per_kv_ktoken_ms) / 1e6,
            },
        }
    ).decode()


@asynccontextmanager
async def _heddle(policy: str, engines: list[str], folder: Path, _: EngineProfile) -> AsyncIterator[str]:
    async with local_gateway(engines, policy, folder, "--log-level", "warning") as url:
        yield url


@asynccontextmanager
async def _router(
    program: str, *options: str | Callable[[EngineProfile], str], engines: list[str], folder: Path, told: EngineProfile
) -> AsyncIterator[str]:
    words = [option if isinstance(option, str) else option(told) for option in options]
    port, ports = free_port(), [int(url.rpartition(":")[2]) for url in engines]
    command = router(program, *words)(port, free_port(), ports, folder)
    async with child(command, folder / f"{program}.log") as server:
        # A router that listens may not know its engines yet; then it lists no model.
        url = f"http://127.0.0.1:{port}"
        await server.until_ready(program, [f"{url}/health", f"{url}/v1/models"], START_TIMEOUT_S)
        yield url


def _vllm_router(policy: str, *options: str | Callable[[EngineProfile], str]) -> Start:
    def start(engines: list[str], folder: Path, told: EngineProfile) -> AbstractAsyncContextManager[str]:
        words = ("--policy", policy, *options)
        return _router("vllm-router", *words, engines=engines, folder=folder, told=told)

    return start


SERVERS: dict[str, Start] = {
    HEDDLE: partial(_heddle, "heddle"),
    STICKY: _vllm_router("sticky_least_loaded"),
    PROGRAMS: _vllm_router(
        "sticky_least_loaded",
        *("--enable-program-scheduling", "--program-scheduling-config-json", program_scheduling),
    ),
    "vllm-router, cache_aware": _vllm_router("cache_aware"),
    "vllm-router, power_of_two": _vllm_router("power_of_two"),
    "Heddle, `--policy thunderagent`": partial(_heddle, "thunderagent"),
}


def main() -> int:
    """Play all, print a table for each case; 1 if a turn failed."""
    parser = argparse.ArgumentParser(
        prog="heddle.rivals", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=list(CASES), help="default: both")
    parser.add_argument("--repeats", type=count, default=5, metavar="N", help="seeds 1 to N (default: %(default)s)")
    parser.add_argument("--only", help=f"servers, with semicolons between them: {'; '.join(SERVERS)}")
    parser.add_argument("--resume", action="store_true", help="keep earlier measurements, and resume from there")
    parser.add_argument("--venv", type=Path, default=DEFAULT_VENV, help="where vLLM is installed")
    parser.add_argument("--work-dir", type=Path, default=Path(".work/rivals"), help="for the model, logs and results")
    parsed = parser.parse_args()
    names = [name.strip() for name in parsed.only.split(";")] if parsed.only else list(SERVERS)
    try:
        if unknown := set(names) - set(SERVERS):
            raise ValueError(f"no such server: {', '.join(unknown)}; known: {'; '.join(SERVERS)}")
        if any(name.startswith("vllm-router") for name in names) and not (ROUTERS / "vllm-router").exists():
            raise LaunchError(f"no vllm-router in {ROUTERS}; get it with: deploy/get-bench-peers.sh")
        return uvloop.run(_main(parsed, names))
    except (LaunchError, profile.ProfilingError, OSError, ValueError) as error:
        print(f"heddle.rivals: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


async def _main(parsed: argparse.Namespace, names: Sequence[str]) -> int:
    console = Console(highlight=False, markup=False)
    model = make_tiny_model(parsed.work_dir / "tiny")
    path = parsed.work_dir / "runs.jsonl"
    if not parsed.resume:
        path.unlink(missing_ok=True)
    for case in [parsed.case] if parsed.case else CASES:
        runs = [run for run in _runs(path) if run.case == case]
        done = {(run.seed, run.server) for run in runs}
        wanted = [(seed, name) for seed in range(1, parsed.repeats + 1) for name in order(names, seed - 1)]
        if left := [one for one in wanted if one not in done]:
            await _play_case(case, left, model, parsed, path, console)
    runs = _runs(path)
    for case in dict.fromkeys(run.case for run in runs):
        print(f"\n{case}\n\n{table([run for run in runs if run.case == case], HEDDLE)}")
    return 1 if any(run.num_failed_turns for run in runs) else 0


def _runs(path: Path) -> list[Run]:
    return [run_of(orjson.loads(line)) for line in path.read_bytes().splitlines()] if path.is_file() else []


async def _play_case(
    case: str,
    left: Sequence[tuple[int, str]],
    model: Path,
    parsed: argparse.Namespace,
    path: Path,
    console: Console,
) -> None:
    spec = LocalVllm(
        model, max_num_seqs=SLOTS, max_model_len=MAX_CONTEXT_TOKENS, num_kv_blocks=CASES[case], venv=parsed.venv
    )
    async with launch_all([spec] * NUM_ENGINES, parsed.work_dir, console.print) as engines:
        urls = [engine.url for engine in engines]
        await asyncio.gather(*(warm_up(url) for url in urls))
        told = await _profiled(urls[0], console)
        for seed, name in left:
            run = await _play(case, seed, name, engines, parsed.work_dir, told, console)
            with path.open("ab") as file:
                file.write(orjson.dumps(run.to_json()) + b"\n")
            console.print(
                f"{case}, seed {seed}, {name}: {run.makespan_s:.1f} s, {run.counts.computed_tokens:,} tokens computed, "
                f"{run.num_failed_turns} failed"
            )


async def _profiled(url: str, console: Console) -> EngineProfile:
    parser = argparse.ArgumentParser()
    profile.add_options(parser)
    fitted, _ = await profile.measure(url, parser.parse_args(PROFILED), Console(quiet=True))
    console.print(str(fitted.profile), soft_wrap=True)
    return fitted.profile


async def _play(
    case: str,
    seed: int,
    name: str,
    engines: Sequence[LocalEngine],
    folder: Path,
    told: EngineProfile,
    console: Console,
) -> Run:
    urls = [engine.url for engine in engines]
    sessions = {engine.server.pid for engine in engines}
    for url in urls:
        await clear_prefix_cache(url)
    async with SERVERS[name](urls, folder, told) as server:
        before, before_s = await counted(urls), cpu_s(sessions)
        # What it is called counts for hashes; so it is the same for all.
        settings = ReplaySettings(f"{server}/v1", identity="session", client="raw", rollout_id=f"s{seed}")
        played = workload(seed)
        with RolloutProgress(played, name, console) as progress:
            result = await replay(played, settings, name=name, on_turn=progress.on_turn, queued_source=None)
        after, after_s = await counted(urls), cpu_s(sessions)
    for error in result.errors[:3]:
        print(f"{name}: {error}", file=sys.stderr)
    return Run(
        case,
        name,
        seed,
        result.makespan_s,
        result.mean_trajectory_s,
        after - before,
        after_s - before_s,
        sum(trajectory.num_failed_turns for trajectory in result.trajectories),
    )


if __name__ == "__main__":
    sys.exit(main())
