"""`heddle keep` restarts a command that dies, and gives back the descriptors that it had stored."""

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
from keeper.keeper import KeeperSettings

pytestmark = pytest.mark.timeout(120)

# The command appends the descriptors that it was given to one file, then runs a part of the script: one part per start.
COMMAND = """
import os, signal, socket, sys
given, script = sys.argv[1:]
def send(message, *descriptors):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        to.connect(os.environ["NOTIFY_SOCKET"])
        socket.send_fds(to, [message.encode()], list(descriptors))
assert os.environ["LISTEN_PID"] == str(os.getpid())
names = os.environ["LISTEN_FDNAMES"].split(":") if "LISTEN_FDS" in os.environ else []
found = [f"{name}={os.pread(number, 100, 0).decode()}" for number, name in enumerate(names, 3)]
with open(given, "a") as file:
    file.write(f"{','.join(found)}\\n")
with open(given) as file:
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
def kept_command(
    folder: Path, *starts: str, options: tuple[str, ...] = (), limit: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A command under a keeper; its first, second, ... start runs the first, second, ... of `starts`.

    Args:
        limit: of the descriptors of a process.
    """
    (folder / "script").write_text("---\n".join(starts))
    command = (sys.executable, "-c", COMMAND, str(folder / "given"), str(folder / "script"))
    limited = () if limit is None else ("sh", "-c", f'ulimit -n {limit} && exec "$@"', "sh")
    keep = (*limited, sys.executable, "-m", "heddle", "keep", *options, "--", *command)
    with subprocess.Popen(keep, stderr=subprocess.PIPE, start_new_session=True) as keeper:
        try:
            yield keeper
        finally:
            keeper.kill()


def given(folder: Path) -> list[str]:
    """The descriptors given to the command, a line for each start."""
    return (folder / "given").read_text().splitlines()


def test_descriptors_stored_just_before_a_kill_are_given_back(tmp_path: Path) -> None:
    """They come back under their names and with their contents, also after the next kill."""
    with kept_command(tmp_path, STORE_AND_DIE, "os.kill(os.getpid(), signal.SIGKILL)\n", "sys.exit(0)\n") as keeper:
        assert keeper.wait(60) == 0
    assert given(tmp_path) == ["", "one=one,two=two", "one=one,two=two"]


def test_a_command_gets_each_descriptor_once(tmp_path: Path) -> None:
    """What it closes is closed: a second copy under another number would hold a leg's connection and memory as long as
    the command lives."""
    count = """
stored = [link for link in map(link_of, os.listdir("/proc/self/fd")) if link.startswith("/memfd:")]
with open(given, "a") as file:
    file.write(f"{len(stored)} open\\n")
"""
    links = """
def link_of(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:
        return ""
"""
    with kept_command(tmp_path, STORE_AND_DIE, links + count + "sys.exit(0)\n") as keeper:
        assert keeper.wait(60) == 0
    assert given(tmp_path) == ["", "one=one,two=two", "2 open"]


def test_a_removed_descriptor_is_not_given_back(tmp_path: Path) -> None:
    """Removal is by name and touches no other descriptor."""
    remove = "send('FDSTOREREMOVE=1\\nFDNAME=one')\nsys.exit(3)\n"
    with kept_command(tmp_path, STORE_AND_DIE, remove, "sys.exit(0)\n") as keeper:
        assert keeper.wait(60) == 0
    assert given(tmp_path) == ["", "one=one,two=two", "two=two"]


def test_a_command_is_started_again_however_many_descriptors_it_stored(tmp_path: Path) -> None:
    """Their names must fit into a variable of its environment, which may have 128 KiB. With 3,200 names of 40 letters,
    two for each of 1,600 legs, the command could not be started any more.
    """
    store_and_die = """
descriptor = os.memfd_create("one")
for number in range(20):
    send(f"FDSTORE=1\\nFDNAME={number:040}", *[descriptor] * 200)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with kept_command(tmp_path, store_and_die, "sys.exit(0)\n", options=("--max-failures", "1")) as keeper:
        assert keeper.wait(60) == 0
    assert given(tmp_path)[1].count("=") == 15 * 200  # a message whose descriptors do not all fit is refused as a whole


def test_a_command_is_started_again_however_few_descriptors_a_process_may_have(tmp_path: Path) -> None:
    """To hand on what is kept takes as many descriptors again. Above half of its limit, the keeper could start nothing
    any more.
    """
    store_and_die = """
descriptor = os.memfd_create("one")
for number in range(60):
    send(f"FDSTORE=1\\nFDNAME={number}", descriptor)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with kept_command(tmp_path, store_and_die, "sys.exit(0)\n", options=("--max-failures", "1"), limit=100) as keeper:
        assert keeper.wait(60) == 0
    assert given(tmp_path)[1].count("=") == 34


def test_a_command_that_keeps_failing_is_given_up_with_its_status(tmp_path: Path) -> None:
    """The keeper gives up when more than `--max-failures` starts fail in a row."""
    with kept_command(tmp_path, *["sys.exit(7)\n"] * 4, options=("--max-failures", "2")) as keeper:
        assert keeper.wait(60) == 7
    assert len(given(tmp_path)) == 3


def test_a_command_is_started_again_after_the_reader_of_the_log_is_gone(tmp_path: Path) -> None:
    """Such as a program that the log is piped to. The keeper itself ended when it said that the command had."""
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    die = f"open({str(ready)!r}).read()\nos.kill(os.getpid(), signal.SIGKILL)\n"
    with kept_command(tmp_path, die, "sys.exit(0)\n") as keeper:
        assert keeper.stderr is not None
        with ready.open("w"):
            keeper.stderr.close()
        assert keeper.wait(60) == 0
    assert len(given(tmp_path)) == 2


def test_a_missing_command_is_given_up_at_once(tmp_path: Path) -> None:
    """The status is 127, as in a shell."""
    command = [sys.executable, "-m", "heddle", "keep", "--", str(tmp_path / "nothing")]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 127 and ended.stderr.count(b"No such file") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_the_commands_status_returned(tmp_path: Path, number: int) -> None:
    """The command is not started again, even if its status reports a failure."""
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    wait = f"signal.signal({int(number)}, lambda *_: sys.exit(5))\nopen({str(ready)!r}, 'w').close()\n{WAIT}"
    with kept_command(tmp_path, wait, "sys.exit(6)\n") as keeper:
        ready.read_text()  # returns once the command has opened it, too
        keeper.send_signal(number)
        assert keeper.wait(60) == 5
    assert len(given(tmp_path)) == 1


def test_a_signal_to_the_whole_process_group_reaches_the_command_once(tmp_path: Path) -> None:
    """A terminal's Ctrl+C is such a signal. Passed on as well, it came twice, and a gateway cut its turns at once."""
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    wait = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
        f"open({str(ready)!r}, 'w').close()\n"
        "sys.exit(5 if signal.sigwaitinfo([signal.SIGINT]).si_pid == os.getppid() else 6)\n"
    )
    with kept_command(tmp_path, wait) as keeper:
        ready.read_text()
        os.killpg(keeper.pid, signal.SIGINT)
        assert keeper.wait(60) == 5


@pytest.mark.parametrize("pause_s", ["600", "1e12"])
def test_a_signal_between_two_starts_ends_the_keeper(tmp_path: Path, pause_s: str) -> None:
    """No command runs then: the keeper has logged that it ended. epoll takes at most 24 days; a longer pause ended the
    keeper with a traceback."""
    options = ("--longest-pause-s", pause_s, "--first-pause-s", pause_s)
    with kept_command(tmp_path, "sys.exit(1)\n", WAIT, options=options) as keeper:
        assert keeper.stderr is not None
        assert any(b'"message": "ended"' in line for line in keeper.stderr)
        keeper.send_signal(signal.SIGTERM)
        assert keeper.wait(60) == 128 + signal.SIGTERM


def test_pauses_double_up_to_their_limit_after_any_number_of_failures() -> None:
    """After 1,024 failures in a row, which take an hour and a half, the keeper itself ended: 2 ** 1024 exceeds a
    float."""
    settings = KeeperSettings(max_failures=10**6)
    pauses = [settings.pause_s(num_failures) for num_failures in (1, 2, 3, 9, 1_024, 1_026, 10**6)]
    assert pauses == [0.05, 0.1, 0.2, 5.0, 5.0, 5.0, 5.0]


def test_descriptors_beyond_the_limit_are_not_kept(tmp_path: Path) -> None:
    """A message whose descriptors do not all fit is refused as a whole."""
    stored = Descriptors(tmp_path / "notify", limit=3)
    first, second = socket.socketpair()
    with first, second, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        to.connect(str(stored.path))
        for name in ("a", "b"):
            socket.send_fds(to, [b"FDSTORE=1\nFDNAME=" + name.encode()], [first.fileno(), second.fileno()])
        stored.receive()
        assert [name for name, _ in stored] == ["a", "a"]
        to.send(b"FDSTOREREMOVE=1\nFDNAME=a")
        stored.receive()
        assert len(stored) == 0
    stored.close()
