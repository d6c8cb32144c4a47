"""`heddle up`: one command for gateway and controller."""

import asyncio
import itertools
import os
import signal
import sys
from pathlib import Path

import httpx
import pytest

from controller.admin_key import ADMIN_KEY_VARIABLE
from controller.fleet_file import load_fleet_file
from controller.launcher import ServerState
from engines.children import free_port
from tests.controller.fleet_site import TIMEOUT_S, alive, engines, launcher_for, stopped_at_the_end
from tests.controller.test_commands import heddle, write_fleet
from tests.support.gateway import ADMIN_KEY, eventually, running_gateway

pytestmark = pytest.mark.timeout(300)


async def up(path: Path) -> asyncio.subprocess.Process:
    """Its log is the file `log` beside the fleet file."""
    store = f"sqlite:{path.parent / 'store.sqlite3'}"
    with (path.parent / "log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "heddle", "up", "--fleet", str(path), "--log-level", "warning"),
            env={**os.environ, ADMIN_KEY_VARIABLE: ADMIN_KEY, "HEDDLE_STORE": store},
            stderr=log,
        )


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_a_fleet_serves_with_one_command(how: signal.Signals, tmp_path: Path) -> None:
    """A turn is answered by an engine that nobody started by hand. When `heddle up` is told to end, or is killed,
    gateway and controller end, too, and the engines keep running. The controller's first look comes before its gateway
    serves, which was an alarm."""
    gateway, listen = (f"http://127.0.0.1:{port}" for port in (free_port(), free_port()))
    path = write_fleet(tmp_path, gateway, int(listen.rpartition(":")[2]))
    fleet = load_fleet_file(path)
    async with stopped_at_the_end(fleet), httpx.AsyncClient(timeout=60) as client:
        process = await up(path)
        try:

            async def serves() -> bool:
                try:
                    return bool((await client.get(f"{listen}/v1/fleet")).json()["is_reached"])
                except httpx.TransportError:
                    return False

            await eventually(serves, TIMEOUT_S)
            body = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            assert (await client.post(f"{gateway}/v1/chat/completions", json=body)).status_code == 200
            assert "gateway_away" not in (tmp_path / "log").read_text()
        finally:
            process.send_signal(how)
        assert await process.wait() == (0 if how is signal.SIGTERM else -signal.SIGKILL)

        async def are_gone() -> bool:
            for url in (gateway, listen):
                try:
                    await client.get(f"{url}/healthz")
                    return False
                except httpx.TransportError:
                    pass
            return True

        await eventually(are_gone, TIMEOUT_S)
        servers = await launcher_for(fleet).find(fleet.fleet)
        assert [server.state for server in servers] == [ServerState.RUNNING] * 2


async def test_a_keeper_starts_it_again_when_its_gateway_is_killed(tmp_path: Path) -> None:
    """`heddle keep` keeps descriptors of the command that it starts, which is not the gateway here. It kept the
    gateway's listening socket all the same: no further `heddle up` could listen, and clients waited there for ever."""
    url = f"http://127.0.0.1:{free_port()}"
    path = write_fleet(tmp_path, url, free_port())
    store = f"sqlite:{tmp_path / 'store.sqlite3'}"
    async with stopped_at_the_end(load_fleet_file(path)), httpx.AsyncClient(timeout=5) as client:
        keeper = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "heddle", "keep", "--"),
            *(sys.executable, "-m", "heddle", "up", "--fleet", str(path), "--log-level", "warning"),
            env={**os.environ, ADMIN_KEY_VARIABLE: ADMIN_KEY, "HEDDLE_STORE": store},
        )
        try:

            async def serves() -> bool:
                try:
                    return (await client.get(f"{url}/healthz")).is_success
                except httpx.TransportError:
                    return False

            await eventually(serves, TIMEOUT_S)
            (one,) = children(keeper.pid)
            (gateway,) = (pid for pid in children(one) if "serve" in arguments_of(pid))
            os.kill(gateway, signal.SIGKILL)
            await eventually(lambda: children(keeper.pid) != [one], TIMEOUT_S)
            await eventually(serves, TIMEOUT_S)
        finally:
            keeper.terminate()
            await keeper.wait()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def arguments_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


async def test_the_fleet_in_its_help_text_is_valid(tmp_path: Path) -> None:
    """A newcomer who copies it gets engines."""
    _, output = await heddle("up", "--help")
    lines = output.partition("for a first look")[2].splitlines()[1:]
    file = tmp_path / "fleet.toml"
    file.write_text("\n".join(itertools.takewhile(str.strip, lines)))
    fleet = load_fleet_file(file)
    assert fleet.local_devices == ("cpu0", "cpu1") and set(fleet.profiles()) == {1, 2}


async def test_a_refused_configuration_ends_both_processes(tmp_path: Path) -> None:
    """The exit status is that of the process that refused it. Without a key, or without the fleet file, neither
    starts."""
    port = free_port()
    path = write_fleet(tmp_path, f"http://127.0.0.1:{port}", free_port())
    config = tmp_path / "heddle.toml"
    config.write_text("no_such_setting = 1")
    status, output = await heddle("up", "--fleet", str(path), "--config", str(config))
    assert status == 2 and "no_such_setting" in output and "the gateway ended with status 2" in output
    status, output = await heddle("up", "--fleet", str(path), admin_key=None)
    assert (status, output) == (2, "heddle up: gateway and controller need a shared secret: set HEDDLE_ADMIN_KEY\n")
    status, output = await heddle("up", "--fleet", str(tmp_path / "absent.toml"))
    assert status == 2 and output.startswith("heddle up: cannot read ") and output.count("\n") == 1


async def test_no_engine_is_launched_if_another_gateway_has_the_address(tmp_path: Path) -> None:
    """The controller took it for its own: the other fleet got this one's engines, which then ran for ever."""
    async with running_gateway() as gateway:
        path = write_fleet(tmp_path, gateway.url, free_port())
        async with stopped_at_the_end(load_fleet_file(path)):
            status, output = await heddle("up", "--fleet", str(path))
            at = gateway.url.removeprefix("http://")
            assert (status, output) == (2, f"heddle up: cannot listen on {at}: Address already in use\n")
            assert not await alive(load_fleet_file(path)) and not await engines(gateway.url)


@pytest.mark.parametrize("url", ["https://127.0.0.1", "https://127.0.0.1:8443", "http://127.0.0.1:8080/heddle"])
async def test_a_gateway_url_at_which_it_cannot_listen_is_refused(url: str, tmp_path: Path) -> None:
    """It speaks plain HTTP, at no other path: clients and controller would ask in vain. Neither process starts, and so
    the wrong setting is not reported."""
    path = write_fleet(tmp_path, url, free_port())
    config = tmp_path / "heddle.toml"
    config.write_text("no_such_setting = 1")
    status, output = await heddle("up", "--fleet", str(path), "--config", str(config))
    assert status == 2 and output.count("\n") == 1, output
    assert output.startswith(f"heddle up: {path}: gateway: ") and f"http://127.0.0.1:8080, not '{url}'" in output
