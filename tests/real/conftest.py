"""Real vLLM servers of the tiny model. Each starts once for all tests that need it, and all start at the same time.

A test requests a server through its fixture. To add one, add a line to `SERVERS` and a fixture like those below.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from engines.children import LaunchError
from engines.local_vllm import DEFAULT_VENV, LocalEngine, LocalVllm, launch_all
from engines.tiny_model import make_tiny_model

Servers = dict[str, "asyncio.Task[list[LocalEngine]]"]

# The servers of each fixture, given the common specification, the new weights and an empty folder.
SERVERS: dict[str, Callable[[LocalVllm, Path, Path], list[LocalVllm]]] = {
    "real_engines": lambda spec, _, __: [spec] * 2,
    "nixl_engines": lambda spec, _, __: [replace(spec, kv_transfer=True)] * 2,
    "tier_engines": lambda spec, _, folder: [replace(spec, kv_tier=folder, tp=tp) for tp in (1, 2)],
    "new_engine": lambda spec, new_weights, _: [replace(spec, model_dir=new_weights)],
    "ranked_server": lambda spec, _, __: [replace(spec, dp=2)],
    "doomed_engine": lambda spec, _, __: [replace(spec, max_num_seqs=16)],
    # A prompt that is prefilled in parts ends vLLM 0.32 on a CPU if its request has a seed.
    "training_engines": lambda spec, _, __: (
        [replace(spec, max_num_seqs=16, extra_args=("--max-num-batched-tokens", "16384"))] * 2
    ),
}


@pytest.fixture(scope="session")
def vllm_venv() -> Path:
    return Path(os.environ.get("VLLM_CPU_VENV", DEFAULT_VENV))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def new_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return make_tiny_model(tmp_path_factory.mktemp("new-weights"), seed=1)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def servers(
    vllm_venv: Path,
    tiny_model: Path,
    new_weights: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> AsyncIterator[Servers]:
    """All servers that tests of this session need, as tasks that start them."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def print_uncaptured(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(line, flush=True)

    # Contexts are so long that a turn outlasts the seconds for which a busy machine may stall.
    spec = LocalVllm(tiny_model, max_model_len=32_768, num_kv_blocks=4096, venv=vllm_venv)
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    starting: Servers = {}
    async with AsyncExitStack() as stack:
        for name in SERVERS.keys() & wanted:
            specs = SERVERS[name](spec, new_weights, tmp_path_factory.mktemp(f"{name}-kv"))
            launched = launch_all(specs, tmp_path_factory.mktemp(name), print_uncaptured)
            starting[name] = asyncio.create_task(stack.enter_async_context(launched))
        yield starting
        for task in starting.values():
            task.cancel()  # one that no test used in the end
        await asyncio.gather(*starting.values(), return_exceptions=True)


async def started(servers: Servers, name: str) -> list[LocalEngine]:
    """The servers of this fixture. On a machine without vLLM, the test fails with the command to install it."""
    try:
        return await servers[name]
    except LaunchError as error:
        pytest.fail(str(error), pytrace=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def real_engines(servers: Servers) -> list[LocalEngine]:
    """Two equal engines of 4 slots."""
    return await started(servers, "real_engines")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def nixl_engines(servers: Servers) -> list[LocalEngine]:
    """Two engines that can fetch KV from each other."""
    return await started(servers, "nixl_engines")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tier_engines(servers: Servers) -> list[LocalEngine]:
    """One engine of TP 1 and one of TP 2, which share their KV in a folder; for the one test that kills the second."""
    return await started(servers, "tier_engines")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def new_engine(servers: Servers) -> LocalEngine:
    """An engine that was started with the new weights."""
    return (await started(servers, "new_engine"))[0]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def ranked_server(servers: Servers) -> LocalEngine:
    """A server of two data-parallel ranks, of 4 slots each."""
    return (await started(servers, "ranked_server"))[0]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def doomed_engine(servers: Servers) -> LocalEngine:
    """An engine of 16 slots, for the one test that kills it."""
    return (await started(servers, "doomed_engine"))[0]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def training_engines(servers: Servers) -> list[LocalEngine]:
    """Two engines of 16 slots, which get the weights of a trainer."""
    return await started(servers, "training_engines")
