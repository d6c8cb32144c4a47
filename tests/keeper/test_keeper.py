"""`heddle keep`: what a command stored is there when it is started again, and only then is it started again."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keeper.descriptors import Descriptors

pytestmark = pytest.mark.timeout(120)

# A command says in its file what it was given, and does then what the lines of another file say, one at each start.
COMMAND = """
import os, signal, socket, sys
said, script = sys.argv[1:]
def send(message, *descriptors):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        to.connect(os.environ["NOTIFY_SOCKET"])
        socket.send_fds(to, [message.encode()], list(descriptors))
names = os.environ.get("LISTEN_FDNAMES", "").split(":") if os.environ.get("LISTEN_PID") == str(os.getpid()) else []
found = [f"{name}={os.pread(number, 100, 0).decode()}" for number, name in enumerate(names, 3)]
with open(said, "a") as file:
    file.write(f"{','.join(found)}\\n")
with open(said) as file:
    number = len(file.readlines())
exec(open(script).read().split("---\\n")[number - 1])
"""
STORE_AND_DIE = """
for text in ("one", "two"):
    descriptor = os.memfd_create(text)
    os.write(descriptor, text.encode())
    send("FDSTORE=1\\nFDNAME=" + text, descriptor)
os.kill(os.getpid(), signal.SIGKILL)
"""
WAIT = "signal.pause()\n"  # until it is killed


@contextmanager
def kept(folder: Path, *starts: str, options: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """The command under a keeper, doing this at its first, second, ... start."""
    (folder / "script").write_text("---\n".join(starts))
    command = (sys.executable, "-c", COMMAND, str(folder / "said"), str(folder / "script"))
    keep = (sys.executable, "-m", "heddle", "keep", *options, "--", *command)
    with subprocess.Popen(keep, stderr=subprocess.PIPE) as keeper:
        try:
            yield keeper
        finally:
            keeper.kill()


def said(folder: Path) -> list[str]:
    return (folder / "said").read_text().splitlines()


def test_what_was_stored_at_the_last_moment_is_there_after_a_kill(tmp_path: Path) -> None:
    """Under its names, with what was written to it; and still after the next kill."""
    with kept(tmp_path, STORE_AND_DIE, "os.kill(os.getpid(), signal.SIGKILL)\n", "sys.exit(0)\n") as keeper:
        assert keeper.wait(60) == 0
    assert said(tmp_path) == ["", "one=one,two=two", "one=one,two=two"]


def test_what_was_removed_is_gone(tmp_path: Path) -> None:
    """By its name, and nothing else."""
    remove = "send('FDSTOREREMOVE=1\\nFDNAME=one')\nsys.exit(3)\n"
    with kept(tmp_path, STORE_AND_DIE, remove, "sys.exit(0)\n") as keeper:
        assert keeper.wait(60) == 0
    assert said(tmp_path) == ["", "one=one,two=two", "two=two"]


def test_a_command_that_fails_on_and_on_is_given_up_with_its_status(tmp_path: Path) -> None:
    """After so many failures in a row."""
    with kept(tmp_path, *["sys.exit(7)\n"] * 4, options=("--max-failures", "2")) as keeper:
        assert keeper.wait(60) == 7
    assert len(said(tmp_path)) == 3


def test_a_command_that_is_not_there_is_given_up_at_once(tmp_path: Path) -> None:
    """As a shell does."""
    command = [sys.executable, "-m", "heddle", "keep", "--", str(tmp_path / "nothing")]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 127 and ended.stderr.count(b"No such file") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_goes_to_the_command_whose_status_is_the_keepers(tmp_path: Path, number: int) -> None:
    """Which is not started again, even if it calls its end a failure."""
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    wait = f"signal.signal({int(number)}, lambda *_: sys.exit(5))\nopen({str(ready)!r}, 'w').close()\n{WAIT}"
    with kept(tmp_path, wait, "sys.exit(6)\n") as keeper:
        ready.read_text()  # returns when the command has opened it too
        keeper.send_signal(number)
        assert keeper.wait(60) == 5
    assert len(said(tmp_path)) == 1


def test_a_signal_between_two_starts_ends_it(tmp_path: Path) -> None:
    """There is no command then to tell: the keeper has said that it ended."""
    options = ("--longest-pause-s", "600", "--first-pause-s", "600")
    with kept(tmp_path, "sys.exit(1)\n", WAIT, options=options) as keeper:
        assert keeper.stderr is not None
        assert any(b'"message": "ended"' in line for line in keeper.stderr)
        keeper.send_signal(signal.SIGTERM)
        assert keeper.wait(60) == 128 + signal.SIGTERM


def test_no_more_is_kept_than_the_limit(tmp_path: Path) -> None:
    """A message whose descriptors do not all fit is kept in no part."""
    kept = Descriptors(tmp_path / "notify", limit=3)
    first, second = socket.socketpair()
    with first, second, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        to.connect(str(kept.path))
        for name in ("a", "b"):
            socket.send_fds(to, [b"FDSTORE=1\nFDNAME=" + name.encode()], [first.fileno(), second.fileno()])
        kept.receive()
        assert [name for name, _ in kept] == ["a", "a"]
        to.send(b"FDSTOREREMOVE=1\nFDNAME=a")
        kept.receive()
        assert len(kept) == 0
    kept.close()
