"""Reads engine profiles: those in `engines/profiles/`, and those in a user's own TOML file of the same form."""

import difflib
import math
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from scheduling.cost import EngineProfile

_DIRECTORY = Path(__file__).parent / "profiles"
# The least value of each number. A quadratic prefill term below 0 counts as 0.
_LEAST = {
    "tp": 1,
    "slots": 1,
    "kv_capacity_tokens": 1,
    "kv_bytes_per_token": 0,
    "decode_base_ms": 0,
    "decode_per_sequence_ms": 0,
    "decode_per_kv_ktoken_ms": 0,
    "prefill_per_ktoken_ms": 0,
    "prefill_per_ktoken2_ms": -math.inf,
    "request_ms": 0,
    "request_gap_ms": 0,
    "prefill_step_ms": 0,
    "prefill_least_tokens": 0,
}
# Placement divides by the base. A fit to noisy times may leave nothing for it; no engine steps in less than this.
_LEAST_BASE_MS = 0.001


def load_profile(name: str) -> EngineProfile:
    """The profile of that name, such as `qwen3-14b-h100-tp1`.

    Args:
        name: a name of `profile_names()`, or `path/to/file.toml:name` for your own profile.

    Raises:
        ValueError: there is no such profile or file, or the file is malformed; the message names the nearest ones.
    """
    path, separator, wanted = name.rpartition(":")
    profiles = _read_file(Path(path)) if separator else _read_built_in()
    if wanted in profiles:
        return profiles[wanted]
    if ".toml" in wanted:
        raise ValueError(
            f"unknown engine profile {name!r}; one of your own is FILE.toml:NAME, as `heddle profile` says"
        )
    near = difflib.get_close_matches(wanted, profiles, n=5)
    hint = f"did you mean one of: {', '.join(near)}" if near else f"known: {', '.join(sorted(profiles))}"
    raise ValueError(f"unknown engine profile {name!r}; {hint}")


def profile_names() -> list[str]:
    """The names of the profiles that come with Heddle, sorted."""
    return sorted(_read_built_in())


@cache
def _read_built_in() -> dict[str, EngineProfile]:
    return {name: profile for path in sorted(_DIRECTORY.glob("*.toml")) for name, profile in _read_file(path).items()}


def _read_file(path: Path) -> dict[str, EngineProfile]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        profiles = [
            _checked(_profile(content, short_name, model, engine))
            for short_name, model in content["models"].items()
            for engine in model["engines"]
        ]
    except OSError as error:
        raise ValueError(f"cannot read engine profiles from {path}: {error.strerror}") from error
    except KeyError as error:
        raise ValueError(f"{path} is not a profile file: {error} is missing") from error
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a profile file: {error}") from error
    return {profile.name: profile for profile in profiles}


def _profile(content: dict[str, Any], short_name: str, model: dict[str, Any], engine: dict[str, Any]) -> EngineProfile:
    tp = int(engine["tp"])
    base_ms, per_sequence_ms, per_kv_ktoken_ms = map(float, engine["kernel_ms"])
    prefill_per_ktoken_ms, prefill_per_ktoken2_ms = map(float, engine["prefill_ms"])
    return EngineProfile(
        name=f"{short_name}-{content['gpu']}-tp{tp}",
        model=model["model"],
        gpu=content["gpu"],
        tp=tp,
        slots=round(content["slots_per_gpu"] * tp),
        kv_capacity_tokens=int(engine["kv_capacity_tokens"]),
        kv_bytes_per_token=int(model["kv_bytes_per_token"]),
        decode_base_ms=base_ms + float(content["overhead_ms"]["base"]),
        decode_per_sequence_ms=per_sequence_ms + float(content["overhead_ms"]["per_sequence"]),
        decode_per_kv_ktoken_ms=per_kv_ktoken_ms,
        prefill_per_ktoken_ms=prefill_per_ktoken_ms,
        prefill_per_ktoken2_ms=prefill_per_ktoken2_ms,
        source=content["source"],
        request_ms=float(engine.get("request_ms", 0.0)),
        request_gap_ms=float(engine.get("request_gap_ms", 0.0)),
        prefill_step_ms=float(engine.get("prefill_step_ms", 0.0)),
        prefill_least_tokens=int(engine.get("prefill_least_tokens", 0)),
    )


def _checked(profile: EngineProfile) -> EngineProfile:
    """The profile, if an engine can have it, with a base above 0. Raises ValueError: a number is out of range, or work
    takes no time."""
    for name, least in _LEAST.items():
        value = getattr(profile, name)
        if not least <= value < math.inf:
            wish = f"a finite number from {least}" if least > -math.inf else "a finite number"
            raise ValueError(f"{profile.name}: {name}: must be {wish}, not {value}")
    if not profile.decode_base_ms + profile.decode_per_sequence_ms:
        raise ValueError(f"{profile.name}: a decode step must take time, but its base and its time per sequence are 0")
    if not profile.prefill_per_ktoken_ms + max(profile.prefill_per_ktoken2_ms, 0.0):
        raise ValueError(f"{profile.name}: prefill must take time, but prefill_ms is 0")
    return replace(profile, decode_base_ms=max(profile.decode_base_ms, _LEAST_BASE_MS))
