"""Where a hot turn's time goes: the gateway under a fixed number of turns, its functions sorted by their own time.

    python -m loadtest.bench.profile [--stream] [--answers 3000] [--body 5500] [--setting HEDDLE_TOKEN_LEGS=auto]
    python -m loadtest.bench.profile --perf      # the same by samples of `perf`, the C of uvloop and the kernel too
    python -m loadtest.bench.profile --instructions   # how many the processor runs for an answer; needs valgrind

First the turns are run without a profiler; this gives the cost, in microseconds of CPU time per answer. Then they are
run with cProfile in the gateway. Calls per answer are the same in each run, however busy the machine is. The profiler
inflates times where there are many calls, so they show where to look, not what it costs.

Instructions are the same in each run too, to half a percent, so they show on a busy machine which of two versions is
cheaper. They are those outside the kernel, as callgrind counts them. Meanwhile engines are not observed and garbage is
not collected: everything takes fifty times as long, so both would happen fifty times as often.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from loadtest.bench.answers import NUM_CHUNKS
from loadtest.bench.peers import FROM_SOURCE
from loadtest.bench.processes import (
    CLIENT_CORE,
    SERVER_CORE,
    START_TIMEOUT_S,
    answers,
    cpu_us,
    free_ports,
    running,
    wait_until,
)

_HERE = "loadtest.bench.profile"
_PROFILE_TIMEOUT_S = 20.0  # to write the statistics of some thousand functions
_SLOWER = 50  # slowdown of an instruction under callgrind
_CALLGRIND = ("valgrind", "--tool=callgrind", "--instr-atstart=no")
_COUNTED = re.compile(r"^totals: (\d+)$", re.MULTILINE)
_NOT_BY_THE_CLOCK = {"HEDDLE_OBSERVE_INTERVAL_S": "3600", "HEDDLE_COLLECT_INTERVAL_S": "3600"}


def _serve_profiled(statistics: str, arguments: list[str]) -> None:
    """Run the gateway; the first SIGUSR1 begins the profile, the second writes it."""
    profile = cProfile.Profile()

    def begin(_: int, __: FrameType | None) -> None:
        signal.signal(signal.SIGUSR1, end)
        profile.enable()

    def end(_: int, __: FrameType | None) -> None:
        profile.disable()
        profile.dump_stats(statistics + ".part")
        Path(statistics + ".part").rename(statistics)

    signal.signal(signal.SIGUSR1, begin)
    sys.argv = ["heddle", *arguments]
    runpy.run_module("heddle", run_name="__main__")


@contextmanager
def _gateway(
    home: Path, parsed: argparse.Namespace, statistics: Path | None, under: Sequence[str] = ()
) -> Iterator[tuple[int, int]]:
    """A gateway in front of two backends; yields its process and its port.

    Args:
        under: a command that runs it, slowly.
    """
    port, *backends = free_ports(3)
    environment = dict(setting.split("=", 1) for setting in parsed.setting)
    environment |= _NOT_BY_THE_CLOCK if under else {}
    backend = [sys.executable, "-m", "loadtest.bench.backend", "--interval-ms", "5" if parsed.stream else "0"]
    backend += [word for number in backends for word in ("--port", str(number))]
    command = FROM_SOURCE(port, 0, backends, home)
    if statistics:
        command = [sys.executable, "-m", _HERE, "--serve", str(statistics), *command[3:]]
    log = home / "log"
    with (
        running(backend, CLIENT_CORE, home / "backend.log"),
        running([*under, *command], SERVER_CORE, log, environment) as pid,
    ):
        wait_until(lambda: answers(port), "the gateway", pid, log, START_TIMEOUT_S * (_SLOWER if under else 1))
        yield pid, port


def _load(port: int, num_answers: int, parsed: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "loadtest.bench.load", "--port", str(port), "--answers", str(num_answers)]
    command += ["--connections", str(parsed.connections), "--body", str(parsed.body), "--seconds", "600"]
    command += ["--trajectories", str(parsed.trajectories)] if parsed.trajectories else []
    command += [*(["--contexts"] if parsed.contexts else []), *(["--no-ids"] if parsed.no_ids else [])]
    command += [*(["--stream"] if parsed.stream else []), *(["--no-tools"] if parsed.no_tools else [])]
    subprocess.run(
        ["taskset", "-c", CLIENT_CORE, *command],
        stdout=subprocess.DEVNULL,
        check=True,
    )


def _warm_up(port: int, parsed: argparse.Namespace) -> None:
    _load(port, parsed.trajectories or parsed.answers // 4, parsed)


def _measure(parsed: argparse.Namespace, home: Path) -> str:
    with _gateway(home, parsed, None) as (pid, port):
        _warm_up(port, parsed)
        costs = []
        for _ in range(3):
            before_us = cpu_us(pid)
            _load(port, parsed.answers, parsed)
            costs.append((cpu_us(pid) - before_us) / parsed.answers)
    per_chunk = f", {min(costs) / NUM_CHUNKS:.1f} us a chunk" if parsed.stream else ""
    shown = ", ".join(f"{cost:.1f}" for cost in sorted(costs))
    return f"{min(costs):.1f} us of processor time an answer{per_chunk} (three runs: {shown})"


def _profile(parsed: argparse.Namespace, home: Path) -> None:
    statistics = home / "statistics"
    with _gateway(home, parsed, statistics) as (pid, port):
        _warm_up(port, parsed)
        subprocess.run(["kill", "-USR1", str(pid)], check=True)
        _load(port, parsed.answers, parsed)
        subprocess.run(["kill", "-USR1", str(pid)], check=True)
        deadline = time.monotonic() + _PROFILE_TIMEOUT_S
        while not statistics.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    seen = pstats.Stats(str(statistics))
    print(_calls(seen, parsed.answers))
    for order in ("tottime", "cumtime"):
        print(_table(seen, order, parsed.answers, parsed.top))


def _calls(statistics: pstats.Stats, num_answers: int) -> str:
    calls = {where: num for where, (_, num, *_) in statistics.stats.items()}  # type: ignore[attr-defined]
    of_functions = sum(num for (file, *_), num in calls.items() if file != "~")
    return (
        f"{sum(calls.values()) / num_answers:.0f} calls an answer, {of_functions / num_answers:.0f} of Python functions"
    )


def _table(statistics: pstats.Stats, order: str, num_answers: int, top: int) -> str:
    rows = [
        (own * 1e6 / num_answers, cumulative * 1e6 / num_answers, calls / num_answers, where)
        for where, (_, calls, own, cumulative, _) in statistics.stats.items()  # type: ignore[attr-defined]
        if calls >= num_answers // 20
    ]
    rows.sort(key=lambda row: row[0 if order == "tottime" else 1], reverse=True)
    lines = [f"\nby {'own' if order == 'tottime' else 'cumulative'} time: own us | cumulative us | calls, per answer"]
    for own, cumulative, calls, (file, line, function) in rows[:top]:
        place = function if file == "~" else f"{_short(file)}:{line} {function}"
        lines.append(f"{own:8.1f} {cumulative:9.1f} {calls:8.2f}  {place}")
    return "\n".join(lines)


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else "/".join(path.parts[-2:])


def _instructions(parsed: argparse.Namespace, home: Path) -> str:
    out = home / "callgrind"
    with _gateway(home, parsed, None, [*_CALLGRIND, f"--callgrind-out-file={out}"]) as (pid, port):
        _warm_up(port, parsed)
        subprocess.run(["callgrind_control", "--instr=on", str(pid)], capture_output=True, check=True)
        _load(port, parsed.answers, parsed)
        subprocess.run(["callgrind_control", "--dump", str(pid)], capture_output=True, check=True)
    if parsed.keep:
        shutil.copy(f"{out}.1", parsed.keep)
    counted = _COUNTED.search(Path(f"{out}.1").read_text())
    assert counted is not None, "callgrind wrote no totals"
    return f"{int(counted[1]) / parsed.answers:,.0f} instructions an answer outside the kernel"


def _perf(parsed: argparse.Namespace, home: Path) -> None:
    with _gateway(home, parsed, None) as (pid, port):
        _warm_up(port, parsed)
        record = ["perf", "record", "-q", "-F", "2000", "-p", str(pid), "-o", str(home / "perf.data")]
        with subprocess.Popen(record) as perf:
            _load(port, parsed.answers, parsed)
            perf.send_signal(signal.SIGINT)
    report = ["perf", "report", "-i", str(home / "perf.data"), "--stdio", "--no-children"]
    for sort in ("dso", "dso,symbol"):
        command = [*report, "--percent-limit", "0.4", "--sort", sort]
        shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        print("\n".join(line.rstrip(" -") for line in shown.splitlines() if line and not line.startswith("#")))


def main() -> None:
    """Run it as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stream", action="store_true", help=f"answers are streams of {NUM_CHUNKS} chunks, 5 ms apart")
    parser.add_argument("--answers", type=int, help="default 3,000, or 600 streams")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--body", type=int, default=5_500, metavar="BYTES")
    parser.add_argument("--contexts", action="store_true", help="requests are contexts of coding agents")
    parser.add_argument("--trajectories", type=int, help="live trajectories, each with an answer before the counting")
    parser.add_argument("--no-ids", action="store_true", help="requests do not name their trajectory")
    parser.add_argument("--no-tools", action="store_true", help="requests offer no tools")
    parser.add_argument("--setting", action="append", default=[], metavar="HEDDLE_NAME=VALUE")
    parser.add_argument("--top", type=int, default=30)
    parser.add_argument("--perf", action="store_true")
    parser.add_argument("--instructions", action="store_true")
    parser.add_argument("--keep", metavar="FILE", help="what callgrind wrote, for callgrind_annotate or kcachegrind")
    parsed = parser.parse_args()
    # Its children end with it, however it is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parsed.answers = parsed.answers or (600 if parsed.stream else 3_000)
    with tempfile.TemporaryDirectory(prefix="heddle-bench-") as name:
        home = Path(name)
        if parsed.instructions:
            print(_instructions(parsed, home))
            return
        for part in ("plain", "profiled"):
            (home / part).mkdir()
        print(_measure(parsed, home / "plain"), flush=True)
        (_perf if parsed.perf else _profile)(parsed, home / "profiled")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _serve_profiled(sys.argv[2], sys.argv[3:])
    else:
        main()
