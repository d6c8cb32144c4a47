"""The event log: it replays; and when it cannot be written, turns do not depend on it."""

import asyncio
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import orjson
import pytest

from gateway.config import ConfigError
from gateway.state.eventlog import MAX_LINES_BEHIND, EventLog
from gateway.turnlog import LOGGER
from scheduling.types import Tick
from simulator.replay import replay
from tests.support.gateway import running_gateway


@contextmanager
def full_at(num_bytes: int) -> Iterator[None]:
    """Limits the files of this process to this size: like a full disk, except for the error's number.

    Only until the log is given up, because the tests' own output may go to a file too, and because a full disk lets
    `truncate` make a file longer.
    """
    before, (soft, hard) = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))

    def end(_: object = None) -> bool:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return True

    LOGGER.addFilter(end)  # it logs that it is given up, and then truncates
    try:
        yield
    finally:
        LOGGER.removeFilter(end)
        end()
        signal.signal(signal.SIGXFSZ, before)


def test_a_log_that_cannot_be_written_is_given_up(tmp_path: Path) -> None:
    """Events continue, nothing is raised, and what was written until then is whole lines."""
    path = tmp_path / "events.jsonl"
    log = EventLog(str(path), 2**30)
    with full_at(1_000):
        for number in range(100):
            log.add(Tick(float(number)), [])
    assert not log.is_on
    lines = path.read_bytes().splitlines(keepends=True)
    assert 1 < len(lines) < 100 and all(orjson.loads(line)["kind"] == "event" and line[-1:] == b"\n" for line in lines)


def test_a_file_that_another_gateway_writes_is_refused(tmp_path: Path) -> None:
    """Their lines were mixed, and each moved away the file that the other one wrote. A file that was begun when the
    first was full is refused, too; one whose gateway has ended is not."""
    path = tmp_path / "events.jsonl"
    log = EventLog(str(path), 100)
    for at in (1.0, 2.0, 3.0):
        log.add(Tick(at), [])
        before = path.read_bytes()
        with pytest.raises(OSError, match="another gateway writes it"):
            EventLog(str(path), 100)
        assert path.read_bytes() == before
    log.close()
    EventLog(str(path), 100).close()


async def test_a_second_gateway_on_the_same_event_log_is_refused_with_one_line(tmp_path: Path) -> None:
    """Before it has taken a store."""
    path = tmp_path / "events.jsonl"
    async with running_gateway(event_log=str(path)):
        with pytest.raises(ConfigError) as refused:
            async with running_gateway(event_log=str(path), store=f"sqlite:{tmp_path}/store.sqlite3"):
                pass
    why = "another gateway writes it: stop that one, or choose another file"
    assert str(refused.value) == f"cannot write the event log {path}: {why}"
    assert os.listdir(tmp_path) == [path.name]


def test_half_a_line_of_a_killed_process_is_dropped(tmp_path: Path) -> None:
    """SIGKILL may end a long write midway. The lines of the next process would begin in the middle of that line."""
    path = tmp_path / "events.jsonl"
    log = EventLog(str(path), 2**30)
    log.add(Tick(1.0), [])
    log.close()
    whole = path.read_bytes()
    for half in (whole[:-1], whole[: len(whole) // 2], b"{", b'{"kind":"contin', b""):
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


@pytest.mark.parametrize("room", [0, 10, 50])
def test_a_disk_that_is_full_as_the_log_is_continued_costs_no_line_before(tmp_path: Path, room: int) -> None:
    """The new file was made as long as the full one, of NULs, and the next process moved it over the full one."""
    path = tmp_path / "events.jsonl"
    log = EventLog(str(path), 100)
    for at in (1.0, 2.0):
        log.add(Tick(at), [])
    with full_at(room):
        log.add(Tick(3.0), [])
    assert not log.is_on
    log = EventLog(str(path), 100)
    log.add(Tick(4.0), [])
    log.close()
    older, newer = (
        [orjson.loads(line)["at"] for line in file.read_bytes().splitlines()]
        for file in (tmp_path / "events.jsonl.1", path)
    )
    assert (older, newer) == ([1.0, 2.0], [4.0])


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


@pytest.mark.parametrize("copies", [False, True])
def test_a_disk_that_is_full_after_a_rotation_changes_only_the_logs_own_file(tmp_path: Path, copies: bool) -> None:
    """Someone else's rotation made an empty file at its path, or emptied its own. That was filled with NULs."""
    path, moved = tmp_path / "events.jsonl", tmp_path / "moved"
    log = EventLog(str(path), 2**30)
    for at in range(20):
        log.add(Tick(float(at)), [])
    if copies:
        moved.write_bytes(path.read_bytes())
        path.write_bytes(b"")
    else:
        path.rename(moved)
        path.touch()
    written = moved.read_bytes()
    with full_at(10 if copies else len(written) + 10):
        log.add(Tick(20.0), [])
    assert not log.is_on
    assert moved.read_bytes() == written and b"\0" not in path.read_bytes()


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


async def test_a_watcher_that_falls_behind_is_told_once_how_many_lines_it_lost() -> None:
    """The oldest are lost; what comes afterwards is whole again."""
    log = EventLog(None, 2**30)
    watching = log.watch(silence_s=0.001)
    assert await anext(watching) == b""
    for number in range(MAX_LINES_BEHIND + 7):
        log.add(Tick(float(number)), [])
    lost, first, *others = [orjson.loads(line) for line in (await anext(watching)).splitlines()]
    assert lost == {"kind": "lost", "num_lines": 7}
    assert (first["at"], len(others)) == (7.0, MAX_LINES_BEHIND - 1)
    log.add(Tick(1e6), [])
    assert [orjson.loads(line)["kind"] for line in (await anext(watching)).splitlines()] == ["event"]


async def test_events_in_quick_succession_reach_a_watcher_together() -> None:
    """A watcher had a wake-up and a chunk for each, which five of them paid with a fifth of what turns cost."""
    log = EventLog(None, 2**30)
    watching = log.watch(silence_s=0.001)
    assert await anext(watching) == b""
    log.add(Tick(1.0), [])
    assert (await anext(watching)).count(b'"Tick"') == 1, "the first comes at once"
    log.add(Tick(2.0), [])
    asyncio.get_running_loop().call_soon(log.add, Tick(3.0), [])
    assert (await anext(watching)).count(b'"Tick"') == 2


async def test_the_log_of_a_declaration_replays(tmp_path: Path) -> None:
    """A client states its expected output as a whole number; a prediction is none, and a replay reads it as such."""
    path = tmp_path / "events.jsonl"
    settings = {"event_log": str(path), "store": f"sqlite:{tmp_path}/store.sqlite3"}
    for name in ("t-1", "t-2"):  # the second process begins with the first one's record
        async with running_gateway(**settings) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
            declared = {"id": name, "expected_output_tokens": 6_000}
            assert (await client.post("/v1/trajectories", json=declared)).status_code == 201
    replayed = replay(path)
    assert replayed.difference is None
    assert replayed.num_actions >= 2
