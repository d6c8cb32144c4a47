"""What a local vLLM server leaves behind: the simulated engine stands in for vLLM."""

import sys
from pathlib import Path

from engines.local_vllm import LocalVllm, launch

# Called as `python -m MODULE --host HOST --port PORT ...`.
VLLM = """#!/bin/sh
mktemp
exec "{python}" -m heddle sim-engine --port "$6"
"""


async def test_temporary_files_of_a_server_end_with_it(tmp_path: Path) -> None:
    """vLLM leaves some ten sockets and files a server, which would otherwise gather in /tmp."""
    python, log = tmp_path / "venv" / "bin" / "python", tmp_path / "log"
    python.parent.mkdir(parents=True)
    python.write_text(VLLM.format(python=sys.executable))
    python.chmod(0o755)
    async with launch(LocalVllm(tmp_path, venv=tmp_path / "venv"), log):
        left = Path(log.read_text().splitlines()[0])
        assert left.is_file()  # noqa: ASYNC240 (a local disk)
    assert not left.exists()  # noqa: ASYNC240
