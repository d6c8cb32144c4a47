"""One look through all processes serves for all who wait for one."""

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

from controller.local_guard import started
from controller.local_processes import Sessions, Table, read_processes


def test_who_asks_while_a_look_is_taken_shares_the_next_one() -> None:
    """Not the one that began before he asked: a process that came in between must be in it."""
    # A busy machine may let threads ask one after the other: then each has a look of his own, and it is tried again.
    assert min(num_reads_of(16) for _ in range(20)) < 17, "each took a look of his own"


def num_reads_of(num_asking: int) -> int:
    """How many looks are taken for one who asks, and so many more who ask while his look is taken."""
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


def test_a_look_finds_a_sessions_processes_and_none_of_another_of_its_number() -> None:
    """By session and start: a number that was given again is another session."""
    # The tests' own session may have a leader that is not seen from here: in a container it has the number 0.
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
