"""Gives an engine new weights while requests are in flight: the calls to vLLM and SGLang, step by step.

The steps are `pause`, `load`, `resume`. Running requests keep their tokens throughout. Their KV is

- `keep`: kept as well, so the pause is as long as the load, and later tokens are made from KV of both versions;
- `restart`: recomputed under the new weights, so that later tokens are those of an engine that had the new weights from
  that token on. The engine does this itself: it puts its running requests back into its queue.

A later request must never use KV of the old weights. On vLLM the gateway's `cache_salt` ensures this: every route takes
a salt, and the cache cannot be cleared while requests run. SGLang's `/v1/messages` takes no salt (0.5.23,
entrypoints/anthropic/protocol.py), so there the cache is flushed, for which nothing may run: both modes retract.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import orjson

from engines.http import FAULTS, HttpClient

STARTED_WITH = "default"
"""The version that both kinds report until another one is set."""
_MAX_TOLD = 500


class UpdateMode(StrEnum):
    """What happens to the KV of running requests."""

    KEEP = "keep"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class NewWeights:
    """Weights for an engine.

    Args:
        version: their name; the engine reports it with the tokens that they make.
        path: where they are, as the engine sees its disk. None: they come by `transfer`.
        transfer: for the engine's own transfer calls, in its kind's form (see `VllmWeights` and `SglangWeights`).
    """

    version: str
    mode: UpdateMode
    path: str | None = None
    transfer: Mapping[str, Any] | None = None


class WeightsError(Exception):
    """A step failed.

    Args:
        step: `pause`, `load`, `resume` or `version`. Before `load` the weights are unchanged.
        is_refusal: the engine answered and refused; another engine would probably refuse too.
    """

    def __init__(self, step: str, message: str, is_refusal: bool) -> None:
        super().__init__(f"{step}: {message}")
        self.step = step
        self.is_refusal = is_refusal


class WeightControl(Protocol):
    """How one kind of engine gets new weights. Every method raises WeightsError, and may be repeated."""

    async def version(self, http: HttpClient, timeout_s: float) -> str | None:
        """The version of its weights, as it reports it; None if it does not."""
        ...

    async def pause(self, http: HttpClient, mode: UpdateMode, timeout_s: float) -> None:
        """Stop making tokens; running and new requests wait."""
        ...

    async def load(self, http: HttpClient, weights: NewWeights, timeout_s: float) -> None:
        """Load the weights and their version. Only when paused."""
        ...

    async def resume(self, http: HttpClient, timeout_s: float) -> None:
        """Continue the waiting requests."""
        ...


class VllmWeights:
    """vLLM 0.32 and 0.33 in development mode (`VLLM_SERVER_DEV_MODE=1`).

    A transfer is `{"init_info": {...}, "update_info": {...}}`, for a server started with `--weight-transfer-config`;
    without `init_info` the connection to the trainer already exists.
    """

    async def version(self, http: HttpClient, timeout_s: float) -> str | None:
        return await _told_version(http, "/weight_info", timeout_s)

    async def pause(self, http: HttpClient, mode: UpdateMode, timeout_s: float) -> None:
        await _post(http, "pause", "/pause?mode=keep&clear_cache=false", None, timeout_s)
        if mode is UpdateMode.RESTART:
            path = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
            answer = await _post(http, "pause", path, None, timeout_s)
            if answer.get("success") is not True:
                raise WeightsError("pause", "the prefix cache could not be cleared", is_refusal=True)

    async def load(self, http: HttpClient, weights: NewWeights, timeout_s: float) -> None:
        version = {"weight_version": weights.version}
        if weights.path is not None:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": weights.path}}
            await _post(http, "load", "/collective_rpc", reload, timeout_s)
            await _post(http, "load", "/update_weight_version", {"new_version": weights.version}, timeout_s)
            return
        transfer = weights.transfer or {}
        if "init_info" in transfer:
            body = {"init_info": transfer["init_info"]}
            await _post(http, "load", "/init_weight_transfer_engine", body, timeout_s)
        await _post(http, "load", "/start_weight_update", None, timeout_s)
        await _post(http, "load", "/update_weights", {"update_info": transfer.get("update_info", {})}, timeout_s)
        await _post(http, "load", "/finish_weight_update", version, timeout_s)

    async def resume(self, http: HttpClient, timeout_s: float) -> None:
        await _post(http, "resume", "/resume", None, timeout_s)


class SglangWeights:
    """SGLang 0.5.23.

    A transfer is `{"distributed": {...}}`, `{"tensor": {...}}` or `{"ipc": {...}}`, the body of that
    `/update_weights_from_...`; `init` is the body of `/init_weights_update_group`, if the group is new.
    """

    async def version(self, http: HttpClient, timeout_s: float) -> str | None:
        return await _told_version(http, "/model_info", timeout_s)

    async def pause(self, http: HttpClient, mode: UpdateMode, timeout_s: float) -> None:
        await _post(http, "pause", "/pause_generation", {"mode": "retract"}, timeout_s)

    async def load(self, http: HttpClient, weights: NewWeights, timeout_s: float) -> None:
        given = {"weight_version": weights.version, "flush_cache": True, "abort_all_requests": False}
        if weights.path is not None:
            body = {"model_path": weights.path, **given}
            await _post(http, "load", "/update_weights_from_disk", body, timeout_s)
            return
        transfer = weights.transfer or {}
        if "init" in transfer:
            await _post(http, "load", "/init_weights_update_group", transfer["init"], timeout_s)
        ways = [way for way in ("distributed", "tensor", "ipc") if way in transfer]
        has_session = ways != ["ipc"]
        if has_session:
            await _post(http, "load", "/begin_weight_update", {}, timeout_s)
        for way in ways:
            await _post(http, "load", f"/update_weights_from_{way}", {**transfer[way], **given}, timeout_s)
        if has_session:
            await _post(http, "load", "/end_weight_update", {}, timeout_s)

    async def resume(self, http: HttpClient, timeout_s: float) -> None:
        await _post(http, "resume", "/continue_generation", {}, timeout_s)


WEIGHTS: Mapping[str, WeightControl] = {"vllm": VllmWeights(), "sglang": SglangWeights()}
"""By the engine's kind."""


def transfer_fields(kind: str) -> frozenset[str]:
    """The fields of which a transfer for this kind must have at least one."""
    return frozenset({"update_info"}) if kind == "vllm" else frozenset({"distributed", "tensor", "ipc"})


async def _told_version(http: HttpClient, path: str, timeout_s: float) -> str | None:
    status, body = await _asked(http, "version", "GET", path, b"", timeout_s)
    try:
        version = orjson.loads(body)["weight_version"] if status == 200 else None
    except (KeyError, TypeError, ValueError):
        return None
    return version if isinstance(version, str) and version else None


async def _post(
    http: HttpClient, step: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
) -> dict[str, Any]:
    status, answer = await _asked(http, step, "POST", path, b"" if body is None else orjson.dumps(body), timeout_s)
    try:
        told = orjson.loads(answer)
    except ValueError:
        told = None
    told = told if isinstance(told, dict) else {}
    if status != 200 or told.get("success") is False:
        reason = answer[:_MAX_TOLD].decode("utf-8", "replace").strip()
        raise WeightsError(step, f"{path.partition('?')[0]} answered {status}: {reason}", is_refusal=True)
    return told


async def _asked(
    http: HttpClient, step: str, method: str, path: str, body: bytes, timeout_s: float
) -> tuple[int, bytes]:
    try:
        if method == "GET":
            return await http.get(path, timeout_s)
        return await http.post(path, body, timeout_s)
    except FAULTS as fault:
        raise WeightsError(step, f"{path.partition('?')[0]}: {fault}", is_refusal=False) from None
