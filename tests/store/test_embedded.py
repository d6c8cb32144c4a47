"""The embedded store under SIGKILL, a second owner, damage and a full disk."""

import asyncio
import os
import sqlite3
import subprocess
import time
from contextlib import closing
from pathlib import Path

import pytest

from store import StoreCorrupt, StoredTrajectory, StoreError, StoreInUse, StoreSettings, open_store
from tests.store.child import child, last_number_before_kill
from tests.support.gateway import eventually


async def test_every_settled_put_survives_sigkill(tmp_path: Path) -> None:
    """A process killed while it puts leaves everything that had settled, no put by half, and a sound file."""
    path = tmp_path / "store.sqlite3"
    last = last_number_before_kill(
        """
        store.put_trajectory("t", {"number": number})
        store.append_turn(f"t{number % 50}", {"number": number})
        assert await store.settle(1.0)
        """,
        path,
        2_500,  # past several checkpoints
    )

    store = open_store(f"sqlite:{path}")
    await store.open()
    found = {each.trajectory_id: each for each in await store.load()}
    await store.close()
    assert found["t"].record["number"] in (last, last + 1)
    numbers = sorted(turn["number"] for each in found.values() for turn in each.turns)
    assert numbers in (list(range(last + 1)), list(range(last + 2)))


@pytest.mark.parametrize("name", ["store.sqlite3", "store.sqlite3-pieces", "store.sqlite3-shm"])
async def test_a_read_only_file_is_named_and_nothing_is_left_beside_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite left a read-only `-shm` there, so the store stayed unusable when its own file could be written again."""
    await open_and_close(tmp_path / "store.sqlite3")
    store = open_store(f"sqlite:{tmp_path / 'store.sqlite3'}")
    (tmp_path / name).touch()
    before = set(os.listdir(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: Path(path).name != name)  # root may write any file
        with pytest.raises(StoreError, match=f"cannot be used: .*{name} is read-only"):
            await store.open()
    left = set(os.listdir(tmp_path)) - before
    assert not [one for one in left if one.startswith(name)]
    await open_and_close(tmp_path / "store.sqlite3")


async def open_and_close(path: Path) -> None:
    store = open_store(f"sqlite:{path}")
    await store.open()
    await store.close()


async def test_a_second_process_is_refused_until_the_first_has_died(tmp_path: Path) -> None:
    """Two gateways on one file would overwrite each other. The error names the owner, and SIGKILL frees the file."""
    path = tmp_path / "store.sqlite3"
    process = child(
        """
        import asyncio, sys
        from store import open_store
        store = open_store(f"sqlite:{sys.argv[1]}")
        asyncio.run(store.open())
        print("open", flush=True)
        sys.stdin.read()
        """,
        path,
    )
    assert process.stdout
    assert process.stdout.readline() == "open\n"
    store = open_store(f"sqlite:{path}")
    with pytest.raises(StoreInUse, match=f"process {process.pid}"):
        await store.open()
    process.kill()
    process.communicate()
    await store.open()
    await store.close()


async def test_one_process_cannot_open_a_file_twice(tmp_path: Path) -> None:
    """The lock also holds within one process."""
    first, second = (open_store(f"sqlite:{tmp_path / 's'}") for _ in range(2))
    await first.open()
    with pytest.raises(StoreInUse):
        await second.open()
    await first.close()
    await second.open()
    await second.close()


@pytest.mark.parametrize("where", ["header", "middle"])
async def test_a_damaged_file_is_refused_and_named(tmp_path: Path, where: str) -> None:
    """The gateway does not start on half a record; the operator is told which file to move away."""
    path = tmp_path / "store.sqlite3"
    store = open_store(f"sqlite:{path}")
    await store.open()
    for number in range(500):
        store.put_trajectory(f"t{number}", {"pad": "x" * 200})
    await store.close()
    content = bytearray(path.read_bytes())
    start = 0 if where == "header" else len(content) // 2
    content[start : start + 8192] = b"damage! " * 1024
    path.write_bytes(content)

    with pytest.raises(StoreCorrupt, match=r"store\.sqlite3 is damaged"):
        await open_store(f"sqlite:{path}").open()
    path.unlink()
    store = open_store(f"sqlite:{path}")
    await store.open()  # the refusal left no lock behind
    await store.close()


async def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    """A newer program's record, or another program's database, is not touched."""
    path = tmp_path / "other.sqlite3"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE bookmarks (url TEXT)")
    database.close()
    content = path.read_bytes()
    with pytest.raises(StoreCorrupt, match="has format 0"):
        await open_store(f"sqlite:{path}").open()
    assert path.read_bytes() == content


async def test_a_directory_in_place_of_the_file_is_a_clear_error(tmp_path: Path) -> None:
    """The message names the path."""
    with pytest.raises(StoreError, match=str(tmp_path)):
        await open_store(f"sqlite:{tmp_path}").open()


async def test_puts_continue_on_a_full_disk_and_the_record_is_healed(tmp_path: Path) -> None:
    """While the file cannot grow, puts return and health reports the fault. Then the owner rewrites everything,
    once."""
    path = tmp_path / "store.sqlite3"
    process = child(
        """
        async def main():
            store = open_store(f"sqlite:{sys.argv[1]}", StoreSettings(backoff_max_s=0.01))
            await store.open()
            healed = asyncio.Event()
            def rewrite():
                store.put_trajectory("live", {"number": 99})
                store.append_turn("live", {"number": 1})
                store.append_turn("live", {"number": 2})
                healed.set()
            store.on_loss(rewrite)
            store.append_turn("live", {"number": 1})
            limit(os.path.getsize(sys.argv[1] + "-wal"))
            for number in range(100):
                store.put_trajectory("live", {"number": number, "pad": "x" * 1000})
            store.append_turn("live", {"number": 2})
            store.forget_trajectory("ended")
            assert not await store.settle(1.0)
            assert not store.health().ok and store.health().num_dropped, store.health()
            assert store.health().num_pending == 1 and 0.0 < store.health().lag_s < 60.0, store.health()
            limit(resource.RLIM_INFINITY)
            while not healed.is_set():  # so that a put numbered before the heal still waits when it begins
                store.put_trajectory("live", {"number": 98})
                await asyncio.sleep(0)
            assert store.health().ok and await store.settle(1.0), store.health()
            assert store.health().num_losses == 1, store.health()
            assert (store.health().num_pending, store.health().lag_s) == (0, 0.0), store.health()
            print("healed", flush=True)
            sys.stdin.read()
        asyncio.run(main())
        """,
        path,
    )
    found = await _trajectory_left_by(process, "healed", path)
    assert (found.record, found.turns) == ({"number": 99}, [{"number": 1}, {"number": 2}])


async def test_a_failed_heal_leaves_each_trajectory_once_with_all_that_settled(tmp_path: Path) -> None:
    """The process is killed after a heal that found the disk still full and before the next one.

    The trajectory was once there twice, and only the copy with the newest turn was found.
    """
    path = tmp_path / "store.sqlite3"
    process = child(
        """
        async def main():
            store = open_store(f"sqlite:{sys.argv[1]}", StoreSettings(backoff_max_s=0.01))
            await store.open()
            tried = asyncio.Event()
            def rewrite():
                store.put_trajectory("t", {"pad": "x" * 100_000})
                tried.set()
            store.on_loss(rewrite)
            store.append_turn("t", {"number": 1})
            assert await store.settle(1.0)
            limit(os.path.getsize(sys.argv[1] + "-wal"))
            store.append_turn("t", {"number": 2})
            await tried.wait()
            assert not store.health().ok
            limit(resource.RLIM_INFINITY)
            store.put_trajectory("t", {"number": 3})
            store.append_turn("t", {"number": 3})
            await store.settle(1.0)
            print("written", flush=True)
            sys.stdin.read()
        asyncio.run(main())
        """,
        path,
    )
    found = await _trajectory_left_by(process, "written", path)
    assert (found.record, found.turns) == ({"number": 3}, [{"number": 1}, {"number": 3}])


async def test_a_heal_replaces_the_record_at_once(tmp_path: Path) -> None:
    """A process that is killed just after it leaves all that its owner put, not an empty record."""
    path = tmp_path / "store.sqlite3"
    process = child(
        """
        async def main():
            store = open_store(f"sqlite:{sys.argv[1]}", StoreSettings(backoff_max_s=0.01))
            await store.open()
            def stop():
                print("healed", flush=True)
                sys.stdin.read()
            def rewrite():
                asyncio.get_running_loop().call_soon(stop)
                store.put_trajectory("t", {"number": 2})
                store.append_turn("t", {"number": 2})
            store.on_loss(rewrite)
            store.append_turn("t", {"number": 1})
            assert await store.settle(1.0)
            limit(os.path.getsize(sys.argv[1] + "-wal"))
            store.append_turn("t", {"number": 2})
            assert not await store.settle(1.0)
            limit(resource.RLIM_INFINITY)
            await asyncio.sleep(60.0)
        asyncio.run(main())
        """,
        path,
    )
    found = await _trajectory_left_by(process, "healed", path)
    assert (found.record, found.turns) == ({"number": 2}, [{"number": 2}])


async def test_a_program_that_keeps_the_file_locked_stalls_one_put(tmp_path: Path) -> None:
    """A shell with an unfinished transaction. Each put waited two seconds for it, with the whole event loop: turns took
    ten seconds, and health checks eight."""
    path = tmp_path / "store.sqlite3"
    store = open_store(f"sqlite:{path}", StoreSettings(backoff_max_s=0.01))
    await store.open()
    healed = asyncio.Event()

    def rewrite() -> None:
        store.put_trajectory("t", {"number": 4})
        healed.set()

    store.on_loss(rewrite)
    waits = []
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        for number in range(5):
            began_at = time.monotonic()
            store.put_trajectory("t", {"number": number})
            assert not await store.settle(1.0)
            waits.append(time.monotonic() - began_at)
        assert "locked" in store.health().detail
    assert len([wait_s for wait_s in waits if wait_s > 1.0]) < 3, waits  # it was five; a busy machine may add one
    await healed.wait()
    assert await store.settle(1.0) and store.health().ok
    await store.close()


async def test_heals_that_fail_leave_the_event_loop_to_others(tmp_path: Path) -> None:
    """A disk with some room, but not for everything: a large record is written until it does not fit, again and again.

    With 6,400 trajectories that took 1.6 of every 3.6 seconds.
    """
    path = tmp_path / "store.sqlite3"
    process = child(
        """
        import time
        async def main():
            store = open_store(f"sqlite:{sys.argv[1]}", StoreSettings(backoff_max_s=0.001))
            await store.open()
            began = []
            tried = asyncio.Event()
            def rewrite():
                began.append(time.monotonic())
                while time.monotonic() < began[-1] + 0.02:
                    pass
                store.put_trajectory("t", {"pad": "x" * 100_000})
                tried.set()
            store.on_loss(rewrite)
            limit(os.path.getsize(sys.argv[1] + "-wal"))
            store.put_trajectory("t", {})
            assert not await store.settle(1.0)
            for _ in range(4):
                await tried.wait()
                tried.clear()
            limit(resource.RLIM_INFINITY)
            while not store.health().ok:
                await tried.wait()
                tried.clear()
                await asyncio.sleep(0)
            await store.close()
            print(min(later - earlier for earlier, later in itertools.pairwise(began)), flush=True)
        asyncio.run(main())
        """,
        path,
    )
    output, _ = process.communicate()
    assert process.returncode == 0
    assert float(output) > 0.2  # the heal itself takes 0.02 s


async def test_a_store_that_closes_once_the_disk_has_room_again_is_healed_first(tmp_path: Path) -> None:
    """A gateway that is shut down between a full disk and its next look at it lost what it had served meanwhile."""
    path = tmp_path / "store.sqlite3"
    process = child(
        """
        async def main():
            store = open_store(f"sqlite:{sys.argv[1]}", StoreSettings(backoff_max_s=60.0))
            await store.open()
            def rewrite():
                store.put_piece("t", "tokens/2", b"2")
                for number in (1, 2):
                    store.append_turn("t", {"number": number})
            store.on_loss(rewrite)
            store.append_turn("t", {"number": 1})
            assert await store.settle(1.0)
            limit(os.path.getsize(sys.argv[1] + "-wal"))
            store.append_turn("t", {"number": 2})
            assert not await store.settle(1.0)
            limit(resource.RLIM_INFINITY)
            await store.close()
            print("closed", flush=True)
            sys.stdin.read()
        asyncio.run(main())
        """,
        path,
    )
    found = await _trajectory_left_by(process, "closed", path)
    assert found.turns == [{"number": 1}, {"number": 2}]


async def test_what_is_put_anew_waits_for_its_own_pieces(tmp_path: Path) -> None:
    """A piece from before everything was put anew counted for the next one of its trajectory. A process killed then
    left a record without that piece."""
    path = tmp_path / "store.sqlite3"
    store = open_store(f"sqlite:{path}", StoreSettings(backoff_max_s=0.01, piece_pause_s=1.0))
    await store.open()

    def rewrite() -> None:
        store.put_piece("t", "new", b"")
        store.put_trajectory("t", {})

    def count(file: Path, table: str) -> int:
        with closing(sqlite3.connect(file)) as database:
            return int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])

    store.on_loss(rewrite)
    pieces = tmp_path / "store.sqlite3-pieces"
    with (
        closing(sqlite3.connect(pieces, isolation_level=None)) as holds_pieces,
        closing(sqlite3.connect(path, isolation_level=None)) as holds_records,
    ):
        holds_records.execute("BEGIN IMMEDIATE")
        store.put_trajectory("other", {})
        await eventually(lambda: not store.health().ok)
        holds_pieces.execute("BEGIN IMMEDIATE")  # for a moment: SQLite waits five seconds for it
        store.put_piece("t", "old", b"")
        holds_records.execute("ROLLBACK")
        await eventually(lambda: store.health().num_losses == 1)
    await eventually(lambda: count(path, "record") == 1)
    assert count(pieces, "piece") == 2
    await store.close()


async def test_a_turn_without_its_trajectory_does_not_stop_the_start(tmp_path: Path) -> None:
    """A process killed before it could rewrite everything leaves a turn whose trajectory is missing. It is dropped."""
    path = tmp_path / "store.sqlite3"
    process = child(
        """
        async def main():
            store = open_store(f"sqlite:{sys.argv[1]}", StoreSettings(backoff_max_s=60.0))
            await store.open()
            limit(os.path.getsize(sys.argv[1] + "-wal"))
            store.append_turn("lost", {"number": 1})
            assert not await store.settle(1.0)
            limit(resource.RLIM_INFINITY)
            store.append_turn("lost", {"number": 2})
            store.append_turn("kept", {"number": 3})
            await store.settle(1.0)
            print("written", flush=True)
            sys.stdin.read()
        asyncio.run(main())
        """,
        path,
    )
    found = await _trajectory_left_by(process, "written", path)
    assert (found.trajectory_id, found.record, found.turns) == ("kept", {}, [{"number": 3}])


async def test_a_link_to_an_open_file_is_refused_too(tmp_path: Path) -> None:
    """A link to a record is that record: two gateways given both names would overwrite each other."""
    (tmp_path / "link").symlink_to(tmp_path / "s")
    first, second = open_store(f"sqlite:{tmp_path / 's'}"), open_store(f"sqlite:{tmp_path / 'link'}")
    await first.open()
    with pytest.raises(StoreInUse):
        await second.open()
    await first.close()


async def _trajectory_left_by(process: subprocess.Popen[str], last_line: str, path: Path) -> StoredTrajectory:
    """The one trajectory that a process leaves when it is killed after printing `last_line`."""
    assert process.stdout and process.stdout.readline() == f"{last_line}\n"
    process.kill()
    process.communicate()
    store = open_store(f"sqlite:{path}")
    await store.open()
    [found] = await store.load()
    await store.close()
    return found


def _wal_bytes(path: Path) -> int:
    return Path(f"{path}-wal").stat().st_size


async def test_the_write_ahead_log_stays_small_while_puts_continue(tmp_path: Path) -> None:
    """Checkpoints run beside the puts: 40,000 records of 1 KB do not leave a log of 40,000 pages."""
    path = tmp_path / "store.sqlite3"
    store = open_store(f"sqlite:{path}", StoreSettings())
    await store.open()
    for number in range(40_000):
        store.put_trajectory(f"t{number % 100}", {"number": number, "pad": "x" * 1000})
        if number % 20 == 0:
            await asyncio.sleep(0)
    assert _wal_bytes(path) < 100 * 2**20
    await store.close()


async def test_the_write_ahead_log_stays_small_when_values_are_large(tmp_path: Path) -> None:
    """The predictor's state is megabytes, put again every few seconds, and a gateway may have little else to put.

    A put that waits for a checkpoint must not keep the checkpoint waiting: both would last until the checkpoint gives
    up.
    """
    path = tmp_path / "store.sqlite3"
    store = open_store(f"sqlite:{path}", StoreSettings())
    await store.open()
    for number in range(480):
        store.put_state("predictor", bytes(2**20))
        store.put_trajectory("t", {"number": number}, bytes(2**18))
        await asyncio.sleep(0)
    assert _wal_bytes(path) < 100 * 2**20
    await store.close()


async def test_a_program_that_reads_the_file_stalls_no_puts_and_keeps_no_log(tmp_path: Path) -> None:
    """A shell with an open result keeps the log from being emptied. Each checkpoint waited two seconds for it, and so
    did the put beside it, with the whole event loop. Once the reader is gone, the log grows no more.
    """
    path = tmp_path / "store.sqlite3"
    store = open_store(f"sqlite:{path}", StoreSettings())
    await store.open()

    async def waits_of_puts(num_puts: int) -> list[float]:
        waits = []
        for _ in range(num_puts):
            began_at = time.monotonic()
            store.put_state("predictor", bytes(2**20))
            await asyncio.sleep(0)
            waits.append(time.monotonic() - began_at)
        return waits

    store.put_trajectory("t", {})
    assert await store.settle(1.0)
    with closing(sqlite3.connect(path)) as database:
        reader = database.execute("SELECT 1 UNION ALL SELECT number FROM record")
        reader.fetchone()
        waits = await waits_of_puts(100)
        assert _wal_bytes(path) > 90 * 2**20
        reader.close()
    # A disk that is busy for a moment may hold up one put; it was nine of these.
    assert len([wait_s for wait_s in waits if wait_s > 1.0]) < 3, waits
    wal_bytes = _wal_bytes(path)
    await waits_of_puts(200)
    assert _wal_bytes(path) < wal_bytes + 100 * 2**20
    assert store.health().ok and not store.health().num_losses
    await store.close()
