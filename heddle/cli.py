"""The command `heddle` and its verbs."""

import errno
import gc
import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from types import ModuleType

import uvloop

from heddle.arguments import Help, Parser

# Name, help, and the module with its `add_arguments` and `run`. Only the requested module is imported: all of them take
# 2.5 s of a core, a simulated engine alone 0.3 s, and fleets start them by the dozen.
_VERBS = (
    ("serve", "Serve the gateway.", "heddle.serve"),
    ("keep", "Run a gateway, and restart it when it dies.", "heddle.keep"),
    ("controller", "Run the engines of a fleet, and reshape it.", "heddle.controller"),
    ("up", "Run gateway and controller of a fleet on this machine.", "heddle.up"),
    ("fleet", "Show and change a fleet through its controller.", "heddle.fleet"),
    ("sim-engine", "Serve a simulated vLLM or SGLang engine.", "heddle.sim_engine"),
    ("profile", "Measure a running engine, for simulation and placement.", "heddle.profile"),
    ("trial", "Compare policies on running engines, and each with its simulation.", "heddle.trial"),
    ("import", "Convert other programs' traces, engines' logs and event logs into a trace.", "heddle.importing"),
    ("predictor", "Train predictors, and compare them.", "heddle.predictor"),
    ("demo", "Run a rollout on simulated engines, with and without Heddle.", "heddle.demo"),
    ("simulate", "Compare policies in virtual time.", "heddle.simulate"),
    ("real", "Run a rollout on real vLLM on CPUs, with and without Heddle.", "heddle.real"),
    ("replay", "Play agent trajectories against any OpenAI base URL.", "heddle.replay"),
)

# These start processes that end with their parent, and keep memory for the next one: both are Linux's work.
_ON_LINUX = ("keep", "controller", "up")

_THIS_MACHINE = "localhost,127.0.0.1,::1"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; returns the process's exit status."""
    _have_standard_files()
    _ask_this_machine_directly()
    try:
        status = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `heddle ... | head`: the reader has read enough
        _write_no_more()
        return 141
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        return 141  # rich's consoles write no more, and end the program themselves
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _write_no_more()
        print(f"heddle: cannot write: {error.strerror}", file=sys.stderr)
        return 1
    return status


def _have_standard_files() -> None:
    """Open the standard files that the caller closed (`heddle ... >&-`): a socket would get the number, and libuv
    aborts a process that closes it. What standard output cannot express, such as a name in another script, is escaped.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - it lives as long as the process
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115 - it lives as long as the process
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _write_no_more() -> None:
    """Discard what standard output still holds: the interpreter writes it at its end, and would report the error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: Sequence[str]) -> int:
    parser = Parser(prog="heddle", description="An OpenAI-compatible gateway for agentic RL rollouts.")
    parser.add_argument("--version", action="version", version=_version() if "--version" in arguments else "")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    module: ModuleType | None = None
    for name, text, module_name in _VERBS:
        verb = verbs.add_parser(name, help=text, description=text, formatter_class=Help)
        if [name] == list(arguments[:1]):
            module = _imported(module_name)
            module.add_arguments(verb)
    parsed, unknown = parser.parse_known_args(arguments)
    if parsed.verb == "fleet" and not any(word.startswith("-") for word in unknown):
        parsed.of += unknown  # what stands after an option: `scale --empty 0xTP1`
        unknown = []
    if unknown:
        is_of_command = parsed.verb == "keep" and "--" not in arguments
        hint = "; the command to keep comes after --, as in `heddle keep -- heddle serve`" if is_of_command else ""
        verbs.choices[parsed.verb].error(f"unknown argument {unknown[0]!r}{hint}")
    if parsed.verb in _ON_LINUX and sys.platform != "linux":
        verbs.choices[parsed.verb].error("needs Linux")
    assert module is not None, "the parser ends the program where no verb is given"
    ran = module.run(parsed)
    status: int = uvloop.run(ran) if inspect.iscoroutine(ran) else ran
    return status


def _imported(name: str) -> ModuleType:
    """A verb's module. What its import creates stays, so no collection scans it: that took a tenth of the import."""
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def _ask_this_machine_directly() -> None:
    """A proxy cannot reach this machine's loopback interface, where verbs start gateways and engines; so neither they
    nor the processes that they start may ask it to.
    """
    has_proxy = any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") for name in os.environ)
    without = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if has_proxy and without.strip() != "*":
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(filter(None, (without, _THIS_MACHINE)))


def _version() -> str:
    from importlib.metadata import version  # a tenth of a simulated engine's start

    return version("heddle")
