"""Writes workloads in the form that `workloads.traces` reads."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from pathlib import Path

from workloads.trajectories import Workload


def write_trace(workload: Workload, path: Path) -> None:
    """One trajectory a line, gzipped where the name ends in `.gz`. The same workload gives the same bytes."""
    lines = (json.dumps(asdict(trajectory), separators=(",", ":")) for trajectory in workload.trajectories)
    content = "".join(f"{line}\n" for line in lines).encode()
    # Gzip writes the time into its head unless it is told one.
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
