"""What the controller makes of servers at the gateway's address that are not a gateway."""

import pytest

from controller.demand import AskedDemand, DemandAway
from controller.gateway_client import GatewayAway, GatewayClient, GatewayRefused
from engines.simulated.settings import SimulatedEngineSettings
from tests.support.engine import fixed, recorded_engine

OTHERS = {
    "a page": (200, b"<html>hello</html>"),
    "a list": (200, b"[]"),
    "null": (200, b"null"),
    "an object": (200, b'{"data":[{"id":"a"}]}'),
    "nothing": (200, b""),
    "no such route": (404, b'{"detail":"Not Found"}'),
    "a text": (403, b'{"error":"no"}'),
    "another list": (403, b"[]"),
    "its own form": (401, b'{"error":{"message":"no","type":"x","param":null,"code":null}}'),
    "a failure": (500, b"{}"),
}


@pytest.mark.parametrize("status, body", OTHERS.values(), ids=OTHERS.keys())
async def test_answers_of_other_servers_count_as_gateway_errors(status: int, body: bytes) -> None:
    """A proxy or another service may answer there: the client raises only the errors after which the controller tries
    again. The message names the address: it may be the wrong one."""
    async with recorded_engine(SimulatedEngineSettings()) as server:
        server.scripts |= {path: fixed(status, body) for path in ("/v1/engines", "/v1/demand")}
        gateway = GatewayClient(server.url, "key")
        with pytest.raises((GatewayAway, GatewayRefused), match=f"^the gateway at {server.url}: GET /v1/engines: "):
            await gateway.engines()
        with pytest.raises(DemandAway, match=f"^the gateway at {server.url}: GET /v1/demand|^the gateway's report"):
            await AskedDemand(gateway).work()
        gateway.close()


async def test_a_gateway_that_answers_5xx_is_quoted() -> None:
    """One whose store another gateway has, or that shuts down, says so. All that was told was `status 503`, as of one
    that does not answer."""
    async with recorded_engine(SimulatedEngineSettings()) as server:
        said = "Another gateway has taken over the store of this one."
        body = b'{"error":{"message":"%b","type":"server_error","param":null,"code":"fenced"}}' % said.encode()
        server.scripts |= {path: fixed(503, body) for path in ("/v1/engines", "/v1/engines/a/uncordon")}
        gateway = GatewayClient(server.url, "key")
        with pytest.raises(GatewayAway, match=f"GET /v1/engines: {said}$"):
            await gateway.engines()
        with pytest.raises(GatewayAway, match=f"POST /v1/engines/a/uncordon: {said}$"):
            await gateway.uncordon("a")
        gateway.close()
