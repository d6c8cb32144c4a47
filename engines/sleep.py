"""Puts an engine to sleep and wakes it. A sleeping engine frees its GPUs' memory and keeps its processes, so that
another engine can use the GPUs meanwhile, and waking takes seconds instead of a start.

Asleep it has no KV, and answers nothing that needs tokens. Levels are vLLM's:

- 1: the weights stay in host memory, a whole copy for each engine;
- 2: they are dropped. Waking reloads the checkpoint that the engine was started with and says so: its weights are then
  called `AS_STARTED`, so a gateway with newer weights sees that the engine lacks them.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import orjson

from engines.http import FAULTS, HttpClient

AS_STARTED = "as-started"
_MAX_TOLD = 300


class SleepFault(Exception):
    """Falling asleep or waking failed; the engine's state is unknown. Safe to repeat."""


class CannotSleep(SleepFault):
    """The engine answered that it cannot sleep; it would answer the same again."""


class Sleep(Protocol):
    """How one kind of engine does it. Nothing may run on it. Every method raises SleepFault, and may be repeated.

    Attributes:
        levels: those that it supports.
    """

    levels: frozenset[int]

    def flags(self, has_gpu: bool) -> tuple[list[str], dict[str, str]]:
        """Flags and environment of a server that can sleep."""
        ...

    async def fall_asleep(self, http: HttpClient, level: int, timeout_s: float) -> None:
        """Returns when its memory is free. Raises CannotSleep."""
        ...

    async def wake(self, http: HttpClient, level: int, timeout_s: float) -> None:
        """Returns when it can make tokens. `level`: the one at which it fell asleep."""
        ...


class VllmSleep:
    """vLLM 0.32 and 0.33 in development mode. Without a GPU an engine stops but frees nothing: a start with the flag is
    refused there, and without the flag `/sleep` works except for the memory.
    """

    levels = frozenset({1, 2})

    def flags(self, has_gpu: bool) -> tuple[list[str], dict[str, str]]:
        return ["--enable-sleep-mode"] if has_gpu else [], {"VLLM_SERVER_DEV_MODE": "1"}

    async def fall_asleep(self, http: HttpClient, level: int, timeout_s: float) -> None:
        await _post(http, f"/sleep?level={level}&mode=abort", None, timeout_s)

    async def wake(self, http: HttpClient, level: int, timeout_s: float) -> None:
        if level == 2:  # it reports that it sleeps until the end, so nothing takes it for ready before
            await _post(http, "/wake_up?tags=weights", None, timeout_s)
            await _post(http, "/update_weight_version", {"new_version": AS_STARTED}, timeout_s)
            await _post(http, "/collective_rpc", {"method": "reload_weights"}, timeout_s)
        told = await _post(http, "/wake_up", None, timeout_s)
        if told.get("status") == "sleeping":
            raise SleepFault("/wake_up: it is still asleep")


class SglangSleep:
    """SGLang 0.5.23, level 1 only: reloading weights from disk would rename the model that it serves."""

    levels = frozenset({1})

    def flags(self, has_gpu: bool) -> tuple[list[str], dict[str, str]]:
        return ["--enable-memory-saver", "--enable-weights-cpu-backup"], {}

    async def fall_asleep(self, http: HttpClient, level: int, timeout_s: float) -> None:
        await _post(http, "/release_memory_occupation", {}, timeout_s)

    async def wake(self, http: HttpClient, level: int, timeout_s: float) -> None:
        await _post(http, "/resume_memory_occupation", {}, timeout_s)


SLEEP: Mapping[str, Sleep] = {"vllm": VllmSleep(), "sglang": SglangSleep()}
"""By the engine's kind."""


async def _post(http: HttpClient, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
    route = path.partition("?")[0]
    try:
        status, answer = await http.post(path, b"" if body is None else orjson.dumps(body), timeout_s)
    except FAULTS as fault:
        raise SleepFault(f"{route}: {fault or type(fault).__name__}") from None
    if status in (404, 405, 501):
        raise CannotSleep(f"it has no {route}")
    if status != 200:
        raise SleepFault(f"{route} answered {status}: {answer[:_MAX_TOLD].decode('utf-8', 'replace').strip()}")
    try:
        told = orjson.loads(answer)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
