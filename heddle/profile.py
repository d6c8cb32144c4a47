"""`heddle profile`: measures a running engine and writes the profile that simulation and placement use.

The engine should be idle. Answers are not streamed, so that the engine is measured and not its client.
"""

import argparse
import asyncio
import math
import random
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import orjson
import uvloop
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from engines.dialect import ObservationError
from engines.http import FAULTS, HttpClient, can_be_asked
from engines.probe import discover
from engines.profiling import VISIT_TOKENS, Batch, Fit, Measurement, fit, plan, to_toml
from engines.upstream import RANK_HEADER
from heddle.arguments import count, out_file, whole, why
from scheduling.cost import EngineProfile
from workloads.result_files import write_whole

_PROBE_TIMEOUT_S = 60.0  # Seen: over 10 s, from a vLLM that had just started on a busy machine.
_REQUEST_TIMEOUT_S = 600.0  # The largest batch of a slow engine takes minutes; beyond this the engine hangs.
_NAME = re.compile(r"([A-Za-z0-9._-]+)-([A-Za-z0-9._]+)-tp([1-9]\d*)")
_EPILOG = """examples:
  heddle profile http://10.0.0.5:8000 --name qwen3-14b-h100-tp2 --out qwen.toml
  heddle sim-engine --profile qwen.toml:qwen3-14b-h100-tp2
"""


class ProfilingError(Exception):
    """The engine cannot be measured; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What an engine reports of itself. `profile` has no coefficients yet."""

    http: HttpClient
    max_context_tokens: int
    profile: EngineProfile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engine and the options."""
    parser.epilog = _EPILOG
    parser.add_argument("engine", type=base_url, help="base URL of a vLLM or SGLang server, without /v1")
    add_options(parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a measurement and its file."""
    parser.add_argument("--out", type=out_file, default=Path("profile.toml"), help="the file to write")
    parser.add_argument("--model", help="the served model (default: the first one)")
    parser.add_argument("--name", default="model-gpu-tp1", help="the profile's name: MODEL-GPU-tpN (%(default)s)")
    parser.add_argument("--slots", type=count, help="concurrent turns, if not reported: vLLM's --max-num-seqs")
    parser.add_argument(
        "--kv-bytes-per-token", type=whole, default=0, help="no engine reports it (default: 0, unknown)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter batches, each once")


def base_url(text: str) -> str:
    """An argument's type: an engine's URL, as `heddle serve` takes it."""
    if not can_be_asked(text):
        raise argparse.ArgumentTypeError("must be a base URL such as http://host:8000")
    return text.rstrip("/").removesuffix("/v1")


def run(parsed: argparse.Namespace) -> int:
    """Measure, print the fit, write the file."""
    console = Console(markup=False)
    try:
        out = checked_out(parsed)
        fitted, measurements = uvloop.run(measure(parsed.engine, parsed, console))
        write(fitted.profile, out)
    except (ProfilingError, OSError, ValueError) as error:
        print(f"heddle profile: {why(error)}", file=sys.stderr)
        return 2
    show(fitted, measurements, console)
    console.print(f"Wrote {out}:{fitted.profile.name}", soft_wrap=True)
    return 0


def checked_out(parsed: argparse.Namespace) -> Path:
    """The file to write, also where it is the default, which the parser does not check. Raises ProfilingError."""
    try:
        return out_file(str(parsed.out))
    except argparse.ArgumentTypeError as error:
        raise ProfilingError(f"--out: {error}") from None


def write(profile: EngineProfile, path: Path) -> None:
    """Write a file in which `load_profile` finds it."""
    short_name = profile.name.rpartition(f"-{profile.gpu}-tp")[0]
    write_whole(path, to_toml(short_name, profile).encode())


async def measure(url: str, parsed: argparse.Namespace, console: Console) -> tuple[Fit, list[Measurement]]:
    """The fit to an engine, and the batches on which it is based.

    Args:
        parsed: the options.

    Raises:
        ProfilingError: the engine does not answer as required.
        ValueError: it holds too little to measure.
    """
    http = HttpClient(url, headers=((RANK_HEADER, "0"),))  # of data-parallel ranks, the first is measured
    try:
        engine = await _ask(http, parsed)
        profile = engine.profile
        batches = plan(profile.slots, profile.kv_capacity_tokens, engine.max_context_tokens, is_quick=parsed.quick)
        measurements = await _measure_all(engine, batches, 1 if parsed.quick else 3, console)
    except (*FAULTS, ObservationError) as error:
        raise ProfilingError(f"{url}: {error}") from None
    finally:
        http.close()
    return fit(measurements, profile), measurements


async def _ask(http: HttpClient, parsed: argparse.Namespace) -> Engine:
    """What the engine reports of itself, with what the user adds."""
    name = _NAME.fullmatch(parsed.name)
    if name is None:
        raise ProfilingError(f"--name {parsed.name!r} is not MODEL-GPU-tpN, such as qwen3-14b-h100-tp2")
    discovery = await discover(http, None, _PROBE_TIMEOUT_S)
    models = {model.model_id: model for model in discovery.models}
    if not models or (parsed.model is not None and parsed.model not in models):
        raise ProfilingError(f"no model {parsed.model or ''!r} there; it serves: {', '.join(models) or 'none'}")
    model = models[parsed.model or next(iter(models))]
    seen, *_ = await discovery.dialect.observe(http, _PROBE_TIMEOUT_S)
    if seen.num_running or seen.num_waiting:
        raise ProfilingError(
            f"the engine is busy ({seen.num_running} running, {seen.num_waiting} waiting); drain it first"
        )
    slots = parsed.slots or seen.slots or await discovery.dialect.slots(http, _PROBE_TIMEOUT_S)
    if slots is None:
        raise ProfilingError(
            "the engine does not report how many turns it runs at once; pass --slots (vLLM's --max-num-seqs)"
        )
    if seen.kv_capacity_tokens is None or model.max_context_tokens is None:
        raise ProfilingError("the engine does not report the size of its KV cache or of its context")
    profile = EngineProfile(
        name=parsed.name,
        model=model.model_id,
        gpu=name[2],
        tp=int(name[3]),
        slots=slots,
        kv_capacity_tokens=seen.kv_capacity_tokens,
        kv_bytes_per_token=parsed.kv_bytes_per_token,
        decode_base_ms=0.0,
        decode_per_sequence_ms=0.0,
        decode_per_kv_ktoken_ms=0.0,
        prefill_per_ktoken_ms=0.0,
        prefill_per_ktoken2_ms=0.0,
        source=f"heddle profile of a {discovery.dialect.kind} server, {time.strftime('%Y-%m-%d')}",
    )
    return Engine(http, model.max_context_tokens, profile)


async def _measure_all(engine: Engine, batches: list[Batch], repeats: int, console: Console) -> list[Measurement]:
    """The median of this many runs of each batch. Runs of one batch are spread out, so a busy minute spoils only one of
    them.
    """
    walls: dict[Batch, list[float]] = {batch: [] for batch in batches if not batch.num_visits}
    visited: list[Measurement] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("warming up", total=repeats * len(batches))
        await _warm_up(engine, max(batch.prompt_tokens for batch in batches))
        for _ in range(repeats):
            prompts: list[list[int]] = []
            for batch in batches:
                progress.update(task, description=_words(batch))
                prompts = prompts if batch.is_cached else _new_prompts(batch)
                if batch.num_visits:
                    visited.append(await _visited(engine, batch, prompts))
                else:
                    walls[batch].append(await _wall_s(engine, batch, prompts))
                progress.advance(task)
    return [*(Measurement(batch, median(times)) for batch, times in walls.items()), *visited]


async def _warm_up(engine: Engine, prompt_tokens: int) -> None:
    """Make the engine do its one-time work, and check that it caches prefixes."""
    once = Batch(1, prompt_tokens, 1)
    await _wall_s(engine, once, _new_prompts(once))
    prompts = _new_prompts(once)
    new_s = await _wall_s(engine, once, prompts)
    cached_s = math.inf
    for _ in range(3):
        wall_s, answers = await _answered(engine, once, prompts)
        if _cached_tokens(answers[0]):  # surer than times of a few milliseconds; by default vLLM does not report it
            return
        cached_s = min(cached_s, wall_s)
    if cached_s > 0.8 * new_s:
        raise ProfilingError(
            f"a prompt of {prompt_tokens} tokens took {new_s:.3f} s, and {cached_s:.3f} s again: "
            "turn on its prefix cache, which agents need anyway"
        )


def _new_prompts(batch: Batch) -> list[list[int]]:
    """Random prompts, which are in no prefix cache. Ids below 250 are single bytes in most tokenizers, so all models
    have them.
    """
    return [random.choices(range(130, 250), k=batch.prompt_tokens) for _ in range(batch.num_sequences)]


async def _wall_s(engine: Engine, batch: Batch, prompts: list[list[int]]) -> float:
    """Seconds from sending a batch to the end of its last answer."""
    return (await _answered(engine, batch, prompts))[0]


async def _answered(engine: Engine, batch: Batch, prompts: list[list[int]]) -> tuple[float, list[bytes]]:
    """These seconds, and the answers, which are as long as they were to be. Raises ProfilingError."""
    fields = {"model": engine.profile.model, "max_tokens": batch.output_tokens, "temperature": 0, "ignore_eos": True}
    bodies = [orjson.dumps(fields | {"prompt": prompt}) for prompt in prompts]
    began_at = time.perf_counter()
    answers = await asyncio.gather(*(engine.http.post("/v1/completions", body, _REQUEST_TIMEOUT_S) for body in bodies))
    wall_s = time.perf_counter() - began_at
    for status, body in answers:
        if status != 200:
            raise ProfilingError(f"/v1/completions answered {status}: {body[:300].decode(errors='replace')}")
        if (made := _output_tokens(body)) != batch.output_tokens:
            raise ProfilingError(
                f"asked for {batch.output_tokens} tokens, got {made}: the engine does not support ignore_eos"
            )
    return wall_s, [body for _, body in answers]


async def _visited(engine: Engine, batch: Batch, prompts: list[list[int]]) -> Measurement:
    """A batch and its visits: as many as were over before it was, which on a fast engine may be fewer than wanted."""
    visit, num_visits = Batch(1, VISIT_TOKENS, 1), 0
    running = asyncio.create_task(_wall_s(engine, batch, prompts))
    try:
        while num_visits < batch.num_visits:
            await _wall_s(engine, visit, _new_prompts(visit))
            if running.done():
                break
            num_visits += 1
        wall_s = await running
    finally:
        running.cancel()
    return Measurement(replace(batch, num_visits=num_visits), wall_s)


def _cached_tokens(body: bytes) -> int:
    """Prompt tokens that were cached, as far as the engine reports them."""
    try:
        return int(orjson.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"])
    except (KeyError, TypeError, ValueError):
        return 0


def _output_tokens(body: bytes) -> int:
    try:
        return int(orjson.loads(body)["usage"]["completion_tokens"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProfilingError(f"/v1/completions answered without usage: {error!r}") from None


def show(fitted: Fit, measurements: Iterable[Measurement], console: Console) -> None:
    table = Table("batch", "measured s", "fitted s", "error", title=fitted.profile.name)
    for measurement, predicted_s in zip(measurements, fitted.predicted_s, strict=True):
        error = predicted_s / measurement.wall_s - 1
        table.add_row(_words(measurement.batch), f"{measurement.wall_s:.3f}", f"{predicted_s:.3f}", f"{error:+.1%}")
    console.print(table)
    profile = fitted.profile
    console.print(
        f"A decode step: {profile.decode_base_ms:.3f} ms + {profile.decode_per_sequence_ms:.4f} a sequence"
        f" + {profile.decode_per_kv_ktoken_ms:.4f} per 1,000 KV tokens.\n"
        f"Prefill: {profile.prefill_per_ktoken_ms:.3f} ms per 1,000 tokens + {profile.prefill_per_ktoken2_ms:.4f}"
        f" per square of them; {profile.prefill_step_ms:.3f} ms for each step that prefills, which counts as at least"
        f" {profile.prefill_least_tokens:,} tokens."
        f" Beside the engine's steps: {profile.request_ms:.1f} ms a request; those sent together reach them"
        f" {profile.request_gap_ms:.1f} ms apart.\n"
        f"{profile.slots} slots, {profile.kv_capacity_tokens:,} KV tokens. Mean absolute error {fitted.mape:.1%}.",
        highlight=False,
    )


def _words(batch: Batch) -> str:
    source = "cached" if batch.is_cached else "new"
    visits = f", {batch.num_visits} visits" if batch.num_visits else ""
    return f"{batch.num_sequences} x {batch.prompt_tokens:,} {source} tokens in, {batch.output_tokens} out{visits}"
