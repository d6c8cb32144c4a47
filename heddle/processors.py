"""What this machine's processors did, and for which processes: read from /proc."""

import contextlib
import os
from pathlib import Path


def cpu_s(sessions: set[int]) -> float:
    """CPU seconds of the processes alive in these sessions."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(") ")[2].split()
            if int(fields[3]) in sessions:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def idle_and_all_ticks() -> tuple[int, int]:
    """Idle and total time of this machine's cores so far."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)
