"""The event log when it cannot be written: turns do not depend on it."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from gateway.state.eventlog import EventLog
from scheduling.types import Tick


@contextmanager
def full_at_1000_bytes() -> Iterator[None]:
    """Limits the files of this process to 1,000 bytes: like a full disk, except for the error's number.

    Only while the log is written, because the tests' own output may go to a file too.
    """
    before, (soft, hard) = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_log_that_cannot_be_written_is_given_up(tmp_path: Path) -> None:
    """Events continue, nothing is raised, and what was written until then is whole lines."""
    path = tmp_path / "events.jsonl"
    log = EventLog(str(path), 2**30)
    with full_at_1000_bytes():
        for number in range(100):
            log.add(Tick(float(number)), [])
    assert not log.is_on
    lines = path.read_bytes().splitlines(keepends=True)
    assert 1 < len(lines) < 100 and all(orjson.loads(line)["kind"] == "event" and line[-1:] == b"\n" for line in lines)


def test_half_a_line_of_a_killed_process_is_dropped(tmp_path: Path) -> None:
    """SIGKILL may end a long write midway. The lines of the next process would begin in the middle of that line."""
    path = tmp_path / "events.jsonl"
    log = EventLog(str(path), 2**30)
    log.add(Tick(1.0), [])
    log.close()
    whole = path.read_bytes()
    for half in (whole[:-1], whole[: len(whole) // 2], b"{", b""):
        path.write_bytes(whole + half)
        log = EventLog(str(path), 2**30)
        log.add(Tick(2.0), [])
        log.close()
        assert [orjson.loads(line)["at"] for line in path.read_bytes().splitlines()] == [1.0, 2.0]


def test_a_full_file_is_continued_in_a_new_one_that_says_so(tmp_path: Path) -> None:
    """Without the older file, its lines make no sense to a replay."""
    path = tmp_path / "events.jsonl"
    log = EventLog(str(path), 100)
    for at in (1.0, 2.0, 3.0):
        log.add(Tick(at), [])
    log.close()
    older, newer = (
        [orjson.loads(line) for line in file.read_bytes().splitlines()] for file in (tmp_path / "events.jsonl.1", path)
    )
    assert [line["at"] for line in older] == [1.0, 2.0]
    assert newer[0] == {"kind": "continued"} and [line["at"] for line in newer[1:]] == [3.0]


def test_a_full_file_that_was_moved_away_is_continued_too(tmp_path: Path) -> None:
    """Someone else's rotation moved it. The log was given up until the next start, although the disk was well."""
    path, moved = tmp_path / "events.jsonl", tmp_path / "moved"
    log = EventLog(str(path), 100)
    log.add(Tick(1.0), [])
    path.rename(moved)
    for at in (2.0, 3.0):
        log.add(Tick(at), [])
    assert log.is_on
    log.close()
    assert [orjson.loads(line)["at"] for line in moved.read_bytes().splitlines()] == [1.0, 2.0]
    assert [orjson.loads(line).get("at") for line in path.read_bytes().splitlines()] == [None, 3.0]


def test_a_file_of_something_else_keeps_its_end(tmp_path: Path) -> None:
    """A wrong path in the configuration must not delete what is there."""
    path = tmp_path / "notes.txt"
    path.write_bytes(b"first\nsecond")
    EventLog(str(path), 2**30).close()
    assert path.read_bytes() == b"first\nsecond"


async def test_watchers_still_get_events_when_the_file_is_given_up() -> None:
    """The feed of `GET /v1/events` needs no disk."""
    log = EventLog("/dev/full", 2**30)
    watching = log.watch(silence_s=0.001)
    assert await anext(watching) == b""
    log.add(Tick(1.0), [])
    log.add(Tick(2.0), [])
    assert (await anext(watching)).count(b'"Tick"') == 2
    log.close()
