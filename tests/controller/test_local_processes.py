"""One scan of all processes serves every caller that waits for one."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from controller.local_guard import started
from controller.local_processes import Sessions, Table, read_processes


def test_callers_during_a_scan_share_the_next_one() -> None:
    """They cannot use the scan that began before they asked: a process that started in between must be in it."""
    # On a busy machine, threads may ask one after the other, and each gets its own scan: then it is tried again.
    assert min(num_scans_for(16) for _ in range(20)) < 17, "each caller made its own scan"


def num_scans_for(num_asking: int) -> int:
    """The number of scans for one caller and `num_asking` others that ask while its scan runs."""
    num_reads = 0
    first_began, may_end = threading.Event(), threading.Event()

    def read() -> Table:
        nonlocal num_reads
        num_reads += 1
        number = num_reads
        first_began.set()
        assert may_end.wait(60)
        return {number: ()}

    sessions = Sessions(read)
    asking = threading.Barrier(num_asking + 1)

    def ask() -> Table:
        asking.wait(60)
        return sessions.table()

    with ThreadPoolExecutor(num_asking + 1) as pool:
        first = pool.submit(sessions.table)
        assert first_began.wait(60)
        others = [pool.submit(ask) for _ in range(num_asking)]
        asking.wait(60)
        may_end.set()
        assert list(first.result(60)) == [1]
        assert all(next(iter(other.result(60))) > 1 for other in others)
    return num_reads


def test_a_scan_distinguishes_sessions_that_reuse_a_number() -> None:
    """A session is identified by its number and its leader's start time."""
    # The tests' own session may have a leader that is not visible here: in a container it has the number 0.
    leader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True)
    try:
        since = started(leader.pid)
        assert since is not None
        look = Sessions().look()
        assert look.processes(leader.pid, since) == [leader.pid]
        assert look.processes(leader.pid, since + 1) == []
        assert (leader.pid, since) in read_processes()[leader.pid]
    finally:
        leader.communicate()


def test_a_scan_takes_a_process_whose_name_is_no_text() -> None:
    """Linux cuts names after 15 bytes, also in the middle of a letter. While such a process ran, of whichever user, no
    server could be found or stopped."""
    renames = r"import ctypes, sys; ctypes.CDLL(None).prctl(15, b'\xe8\xae\xad\xe7', 0, 0, 0); print(flush=True)"
    command = (sys.executable, "-c", f"{renames}; sys.stdin.read()")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None and process.stdout.readline()
        assert [pid for pid, _ in read_processes()[process.pid]] == [process.pid]
    finally:
        process.communicate()
