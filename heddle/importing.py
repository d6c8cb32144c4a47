"""`heddle import`: converts other programs' traces, engines' logs and event logs to traces that every `--trace` here
reads."""

import argparse
import sys
from pathlib import Path

from heddle.arguments import out_file, why
from workloads.importers import READERS, detect_format, import_trace
from workloads.importers.native import write_trace
from workloads.traces import TraceError

_EPILOG = """examples:
  heddle import conversation_trace.jsonl --out conversations.jsonl.gz
  heddle import traces/ --format kv-cache-tester --out agents.jsonl.gz
  heddle import server.log --out yesterday.jsonl.gz
  heddle import events.jsonl --out sessions.jsonl.gz        # a gateway's event_log
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = _EPILOG
    parser.add_argument("file", type=Path, help="a trace or a log; for kv-cache-tester also a folder")
    parser.add_argument("--out", type=out_file, required=True, help="the trace to write, gzipped if it ends in .gz")
    parser.add_argument("--format", choices=sorted(READERS), help="format of the file (default: detected)")


def run(parsed: argparse.Namespace) -> int:
    """Read, write and report what it was."""
    try:
        _check_kept(parsed.file, parsed.out)
        format_name = parsed.format or detect_format(parsed.file)
        workload = import_trace(parsed.file, format_name)
        write_trace(workload, parsed.out)
    except (TraceError, OSError) as error:
        print(f"heddle import: {why(error)}", file=sys.stderr)
        return 2
    print(
        f"{parsed.out}: {len(workload.trajectories):,} trajectories in {len(workload.groups):,} groups, "
        f"{workload.num_turns:,} turns, {workload.output_tokens:,} output tokens, from {format_name}."
    )
    if workload.left_out:
        print(f"Left out: {workload.left_out}.")
    return 0


def _check_kept(source: Path, out: Path) -> None:
    """Refuse to write over what is to be read, also in a folder and under another name."""
    read = source.iterdir() if source.is_dir() else [source]
    if out.exists() and any(file.exists() and out.samefile(file) for file in read):
        which = "in the folder" if source.is_dir() else "the file"
        raise TraceError(f"--out: {out} is {which} to read, and would be overwritten")
