"""Pieces in the embedded store under SIGKILL, a full disk and damage; and the bound on waiting pieces."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from store import StoreCorrupt, StoreSettings, open_store
from tests.store.child import child, last_number_before_kill
from tests.support.gateway import eventually


async def test_every_settled_piece_survives_sigkill(tmp_path: Path) -> None:
    """A process killed while it puts leaves everything that had settled, and each piece whole or not at all."""
    path = tmp_path / "store.sqlite3"
    last = last_number_before_kill(
        """
        for part in range(3):
            store.put_piece(f"t{number % 7}", f"{number}/{part}", b"%d" % number * 2_000)
        assert await store.settle(60.0)
        """,
        path,
        300,
    )

    store = open_store(f"sqlite:{path}")
    await store.open()
    found = {name: data for number in range(7) for name, data in (await store.get_pieces(f"t{number}")).items()}
    await store.close()
    assert {f"{number}/{part}" for number in range(last + 1) for part in range(3)} <= found.keys()
    assert all(data == name.partition("/")[0].encode() * 2_000 for name, data in found.items())


async def test_no_record_survives_a_kill_without_the_pieces_before_it(tmp_path: Path) -> None:
    """Turns of many trajectories end, and nobody settles anything. The record may lack the last ones, but it names none
    whose pieces are lost."""
    path = tmp_path / "store.sqlite3"
    last_number_before_kill(
        """
        name = f"t{number % 7}"
        store.put_piece(name, f"{number}/0", b"x" * 20_000)
        store.put_piece(name, f"{number}/1", b"x" * 20_000)
        store.put_trajectory(name, {"number": number})
        store.append_turn(name, {"number": number})
        await asyncio.sleep(0.001)
        while number == 200 and store.health().num_pending:
            await asyncio.sleep(0.001)
        """,
        path,
        300,
    )

    store = open_store(f"sqlite:{path}")
    await store.open()
    found = await store.load()
    for each in found:
        names = await store.get_pieces(each.trajectory_id)
        assert {f"{turn['number']}/{part}" for turn in each.turns for part in range(2)} <= names.keys()
        assert each.record["number"] == each.turns[-1]["number"]
    await store.close()
    assert max(each.record["number"] for each in found) >= 200, "what was written is there"


async def test_pieces_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    """Puts return and health reports the fault. When the file can grow again, everything that waited is written."""
    path = tmp_path / "store.sqlite3"
    process = child(
        """
        async def main():
            store = open_store(f"sqlite:{sys.argv[1]}", StoreSettings(backoff_max_s=0.01))
            await store.open()
            store.put_piece("t", "first", b"x" * 10_000)
            assert await store.settle(60.0)
            limit(os.path.getsize(sys.argv[1] + "-pieces-wal"))
            for number in range(50):
                store.put_piece("t", str(number), b"y" * 10_000)
            assert not await store.settle(60.0)
            health = store.health()
            assert not health.ok and "takes no writes" in health.detail and health.num_pending == 50, health
            assert 0.0 < health.lag_s < 60.0, health
            try:
                await store.get_pieces("t")
            except StoreAway:
                print("away", flush=True)
            limit(resource.RLIM_INFINITY)
            while not await store.settle(60.0):
                await asyncio.sleep(0.01)
            assert (store.health().num_dropped, store.health().lag_s) == (0, 0.0), store.health()
            print("written", flush=True)
            sys.stdin.read()
        asyncio.run(main())
        """,
        path,
    )
    assert process.stdout
    assert [process.stdout.readline() for _ in range(2)] == ["away\n", "written\n"]
    process.kill()
    process.communicate()
    store = open_store(f"sqlite:{path}")
    await store.open()
    assert set(await store.get_pieces("t")) == {"first", *map(str, range(50))}
    await store.close()


@pytest.mark.parametrize("is_closed", [False, True], ids=["looks again", "is closed"])
async def test_what_waited_for_the_disk_is_written_in_order(tmp_path: Path, is_closed: bool) -> None:
    """A piece that was dropped and put again meanwhile is the new one, whether the store looks again once the disk has
    room, or is closed before that."""
    path = tmp_path / "store.sqlite3"
    process = child(
        f"""
        async def main():
            store = open_store(f"sqlite:{{sys.argv[1]}}", StoreSettings(backoff_max_s={60.0 if is_closed else 0.01}))
            await store.open()
            store.put_piece("t", "again", b"old")
            assert await store.settle(60.0)
            limit(os.path.getsize(sys.argv[1] + "-pieces-wal"))
            store.put_piece("t", "large", b"x" * 10_000)
            store.drop_pieces("t", "again")
            store.put_piece("t", "again", b"new")
            assert not await store.settle(60.0)
            limit(resource.RLIM_INFINITY)
            while not {is_closed} and not await store.settle(60.0):
                await asyncio.sleep(0.01)
            await store.close()
        asyncio.run(main())
        """,
        path,
    )
    process.communicate()
    assert process.returncode == 0
    store = open_store(f"sqlite:{path}")
    await store.open()
    assert await store.get_pieces("t") == {"again": b"new", "large": b"x" * 10_000}
    await store.close()


async def test_pieces_wait_for_a_program_that_keeps_their_file_locked(tmp_path: Path) -> None:
    """For longer than SQLite itself waits for it, which is five seconds. They are written once it lets go."""
    store = open_store(f"sqlite:{tmp_path / 's'}", StoreSettings(backoff_max_s=0.01))
    await store.open()
    with closing(sqlite3.connect(tmp_path / "s-pieces", isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        store.put_piece("t", "p", b"x")
        assert not await store.settle(0.01) and store.health().ok, "it may still be written"
        assert not await store.settle(60.0)
        assert "locked" in store.health().detail
    await eventually(lambda: store.health().ok)
    assert await store.get_pieces("t") == {"p": b"x"}
    await store.close()


async def test_pieces_that_wait_are_bounded(tmp_path: Path) -> None:
    """The oldest are dropped and counted; the newest stay."""
    store = open_store(f"sqlite:{tmp_path / 's'}", StoreSettings(max_pending_bytes=50_000))
    await store.open()
    for number in range(20):
        store.put_piece("t", str(number), b"x" * 10_000)
    assert await store.settle(60.0)
    assert set(await store.get_pieces("t")) == {"16", "17", "18", "19"}
    assert (store.health().num_dropped, store.health().ok) == (16, True)
    await store.close()


async def test_written_pieces_do_not_count_against_the_bound(tmp_path: Path) -> None:
    """This holds however many bytes were written in all. A piece larger than the bound is written, too."""
    store = open_store(f"sqlite:{tmp_path / 's'}", StoreSettings(max_pending_bytes=50_000, batch_bytes=15_000))
    await store.open()
    for number in range(20):
        for part in range(4):
            store.put_piece("t", f"{number}/{part}", b"x" * 10_000)
        assert await store.settle(60.0)
    store.put_piece("t", "large", b"x" * 60_000)
    assert await store.settle(60.0)
    assert len(await store.get_pieces("t")) == 81 and store.health().num_dropped == 0
    await store.close()


@pytest.mark.parametrize("damage", [b"no database at all" * 100, None], ids=["damaged", "another format"])
async def test_an_unreadable_piece_file_is_refused_and_named(tmp_path: Path, damage: bytes | None) -> None:
    """The operator is told which file to move away; the records stay as they were."""
    path = tmp_path / "store.sqlite3"
    store = open_store(f"sqlite:{path}")
    await store.open()
    store.put_trajectory("t", {})
    await store.close()
    pieces = path.with_name("store.sqlite3-pieces")
    if damage is None:
        child("import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('PRAGMA user_version = 9')", pieces).wait()
    else:
        pieces.write_bytes(damage)
    with pytest.raises(StoreCorrupt, match=r"sqlite3-pieces (is damaged|has format 9)"):
        await open_store(f"sqlite:{path}").open()
    pieces.unlink()
    store = open_store(f"sqlite:{path}")
    await store.open()
    assert [each.trajectory_id for each in await store.load()] == ["t"]
    await store.close()
