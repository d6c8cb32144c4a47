"""How a server's KV gets to others: what it is started with for that, and what it tells of it.

Two ways, and a server may have both. Over *NIXL* another one fetches a context from it, while it lives (see `kv.py`).
In a *KV tier*, a folder that servers share, each finds what any of them computed, of the same model, block by block,
whether it still lives or not. vLLM's goes through host memory, in which loads and stores wait for the disk; SGLang's is
its HiCache.

Source: vLLM 0.32 and 0.33, v1/kv_offload/tiering/, kv_connector/v1/multi_connector.py; SGLang 0.5.23,
mem_cache/hicache_storage.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from engines.http import FAULTS, HttpClient

SIDE_CHANNEL = "VLLM_NIXL_SIDE_CHANNEL"
"""Environment variables that begin so say where a server tells others of its memory: `_HOST` and `_PORT`."""

# Where KV cannot be had it is computed, which is not vLLM's default.
_COMMON: Mapping[str, Any] = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}

Connector = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KvWays:
    """How a server's KV gets to others.

    Args:
        fetches: over NIXL; it offers its own, and fetches theirs.
        tier: the KV tier that it shares with all that tell the same; "" for none.
    """

    fetches: bool = False
    tier: str = ""


def nixl_connector(has_gpu: bool) -> Connector:
    """vLLM offers and fetches KV."""
    return {"kv_connector": "NixlConnector", **_COMMON, **({} if has_gpu else {"kv_buffer_device": "cpu"})}


def tier_connector(folder: Path, host_bytes: int, has_gpu: bool) -> Connector:
    """vLLM shares its KV in a folder, with servers of any TP size.

    Args:
        host_bytes: of /dev/shm that one server takes; a context that does not fit in there is not found.
    """
    spec = {"spec_name": "TieringOffloadingSpec"}
    if not has_gpu:  # see deploy/vllm_cpu_tier.py
        spec = {"spec_name": "CpuTieringSpec", "spec_module_path": "heddle_cpu_tier"}
    extra: dict[str, Any] = {
        **spec,
        "cpu_bytes_to_use": host_bytes,
        # Without it what a turn made would be absent when the next one comes.
        "offload_prompt_only": False,
        # Without it servers of another TP size may take the bytes for something else: answers were altered (0.32).
        "canonical_layout": True,
        "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
    }
    return {"kv_connector": "OffloadingConnector", **_COMMON, "kv_connector_extra_config": extra}


def kv_transfer_config(connectors: Sequence[Connector]) -> Connector | None:
    """vLLM's `kv_transfer_config`; of several, the first one that has something is taken."""
    if len(connectors) < 2:
        return connectors[0] if connectors else None
    device = {"kv_buffer_device": "cpu"} if any("kv_buffer_device" in one for one in connectors) else {}
    extra = {"connectors": list(connectors)}
    return {"kv_connector": "MultiConnector", **_COMMON, **device, "kv_connector_extra_config": extra}


def vllm_flags(connectors: Sequence[Connector], engine_id: str) -> tuple[str, ...]:
    """What `vllm serve` is started with for them.

    Args:
        engine_id: unique for ever; names its part of /dev/shm, too.
    """
    config = kv_transfer_config(connectors)
    return ("--kv-transfer-config", orjson.dumps(config | {"engine_id": engine_id}).decode()) if config else ()


def left_in_memory(engine_id: str) -> str:
    """Pattern of the files that a vLLM server with a tier leaves in /dev/shm when it is killed: all its host memory."""
    return f"/dev/shm/vllm_offload_{engine_id}*.mmap"


def sglang_tier(folder: Path) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Flags and environment of an SGLang server that shares its KV in a folder, with servers of the same TP size.

    What waits for a request's KV to be loaded is the request alone (`wait_complete`).
    """
    flags = (
        *("--enable-hierarchical-cache", "--hicache-write-policy", "write_through"),
        *("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete"),
    )
    return flags, {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)}


def tier_name(kind: str, folder: Path, tp: int) -> str:
    """The tier that a server of this TP size shares through a folder."""
    return f"{folder}:tp{tp}" if kind == "sglang" else str(folder)


async def kv_ways(http: HttpClient, timeout_s: float) -> KvWays:
    """Those of a vLLM server, as far as it tells: only one in development mode does."""
    try:
        status, body = await http.get("/server_info?config_format=json", timeout_s)
        if status != 200:
            return KvWays()
        config = orjson.loads(body)["vllm_config"]
        tp = config["parallel_config"]["tensor_parallel_size"]
        return ways_told(config["kv_transfer_config"] or {}, tp)
    except (*FAULTS, AttributeError, KeyError, TypeError, ValueError):
        return KvWays()


def ways_told(config: Mapping[str, Any], tp: int) -> KvWays:
    """Those of a server of this TP size whose `kv_transfer_config` is that. Raises what a wrong type raises."""
    extra = config.get("kv_connector_extra_config") or {}
    if config.get("kv_connector") == "MultiConnector":
        ways = [ways_told(one, tp) for one in extra["connectors"]]
        tiers = [one.tier for one in ways if one.tier]
        return KvWays(any(one.fetches for one in ways), tiers[0] if tiers else "")
    if config.get("kv_role") != "kv_both":
        return KvWays()
    if config["kv_connector"] == "OffloadingConnector":
        folders = [str(one["root_dir"]) for one in extra.get("secondary_tiers", ()) if one.get("type") == "fs"]
        if not folders:
            return KvWays()
        return KvWays(tier=folders[0] if extra.get("canonical_layout") else f"{folders[0]}:tp{tp}")
    return KvWays(fetches=config["kv_connector"] in ("NixlConnector", "NixlPullConnector"))
