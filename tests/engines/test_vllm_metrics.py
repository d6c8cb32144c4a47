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


async def observed(page: str) -> tuple[Observation, ...]:
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
async def test_each_data_parallel_rank_has_what_is_its_own(tokens: str) -> None:
    """Requests, tokens, and KV, also where the page tells only the blocks of all ranks."""
    series = [SERIES.format(engine=engine, share=share, tokens=tokens) for engine, share in enumerate((0.5, 0.7))]
    first, second = await observed(
        "".join(series).replace('running{engine="1",model_name="m"} 10', 'running{engine="1",model_name="m"} 3')
    )
    assert (first.num_running, first.num_waiting, first.work_counter) == (10, 1, 5.0)
    assert (first.kv_used_share, first.kv_capacity_tokens) == (0.5, 160_000)
    assert (second.num_running, second.num_waiting, second.work_counter) == (3, 1, 5.0)
    assert (second.kv_used_share, second.kv_capacity_tokens) == (0.7, 160_000)


async def test_ranks_come_in_the_order_of_their_numbers() -> None:
    """Not in that of the page, nor of the digits; a server that has only a node's ranks counts from its first."""
    numbers = [*range(13, 7, -1)]
    page = "".join(f'vllm:num_requests_running{{engine="{number}",model_name="m"}} {number}.0\n' for number in numbers)
    assert [seen.num_running for seen in await observed(page)] == sorted(numbers)


async def test_a_metric_of_another_name_is_not_taken_for_a_ranks() -> None:
    """Of metrics that begin alike, and of labels that end alike."""
    page = (
        'vllm:num_requests_running{pipeline_engine="7",engine="0",model_name="m"} 2.0\n'
        'vllm:num_requests_running_max{engine="1",model_name="m"} 9.0\n'
        "# HELP vllm:num_requests_running how many run\n"
    )
    [seen] = await observed(page)
    assert seen.num_running == 2
