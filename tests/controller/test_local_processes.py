"""One look through all processes serves for all who wait for one."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from controller.local_guard import started
from controller.local_processes import Sessions, Table, read_processes


def test_who_asks_while_a_look_is_taken_shares_the_next_one() -> None:
    """Not the one that began before he asked: a process that came in between must be in it."""
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
    with ThreadPoolExecutor(17) as pool:
        first = pool.submit(sessions.table)
        assert first_began.wait(60)
        asking = threading.Barrier(17)

        def ask() -> Table:
            asking.wait(60)
            return sessions.table()

        others = [pool.submit(ask) for _ in range(16)]
        asking.wait(60)
        may_end.set()
        assert list(first.result(60)) == [1]
        assert all(next(iter(other.result(60))) > 1 for other in others)
    assert num_reads < 17, "each took a look of his own"


def test_a_look_finds_this_process_and_no_other_of_its_session_number() -> None:
    """By session and start: a number that was given again is another session."""
    session = os.getsid(0)
    since = started(session) or 0
    look = Sessions().look()
    assert os.getpid() in look.processes(session, since)
    assert look.processes(session, since + 1) == []
    assert os.getpid() in {pid for pid, _ in read_processes()[session]}
