"""Everything one can set of a simulated engine server."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engines.profiles import load_profile
from scheduling.cost import EngineProfile

FaultKind = Literal["refuse", "error", "slow", "hang", "reset", "die", "nonsense", "html"]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong with requests.

    Args:
        kind: `refuse` answers 503 and `error` 500; `slow` waits `delay_s` before the first byte; `hang` never answers;
            `reset` resets the connection, and `die` closes it in mid-body; `nonsense` answers 200 with broken JSON
            (in a stream: one broken event), and `html` 502 with a page of HTML.
        after_chunks: for `reset` and `die` in a stream, the chunks sent before. 0: `reset` sends nothing at all.
        delay_s: real seconds, for `slow`.
        probability: of each request to meet it.
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
        speed_up: virtual seconds per real second.
        max_model_len: tokens of prompt and answer together; no more than fits into the profile's KV cache.
        block_size: tokens per prefix-cache block.
        scheduling_policy: `priority` sorts by the requests' priority numbers.
        low_priority_values_first: SGLang's `--schedule-low-priority-values-first`; vLLM always has it so.
        preemption_threshold: SGLang's, by how much a newcomer must be more urgent to take a running one's place.
        incremental_streaming_output: SGLang's flag for native streams; without it each event repeats all before.
        sampling_defaults: SGLang's, which it only tells of; the simulated model has no parameters of its own.
        tool_call_parser, reasoning_parser: SGLang's names of them.
        response_store: vLLM's VLLM_ENABLE_RESPONSES_API_STORE and SGLang's --enable-response-store, of which it only
            tells: no response is kept.
        max_num_queued: requests waiting and running before new ones get 503. None: no limit.
        chunk_interval_s: real seconds between the chunks of a stream, with several tokens in one. 0: a chunk per token.
        mean_output_tokens: how long an answer is on average when the request does not limit it.
        weight_version: of the weights it starts with; they enter every answer, so that answers of other weights differ.
        weight_load_s: virtual seconds that other weights take to load.
        sleep_s: virtual seconds that falling asleep takes, and waking.
        api_key: clients of `/v1` and `/inference` must send it. None: anyone may.
        keep_alive_s: idle connections are closed after this long; 5 s as the real engines have it.
        kv_transfer: vLLM's NixlConnector is there: KV can be offered and fetched.
        kv_tier: folder in which it shares its KV with other servers, as with vLLM's file tier. None: it shares none.
        kv_lease_s: virtual seconds for which an offer stands; the real one's `kv_lease_duration`.
        seed: of the dice for faults.
    """

    dialect: Literal["vllm", "sglang"] = "vllm"
    profile: EngineProfile = field(default_factory=lambda: load_profile("qwen3-14b-h100-tp1"))
    speed_up: float = 1.0
    model: str = "simulated"
    max_model_len: int = 40_960
    block_size: int = 16
    scheduling_policy: Literal["fcfs", "priority"] = "priority"
    low_priority_values_first: bool = True
    preemption_threshold: int = 10
    incremental_streaming_output: bool = False
    sampling_defaults: Literal["model", "openai"] = "openai"
    tool_call_parser: str | None = "hermes"
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
