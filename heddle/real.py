"""`heddle real`: a rollout on real vLLM servers with no GPU, scheduled step by step and by Heddle, side by side."""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import uvloop
from rich.console import Console

from engines.children import LaunchError
from engines.http import FAULTS, HttpClient
from engines.local_vllm import DEFAULT_VENV, LocalVllm, launch_all
from engines.tiny_model import make_tiny_model
from heddle.arguments import count, seed, why
from heddle.rollouts import COMPARED, local_gateway, play
from loadtest.display import print_results
from loadtest.replayer import ReplaySettings
from loadtest.results import RolloutResult
from loadtest.rivalry import Counts, counts
from workloads.laws import draw, law_named
from workloads.traces import load_trace
from workloads.trajectories import Workload

ENGINE_TIMEOUT_S = 300.0  # Of one request; a busy machine stands still for many seconds.
_EPILOG = """examples:
  heddle real
  heddle real --trace agents.jsonl.gz --trajectories 32 --engines 3
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="JSON lines of trajectories (default: draw from the coding law)"
    )
    parser.add_argument("--trajectories", type=count, default=32, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=seed, default=1, help="seed of the rollout")
    parser.add_argument("--engines", type=count, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--slots", type=count, default=4, help="concurrent turns of an engine")
    parser.add_argument("--max-context-tokens", type=count, default=3_000, help="lengths are scaled to fit")
    parser.add_argument("--max-turns", type=count, default=12, help="later turns are left out (default: %(default)s)")
    parser.add_argument("--venv", type=Path, default=DEFAULT_VENV, help="where vLLM is installed")
    parser.add_argument(
        "--work-dir", type=Path, default=Path(".work/real"), help="folder for the model, logs and stores"
    )


def run(parsed: argparse.Namespace) -> int:
    """Play both; 1 if a turn failed."""
    try:
        workload = _workload(parsed)
        return uvloop.run(_run(parsed, workload, make_tiny_model(parsed.work_dir / "tiny")))
    except (LaunchError, OSError, ValueError) as error:
        print(f"heddle real: {why(error)}", file=sys.stderr)
        return 2


def _workload(parsed: argparse.Namespace) -> Workload:
    if parsed.trace is not None:
        workload = load_trace(parsed.trace, parsed.trajectories, parsed.seed)
    else:
        workload = draw(law_named("coding"), parsed.trajectories, parsed.seed)
    # Tool times are scaled down as answers are; a person's coffee break is not a tool call.
    return workload.within(parsed.max_turns, parsed.max_context_tokens, max_tool_s=1.0)


async def _run(parsed: argparse.Namespace, workload: Workload, model: Path) -> int:
    console = Console(markup=False)
    console.print(
        f"{len(workload.trajectories)} trajectories of {workload.name}, {workload.num_turns} turns, "
        f"{workload.output_tokens:,} output tokens, on {parsed.engines} vLLM servers of {parsed.slots} slots (CPU)."
    )
    specs = [LocalVllm(model, max_num_seqs=parsed.slots, venv=parsed.venv) for _ in range(parsed.engines)]
    results: list[RolloutResult] = []
    async with launch_all(specs, parsed.work_dir, console.print) as engines:
        urls = [engine.url for engine in engines]
        await asyncio.gather(*(warm_up(url) for url in urls))
        for policy, title in COMPARED:
            for url in urls:
                await clear_prefix_cache(url)
            async with local_gateway(urls, policy, parsed.work_dir, "--log-level", "warning") as gateway:
                settings = ReplaySettings(base_url=f"{gateway}/v1", rollout_id=policy)
                results.append(await play(workload, title, settings, console))
    print_results(results, console)
    return 1 if any(result.errors for result in results) else 0


async def warm_up(engine_url: str) -> None:
    """Make an engine do its one-time work, its first prefill and first steps, so that the first policy does not pay for
    it. Raises LaunchError if it cannot be reached.
    """
    body = {"prompt": "warm " * 400, "max_tokens": 64, "ignore_eos": True}
    async with _client_of(engine_url) as http:
        await http.post("/v1/completions", orjson.dumps(body), timeout_s=ENGINE_TIMEOUT_S)


async def clear_prefix_cache(engine_url: str) -> None:
    """Clear the cache, so that no policy benefits from the one before it. Both kinds of engine refuse while an ended
    turn still holds blocks, so it is repeated until it succeeds. vLLM has its route in its development mode only.

    Raises:
        LaunchError: it never succeeded, or the engine cannot be reached.
    """
    status, body = 0, b""
    try:
        async with asyncio.timeout(ENGINE_TIMEOUT_S), _client_of(engine_url) as http:
            while True:
                status, body = await http.post("/reset_prefix_cache", b"", timeout_s=ENGINE_TIMEOUT_S)
                if status == 200 and b"false" not in body:
                    return
                if status == 404:
                    status, body = await http.post("/flush_cache", b"", timeout_s=ENGINE_TIMEOUT_S)  # SGLang's
                    if status in (200, 404):
                        break
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise LaunchError(f"the engine at {engine_url} keeps its prefix cache: {status} {body[:200]!r}") from None
    if status == 404:
        raise LaunchError(f"vLLM at {engine_url} cannot clear its prefix cache; start it with VLLM_SERVER_DEV_MODE=1")


async def counted(engine_urls: Sequence[str]) -> Counts:
    """What vLLM servers have counted in all.

    Raises:
        KeyError, ValueError: one of them is no vLLM.
        LaunchError: one cannot be reached.
    """
    total = Counts()
    for url in engine_urls:
        async with _client_of(url) as http:
            _, page = await http.get("/metrics", ENGINE_TIMEOUT_S)
        total += counts(page.decode())
    return total


@asynccontextmanager
async def _client_of(engine_url: str) -> AsyncIterator[HttpClient]:
    """Raises LaunchError, which names the engine, for every fault of a request."""
    http = HttpClient(engine_url)
    try:
        yield http
    except FAULTS as fault:
        raise LaunchError(f"{engine_url}: {fault}") from None
    finally:
        http.close()
