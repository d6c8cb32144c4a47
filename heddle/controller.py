"""`heddle controller`: the process that launches, relaunches and stops the engines of a fleet."""

import argparse
import sys

import uvloop

from controller.assembly import launcher_of
from controller.demand import DemandAway
from controller.dry_run import LauncherAway, told
from controller.fleet_file import FleetFileError, load_fleet_file
from controller.gateway_client import GatewayAway, GatewayRefused
from gateway.turnlog import log_to_stderr

_EPILOG = """examples:
  HEDDLE_ADMIN_KEY=... heddle controller --fleet fleet.toml
  heddle controller --fleet fleet.toml --dry-run

docs/controller.md describes fleet.toml and each alarm.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The controller's options; everything else is in the file."""
    parser.epilog = _EPILOG
    parser.add_argument("--fleet", required=True, metavar="FILE", help="the fleet file")
    parser.add_argument("--dry-run", action="store_true", help="explain the next plan step by step, and change nothing")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")


def run(parsed: argparse.Namespace) -> int:
    """Run until stopped; 2 if the file or the journal cannot be used."""
    try:
        fleet = load_fleet_file(parsed.fleet)
        if parsed.dry_run:
            print("\n".join(uvloop.run(told(fleet, launcher_of(fleet)))))
            return 0
        from controller.process import run as run_controller  # with its web server, 0.4 s of a core

        log_to_stderr(parsed.log_level)
        uvloop.run(run_controller(fleet))
    except (FleetFileError, LauncherAway, GatewayAway, GatewayRefused, DemandAway, ValueError) as error:
        print(f"heddle controller: {error}", file=sys.stderr)
        return 2
    return 0
