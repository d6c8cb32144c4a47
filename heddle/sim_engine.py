"""`heddle sim-engine`: a simulated model server on a port."""

import argparse
import dataclasses
import sys
import time
from pathlib import Path

from engines.listener import bound
from engines.profiles import load_profile, profile_names
from engines.simulated.server import run as run_engine
from engines.simulated.settings import SimulatedEngineSettings
from heddle.arguments import count, port, positive, seconds, seed, why

_EPILOG = """examples:
  heddle sim-engine --port 8000
  heddle sim-engine --dialect sglang --port 30000 --profile qwen3-14b-h100-tp4 --speed-up 20
  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
       -d '{"model":"simulated","messages":[{"role":"user","content":"hi"}]}'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a simulated engine."""
    parser.epilog = _EPILOG
    parser.add_argument("--dialect", choices=("vllm", "sglang"), default="vllm", help="default: %(default)s")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=port, default=8000, help="port to listen on (default: %(default)s)")
    parser.add_argument("--model", default="simulated", help="the model's name (default: %(default)s)")
    parser.add_argument("--profile", default="qwen3-14b-h100-tp1", help="timing and KV; 'list' shows all")
    parser.add_argument("--slots", type=count, help="concurrent turns (default: the profile's)")
    parser.add_argument("--kv-tokens", type=count, help="KV capacity (default: the profile's)")
    parser.add_argument(
        "--data-parallel-size", type=count, default=1, metavar="N", help="engines, each with its own slots and KV"
    )
    parser.add_argument("--max-model-len", type=count, default=40_960, help="tokens of prompt and answer together")
    parser.add_argument("--speed-up", type=positive, default=1.0, help="virtual seconds per second")
    parser.add_argument(
        "--start-s", type=seconds, default=0.0, help="virtual seconds until it listens: loading weights"
    )
    parser.add_argument("--sleep-s", type=seconds, default=0.0, help="virtual seconds to fall asleep, and to wake")
    parser.add_argument("--chunk-interval", type=seconds, default=0.0, metavar="S", help="seconds between chunks")
    parser.add_argument(
        "--scheduling-policy",
        choices=("fcfs", "priority"),
        default="priority",
        help="vLLM's option (default: %(default)s)",
    )
    parser.add_argument("--kv-transfer", action="store_true", help="vLLM's NixlConnector: KV can be fetched by others")
    parser.add_argument("--kv-tier", type=Path, metavar="FOLDER", help="KV is shared with all servers of this folder")
    parser.add_argument("--seed", type=seed, default=0, help="seed of the faults")


def run(parsed: argparse.Namespace) -> int:
    """Serve until stopped."""
    if parsed.profile == "list":
        print("\n".join(profile_names()))
        return 0
    try:
        settings = _settings(parsed)
        if settings.kv_tier is not None:
            settings.kv_tier.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        print(f"heddle sim-engine: {why(error)}", file=sys.stderr)
        return 2
    try:
        address = bound(parsed.host, parsed.port)
    except OSError as error:
        print(f"heddle sim-engine: cannot listen on {parsed.host}:{parsed.port}: {error.strerror}", file=sys.stderr)
        return 2
    time.sleep(parsed.start_s / parsed.speed_up)
    run_engine(settings, address)
    return 0


def _settings(parsed: argparse.Namespace) -> SimulatedEngineSettings:
    """Raises ValueError: there is no such profile, or the options exclude each other."""
    profile = load_profile(parsed.profile)
    if parsed.slots:
        profile = dataclasses.replace(profile, slots=parsed.slots)
    if parsed.kv_tokens:
        profile = dataclasses.replace(profile, kv_capacity_tokens=parsed.kv_tokens)
    return SimulatedEngineSettings(
        dialect=parsed.dialect,
        profile=profile,
        data_parallel_size=parsed.data_parallel_size,
        speed_up=parsed.speed_up,
        max_model_len=parsed.max_model_len,
        model=parsed.model,
        scheduling_policy=parsed.scheduling_policy,
        chunk_interval_s=parsed.chunk_interval,
        kv_transfer=parsed.kv_transfer,
        kv_tier=parsed.kv_tier,
        sleep_s=parsed.sleep_s,
        seed=parsed.seed,
    )
