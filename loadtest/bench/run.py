"""What the gateway costs beside its rivals, in one run on pinned cores.

    python -m loadtest.bench.run [--sections answers,slow] [--only gateway,direct] [--repeats 3] [--seconds 1]
                                 [--write docs/results.md] [--resume]

For each section the servers run one after the other on core 0, with client and backend on core 1, and again for each
repeat, so that a noisy machine affects all alike. CPU time is the kernel's account of the server's process tree.
`--write` puts each table between its marks in that file as soon as it is measured, so a run can be cut short;
`--resume` continues one with the same settings. `deploy/get-bench-peers.sh` gets the rivals; the table marks one that
is absent or fails.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from loadtest.bench.goals import goals_table
from loadtest.bench.peers import DIRECT, PEERS, WORK, Peer
from loadtest.bench.processes import NotStarted, raise_file_limit
from loadtest.bench.rig import Failed, Rig
from loadtest.bench.sections import IDLE_STREAMS, SECTIONS, Section
from loadtest.bench.tables import Sample, table, write

_FILES = 2 * IDLE_STREAMS + 4_096


@dataclass(slots=True)
class Record:
    """What one section has measured, also in a file, line by line.

    Args:
        settings: of the run; a record with other settings is not continued. Empty to read any.
    """

    path: Path
    settings: dict[str, Any]
    done: dict[tuple[int, str], Sample | None] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def restore(self) -> None:
        """Load what an earlier run measured, if its settings are the same or none are given here."""
        lines = self.path.read_bytes().splitlines() if self.path.is_file() else []
        settings = orjson.loads(lines[0]) if lines else None
        if settings is not None and self.settings in ({}, settings):
            self.settings = settings
            for line in lines[1:]:
                self._take(orjson.loads(line))

    def begin(self) -> None:
        """Rewrite the file with what is known."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(orjson.dumps(self.settings) + b"\n")
        for (repeat, peer), sample in self.done.items():
            self._write({"repeat": repeat, "peer": peer, "sample": sample, "failure": self.failures.get(peer)})

    def add(self, repeat: int, peer: str, sample: Sample | None, failure: str | None) -> None:
        """A server was measured, or could not be."""
        entry = {"repeat": repeat, "peer": peer, "sample": sample, "failure": failure}
        self._take(entry)
        self._write(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        self.done[entry["repeat"], entry["peer"]] = entry["sample"]
        if entry["failure"]:
            self.failures[entry["peer"]] = entry["failure"]

    def _write(self, entry: dict[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(orjson.dumps(entry) + b"\n")

    def samples(self) -> dict[str, list[Sample | None]]:
        """The samples by server, one for each repeat so far."""
        names = list(dict.fromkeys(peer for _, peer in self.done))
        return {name: [sample for (_, peer), sample in self.done.items() if peer == name] for name in names}


def run_section(section: Section, peers: list[Peer], options: argparse.Namespace, rig: dict[str, Any]) -> str:
    """Measure each server; returns the table in Markdown."""
    repeats = min(options.repeats, section.repeats or options.repeats)
    names = ",".join(peer.name for peer in peers)
    settings = {
        "seconds": options.seconds,
        "scale": options.scale,
        "seed": options.seed,
        "commit": _commit(),
        "peers": names,
    }
    record = Record(_path(section.name), settings)
    if options.resume:
        record.restore()
    record.begin()
    for repeat in range(repeats):
        for peer in peers:
            if peer.name in section.without:
                continue
            if (repeat, peer.name) in record.done or (repeat and peer.name in record.failures):
                continue  # what fails once would fail again, and take a minute each time
            began_at = time.monotonic()
            sample, failure = _measured(section, peer, rig)
            record.add(repeat, peer.name, sample, failure)
            _progress(section.name, repeat, repeats, peer.name, sample, failure, time.monotonic() - began_at)
    text = table(section.columns, record.samples(), record.failures)
    return f"**{section.title}.** {section.about}\n\n{text}\n\n{_about(options, repeats)}"


def goals() -> str:
    """Each goal beside what the last runs of all sections measured."""
    measured = {}
    for section in SECTIONS:
        record = Record(_path(section.name), {})
        record.restore()
        if record.settings.get("scale") == 1:
            measured[section.name] = record.samples()
    return goals_table(measured)


def _path(section: str) -> Path:
    return WORK / "bench" / f"{section}.jsonl"


def _measured(section: Section, peer: Peer, rig: dict[str, Any]) -> tuple[Sample | None, str | None]:
    if peer.needs is not None and not peer.needs.exists():
        return None, "is not here (deploy/get-bench-peers.sh, make compiled)"
    try:
        return section.measure(Rig(peer, **rig)), None
    except (NotStarted, Failed) as error:
        return None, str(error)


def _progress(
    section: str, repeat: int, repeats: int, peer: str, sample: Sample | None, failure: str | None, seconds: float
) -> None:
    shown = failure or ", ".join(f"{name} {value:,.1f}" for name, value in (sample or {}).items())
    print(f"[{section} {repeat + 1}/{repeats}] {peer}, {seconds:.0f} s: {shown}", file=sys.stderr, flush=True)


# --- what it was measured with ------------------------------------------------------------------------------


def _about(options: argparse.Namespace, repeats: int) -> str:
    load = os.getloadavg()[0]
    part = "" if options.scale == 1 else f"only {options.scale:g} of the streams and trajectories, "
    times = "1 repeat" if repeats == 1 else f"{repeats} repeats"
    shown = "" if repeats == 1 else "; medians, in brackets the smallest and the largest"
    return (
        f"Commit {_commit()}, seed {options.seed}, {times} of {options.seconds:g} s, {part}{os.cpu_count()} cores of "
        f"{_processor()}, load average {load:.1f} at the end, Python {platform.python_version()}{_build()}{shown}."
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if "model name" in line:
            return line.partition(":")[2].strip()
    return platform.machine()


@cache
def _commit() -> str:
    """The commit of the code; this run itself changes docs/."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" and changes" if changed else "")


def _build() -> str:
    """As Python itself reports; a distribution's own build additions are not included."""
    is_optimised = "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")
    return "" if is_optimised else " (configured without --enable-optimizations)"


def _redis_server() -> Path | None:
    """REDIS_SERVER, or what deploy/get-redis.sh finds."""
    told = os.environ.get("REDIS_SERVER")
    script = Path("deploy/get-redis.sh")
    if not told and script.is_file():
        told = subprocess.run([str(script)], stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    found = shutil.which(told or "redis-server")
    return Path(found) if found else None


def _chosen(names: str | None, known: list[str], what: str) -> list[str]:
    """The named ones, in the order of `known`. An unknown name ends the run."""
    if not names:
        return known
    # Names of servers contain commas, so semicolons separate them as well.
    wanted = [name.strip() for name in names.split(";" if ";" in names or names in known else ",")]
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"bench: no such {what}: {', '.join(unknown)}; known: {'; '.join(known)}")
    return [name for name in known if name in wanted]


def main() -> int:
    """Run it as the command line says; 130 if it is interrupted."""
    try:
        _run()
    except KeyboardInterrupt:
        return 130
    return 0


def _run() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sections", help=f"with commas between them: {', '.join(section.name for section in SECTIONS)}"
    )
    parser.add_argument("--only", metavar="SERVERS", help="with semicolons between them; all others are left out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each load")
    parser.add_argument("--scale", type=float, default=1.0, help="of how many streams and trajectories there are")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    # Its children end with it, however it is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sections = _chosen(options.sections, [section.name for section in SECTIONS], "section")
    names = _chosen(options.only, [peer.name for peer in PEERS], "server")
    peers = [peer for peer in PEERS if peer.name in names or peer.name == DIRECT]
    max_files = raise_file_limit(_FILES)
    redis = _redis_server() if any(peer.needs_redis for peer in peers) else None
    with tempfile.TemporaryDirectory(prefix="heddle-bench-") as directory:
        rig = {"seconds": options.seconds, "seed": options.seed, "directory": Path(directory)}
        rig |= {"redis": redis, "max_files": max_files, "scale": options.scale}
        for section in SECTIONS:
            if section.name not in sections:
                continue
            text = run_section(section, peers, options, rig)
            print(text + "\n", flush=True)
            if options.write:
                write(options.write, section.name, text)
                write(options.write, "goals", goals())
    print(goals())


if __name__ == "__main__":
    sys.exit(main())
