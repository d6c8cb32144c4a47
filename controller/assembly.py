"""Assembles a controller, in one place: lease, journal, launcher, gateway, demand and loop."""

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from controller.demand import demand_of
from controller.fleet_file import PIN_VARIABLE, FleetFile, FleetFileError
from controller.gateway_client import GatewayClient
from controller.journal import Journal, JournalAway, check_owner, read_state
from controller.launcher import Launcher
from controller.lease import Lease
from controller.local_launcher import LocalLauncher
from controller.loop import Controller

LOGGER = logging.getLogger("heddle.controller")


def launcher_of(fleet: FleetFile) -> Launcher:
    """The launcher that the file names. Raises FleetFileError if it cannot be used."""
    try:
        match fleet.launcher:
            case "local":
                _check_visible(fleet)
                pin = None if fleet.cpu_slots else PIN_VARIABLE
                folder = fleet.state_dir / "servers"
                return LocalLauncher(folder, fleet.local_devices, pin, fleet.limits.max_log_bytes)
            case "ray":
                from controller.ray_launcher import ray_launcher

                return ray_launcher(fleet.launcher_options)
            case "kubernetes":
                from controller.kubernetes_launcher import kubernetes_launcher

                return kubernetes_launcher(fleet.launcher_options)
    except (ImportError, ValueError) as error:
        raise FleetFileError(f"launcher {fleet.launcher}: {error}") from None


def _check_visible(fleet: FleetFile) -> None:
    """Raises ValueError if `gpus` counts GPUs that this process was not given: Slurm may have given them to others."""
    visible = os.environ.get(PIN_VARIABLE)
    if fleet.gpus and visible and not set(fleet.local_devices) <= set(visible.replace(" ", "").split(",")):
        raise ValueError(
            f"gpus = {fleet.gpus} is GPU 0 and so on, but {PIN_VARIABLE} is {visible}: name them in `devices`"
        )


@asynccontextmanager
async def controller(fleet: FleetFile, launcher: Launcher) -> AsyncIterator[Controller]:
    """A controller that holds the fleet's lease, for which it waits; its loop is not started.

    Raises:
        FleetFileError: its folder cannot be used.
        ValueError: the journal is damaged, cannot be read, or is another fleet's.
    """
    lease, path = Lease(fleet.state_dir / "lease"), fleet.state_dir / "journal.jsonl"
    try:
        if not lease.try_take():
            check_owner(read_state(path), fleet.fleet, fleet.state_dir)
            LOGGER.warning("another controller acts; waiting", extra={"fields": {"process": lease.holder()}})
            await lease.take()
    except OSError as error:
        raise FleetFileError(f"state_dir {fleet.state_dir} cannot be used: {error.strerror}") from None
    try:
        check_owner(read_state(path), fleet.fleet, fleet.state_dir)
        try:
            journal = Journal(path)
            if not journal.state.fleet:
                journal.write(kind="fleet", fleet=fleet.fleet)
        except OSError as error:  # a full disk
            raise FleetFileError(f"state_dir {fleet.state_dir} cannot be used: {error.strerror}") from None
        except JournalAway as fault:
            raise FleetFileError(str(fault)) from None
        key = fleet.admin_key.get_secret_value() if fleet.admin_key else None
        gateway = GatewayClient(fleet.gateway, key)
        demand = demand_of(fleet.demand, gateway)
        made = Controller(fleet, launcher, gateway, demand, journal)
        try:
            yield made
        finally:
            await made.close()
            await demand.aclose()
            journal.close()
    finally:
        lease.give_back()
