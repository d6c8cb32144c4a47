"""The command `heddle replay`: its arguments, and playing the workload that they describe."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from rich.console import Console

from engines.keys import check_key
from heddle.arguments import Help, count, out_file, positive, seed, share, whole, why
from loadtest.agent import Identity
from loadtest.clients import RequestFailed, patience_s
from loadtest.display import RolloutProgress, print_results
from loadtest.replayer import ReplaySettings, replay
from workloads.laws import draw, law_named
from workloads.result_files import write_whole
from workloads.traces import load_trace
from workloads.trajectories import Workload

EPILOG = """\
examples:
  heddle replay --base-url http://127.0.0.1:8080/v1 --law coding --trajectories 64 --speed-up 20
  heddle replay --base-url http://127.0.0.1:8080/v1 --trace agents.jsonl.gz --limit 24 --max-turns 8 \\
      --max-context-tokens 2000 --speed-up 100 --identity path --json out.json
  heddle replay --base-url http://127.0.0.1:8000/v1 --law math-heavy --no-finish   # an engine, with no gateway

Exits with 1 if a turn failed, and with 2 if the arguments or the server's address are wrong.
"""

# A check before the first request; a slower server is left to the requests.
_LOOK_TIMEOUT_S = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments, the description and the examples of `heddle replay`."""
    parser.description = "Play trajectories against any OpenAI base URL, as agents would."
    parser.epilog = EPILOG
    parser.formatter_class = Help
    add = parser.add_argument
    add("--base-url", type=_base_url, required=True, metavar="URL", help="base URL, ending in /v1")
    add("--api-key", type=_api_key, default="none", metavar="KEY", help="sent as the bearer token")
    add("--model", help="model to ask for (default: the first that the server lists)")
    _add_workload_arguments(parser)
    add("--speed-up", type=positive, default=1.0, help="divides tool times (default 1)")
    add("--identity", choices=get_args(Identity), default="header", help="how agents name their trajectory")
    add("--stream", action=argparse.BooleanOptionalAction, default=True, help="stream answers (default)")
    add("--stream-share", type=share, help="only this share of the trajectories streams, 0 to 1")
    add("--concurrency", type=count, help="concurrent trajectories (default: all)")
    add("--max-retries", type=whole, default=8, help="retries of a request; 8 bridge a restart of half a minute")
    add("--client", choices=("sdk", "raw"), default="sdk", help="OpenAI's SDK, or a cheaper client")
    add("--finish", action=argparse.BooleanOptionalAction, default=True, help="tell the gateway of each end")
    add("--rollout-id", help="begins every trajectory's id (default: a new one)")
    add("--json", type=out_file, metavar="FILE", help="write summary, trajectories and turns here")


async def run(args: argparse.Namespace) -> int:
    """Play what the arguments describe; returns the exit code. Best on uvloop: `uvloop.run(run(args))`."""
    # Progress goes to standard error, so that standard output can be piped.
    console = Console(stderr=True)
    try:
        workload = _workload(args)
        settings = _settings(args)
        if settings.max_retries and (reason := await _unreachable(settings.base_url)):
            print(_patience(settings, reason), file=sys.stderr)
        with RolloutProgress(workload, workload.name, console) as progress:
            result = await replay(workload, settings, name=workload.name, on_turn=progress.on_turn)
        if args.json:
            write_whole(args.json, (json.dumps(result.to_json(), indent=1) + "\n").encode())
    except (OSError, ValueError, RequestFailed) as error:
        print(f"heddle replay: {why(error)}{_advice(args.base_url, str(error))}", file=sys.stderr)
        return 2
    print_results([result], Console(markup=False))
    if advice := _advice(args.base_url, *result.errors):
        print(f"heddle replay: turns failed{advice}", file=sys.stderr)
    return 1 if result.errors else 0


def _add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines of trajectories, .gz or not")
    source.add_argument("--law", help="coding, search or math, alone or with -light, -heavy, -pareto, -even")
    add = parser.add_argument
    add("--trajectories", "--limit", type=count, metavar="N", help="default: 64 from a law, all from a trace")
    add("--seed", type=seed, default=1, help="seed of the draw (default 1)")
    add("--scale", type=positive, default=1.0, help="multiplies lengths")
    add("--tool-scale", type=positive, help="multiplies tool times (default: as lengths)")
    add("--max-context-tokens", type=count, help="scale lengths until every trajectory fits")
    add("--max-turns", type=count, help="leave out later turns")
    add("--max-tool-s", type=positive, help="shorten longer tool calls")


def _workload(args: argparse.Namespace) -> Workload:
    if args.trace:
        workload = load_trace(args.trace, args.trajectories, args.seed, args.scale, tool_scale=args.tool_scale)
    else:
        law = law_named(args.law)
        workload = draw(law, args.trajectories or 64, args.seed, scale=args.scale, tool_scale=args.tool_scale)
    return workload.within(args.max_turns, args.max_context_tokens, args.max_tool_s)


def _settings(args: argparse.Namespace) -> ReplaySettings:
    return ReplaySettings(
        base_url=args.base_url,
        api_key=args.api_key,
        model=args.model,
        identity=args.identity,
        stream_share=args.stream_share if args.stream_share is not None else float(args.stream),
        speed_up=args.speed_up,
        concurrency=args.concurrency,
        max_retries=args.max_retries,
        finish=args.finish,
        client=args.client,
        rollout_id=args.rollout_id,
    )


async def _unreachable(base_url: str) -> str | None:
    """Why no connection can be made to a server; None if one can, or if a proxy makes it."""
    address = urlsplit(base_url)
    host = address.hostname or ""
    if address.scheme in getproxies() and not proxy_bypass(host):
        return None
    try:
        async with asyncio.timeout(_LOOK_TIMEOUT_S):
            port = address.port or (443 if address.scheme == "https" else 80)
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"no answer within {_LOOK_TIMEOUT_S:.0f} s"
    except OSError as error:
        return error.strerror or str(error)
    writer.close()
    return None


def _patience(settings: ReplaySettings, reason: str) -> str:
    """What to tell the user while nothing seems to happen: clients retry silently through a restart."""
    num = settings.max_retries
    return (
        f"heddle replay: cannot connect to {settings.base_url}: {reason}; "
        f"retrying up to {num} times, for at most {math.ceil(patience_s(num)):,} s"
    )


def _advice(base_url: str, *errors: str) -> str:
    """What to do about errors of a server that knows no path without /v1; "" if they do not look like that."""
    url = base_url.rstrip("/")
    is_unknown = not url.endswith("/v1") and any("HTTP 404" in error for error in errors)
    return f" (give the base URL with its /v1: --base-url {url}/v1)" if is_unknown else ""


def _base_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        host, port = (parts.hostname or "").encode("idna"), parts.port
    except ValueError:
        host, port = b"", None
    if not text.startswith(("http://", "https://")) or not host or port == 0:
        raise argparse.ArgumentTypeError(f"must be a URL such as http://127.0.0.1:8080/v1, not {text!r}")
    return text


def _api_key(text: str) -> str:
    try:
        check_key(text)
    except ValueError as error:  # as it is, argparse would show the key
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
