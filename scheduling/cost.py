"""The cost model of an engine's time, the only one: shared by placement, the simulated engine and the simulator.

A decode step of `B` running sequences over `K` resident KV tokens takes `base + per_sequence * B + per_kv_token * K`;
prefill takes a linear term for the uncached tokens, plus a quadratic one: that of the whole context less that of its
cached part. Coefficients come from profiles (engines/profiles/), each with its source.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """Timing and capacity of one engine at one tensor-parallel size.

    Args:
        name: the profile's name, `model-gpu-tpN`.
        model: the model that was measured.
        gpu: the accelerator that was measured.
        tp: tensor-parallel size, GPUs per engine.
        slots: turns that the engine runs at once (its `max_num_seqs`).
        kv_capacity_tokens: KV tokens that fit beside the weights.
        kv_bytes_per_token: bytes of KV per token over all GPUs of the engine.
        decode_base_ms: one decode step with an empty batch, engine overhead included; above 0.
        decode_per_sequence_ms: what one more running sequence adds to a step.
        decode_per_kv_ktoken_ms: what 1,000 more resident KV tokens add to a step.
        prefill_per_ktoken_ms: linear prefill cost per 1,000 new tokens.
        prefill_per_ktoken2_ms: quadratic prefill cost, per (1,000 tokens) squared.
        source: where the coefficients come from.
        request_ms: time that a request holds its slot beyond the engine's steps: HTTP, rendering, tokenizing.
        request_gap_ms: how far apart requests that are sent together reach the engine's steps, because its front end
            takes one at a time. It is a part of `request_ms`, as long as that is larger.
        prefill_step_ms: what a step that prefills takes longer than one that only decodes, however many tokens it
            prefills. All running sequences wait for it.
        prefill_least_tokens: a step that prefills fewer tokens takes as long as with these, but for the quadratic cost.
            Engines capture steps of decoding as graphs and launch a prefill's kernels one by one, and until a GPU has
            enough to do for each it waits for the next. Source: docs/gpu.md.
    """

    name: str
    model: str
    gpu: str
    tp: int
    slots: int
    kv_capacity_tokens: int
    kv_bytes_per_token: int
    decode_base_ms: float
    decode_per_sequence_ms: float
    decode_per_kv_ktoken_ms: float
    prefill_per_ktoken_ms: float
    prefill_per_ktoken2_ms: float
    source: str
    request_ms: float = 0.0
    request_gap_ms: float = 0.0
    prefill_step_ms: float = 0.0
    prefill_least_tokens: int = 0

    def decode_step_s(self, num_running: int, kv_tokens: float) -> float:
        """Seconds of one decode step that gives one token to each of `num_running` sequences."""
        return (
            self.decode_base_ms
            + self.decode_per_sequence_ms * num_running
            + self.decode_per_kv_ktoken_ms * kv_tokens / 1000
        ) / 1000

    def prefill_s(self, new_tokens: float, cached_tokens: float = 0) -> float:
        """Seconds to prefill `new_tokens` behind `cached_tokens` that are already in the KV cache."""
        new, cached = new_tokens / 1000, cached_tokens / 1000
        per_ktoken2_ms = self.prefill_per_ktoken2_ms if self.prefill_per_ktoken2_ms > 0.0 else 0.0
        quadratic = per_ktoken2_ms * ((cached + new) ** 2 - cached**2)
        return (self.prefill_per_ktoken_ms * new + quadratic) / 1000

    def prefill_launch_s(self, num_tokens: float) -> float:
        """Seconds that a step which prefills this many tokens takes beside their own `prefill_s`."""
        num_missing = max(self.prefill_least_tokens - num_tokens, 0)
        return (self.prefill_step_ms + self.prefill_per_ktoken_ms * num_missing / 1000) / 1000

    def slower(self, ratio: float) -> "EngineProfile":
        """The profile of an engine that takes `ratio` times as long for everything."""
        return replace(
            self,
            decode_base_ms=self.decode_base_ms * ratio,
            decode_per_sequence_ms=self.decode_per_sequence_ms * ratio,
            decode_per_kv_ktoken_ms=self.decode_per_kv_ktoken_ms * ratio,
            prefill_per_ktoken_ms=self.prefill_per_ktoken_ms * ratio,
            prefill_per_ktoken2_ms=self.prefill_per_ktoken2_ms * ratio,
            request_ms=self.request_ms * ratio,
            request_gap_ms=self.request_gap_ms * ratio,
            prefill_step_ms=self.prefill_step_ms * ratio,
        )
