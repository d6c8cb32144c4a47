"""A gateway under steady load, whose resources must not grow: `make soak`.

    python -m loadtest.soak --minutes 10

Rollouts follow each other on two simulated engines, one of which is killed and restarted again and again. Some agents
end well, some never report their end, some leave in the middle of an answer, and some ask for things that do not exist.
Times to live are a few seconds here, so that the gateway holds only the last rollouts. Once a second it is inspected
from outside. Anything that grows with ended work is a leak: the run fails if its last third used more of something than
the third before.

Groups repeat, because the predictor remembers the newest 20,000 of them, and would grow until it has that many.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

from loadtest.bench.processes import (
    CLIENT_CORE,
    SERVER_CORE,
    NotStarted,
    answers,
    family,
    free_ports,
    memory_bytes,
    running,
    wait_until,
)
from loadtest.clients import RequestFailed
from loadtest.raw_client import RawClient
from loadtest.replayer import ReplaySettings, replay
from workloads.laws import draw, law_named
from workloads.trajectories import Workload

# How far a third may exceed the one before. A leak of 1 KB a turn is 10 % of the memory in 10,000 turns.
GROWTH_SHARE, GROWTH_COUNT = 0.1, 5
NUM_AGENTS = 48
_ENGINE_LIFE_S = 20.0
_TOLD_EVERY_S = 30.0  # often enough to see that it works, twenty lines in ten minutes
_FORGOTTEN_AFTER_S = 10.0
# The store empties SQLite's log at 32 MB, or some thousand pages later on a slow disk, and its file never shrinks.
_LOG_BYTES = 64_000_000
_SETTINGS = {
    "HEDDLE_TRAJECTORY_TTL_S": f"{_FORGOTTEN_AFTER_S / 2}",
    "HEDDLE_RETENTION_S": f"{_FORGOTTEN_AFTER_S / 2}",
    "HEDDLE_EVENT_LOG_MAX_BYTES": "1000000",
    "HEDDLE_MAX_KEPT_ANSWER_BYTES": "1000000",
    "HEDDLE_BYTE_WORKERS": "1",  # with its one core the gateway would have none
    "HEDDLE_BYTE_WORKER_TURNS": "16",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """A gateway's resources at one instant, including its byte workers."""

    memory_bytes: float
    descriptors: float
    processes: float
    metric_series: float
    trajectories: float
    store_bytes: float
    event_log_bytes: float


def grown(before: Sequence[Sample], after: Sequence[Sample]) -> list[str]:
    """The resources whose median over some samples exceeds that of earlier ones by more than chance."""
    names = []
    for name, was, now in medians(before, after):
        if now > was * (1 + GROWTH_SHARE) + GROWTH_COUNT:
            names.append(name)
    return names


def stored_bytes(home: Path) -> int:
    """Bytes of the store's files; of logs, whose length is chance until they are emptied, only what is above that."""
    sizes = ((path.name, path.stat().st_size) for path in home.glob("store.sqlite3*"))
    return sum(max(size - _LOG_BYTES, 0) if name.endswith("-wal") else size for name, size in sizes)


def medians(before: Sequence[Sample], after: Sequence[Sample]) -> list[tuple[str, float, float]]:
    """The medians of each resource, by its name."""
    names = [field.name for field in fields(Sample)]
    return [(name, *(median([getattr(one, name) for one in part]) for part in (before, after))) for name in names]


async def soak(minutes: float, home: Path, tell: Callable[[str], None]) -> tuple[list[Sample], int]:
    """The samples of a gateway over this many minutes, and how many turns it served.

    Args:
        tell: is given a line now and then, from the first sample on.

    Raises:
        NotStarted: something did not start.
    """
    port, *engine_ports = free_ports(3)
    command = [sys.executable, "-m", "heddle", "serve", "--port", str(port), "--store", f"sqlite:{home}/store.sqlite3"]
    command += [word for number in engine_ports for word in ("--engine", f"http://127.0.0.1:{number}")]
    settings = {**_SETTINGS, "HEDDLE_EVENT_LOG": str(home / "events.jsonl")}
    lives = [_ENGINE_LIFE_S, 2 * 60 * minutes]
    engines = [
        asyncio.create_task(_engine_that_dies(number, dialect, life_s, home))
        for number, dialect, life_s in zip(engine_ports, ("vllm", "sglang"), lives, strict=True)
    ]
    log = home / "gateway.log"
    try:
        with running(command, SERVER_CORE, log, settings) as pid:
            await asyncio.to_thread(wait_until, lambda: answers(port, b"simulated"), "the gateway", pid, log)
            began_at = told_at = time.monotonic()
            until = began_at + 60 * minutes
            playing = asyncio.create_task(_play(f"http://127.0.0.1:{port}/v1", until))
            samples: list[Sample] = []
            num_turns = 0
            while not playing.done():
                page, now = await _page(port), time.monotonic()
                samples.append(_sample(pid, page, home))
                num_turns = _num_turns(page)
                if now >= told_at:
                    told_at += _TOLD_EVERY_S
                    tell(f"{now - began_at:.0f} of {60 * minutes:.0f} s: {num_turns:,} turns, {_in_words(samples[-1])}")
                await asyncio.wait((playing,), timeout=1.0)
            playing.result()
            return samples, num_turns
    finally:
        for engine in engines:
            engine.cancel()
        await asyncio.gather(*engines, return_exceptions=True)


async def _engine_that_dies(port: int, dialect: str, life_s: float, home: Path) -> None:
    """An engine that is killed after this long and restarted, forever."""
    command = [sys.executable, "-m", "heddle", "sim-engine", "--dialect", dialect, "--port", str(port)]
    while True:
        with running([*command, "--speed-up", "20"], CLIENT_CORE, home / f"{dialect}.log") as pid:
            await asyncio.sleep(life_s)
            os.killpg(pid, signal.SIGKILL)


async def _play(base_url: str, until: float) -> None:
    """Play rollouts, one after the other."""
    workload = draw(law_named("search"), NUM_AGENTS, 1, scale=0.02, tool_scale=0.2).with_max_turns(6)
    for number in count():
        if time.monotonic() >= until:
            return
        await asyncio.gather(_rollout(base_url, workload, number), _nonsense(base_url, number))


async def _rollout(base_url: str, workload: Workload, number: int) -> None:
    """Each trajectory is new. A third of the rollouts is finished, a third just ends, and in a third all agents
    leave.
    """
    ending = number % 3
    settings = ReplaySettings(
        base_url,
        model="simulated",
        client="raw",
        identity=("header", "path", "none")[number // 3 % 3],
        stream_share=0.5,
        finish=ending == 0,
        calibrate=False,
        rollout_id=f"soak-{number}",
    )
    with suppress(TimeoutError):
        async with asyncio.timeout(1.0 if ending == 1 else None):
            await replay(workload, settings, queued_source=None)


async def _nonsense(base_url: str, number: int) -> None:
    """Ask for paths, models and trajectories that do not exist."""
    client = RawClient(base_url, "none", max_retries=0, timeout_s=60)
    for path in (f"/no-{number}", f"/trajectories/no-{number}/finish", f"/models/no-{number}", "/messages"):
        with suppress(RequestFailed):
            await client.post(path)
    await client.aclose()


async def _page(port: int) -> list[str]:
    """The lines of the gateway's metrics that hold values."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    page = (await reader.read()).decode()
    writer.close()
    return [line for line in page.partition("\r\n\r\n")[2].splitlines() if line and not line.startswith("#")]


def _sample(pid: int, page: list[str], home: Path) -> Sample:
    [trajectories] = [line.split()[1] for line in page if line.startswith("heddle_trajectories ")]
    processes = family(pid)
    return Sample(
        memory_bytes=memory_bytes(pid),
        descriptors=sum(_num_descriptors(member) for member in processes),
        processes=len(processes),
        metric_series=len(page),
        trajectories=float(trajectories),
        store_bytes=stored_bytes(home),
        event_log_bytes=sum(path.stat().st_size for path in home.glob("events.jsonl*")),
    )


def _num_turns(page: list[str]) -> int:
    return round(sum(float(line.split()[-1]) for line in page if line.startswith("heddle_turns_total")))


def _in_words(sample: Sample) -> str:
    return (
        f"{sample.memory_bytes / 1e6:.1f} MB of memory, {sample.descriptors:.0f} descriptors, "
        f"{sample.trajectories:.0f} trajectories"
    )


def _num_descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:  # it ended just now
        return 0


def main() -> int:
    """Print the table; 1 if something has grown, 2 if something did not start."""
    parser = argparse.ArgumentParser(description="Looks for what a gateway does not let go of.")
    parser.add_argument("--minutes", type=float, default=10.0, help="a third is warm-up")
    minutes = parser.parse_args().minutes
    tell = partial(print, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        try:
            samples, num_turns = asyncio.run(soak(minutes, Path(home), tell))
        except NotStarted as error:
            tell(f"soak: {error}")
            return 2
        except KeyboardInterrupt:
            return 130
    third = len(samples) // 3
    before, after = samples[third : 2 * third], samples[2 * third :]
    print(f"| {num_turns:,} turns in {minutes:g} minutes, medians | second third | last third |\n|---|---|---|")
    for name, was, now in medians(before, after):
        print(f"| {name.replace('_', ' ')} | {was:,.0f} | {now:,.0f} |")
    names = grown(before, after)
    print(f"\n{'grown: ' + ', '.join(names) if names else 'nothing has grown'}")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
