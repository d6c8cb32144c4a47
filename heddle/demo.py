"""`heddle demo`: the same rollout on simulated engines, scheduled step by step and by Heddle, side by side."""

import argparse
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import uvloop
from rich.console import Console

from engines.children import LaunchError, child, free_port
from heddle.arguments import count, positive, seed, why
from heddle.rollouts import COMPARED, START_TIMEOUT_S, local_gateway, play
from loadtest.display import print_results
from loadtest.replayer import ReplaySettings
from loadtest.results import RolloutResult
from workloads.laws import draw, law_named

PROFILE = "qwen3-14b-h100-tp1"
_NEXT = (
    "Times are the engines' virtual seconds. The gateway, its queues and its HTTP are real.",
    "",
    "Next, try in two shells:",
    "",
    "  {0} sim-engine --port 8000 & {0} serve --engine http://127.0.0.1:8000",
    "  curl http://127.0.0.1:8080/t/my-trajectory/v1/chat/completions -H 'content-type: application/json' \\",
    """       -d '{{"messages":[{{"role":"user","content":"hello"}}],"max_tokens":20}}'""",
)
_EPILOG = """examples:
  heddle demo
  heddle demo --law search --trajectories 96 --seed 7
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "--law", default="coding", help="coding, search or math, alone or with -light, -heavy, -pareto, -even"
    )
    parser.add_argument("--trajectories", type=count, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=seed, default=1, help="seed of the rollout")
    parser.add_argument("--engines", type=count, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--slots", type=count, default=32, help="concurrent turns of an engine")
    parser.add_argument("--kv-tokens", type=count, default=60_000, help="KV capacity of an engine")
    parser.add_argument("--scale", type=positive, default=0.7, help="multiplies lengths")
    parser.add_argument("--speed-up", type=positive, default=10.0, help="virtual seconds per second")
    parser.add_argument("--work-dir", type=Path, default=Path(".work/demo"), help="for logs and stores")


def run(parsed: argparse.Namespace) -> int:
    """Play both; 1 if a turn failed."""
    try:
        return uvloop.run(_run(parsed))
    except (LaunchError, OSError, ValueError) as error:
        print(f"heddle demo: {why(error)}", file=sys.stderr)
        return 2


async def _run(parsed: argparse.Namespace) -> int:
    console = Console(markup=False)
    workload = draw(law_named(parsed.law), parsed.trajectories, parsed.seed, scale=parsed.scale)
    console.print(
        f"{len(workload.trajectories)} trajectories of the {workload.name} law, {workload.num_turns} turns, "
        f"{workload.output_tokens:,} output tokens, on {parsed.engines} simulated engines ({PROFILE}, "
        f"{parsed.slots} slots, {parsed.kv_tokens:,} KV tokens), {parsed.speed_up:g} times as fast as real ones."
    )
    results: list[RolloutResult] = []
    for policy, title in COMPARED:
        # Separate engines for each, so that no cache is warm.
        async with (
            _engines(parsed) as engines,
            local_gateway(engines, policy, parsed.work_dir, "--log-level", "warning") as url,
        ):
            console.print(f"{title}: to be watched at {url}/dashboard", highlight=False)
            settings = ReplaySettings(
                base_url=f"{url}/v1",
                speed_up=parsed.speed_up,
                rollout_id=policy,
                client="raw",  # an agent's compute time holds KV, and `speed_up` multiplies it, so agents must be cheap
            )
            results.append(await play(workload, title, settings, console))
    print_results([result.times(parsed.speed_up) for result in results], console)
    for line in _NEXT:
        console.print(line.format(called_as(sys.argv[0])), highlight=False, markup=False, soft_wrap=True)
    return 1 if any(result.errors for result in results) else 0


def called_as(program: str) -> str:
    """How a shell calls this command again."""
    return shlex.join([program] if Path(program).name == "heddle" else [sys.executable, "-m", "heddle"])


@asynccontextmanager
async def _engines(parsed: argparse.Namespace) -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as stack:
        children = []
        for number in range(parsed.engines):
            port = free_port()
            command = [sys.executable, "-m", "heddle", "sim-engine", "--port", str(port), "--profile", PROFILE]
            command += ["--slots", str(parsed.slots), "--kv-tokens", str(parsed.kv_tokens)]
            command += ["--speed-up", str(parsed.speed_up), "--chunk-interval", "0.05"]
            engine = await stack.enter_async_context(child(command, parsed.work_dir / f"engine-{number}.log"))
            children.append((engine, f"http://127.0.0.1:{port}"))
        for engine, url in children:
            await engine.until_ready(f"engine at {url}", [f"{url}/health"], START_TIMEOUT_S)
        yield [url for _, url in children]
