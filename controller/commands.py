"""The command and environment of an engine server, with options that make its start faster if they are safe.

vLLM (0.33, docs of `vllm serve` and its environment variables):
- A fixed KV size (`--kv-cache-memory-bytes`) if the file gives one, so that nothing is profiled. Otherwise the result
  of profiling is kept (`VLLM_ENABLE_STARTUP_PLAN`).
- Compiled code is kept, in one folder per TP size: its key covers the TP size, so a single folder would grow with all
  sizes.
- Engines that may sleep are started with sleep enabled.
- If the file asks for it, KV is offered to other servers over NIXL, or shared with them in a tier. A change of the
  fleet then moves the KV.
- Priorities, cached tokens and token routes are on, because the gateway uses them.

SGLang (0.5.23): our own warm-up request replaces the server's (`--skip-server-warmup`); compiled kernels are kept by
the same rule.

No option here changes what an engine answers.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from controller.fleet_file import FleetFile
from controller.launcher import ServerSpec
from controller.steps import DesiredServer
from engines.kv_connectors import SIDE_CHANNEL, kv_connectors, left_in_memory, sglang_tier, vllm_flags
from engines.sleep import SLEEP


def server_spec(fleet: FleetFile, wanted: DesiredServer, asleep: Iterable[str] = ()) -> ServerSpec:
    """The specification for the launcher.

    Args:
        asleep: ids of servers that sleep.
    """
    command, environment = {"vllm": _vllm, "sglang": _sglang, "sim": _sim}[fleet.engine.kind](fleet, wanted)
    if wanted.tp in fleet.sleep.tp_sizes and fleet.engine.kind != "sim":
        more, variables = SLEEP[fleet.engine.kind].flags(has_gpu=not fleet.cpu_slots)
        command, environment = [*command, *more], environment | variables
    flags = (*fleet.engine.flags, *fleet.engine.flags_by_tp.get(wanted.tp, ()))
    return ServerSpec(
        server_id=wanted.server_id,
        fleet_id=fleet.fleet,
        tp=wanted.tp,
        devices=wanted.devices,
        command=(*command, *flags),
        environment={**environment, **fleet.engine.environment},
        beside=tuple(sorted(asleep)),
        leaves=(left_in_memory(wanted.server_id),) if fleet.engine.kind == "vllm" and fleet.engine.kv_tier else (),
    )


def served_name(fleet: FleetFile) -> str:
    """The model's name in requests."""
    return fleet.served_name or fleet.model


def _vllm(fleet: FleetFile, wanted: DesiredServer) -> tuple[list[str], dict[str, str]]:
    program = fleet.engine.program or ("vllm", "serve")
    is_module = program[-1].startswith("vllm.")  # `python -m vllm.entrypoints.openai.api_server`
    command = [
        *program,
        *(("--model", fleet.model) if is_module else (fleet.model,)),
        *("--served-model-name", served_name(fleet), "--host", "{host}", "--port", "{port}"),
        *("--tensor-parallel-size", str(wanted.tp)),
        *("--scheduling-policy", "priority", "--enable-prompt-tokens-details", "--enable-scale-out"),
    ]
    environment: dict[str, str] = {}
    if fleet.engine.slots:
        command += ["--max-num-seqs", str(fleet.engine.slots)]
    transfers, has_gpu = fleet.engine.kv_transfer == "nixl", not fleet.cpu_slots
    connectors = kv_connectors(transfers, fleet.engine.kv_tier, fleet.engine.kv_tier_host_bytes, has_gpu)
    command += vllm_flags(connectors, wanted.server_id)
    if transfers:
        environment |= {f"{SIDE_CHANNEL}_HOST": "{host}", f"{SIDE_CHANNEL}_PORT": "{kv_port}"}
        if not has_gpu:
            environment["UCX_TLS"] = "tcp,self,shm"  # otherwise it looks for GPUs and their networks
    if wanted.tp in fleet.engine.kv_bytes_by_tp:
        command += ["--kv-cache-memory-bytes", str(fleet.engine.kv_bytes_by_tp[wanted.tp])]
    elif fleet.engine.is_fast_start:
        environment["VLLM_ENABLE_STARTUP_PLAN"] = "1"
    if fleet.engine.is_fast_start:
        environment["VLLM_CACHE_ROOT"] = str(_cache_dir(fleet, wanted.tp))
    return command, environment


def _sglang(fleet: FleetFile, wanted: DesiredServer) -> tuple[list[str], dict[str, str]]:
    command = [
        *(fleet.engine.program or ("python3", "-m", "sglang.launch_server")),
        *("--model-path", fleet.model, "--served-model-name", served_name(fleet)),
        *("--host", "{host}", "--port", "{port}", "--tp-size", str(wanted.tp)),
        *("--enable-priority-scheduling", "--schedule-low-priority-values-first", "--enable-cache-report"),
    ]
    environment: dict[str, str] = {}
    if fleet.engine.slots:
        command += ["--max-running-requests", str(fleet.engine.slots)]
    if fleet.engine.kv_tier is not None:
        flags, variables = sglang_tier(fleet.engine.kv_tier)
        command += flags
        environment |= variables
    if fleet.engine.is_fast_start:
        if fleet.warm_up.max_tokens:
            command.append("--skip-server-warmup")
        environment |= {
            "TORCHINDUCTOR_CACHE_DIR": str(_cache_dir(fleet, wanted.tp) / "inductor"),
            "TRITON_CACHE_DIR": str(_cache_dir(fleet, wanted.tp) / "triton"),
        }
    return command, environment


def _sim(fleet: FleetFile, wanted: DesiredServer) -> tuple[list[str], dict[str, str]]:
    program = fleet.engine.program or (sys.executable, "-m", "heddle", "sim-engine")
    command = [*program, "--host", "{host}", "--port", "{port}", "--model", served_name(fleet)]
    if wanted.tp in fleet.engine.profiles:
        command += ["--profile", fleet.engine.profiles[wanted.tp]]
    if fleet.engine.kv_transfer == "nixl":
        command.append("--kv-transfer")
    if fleet.engine.kv_tier is not None:
        command += ["--kv-tier", str(fleet.engine.kv_tier)]
    if fleet.engine.slots:
        command += ["--slots", str(fleet.engine.slots)]
    return command, {}


def _cache_dir(fleet: FleetFile, tp: int) -> Path:
    return fleet.state_dir / "cache" / f"tp{tp}"
