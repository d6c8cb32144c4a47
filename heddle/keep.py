"""`heddle keep`: a command that is restarted when it dies, and finds its file descriptors again."""

import argparse
import sys

from heddle.arguments import count, positive, why
from keeper.keeper import Keeper, KeeperSettings

_DEFAULTS = KeeperSettings()
_EPILOG = """examples:
  heddle keep -- heddle serve --engine http://127.0.0.1:8000
  heddle keep --max-failures 3 -- heddle serve --config heddle.toml

A gateway that is killed under it resumes the token legs in flight (docs/operating.md). SIGTERM and SIGINT go to the
command, and its exit status is returned. Under systemd it is not needed: a unit keeps descriptors itself.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the limits, and the command."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    add(
        "--max-descriptors",
        type=count,
        default=_DEFAULTS.max_descriptors,
        help="limit of kept descriptors (default %(default)s)",
    )
    add(
        "--first-pause-s",
        type=positive,
        default=_DEFAULTS.first_pause_s,
        help="seconds before the first restart; doubles with each further one (default %(default)s)",
    )
    add(
        "--longest-pause-s",
        type=positive,
        default=_DEFAULTS.longest_pause_s,
        help="longest pause before a restart, in seconds (default %(default)s)",
    )
    add(
        "--max-failures",
        type=count,
        default=_DEFAULTS.max_failures,
        help="give up after more failures in a row (default %(default)s)",
    )
    add("command", nargs="+", metavar="COMMAND", help="the command and its arguments, after --")


def run(parsed: argparse.Namespace) -> int:
    """Keep the command running until it ends for good; returns its status, or 2 if nothing can be kept."""
    settings = KeeperSettings(
        max_descriptors=parsed.max_descriptors,
        first_pause_s=parsed.first_pause_s,
        longest_pause_s=parsed.longest_pause_s,
        max_failures=parsed.max_failures,
    )
    try:
        return Keeper(parsed.command, settings).run()
    except OSError as error:  # no folder for temporary files: a container whose root is read-only
        print(f"heddle keep: {why(error)}", file=sys.stderr)
        return 2
