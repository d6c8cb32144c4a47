"""A process that runs a script on a store, to be killed."""

import subprocess
import sys
import textwrap
from pathlib import Path


def child(script: str, path: Path) -> subprocess.Popen[str]:
    """Run `script` with the path as its argument; lines come and go through pipes."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
