"""`heddle fleet`: shows the fleet and what a plan would do, and carries out an operator's orders."""

import argparse
import http.client
import json
import os
import re
import sys
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlencode

from controller.admin_key import ADMIN_KEY_VARIABLE
from engines.keys import check_key
from scheduling.fleets import in_words, largest_first

_TIMEOUT_S = 30.0
_EPILOG = """examples:
  heddle fleet show
  heddle fleet plan            # the last plan, and its steps
  heddle fleet plan 2xTP4      # the steps to two engines of TP 4
  HEDDLE_ADMIN_KEY=... heddle fleet scale 4xTP1 2xTP2
  HEDDLE_ADMIN_KEY=... heddle fleet scale --plans     # let plans decide again
  HEDDLE_ADMIN_KEY=... heddle fleet scale 0xTP1 --empty   # end the fleet
  HEDDLE_ADMIN_KEY=... heddle fleet drain SERVER
"""


class _Failed(Exception):
    """The command cannot be carried out; the message is for a person."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verbs, and the option for the controller's address."""
    parser.epilog = _EPILOG
    parser.add_argument("what", choices=("show", "plan", "scale", "drain"), help="see the examples")
    parser.add_argument("of", nargs="*", metavar="COUNTxTP | SERVER", help="engines such as 2xTP4, or a server's id")
    parser.add_argument("--plans", action="store_true", help="with scale: let plans decide again")
    parser.add_argument("--empty", action="store_true", help="with scale 0xTP1: end every engine of the fleet")
    parser.add_argument("--controller", default="http://127.0.0.1:8070", metavar="URL", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print the API's JSON")


def run(parsed: argparse.Namespace) -> int:
    """1 if the controller refused or cannot be reached, 2 if the command makes no sense."""
    try:
        answer = _asked(parsed)
        told = _plan(answer, _sizes(parsed.of) if parsed.of else None) if parsed.what == "plan" else _fleet(answer)
    except _Failed as failed:
        print(f"heddle fleet: {failed}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"heddle fleet: {error}", file=sys.stderr)
        return 2
    except (KeyError, TypeError, AttributeError) as error:
        print(f"heddle fleet: what answers at {parsed.controller} is not a controller ({error!r})", file=sys.stderr)
        return 1
    print(json.dumps(answer, indent=2) if parsed.json else told)
    return 0


def _asked(parsed: argparse.Namespace) -> Any:
    if not parsed.controller.startswith(("http://", "https://")):
        raise ValueError(f"--controller: must be a URL such as http://127.0.0.1:8070, not {parsed.controller!r}")
    if parsed.plans and parsed.what != "scale":
        raise ValueError("--plans goes with scale")
    if parsed.empty and parsed.what not in ("scale", "plan"):
        raise ValueError("--empty goes with scale")
    if parsed.empty and not parsed.of:
        raise ValueError(f"--empty needs a fleet without engines: `heddle fleet {parsed.what} 0xTP1 --empty`")
    match parsed.what:
        case "show" if parsed.of:
            raise ValueError(f"show takes no arguments, such as {parsed.of[0]!r}")
        case "show":
            return _ask(parsed.controller, "GET", "/v1/fleet")
        case "plan":
            sizes = [("tps", str(tp)) for tp in _sizes(parsed.of)] or [("empty", "true")] * bool(parsed.of)
            return _ask(parsed.controller, "GET", f"/v1/plan?{urlencode(sizes)}")
        case "scale":
            if parsed.plans == bool(parsed.of):
                raise ValueError("scale needs the number of engines of each size, such as 2xTP4, or --plans")
            asked = {"plans": True} if parsed.plans else {"tps": _sizes(parsed.of), "empty": parsed.empty}
            return _ask(parsed.controller, "POST", "/v1/scale", asked)
        case _:
            if len(parsed.of) != 1:
                raise ValueError("drain needs the id of one server; `heddle fleet show` lists them")
            return _ask(parsed.controller, "POST", "/v1/drain", {"server": parsed.of[0]})


def _sizes(texts: list[str]) -> list[int]:
    """`["2xTP4", "1x1"]` is `[4, 4, 1]`."""
    sizes: list[int] = []
    for text in texts:
        # No fleet has 10,000 engines: a larger number is a slip, and its list would take long.
        found = re.fullmatch(r"(\d{1,4})x(?:TP)?([1-9]\d{0,3})", text, re.IGNORECASE)
        if not found:
            raise ValueError(f"{text!r} is not COUNTxTP, such as 2xTP4")
        sizes += [int(found[2])] * int(found[1])
    return sizes


def _ask(url: str, method: str, target: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(url.rstrip("/") + target, method=method)
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("content-type", "application/json")
    if key := os.environ.get(ADMIN_KEY_VARIABLE):
        try:
            check_key(key)
        except ValueError as error:
            raise ValueError(f"{ADMIN_KEY_VARIABLE}: {error}") from None
        request.add_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        try:
            told = json.loads(said)["error"]
            message = told["message"]
            if told.get("code") == "unknown_route":  # of a gateway's errors, not of a controller's
                message = f"no controller at {url}, but a gateway; --controller names another address"
        except (ValueError, KeyError, TypeError):
            message = f"status {error.code}: {said[:300]}"
        raise _Failed(message) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        said = " ".join(str(getattr(error, "reason", error)).split())  # it may quote lines of something else there
        raise _Failed(f"no controller at {url}: {said}; --controller names another address") from None


def _fleet(told: dict[str, Any]) -> str:
    why = f" ({told['why']})" if told["why"] else ""  # before its first look at the gateway it has none
    lines = [f"fleet {told['fleet']}: {'as wanted' if told['is_reached'] else 'on its way'}{why}"]
    if command := told.get("command_to_start"):  # a controller of an earlier version does not tell
        lines.append(f"no engines are wanted, also after a restart: `{command}` starts some")
    lines.append(f"plan: {told['proposal']['why']}")
    if told["is_manual"]:
        lines.append(
            "plans are only shown, because the fleet was set by hand; `heddle fleet scale --plans` lets them decide"
        )
    elif not told["is_automatic"]:
        lines.append("plans are only shown, because planning.is_automatic is off")
    lines += [f"ALARM {name}: {why}" for name, why in told["alarms"].items()]
    for one in sorted(told["servers"], key=lambda one: one["state"] == "asleep"):
        on = ",".join(one["devices"])
        lines.append(f"  {one['id']:28} TP {one['tp']}  {one['state']:10} {one['num_turns']:4} turns  on {on}")
        if waits_for := one.get("waits_for"):  # of an image, or for room on its node
            lines.append(f"    waits: {waits_for}")
    if told["resting_devices"]:
        lines.append(f"resting: {', '.join(told['resting_devices'])}")
    took: dict[str, list[str]] = {}
    for one in told["phase_seconds"]:
        took.setdefault(one["phase"], []).append(f"TP {one['tp']} {one['median']:.1f} s")
    lines += [f"{phase} took {', '.join(times)}" for phase, times in took.items()]
    lines += [
        f"failed: {one['server_id']} (TP {one['tp']}): {one['cause']}; {' | '.join(one['last_lines'][-3:])}"
        for one in told["failures"][-3:]
    ]
    return "\n".join(lines)


def _plan(told: dict[str, Any], sizes: list[int] | None) -> str:
    if sizes is None:
        return "\n".join([told["proposal"]["why"], *told["steps"]])
    return "\n".join([f"to {in_words(largest_first(sizes)) or 'no engine'}:", *(told["steps"] or ["nothing to do"])])
