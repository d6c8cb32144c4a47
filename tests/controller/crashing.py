"""A controller that kills itself: `python -m tests.controller.crashing FLEET_JSON POINT`.

A point is the moment before or after a record, or before or after a call that changes something at the launcher, the
gateway or a server. At point number POINT, the process ends by SIGKILL. If the fleet is as wanted before that, it exits
with 0 and prints how many points it passed.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from pydantic import SecretStr

from controller.admin_key import ADMIN_KEY_VARIABLE
from controller.assembly import controller
from controller.fleet_file import FleetFile
from controller.gateway_client import GatewayClient
from controller.journal import Journal
from controller.local_launcher import LocalLauncher
from controller.steps import is_reached
from engines.sleep import VllmSleep


class Fuse:
    """Counts points, and kills the process at one."""

    def __init__(self, point: int) -> None:
        self.num_passed = 0
        self._point = point

    def pass_point(self) -> None:
        self.num_passed += 1
        if self.num_passed == self._point:
            os.kill(os.getpid(), signal.SIGKILL)

    def guard(self, owner: type, name: str) -> None:
        """Points before and after each call of a method."""
        method = getattr(owner, name)
        setattr(
            owner, name, self._guarded_async(method) if asyncio.iscoroutinefunction(method) else self._guarded(method)
        )

    def _guarded(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.pass_point()
            result = method(*arguments, **named)
            self.pass_point()
            return result

        return call

    def _guarded_async(self, method: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*arguments: Any, **named: Any) -> Any:
            self.pass_point()
            result = await method(*arguments, **named)
            self.pass_point()
            return result

        return call


async def main(fleet: FleetFile, fuse: Fuse) -> None:
    """Run the controller until the fleet is as wanted."""
    async with controller(fleet, LocalLauncher(fleet.state_dir / "servers", fleet.local_devices, None)) as made:
        task = asyncio.create_task(made.run())
        while not (is_reached(made.journal.state.wanted, made.seen) and _is_quiet(made.journal)):
            await asyncio.sleep(0.02)
            assert not task.done(), task.exception()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    print(fuse.num_passed)


def _is_quiet(journal: Journal) -> bool:
    """The gateway and the journal have nothing left to forget."""
    return journal.state.wanted == journal.state.proven and set(journal.state.urls) == {
        one.server_id for one in journal.state.wanted
    }


if __name__ == "__main__":
    fuse = Fuse(int(sys.argv[2]))
    fuse.guard(Journal, "write")
    for name in ("launch", "stop"):
        fuse.guard(LocalLauncher, name)
    for name in ("add", "drain", "uncordon", "remove"):
        fuse.guard(GatewayClient, name)
    for name in ("fall_asleep", "wake"):
        fuse.guard(VllmSleep, name)
    key = SecretStr(os.environ[ADMIN_KEY_VARIABLE])
    fleet = FleetFile.model_validate_json(sys.argv[1]).model_copy(update={"admin_key": key})
    asyncio.run(main(fleet, fuse))
