"""A process that runs a script on a store, to be killed."""

import subprocess
import sys
import textwrap
from pathlib import Path

# The start of every script: `limit` lets no file grow beyond `num_bytes`, as a full disk does.
_HEAD = """
import asyncio, os, resource, sys
from store import StoreAway, StoreSettings, open_store
def limit(num_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
"""


def child(script: str, path: Path) -> subprocess.Popen[str]:
    """Run `script` with the path as its argument; its stdin and stdout are pipes."""
    return subprocess.Popen(
        [sys.executable, "-c", _HEAD + textwrap.dedent(script), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
