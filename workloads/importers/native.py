"""Writes workloads in the form that `workloads.traces` reads, and checks beforehand that this is possible."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from pathlib import Path

from workloads.result_files import write_whole
from workloads.traces import TraceError, parse_line
from workloads.trajectories import Trajectory, Workload


def write_trace(workload: Workload, path: Path) -> None:
    """One trajectory per line, gzipped if the name ends in `.gz`. The same workload gives the same bytes."""
    content = "".join(f"{_line_of(trajectory)}\n" for trajectory in workload.trajectories).encode()
    # Gzip writes the current time into its header unless it is given one.
    write_whole(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def check_writable(workload: Workload, path: Path) -> None:
    """Checks that the written workload can be read again.

    Args:
        path: The workload's source, for the message.

    Raises:
        TraceError: A length or a time is out of range, a name is empty or not Unicode, or two trajectories have the
            same name.
    """
    seen: set[str] = set()
    for trajectory in workload.trajectories:
        name = trajectory.trajectory_id
        try:
            parse_line(_line_of(trajectory))
        except ValueError as error:
            raise TraceError(f"{path}, {name!a}: {error}") from error
        if name in seen:
            raise TraceError(f"{path}: two trajectories would be {name!a}")
        seen.add(name)


def _line_of(trajectory: Trajectory) -> str:
    fields = asdict(trajectory)
    del fields["prompt_id"]  # a trace is one rollout, whose groups are its prompts
    return json.dumps(fields, separators=(",", ":"))
