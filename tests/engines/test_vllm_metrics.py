"""What the gateway makes of vLLM's metrics page."""

import pytest

from engines.dialect import Observation
from engines.http import HttpClient
from engines.vllm import Vllm
from tests.engines.raw_server import Peer, raw_server

# One engine's series, as vLLM 0.32 writes them. `num_gpu_blocks` counts the blocks of all data-parallel engines.
SERIES = """vllm:num_requests_running{{engine="{engine}",model_name="m"}} 10.0
vllm:num_requests_waiting{{engine="{engine}",model_name="m"}} 1.0
vllm:kv_cache_usage_perc{{engine="{engine}",model_name="m"}} {share}
vllm:generation_tokens_total{{engine="{engine}",model_name="m"}} 5.0
vllm:cache_config_info{{block_size="16",engine="{engine}",{tokens}num_gpu_blocks="20000"}} 1.0
"""


async def observed(page: str) -> Observation:
    async def handle(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(page), page.encode()))

    async with raw_server(handle) as server:
        http = HttpClient(server.url)
        try:
            return await Vllm().observe(http, 5.0)
        finally:
            http.close()


@pytest.mark.parametrize("tokens", ['kv_cache_size_tokens="160000",', 'kv_cache_size_tokens="None",', ""])
async def test_data_parallel_engines_count_as_one(tokens: str) -> None:
    """Two of them, 50 % and 70 % full, are one with all their KV, and 60 % full. Shares were added up to 120 % of one
    engine's KV, so that the gateway took it for overfull."""
    series = [SERIES.format(engine=engine, share=share, tokens=tokens) for engine, share in enumerate((0.5, 0.7))]
    seen = await observed("".join(series))
    assert (seen.num_running, seen.num_waiting, seen.work_counter) == (20, 2, 10.0)
    assert (seen.kv_used_share, seen.kv_capacity_tokens) == (pytest.approx(0.6), 320_000)
