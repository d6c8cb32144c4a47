"""`heddle serve`: settings from the command line, then the gateway."""

import argparse
import json
import sys

from pydantic.fields import FieldInfo

from gateway.config import ConfigError, Settings, load_settings
from gateway.engine_settings import EngineSettings
from gateway.server import run as run_gateway
from gateway.turnlog import log_to_stderr
from heddle.arguments import port
from store import StoreError

_EPILOG = """examples:
  heddle serve --engine http://127.0.0.1:8000 --engine sglang+http://127.0.0.1:30000
  heddle serve --config heddle.toml --port 9000
  HEDDLE_ENGINES=http://a:8000,http://b:8000 HEDDLE_STORE=redis://127.0.0.1:6379/0 heddle serve

Every setting is a key of the TOML file and an environment variable: `heartbeat_s` is HEDDLE_HEARTBEAT_S. The command
line overrides the environment, and the environment overrides the file. `heddle serve --settings` lists all settings.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that are set by hand; all others are in the file or the environment."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "--engine", action="append", dest="engines", metavar="URL", help="base URL of an engine; may be repeated"
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings (default: HEDDLE_CONFIG)")
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=port, help="port to listen on; 0 takes any free one (default: 8080)")
    parser.add_argument("--policy", help="how turns are scheduled; see `heddle simulate --help` (default: heddle)")
    parser.add_argument(
        "--store",
        metavar="URL",
        help="sqlite:PATH, redis://host:port/db or memory: (default: sqlite:heddle.sqlite3)",
    )
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), help="default: info, a line per turn"
    )
    parser.add_argument("--settings", action="store_true", help="list all settings with their defaults, and exit")


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
    """One setting a line, its default as the TOML file would have it; those of an engine at the end."""
    fields = dict(Settings.model_fields)
    fields |= {f"engines.{name}": field for name, field in EngineSettings.model_fields.items()}
    return "\n".join(f"{name:27}{_shown(field):25}{field.description or ''}" for name, field in fields.items())


def _shown(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "unset" if field.default is None else json.dumps(field.default)
