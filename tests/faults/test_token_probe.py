"""What becomes of an engine that does not tell at once whether it has token routes."""

from typing import Any

import httpx
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import Fault, SimulatedEngineSettings
from tests.support.gateway import eventually, running_gateway

ASKED_AT = {"vllm": "/v1/completions/render", "sglang": "/v1/tokenize"}


@pytest.mark.parametrize("dialect", ASKED_AT)
async def test_an_engine_that_breaks_off_when_it_is_asked_is_asked_again(
    client: httpx.AsyncClient, dialect: Any
) -> None:
    """It is ready meanwhile, and its turns pass through; the probe's connection is reset twice, for one is repeated."""
    fault = Fault("reset", count=2, path=ASKED_AT[dialect])
    settings = SimulatedEngineSettings(dialect=dialect, faults=(fault,))
    async with (
        serve_engine(settings) as engine,
        running_gateway(engine, token_legs="auto", observe_interval_s=0.2) as gateway,
    ):

        async def has_token_legs() -> bool:
            (seen,) = (await client.get(gateway.url + "/v1/engines")).json()["data"]
            return bool(seen["token_legs"])

        await eventually(has_token_legs, 60)
        assert (await client.get(engine + "/simulate/faults")).json()["left"] == [0], "nothing was reset"
