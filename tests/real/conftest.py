"""Two real vLLM servers of the tiny model, started together once for all tests that want them."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from engines.children import LaunchError
from engines.local_vllm import DEFAULT_VENV, LocalEngine, LocalVllm, launch_all
from engines.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def vllm_venv() -> Path:
    return Path(os.environ.get("VLLM_CPU_VENV", DEFAULT_VENV))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def real_engines(
    vllm_venv: Path,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> AsyncIterator[list[LocalEngine]]:
    """Two equal engines of 4 slots. A machine without vLLM fails the tests, and is told what to run."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def tell(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(line, flush=True)

    # Contexts so long that a turn outlasts the seconds for which a busy machine may stand still.
    spec = LocalVllm(tiny_model, max_model_len=32_768, num_kv_blocks=4096, venv=vllm_venv)
    try:
        async with launch_all([spec, spec], tmp_path_factory.mktemp("vllm"), tell) as engines:
            yield engines
    except LaunchError as error:
        pytest.fail(str(error), pytrace=False)
