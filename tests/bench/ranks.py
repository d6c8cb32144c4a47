"""What it is worth that each data-parallel rank is an engine: `python -m tests.bench.ranks VENV`, on a vLLM server of
two ranks of that environment on the CPU.

The same rollouts through a gateway, and straight at the server, whose own balancer gives each turn to the rank with the
fewest. KV binds: each rank holds some four contexts. In turns, each from an empty cache.
"""

import asyncio
import sys
import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console

from engines.local_vllm import LocalVllm, launch
from engines.tiny_model import make_tiny_model
from heddle.real import clear_prefix_cache, counted, warm_up
from heddle.rollouts import local_gateway, play
from loadtest.replayer import ReplaySettings
from workloads.laws import draw, law_named

_POLICIES = ("heddle", "round-robin", "none")
_REPEATS = 3


async def real(venv: Path, work: Path) -> None:
    console = Console(quiet=True)
    seen: dict[tuple[int, str], list[tuple[float, int]]] = {}
    spec = LocalVllm(make_tiny_model(work / "tiny"), dp=2, max_model_len=16_384, num_kv_blocks=640, venv=venv)
    async with launch(spec, work / "vllm.log") as server:
        await warm_up(server.url)
        for repeat in range(_REPEATS):
            for seed in (1, 2):
                workload = draw(law_named("coding"), 24, seed, scale=0.3).fitted(6_000).with_max_tool_s(1.0)
                for policy in _POLICIES[:: -1 if repeat % 2 else 1]:
                    await clear_prefix_cache(server.url)
                    before = await counted([server.url])
                    if policy == "none":
                        result = await play(workload, policy, settings_for(server.url), console)
                    else:
                        async with local_gateway([server.url], policy, work) as gateway:
                            result = await play(workload, policy, settings_for(gateway), console)
                    computed = (await counted([server.url]) - before).computed_tokens
                    assert not result.errors
                    seen.setdefault((seed, policy), []).append((result.makespan_s, computed))
                    print(f"seed {seed}, {policy}: {result.makespan_s:.1f} s, {computed} computed", flush=True)
    for (seed, policy), them in sorted(seen.items()):
        ratio = median(s for s, _ in them) / median(s for s, _ in seen[seed, "heddle"])
        spans = ", ".join(f"{s:.1f}" for s, _ in them)
        print(f"| {seed} | {policy} | {spans} s | x{ratio:.2f} | {median(tokens for _, tokens in them):,} |")


def settings_for(url: str) -> ReplaySettings:
    return ReplaySettings(f"{url}/v1", stream_share=0.0, client="raw")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(real(Path(sys.argv[1]), Path(folder)))
