"""A result takes the place of an earlier one, as the user left that."""

import os
from pathlib import Path

import pytest

from workloads.result_files import write_whole


@pytest.mark.parametrize("name", ["model", "m" * 250], ids=["", "long"])
def test_a_file_is_replaced_and_keeps_its_mode(name: str, tmp_path: Path) -> None:
    """A long name leaves no room for another file's beside it, and is no reason to lose a result."""
    path = tmp_path / name
    write_whole(path, b"first")
    path.chmod(0o640)
    write_whole(path, b"second")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"second", 0o640)
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_and_a_pipe_stay_what_they_are(tmp_path: Path) -> None:
    """`--json /dev/stdout` is a link to whatever the shell chose."""
    kept, link, pipe = (tmp_path / name for name in ("kept", "link", "pipe"))
    link.symlink_to(kept)
    write_whole(link, b"through the link")
    assert link.is_symlink() and kept.read_bytes() == b"through the link"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, b"through the pipe")
    assert pipe.is_fifo() and os.read(reader, 99) == b"through the pipe"
    os.close(reader)
