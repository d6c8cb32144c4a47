"""Every setting of a simulated engine server."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engines.profiles import load_profile
from scheduling.cost import EngineProfile

FaultKind = Literal["refuse", "error", "slow", "hang", "reset", "die", "nonsense", "html"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in requests.

    Args:
        kind: `refuse` answers 503 and `error` 500; `slow` waits `delay_s` before the first byte; `hang` never answers;
            `reset` resets the connection, and `die` closes it in the middle of the body; `nonsense` answers 200 with
            broken JSON (in a stream: one broken event), and `html` 502 with an HTML page.
        after_chunks: for `reset` and `die` in a stream, the chunks sent before. 0: `reset` sends nothing at all.
        delay_s: real seconds, for `slow`.
        probability: that a request meets it.
        count: how many requests meet it before it is over. None: no limit.
        path: it meets requests whose path begins with this.
        retry_after_s: for `refuse`, how long it asks to be left alone.
    """

    kind: FaultKind
    after_chunks: int = 0
    delay_s: float = 1.0
    probability: float = 1.0
    count: int | None = None
    path: str = "/v1"
    retry_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class SimulatedEngineSettings:
    """One simulated engine server.

    Args:
        profile: of one rank.
        data_parallel_size: engines of the server, called ranks, each with slots, KV and a prefix cache of its own.
        speed_up: virtual seconds per real second.
        max_model_len: tokens of prompt and answer together; at most what fits into the profile's KV cache.
        block_size: tokens per prefix-cache block.
        scheduling_policy: `priority` sorts by the requests' priority numbers.
        low_priority_values_first: SGLang's `--schedule-low-priority-values-first`; vLLM always works this way.
        incremental_streaming_output: SGLang's flag for native streams; without it each event repeats everything before.
        reasoning_parser: the name of SGLang's.
        response_store: vLLM's VLLM_ENABLE_RESPONSES_API_STORE and SGLang's --enable-response-store, which it only
            reports: no response is kept.
        max_num_queued: requests waiting and running on one rank before new ones get 503. None: no limit.
        chunk_interval_s: real seconds between the chunks of a stream, with several tokens in one. 0: a chunk per token.
        mean_output_tokens: the average length of an answer that the request does not limit.
        weight_version: of the weights it starts with; they affect every answer, so that answers of other weights
            differ.
        weight_load_s: virtual seconds that loading other weights takes.
        sleep_s: virtual seconds that falling asleep takes, and waking.
        api_key: clients of `/v1` and `/inference` must send it. None: no key is needed.
        keep_alive_s: idle connections are closed after this long; 5 s as in the real engines.
        kv_transfer: vLLM's NixlConnector is enabled: KV can be offered and fetched. Only with one rank.
        kv_tier: folder in which it shares its KV with other servers, as with vLLM's file tier. None: it shares none.
        kv_lease_s: virtual seconds for which an offer stands; the real one's `kv_lease_duration`.
        seed: of the random numbers for faults.
    """

    dialect: Literal["vllm", "sglang"] = "vllm"
    profile: EngineProfile = field(default_factory=lambda: load_profile("qwen3-14b-h100-tp1"))
    data_parallel_size: int = 1
    speed_up: float = 1.0
    model: str = "simulated"
    max_model_len: int = 40_960
    block_size: int = 16
    scheduling_policy: Literal["fcfs", "priority"] = "priority"
    low_priority_values_first: bool = True
    incremental_streaming_output: bool = False
    reasoning_parser: str | None = None
    response_store: bool = False
    max_num_queued: int | None = None
    chunk_interval_s: float = 0.0
    mean_output_tokens: int = 128
    weight_version: str = "default"
    weight_load_s: float = 0.0
    sleep_s: float = 0.0
    api_key: str | None = None
    keep_alive_s: float = 5.0
    kv_transfer: bool = False
    kv_tier: Path | None = None
    kv_lease_s: float = 30.0
    seed: int = 0
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if self.data_parallel_size < 1:
            raise ValueError("data_parallel_size is at least 1")
        if self.data_parallel_size > 1 and self.kv_transfer:
            raise ValueError("a simulated server of several data-parallel ranks cannot transfer KV")
