"""How a server's KV reaches other servers: the flags that it is started with, and what it reports of them.

There are two ways, and a server may have both. Over *NIXL*, another server fetches a context from it while it lives
(see `kv.py`). In a *KV tier*, a folder that servers share, each finds the KV that any of them computed for the same
model, block by block, whether that server still lives or not. vLLM's tier goes through host memory, where loads and
stores wait for the disk; SGLang's is its HiCache.

Source: vLLM 0.32 and 0.33, v1/kv_offload/tiering/, kv_connector/v1/multi_connector.py; SGLang 0.5.23,
mem_cache/hicache_storage.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from engines.http import HttpClient

SIDE_CHANNEL = "VLLM_NIXL_SIDE_CHANNEL"
"""Prefix of the environment variables for the address where a server describes its memory to others: `_HOST`,
`_PORT`.
"""

# KV that cannot be loaded is computed, which is not vLLM's default.
_COMMON: Mapping[str, Any] = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}

Connector = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KvWays:
    """How a server's KV reaches other servers.

    Args:
        fetches: over NIXL: it offers its own KV, and fetches that of others.
        tier: the KV tier that it shares with all servers that report the same; "" for none.
    """

    fetches: bool = False
    tier: str = ""


def kv_connectors(fetches: bool, tier: Path | None, host_bytes: int, has_gpu: bool) -> list[Connector]:
    """A vLLM server's connectors, in the order in which they are asked for a context: servers that still live first.

    Args:
        fetches: it offers and fetches KV over NIXL.
        tier: folder in which it shares its KV, with servers of any TP size.
        host_bytes: of /dev/shm that one server takes for that; a context that does not fit into it is not found.
    """
    device = {} if has_gpu else {"kv_buffer_device": "cpu"}
    found: list[Connector] = [{"kv_connector": "NixlConnector", **_COMMON, **device}] if fetches else []
    return found if tier is None else [*found, _tier_connector(tier, host_bytes, has_gpu)]


def _tier_connector(folder: Path, host_bytes: int, has_gpu: bool) -> Connector:
    spec = {"spec_name": "TieringOffloadingSpec"}
    if not has_gpu:  # see deploy/vllm_cpu_tier.py
        spec = {"spec_name": "CpuTieringSpec", "spec_module_path": "heddle_cpu_tier"}
    extra: dict[str, Any] = {
        **spec,
        "cpu_bytes_to_use": host_bytes,
        # Otherwise a turn's output would be missing when the next turn comes.
        "offload_prompt_only": False,
        # Otherwise servers of another TP size may misread the bytes: answers were altered (0.32).
        "canonical_layout": True,
        "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
    }
    return {"kv_connector": "OffloadingConnector", **_COMMON, "kv_connector_extra_config": extra}


def kv_transfer_config(connectors: Sequence[Connector]) -> Connector | None:
    """vLLM's `kv_transfer_config`; of several connectors, the first that has a context provides it."""
    if len(connectors) < 2:
        return connectors[0] if connectors else None
    device = {"kv_buffer_device": "cpu"} if any("kv_buffer_device" in one for one in connectors) else {}
    extra = {"connectors": list(connectors)}
    return {"kv_connector": "MultiConnector", **_COMMON, **device, "kv_connector_extra_config": extra}


def vllm_flags(connectors: Sequence[Connector], engine_id: str) -> tuple[str, ...]:
    """The flags of `vllm serve` for these connectors.

    Args:
        engine_id: never reused; also names its part of /dev/shm.
    """
    config = kv_transfer_config(connectors)
    return ("--kv-transfer-config", orjson.dumps(config | {"engine_id": engine_id}).decode()) if config else ()


def left_in_memory(engine_id: str) -> str:
    """Pattern of the files that a killed vLLM server with a tier leaves in /dev/shm: all its host memory."""
    return f"/dev/shm/vllm_offload_{engine_id}*.mmap"


def sglang_tier(folder: Path) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Flags and environment of an SGLang server that shares its KV in a folder, with servers of the same TP size.

    Only the request itself waits for its KV to be loaded (`wait_complete`).
    """
    flags = (
        *("--enable-hierarchical-cache", "--hicache-write-policy", "write_through"),
        *("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete"),
    )
    return flags, {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)}


def tier_name(kind: str, folder: Path, tp: int) -> str:
    """The name of the tier that a server of this TP size shares through a folder."""
    return f"{folder}:tp{tp}" if kind == "sglang" else str(folder)


async def kv_ways(http: HttpClient, timeout_s: float) -> KvWays:
    """How a vLLM server's KV reaches others, as far as it reports: only a server in development mode does.

    Raises: what HttpClient does.
    """
    status, body = await http.get("/server_info?config_format=json", timeout_s)
    if status != 200:
        return KvWays()
    try:
        config = orjson.loads(body)["vllm_config"]
        tp = config["parallel_config"]["tensor_parallel_size"]
        return ways_told(config["kv_transfer_config"] or {}, tp)
    except (AttributeError, KeyError, TypeError, ValueError):
        return KvWays()


def ways_told(config: Mapping[str, Any], tp: int) -> KvWays:
    """The same from a server's TP size and `kv_transfer_config`. Raises whatever a wrong type raises."""
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
