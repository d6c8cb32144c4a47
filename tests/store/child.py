"""A process that runs a script on a store, to be killed."""

import subprocess
import sys
import textwrap
from pathlib import Path

# The start of every script: `limit` lets no file grow beyond `num_bytes`, as a full disk does.
_HEAD = """
import asyncio, itertools, os, resource, sys
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


def last_number_before_kill(step: str, path: Path, num_steps: int) -> int:
    """Run `step` on an open `store`, with `number` 0, 1, 2, ..., and SIGKILL the process after `num_steps` or a little
    more. Returns the number of the last step that it is known to have done.
    """
    script = """
        async def main():
            store = open_store(f"sqlite:{sys.argv[1]}")
            await store.open()
            for number in itertools.count():
        STEP
                print(number, flush=True)
        asyncio.run(main())
    """
    step = textwrap.indent(textwrap.dedent(step).strip(), " " * 8)
    process = child(textwrap.dedent(script).replace("STEP", step), path)
    assert process.stdout
    lines = [process.stdout.readline() for _ in range(num_steps)]
    process.kill()
    lines += [line for line in process.stdout if line.endswith("\n")]
    process.wait()
    return int(lines[-1])
