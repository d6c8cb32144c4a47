"""`heddle serve`: settings from the command line, then the gateway."""

import argparse
import sys
from typing import Any

from gateway.config import ConfigError, Settings, load_settings
from gateway.server import run as run_gateway
from gateway.turnlog import log_to_stderr
from store import StoreError

_EPILOG = """examples:
  heddle serve --engine http://127.0.0.1:8000 --engine sglang+http://127.0.0.1:30000
  heddle serve --config heddle.toml --port 9000
  HEDDLE_ENGINES=http://a:8000,http://b:8000 HEDDLE_STORE=redis://127.0.0.1:6379/0 heddle serve

Every setting is a key of the TOML file and an environment variable HEDDLE_NAME; `heddle serve --settings` lists them.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that one sets by hand; all others are in the file or the environment."""
    parser.epilog = _EPILOG
    parser.add_argument("--engine", action="append", dest="engines", metavar="URL", help="an engine; may be repeated")
    parser.add_argument("--config", metavar="FILE", help="TOML file (or HEDDLE_CONFIG)")
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default 8080)")
    parser.add_argument("--policy", help="how turns are scheduled (default heddle)")
    parser.add_argument("--store", metavar="URL", help="sqlite:PATH, redis://host:port/db or memory:")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"))
    parser.add_argument("--settings", action="store_true", help="list all settings and exit")


def run(parsed: argparse.Namespace) -> int:
    """Serve; 2 if the settings or the store cannot be used."""
    if parsed.settings:
        print(_listed())
        return 0
    names = ("engines", "host", "port", "policy", "store", "log_level")
    try:
        settings = load_settings(parsed.config, **{name: getattr(parsed, name) for name in names})
        log_to_stderr(settings.log_level)
        run_gateway(settings)
    except (ConfigError, StoreError) as error:
        print(f"heddle serve: {error}", file=sys.stderr)
        return 2
    return 0


def _listed() -> str:
    lines = []
    for name, field in Settings.model_fields.items():
        default: Any = field.default
        lines.append(f"{name:24} {default!r:28} {field.description or ''}")
    return "\n".join(lines)
