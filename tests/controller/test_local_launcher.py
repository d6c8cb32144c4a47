"""The launcher contract on processes of this machine, and what only this launcher promises."""

import asyncio
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from controller.launcher import LaunchFailed, ServerSpec, ServerState
from controller.local_guard import rotate, started
from controller.local_launcher import MAX_STOPPED_KEPT, LocalLauncher
from controller.local_processes import Sessions, Table, read_processes
from tests.controller.launcher_contract import FAIL, PROMISES, SERVE, STUBBORN, Promise, Site


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(
        lambda: LocalLauncher(tmp_path, ("0", "1", "2")),
        sys.executable,
        lambda environment: tuple(environment["CUDA_VISIBLE_DEVICES"].split(",")),
    )
    yield site
    await site.stop_all()


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_the_local_launcher_keeps_the_contract(promise: Promise, site: Site) -> None:
    """What every launcher promises."""
    await promise(site)


LAUNCH = """
import asyncio, os, signal, sys
from pathlib import Path
from controller.launcher import ServerSpec
from controller.local_launcher import LocalLauncher
spec = ServerSpec("engine-1", "fleet", 1, ("0",), (sys.executable, "-c", sys.argv[2], "--port", "{port}"))
asyncio.run(LocalLauncher(Path(sys.argv[1]), ("0", "1", "2")).launch(spec))
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_a_server_outlives_a_killed_launcher(site: Site, tmp_path: Path) -> None:
    """SIGKILL of the process that launched it does not touch it, and another launcher finds it."""
    site.fleet_id = "fleet"
    launching = await asyncio.create_subprocess_exec(sys.executable, "-c", LAUNCH, str(tmp_path), SERVE)
    assert await launching.wait() == -signal.SIGKILL
    await site.answer("engine-1")
    (found,) = await site.launcher.find("fleet")
    assert found.state is ServerState.RUNNING and found.spec.devices == ("0",)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_stopping_a_server_removes_the_files_it_leaves(
    site: Site, tmp_path: Path, number: signal.Signals
) -> None:
    """Only its own are removed, also if it had been killed before it was stopped."""
    mine, another = tmp_path / "shm" / "left_mine-0.mmap", tmp_path / "shm" / "left_another-0.mmap"
    mine.parent.mkdir()
    for file in (mine, another):
        file.touch()
    spec = replace(site.spec(), leaves=(f"{mine.parent}/left_mine*.mmap",))
    await site.launcher.launch(spec)
    about = await site.answer(spec.server_id)
    assert mine.exists()
    if number is signal.SIGKILL:
        os.kill(about["pid"], number)
        await site.until(spec.server_id, lambda server: server.state is ServerState.EXITED)
    await site.launcher.stop(spec.server_id, 10.0)
    assert not mine.exists() and another.exists()


async def test_a_device_is_shared_only_with_servers_named_as_sleeping(site: Site) -> None:
    """Any other server on the same device is refused, also beside one that sleeps."""
    sleeper = site.spec()
    await site.launcher.launch(sleeper)
    with pytest.raises(LaunchFailed, match=f"{sleeper.server_id} holds 0"):
        await site.launcher.launch(site.spec())
    awake = await site.launcher.launch(site.spec(beside=(sleeper.server_id,)))
    with pytest.raises(LaunchFailed, match=f"{awake.spec.server_id} holds 0"):
        await site.launcher.launch(site.spec(beside=(sleeper.server_id,)))
    assert {one.spec.server_id for one in await site.connect().find(site.fleet_id)} == {
        sleeper.server_id,
        awake.spec.server_id,
    }
    assert (await site.server(awake.spec.server_id)).spec.beside == (sleeper.server_id,)  # type: ignore[union-attr]


async def test_workers_of_a_killed_guard_hold_the_device_until_they_are_stopped(site: Site, tmp_path: Path) -> None:
    """Whatever is left of a server counts, and `stop` finds it."""
    spec = site.spec(STUBBORN)
    await site.launcher.launch(spec)
    await site.answer(spec.server_id)
    guard = json.loads((tmp_path / site.fleet_id / spec.server_id / "process.json").read_text())["pid"]
    os.kill(guard, signal.SIGKILL)
    left = await site.until(spec.server_id, lambda _: started(guard) is None)
    assert left.state is ServerState.RUNNING  # its worker, which nobody told to end
    with pytest.raises(LaunchFailed, match=f"{spec.server_id} holds 0"):
        await site.launcher.launch(site.spec())
    await site.launcher.stop(spec.server_id, 60.0)
    assert await site.is_gone(spec.server_id)
    await site.launcher.launch(site.spec())


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        (
            "import os, subprocess; subprocess.Popen(['sleep', '600']); os.kill(os.getpid(), 40)",
            "killed by signal 40",
        ),
        ("\0", "it could not be started: embedded null byte"),
    ],
    ids=["a signal without a name", "a command that is none"],
)
async def test_an_unusual_end_is_recorded_and_leaves_nothing(site: Site, program: str, cause: str) -> None:
    """The guard failed over these. Workers that were left then held the devices, and the server counted as running."""
    spec = site.spec(program)
    await site.launcher.launch(spec)
    ended = await site.until(spec.server_id, lambda server: server.state is ServerState.EXITED)
    assert ended.exit_cause == cause


async def test_a_process_that_no_signal_ends_is_reported(site: Site, tmp_path: Path) -> None:
    """A driver that hangs keeps a killed process for good. Its stop never ended, and nothing told why."""
    spec = site.spec(SERVE)
    await site.launcher.launch(spec)
    await site.answer(spec.server_id)
    session = json.loads((tmp_path / site.fleet_id / spec.server_id / "process.json").read_text())["pid"]
    no_pid = 2**22 + 1  # above the largest one that Linux gives, so that no signal reaches it

    def read() -> Table:
        return {**read_processes(), session: (*read_processes().get(session, ()), (no_pid, 2**60))}

    launcher = LocalLauncher(tmp_path, ("0", "1", "2"), confirm_timeout_s=0.1, sessions=Sessions(read))
    async with asyncio.timeout(60.0):
        with pytest.raises(TimeoutError, match=f"{spec.server_id}: process {no_pid} does not end, although"):
            await launcher.stop(spec.server_id, 5.0)
    (found,) = await launcher.find(site.fleet_id)
    assert found.state is ServerState.RUNNING, "it holds its device"
    await site.launcher.stop(spec.server_id, 5.0)
    assert await site.is_gone(spec.server_id)


async def test_a_recycled_pid_is_not_taken_for_a_server(site: Site, tmp_path: Path) -> None:
    """The pid is alive but belongs to another process: the server has ended, and stopping it kills nobody else."""
    spec = site.spec(FAIL)
    await site.launcher.launch(spec)
    await site.until(spec.server_id, lambda server: server.state is ServerState.EXITED)
    bystander = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
    try:
        path = tmp_path / site.fleet_id / spec.server_id / "process.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": bystander.pid}))
        assert (await site.until(spec.server_id, lambda _: True)).state is ServerState.EXITED
        await site.launcher.stop(spec.server_id, 0.0)
        assert bystander.returncode is None and started(bystander.pid)
    finally:
        bystander.kill()
        await bystander.wait()


async def test_a_restarted_machine_has_no_servers(site: Site, tmp_path: Path) -> None:
    """Pids of another boot mean nothing."""
    spec = site.spec()
    await site.launcher.launch(spec)
    await site.answer(spec.server_id)
    path = tmp_path / site.fleet_id / spec.server_id / "process.json"
    written = path.read_text()
    path.write_text(json.dumps(json.loads(written) | {"boot": "another"}))
    found = await site.until(spec.server_id, lambda _: True)
    assert (found.state, found.exit_cause) == (ServerState.EXITED, "the machine was restarted")
    path.write_text(written)


async def test_a_launch_that_broke_off_is_continued(site: Site, tmp_path: Path) -> None:
    """Written down but never started, the server starts at the second try, and never if it was stopped meanwhile."""
    spec, unwanted = site.spec(SERVE, "0"), site.spec(SERVE, "1")
    for one in (spec, unwanted):
        await site.launcher.launch(one)
        await site.launcher.stop(one.server_id, 0.0)
        for name in ("process.json", "stop"):
            (tmp_path / site.fleet_id / one.server_id / name).unlink()
        assert (await site.until(one.server_id, lambda _: True)).state is ServerState.STARTING
    await site.launcher.launch(spec)
    await site.answer(spec.server_id)
    await site.launcher.stop(unwanted.server_id, 0.0)
    assert (await site.launcher.launch(unwanted)).state is ServerState.EXITED


async def test_a_guard_that_cannot_begin_is_reported(site: Site, tmp_path: Path) -> None:
    """On a full disk, for example. The launch counted as done, and the server was awaited for 15 minutes."""
    spec = site.spec(SERVE)
    await site.launcher.launch(spec)
    await site.launcher.stop(spec.server_id, 0.0)
    folder = tmp_path / site.fleet_id / spec.server_id
    for name in ("process.json", "stop"):
        (folder / name).unlink()
    (folder / "process.draft").mkdir()
    with pytest.raises(OSError, match=r"its guard did not begin: IsADirectoryError: .*process\.draft"):
        await site.launcher.launch(spec)
    (folder / "process.draft").rmdir()
    await site.launcher.launch(spec)
    await site.answer(spec.server_id)


@pytest.mark.parametrize("name", ["server.json", "process.json"])
async def test_a_damaged_record_is_named(name: str, site: Site, tmp_path: Path) -> None:
    """A power cut may leave an empty one of an earlier version, and no server can be observed. The alarm has this
    message; it was `Expecting value: line 1 column 1 (char 0)`."""
    spec = site.spec(SERVE)
    await site.launcher.launch(spec)
    record = tmp_path / site.fleet_id / spec.server_id / name
    written = record.read_text()
    record.write_text("")
    with pytest.raises(ValueError, match=f"{record} is damaged; remove its folder"):
        await site.launcher.find(site.fleet_id)
    record.write_text(written)
    assert len(await site.launcher.find(site.fleet_id)) == 1


async def test_a_server_whose_guard_just_began_has_not_ended(site: Site, tmp_path: Path) -> None:
    """Its record was missed and then found, and it counted as killed: it was stopped, and another one launched."""
    spec = site.spec(SERVE)
    await site.launcher.launch(spec)
    record = tmp_path / site.fleet_id / spec.server_id / "process.json"
    is_over = threading.Event()

    def come_and_go() -> None:
        while not is_over.is_set():
            record.rename(record.with_name("hidden"))
            record.with_name("hidden").rename(record)

    renaming = asyncio.create_task(asyncio.to_thread(come_and_go))
    try:
        states = {server.state for _ in range(1_000) for server in await site.launcher.find(site.fleet_id)}
    finally:
        is_over.set()
        await renaming
    assert states == {ServerState.STARTING, ServerState.RUNNING}


# Ends once it is told to, and leaves a worker.
LEAVE = """
import os, pathlib, sys, time
if os.fork() == 0:
    time.sleep(86400)
while not pathlib.Path("{folder}", "go").exists():
    time.sleep(0.01)
"""


async def test_workers_end_with_their_server_also_on_a_full_disk(site: Site, tmp_path: Path) -> None:
    """Its guard could not record how it ended, and left the workers: the server counted as running, for ever."""
    spec = site.spec(LEAVE.replace("{folder}", str(tmp_path)))
    await site.launcher.launch(spec)
    (tmp_path / site.fleet_id / spec.server_id / "exit.draft").mkdir()
    (tmp_path / "go").touch()
    ended = await site.until(spec.server_id, lambda server: server.state is ServerState.EXITED)
    assert ended.exit_cause == "killed with its guard"


async def test_a_missing_program_is_an_exit_cause(site: Site) -> None:
    """It is reported like any other end."""
    spec = site.spec(command=("/no/such/program",))
    await site.launcher.launch(spec)
    ended = await site.until(spec.server_id, lambda server: server.state is ServerState.EXITED)
    assert "/no/such/program" in ended.exit_cause


async def test_servers_launched_at_once_get_different_ports(site: Site) -> None:
    """The ports are chosen before any server listens."""
    specs = [site.spec(SERVE, device) for device in ("0", "1", "2")]
    servers = await asyncio.gather(*(site.launcher.launch(spec) for spec in specs))
    assert len({server.url for server in servers}) == 3


# Writes lines until it is stopped; a million lines would be 20 MB.
TALK = """
import itertools
for number in itertools.count():
    print(f"line number {number:9}", flush=True)
"""


async def test_a_full_log_is_rotated_and_its_last_lines_are_found(site: Site, tmp_path: Path) -> None:
    """The file becomes log.1 and continues empty while the server writes; the last lines come from both files."""
    launcher = LocalLauncher(tmp_path, ("0", "1", "2"), max_log_bytes=100_000)
    spec = site.spec(TALK)
    await launcher.launch(spec)
    folder = tmp_path / site.fleet_id / spec.server_id
    async with asyncio.timeout(60.0):
        while not (folder / "log.1").exists():  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.05)
    (found,) = await launcher.find(site.fleet_id)
    assert len(found.last_lines) == 30 and found.last_lines[5].startswith("line number ")
    await launcher.stop(spec.server_id, 5.0)


async def test_a_log_that_a_full_disk_kept_from_rotation_is_rotated_later(site: Site, tmp_path: Path) -> None:
    """One rotation without room ended them all, and the log grew without bound."""
    launcher = LocalLauncher(tmp_path, ("0", "1", "2"), max_log_bytes=100_000)
    spec = site.spec("import time; print('x' * 200_000, flush=True); time.sleep(1e6)")
    await launcher.launch(spec)
    folder = tmp_path / site.fleet_id / spec.server_id
    guard = json.loads((folder / "process.json").read_text())["pid"]
    limits = resource.prlimit(guard, resource.RLIMIT_FSIZE)
    resource.prlimit(guard, resource.RLIMIT_FSIZE, (1_000, limits[1]))  # like a full disk

    async def until_older_log_has(num_bytes: int) -> None:
        async with asyncio.timeout(120.0):
            while not ((folder / "log.1").exists() and (folder / "log.1").stat().st_size >= num_bytes):  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.05)

    await until_older_log_has(0)
    resource.prlimit(guard, resource.RLIMIT_FSIZE, limits)
    await until_older_log_has(200_000)
    await launcher.stop(spec.server_id, 5.0)


def test_only_a_full_log_is_rotated(tmp_path: Path) -> None:
    """Rotation loses nothing: all lines of a full log are in the older file."""
    log, older = tmp_path / "log", tmp_path / "log.1"
    with log.open("ab") as writer:
        for content in (b"first", b"second"):
            writer.write(content)
            writer.flush()
            rotate(writer.fileno(), log, 10)
            assert not older.exists() and log.read_bytes() == content
            rotate(writer.fileno(), log, 3)
            assert older.read_bytes() == content and log.read_bytes() == b""
            older.unlink()


@pytest.mark.parametrize("moved_to", ["log.1", "log-20260101"])
async def test_a_log_that_somebody_moved_or_removed_is_bounded_all_the_same(
    moved_to: str, site: Site, tmp_path: Path
) -> None:
    """By logrotate, or `rm`. The server goes on with its file, whatever its name is, and wrote it until the disk was
    full."""
    launcher = LocalLauncher(tmp_path, ("0", "1", "2"), max_log_bytes=100_000)
    spec = site.spec(TALK)
    await launcher.launch(spec)
    folder = tmp_path / site.fleet_id / spec.server_id
    log = os.open(folder / "log", os.O_RDONLY)
    try:
        (folder / "log").rename(folder / moved_to)
        (folder / "log").touch()
        if moved_to != "log.1":
            (folder / moved_to).unlink()
        async with asyncio.timeout(60.0):
            largest = 0
            while (size := os.fstat(log).st_size) >= largest:  # until it begins again
                largest = size
                await asyncio.sleep(0.05)
        assert largest > 100_000
        (found,) = await launcher.find(site.fleet_id)
        assert found.last_lines[5].startswith("line number ")
        await launcher.stop(spec.server_id, 5.0)
    finally:
        os.close(log)


async def test_find_sees_whole_servers_while_old_folders_are_removed(tmp_path: Path) -> None:
    """A launch removes the folders of stopped servers beyond those that are kept; nobody sees half a server."""
    launcher = LocalLauncher(tmp_path, ("0",))
    for number in range(MAX_STOPPED_KEPT + 300):
        folder = tmp_path / "fleet" / f"old-{number}"
        folder.mkdir(parents=True)
        fields = {"server_id": folder.name, "fleet_id": "fleet", "tp": 1, "devices": ["0"], "command": [], "port": 1}
        spec = {name: value for name, value in fields.items() if name != "port"}
        (folder / "server.json").write_text(json.dumps({"spec": spec | {"environment": {}}, "port": 1}))
        (folder / "process.json").write_text(json.dumps({"pid": 1, "started": -1, "boot": "another"}))
        (folder / "stop").touch()
    spec = ServerSpec("new", "fleet", 1, ("0",), (sys.executable, "-c", SERVE, "--port", "{port}"))
    launching = asyncio.create_task(launcher.launch(spec))
    while not launching.done():
        found = await launcher.find("fleet")
        assert all(one.state is ServerState.EXITED for one in found if one.spec.server_id != "new")
    await launching
    assert len(await launcher.find("fleet")) == MAX_STOPPED_KEPT + 1
    await launcher.stop("new", 5.0)
