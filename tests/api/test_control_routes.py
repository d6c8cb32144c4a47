"""An engine's control routes cannot be reached through the gateway, however they are spelled."""

import asyncio
import socket
from collections.abc import Iterator
from typing import BinaryIO
from urllib.parse import urlsplit

import orjson
import pytest

from gateway.passthrough import PASSTHROUGH_ROUTES
from gateway.turns.turns import TURN_ROUTES
from tests.api.conftest import GENERATE, MODEL, Site, running_site, toy

# vLLM 0.33 (entrypoints/, routers of its API server) and SGLang 0.5.23 (srt/entrypoints/http_server.py), without the
# routes that the gateway's own API has under the same name.
VLLM = [
    "/v1/chat/completions/batch",
    "/v1/responses/resp_1",
    "/v1/responses/resp_1/cancel",
    "/pooling",
    "/score",
    "/rerank",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/classify",
    "/tokenizer_info",
    "/ping",
    "/invocations",
    "/version",
    "/load",
    "/kv_event_sources",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/start_profile",
    "/stop_profile",
    "/fault_tolerance/status",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/release_kv_cache_memory",
    "/pause",
    "/resume",
    "/is_paused",
    "/abort_requests",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/start_draft_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/shutdown_weight_transfer_engine",
    "/update_weight_version",
    "/weight_info",
    "/weight_checker",
    "/get_world_size",
    "/collective_rpc",
    "/server_info",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/inference/v1/abort_requests",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/responses/render",
    "/v1/messages/render",
    "/v1/chat/completions/derender",
    "/v1/completions/derender",
    "/simulate/faults",
]
SGLANG = [
    "/health_generate",
    "/ready",
    "/model_info",
    "/get_model_info",
    "/get_server_info",
    "/v1/loads",
    "/get_load",
    "/flush_cache",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/update_weights_from_ipc",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/begin_weight_update",
    "/end_weight_update",
    "/weights_checker",
    "/init_weights_send_group_for_remote_instance",
    "/send_weights_to_remote_instance",
    "/open_session",
    "/close_session",
    "/set_internal_state",
    "/pd_role_switch",
    "/hicache/storage-backend",
    "/hicache/storage-backend/clear",
    "/get_hicache_l3_cache_layout",
    "/slow_down",
    "/encode",
]
METHODS = ("GET", "POST", "PUT", "DELETE")


def spellings(route: str) -> Iterator[str]:
    """The route as it is, and as one might write it to evade a list of routes."""
    yield route
    yield f"/t/x{route}"
    yield f"/sessions/x{route}"
    yield f"/t/x/v1/..{route}"
    yield f"/t/x/v1/%2e%2e{route}"
    yield f"/t/x//v1/../..{route}"
    yield f"/{route}"
    yield f"/v1/..{route}"
    yield f"/v1/chat/completions/../../..{route}"
    yield f"/v1/models/..%2f..{route}" if "/" not in route[1:] else f"/v1/.{route}"
    yield "/%2f" + route[1:]
    yield "/" + "".join(f"%{ord(letter):02x}" for letter in route[1:])
    yield route.upper()
    yield route + "/"
    yield route + "?stream=true"
    yield route + ";v1/chat/completions"
    yield f"http://engine{route}"


async def test_no_spelling_of_a_control_route_reaches_an_engine() -> None:
    """Every route of both engines that is not in the public API, in every spelling and method: 404 or 405, in OpenAI's
    form, and the engine gets no request."""
    wrong = []
    async with running_site(toy()) as site:
        host, port = urlsplit(site.url).hostname, urlsplit(site.url).port
        assert host and port
        with socket.create_connection((host, port)) as connection, connection.makefile("rb") as reader:
            connection.setblocking(True)
            for route in (*VLLM, *SGLANG):
                for path in spellings(route):
                    for method in METHODS if path == route else ("POST",):
                        status, body = await ask(connection, reader, method, path)
                        if status not in (404, 405) or not is_openai_error(body):
                            wrong.append((method, path, status, body[:80]))
        assert not site.engine.seen
    assert not wrong


async def ask(connection: socket.socket, reader: BinaryIO, method: str, path: str) -> tuple[int, bytes]:
    """Sends one request as bytes, because HTTP clients normalise paths."""
    body = orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": "a"}], "prompt": "a"})
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )

    def talk() -> tuple[int, bytes]:
        connection.sendall(head.encode() + body)
        status = int(reader.readline().split()[1])
        length = 0
        while line := reader.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return status, reader.read(length)

    return await asyncio.to_thread(talk)


def is_openai_error(body: bytes) -> bool:
    try:
        return set(orjson.loads(body)["error"]) == {"message", "type", "param", "code"}
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return False


@pytest.mark.usefixtures("token_legs")
async def test_engines_get_only_the_paths_of_the_allow_lists(site: Site) -> None:
    """Clients can cause no other request to an engine."""
    for path in (*TURN_ROUTES, *PASSTHROUGH_ROUTES):
        await site.client.post(
            path, json={"model": MODEL, "messages": [], "prompt": "a", "input": "a", "tokens": [200]}
        )
        await site.client.post(f"/t/x{path}?a=b", json={"model": MODEL, "prompt": "a", "input": "a", "tokens": [200]})
    assert {request.path for request in site.engine.turns} <= {*TURN_ROUTES, *PASSTHROUGH_ROUTES, GENERATE}
    assert len(site.engine.turns) >= len(TURN_ROUTES)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
@pytest.mark.parametrize("path", [*TURN_ROUTES, *PASSTHROUGH_ROUTES])
async def test_only_post_is_allowed_on_routes_to_engines(site: Site, method: str, path: str) -> None:
    """405 in the API's own form."""
    answer = await site.client.request(method, path)
    assert answer.status_code == 405
    if method != "HEAD":
        assert answer.json()["error"]["message"] == f"{method} is not allowed on {path}."
    assert not site.engine.seen
