"""The probe that asks an engine whether it has token routes."""

from typing import Any

import httpx
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import Fault, SimulatedEngineSettings
from tests.support.gateway import eventually, running_gateway

PROBE_PATHS = {"vllm": "/v1/completions/render", "sglang": "/v1/tokenize"}


@pytest.mark.parametrize("dialect", PROBE_PATHS)
async def test_a_token_probe_whose_connection_is_reset_is_repeated(client: httpx.AsyncClient, dialect: Any) -> None:
    """The connection is reset twice, because one probe already retries once."""
    fault = Fault("reset", count=2, path=PROBE_PATHS[dialect])
    settings = SimulatedEngineSettings(dialect=dialect, faults=(fault,))
    async with (
        serve_engine(settings) as engine,
        running_gateway(engine, token_legs="auto", observe_interval_s=0.2) as gateway,
    ):

        async def has_token_legs() -> bool:
            (shown,) = (await client.get(gateway.url + "/v1/engines")).json()["data"]
            return bool(shown["token_legs"])

        await eventually(has_token_legs, 60)
        assert (await client.get(engine + "/simulate/faults")).json()["left"] == [0], "the connection was not reset"
