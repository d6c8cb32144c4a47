"""How long an engine needs for the work ahead of it: the additive cost that placement, partition and scaling share.

An engine that must finish trajectories with remaining outputs L over mean contexts C needs about

    base * max(max L, sum L / slots, sum(L * C) / KV) + per_sequence * sum L + per_kv_token * sum(L * C)
    + per_prefill_token * prefill + tools:

The first term is the number of steps: those of the longest trajectory, or as many waves as slots or KV make of the sum.
The others are what each token, each KV read and each prefilled token adds to the steps, then the longest time in tools.
Prompts that trajectories of an engine share count once where KV makes the waves, and in full where they are read.
The policy study divides by the plain mean of C. Here C is weighted by L, which gives the same result if they are
unrelated, and more work never looks like less time. The searches of partition.py and scaling.py rely on that. The
Heddle paper's cost, T * F(size) * longest, ignores waves, prefill and the sum of the work, and loses 10 to 15 % to this
one.
"""

from dataclasses import dataclass

from scheduling.cost import EngineProfile

# The rest of the KV cache is lost to partly filled blocks.
USABLE_KV_SHARE = 0.95

# A 90th percentile of up to TELLING_RATIO times the mean still tells how long a trajectory will be; from VAGUE_RATIO
# times on it tells nothing. No log-normal law exceeds 2.27 times. TELLING_RATIO between 1.8 and 2.2 gives like
# makespans.
TELLING_RATIO = 1.8
VAGUE_RATIO = 2.25


@dataclass(frozen=True, slots=True)
class Remaining:
    """The predicted rest of one trajectory.

    Args:
        output_tokens: tokens that it will still make, at least 0.
        context_tokens: its context now.
        new_tokens: tokens that tools will still add to its context.
        uncached_tokens: the part of its context that its engine must prefill first.
        tool_s: seconds that it will still spend in tools.
    """

    output_tokens: float
    context_tokens: float = 0.0
    new_tokens: float = 0.0
    uncached_tokens: float = 0.0
    tool_s: float = 0.0

    @property
    def mean_context_tokens(self) -> float:
        """Its context half way through."""
        return self.context_tokens + (self.output_tokens + self.new_tokens) / 2

    @property
    def prefill_tokens(self) -> float:
        return self.new_tokens + self.uncached_tokens


@dataclass(slots=True)
class Work:
    """The work ahead of an engine: maxima and sums over its trajectories.

    Args:
        longest_tokens: the largest remaining output, or the largest 90th percentile of one if predictions give it. An
            engine ends with its longest trajectory, and the expectation of a maximum is far above the maximum of
            expectations.
        total_tokens: the sum of remaining outputs.
        token_context_products: the sum of remaining output times mean context (the context half way to its end).
        prefill_tokens: the sum of tokens still to be prefilled.
        tool_s: the longest time that one trajectory still spends in tools.
        vague_tokens: how much of `longest_tokens` is a guess: all of it if its prediction tells nothing.
        room_share: the share of all contexts that takes room in the KV cache: less than 1 if trajectories share
            prompts, which are held once and read by each.
    """

    longest_tokens: float = 0.0
    total_tokens: float = 0.0
    token_context_products: float = 0.0
    prefill_tokens: float = 0.0
    tool_s: float = 0.0
    vague_tokens: float = 0.0
    room_share: float = 1.0

    def add(self, remaining_tokens: float, context_tokens: float, p90_tokens: float = 0.0) -> None:
        """Add a trajectory."""
        longest = p90_tokens if p90_tokens > remaining_tokens else remaining_tokens
        if longest > self.longest_tokens:
            self.longest_tokens, self.vague_tokens = longest, vague_tokens(remaining_tokens, longest)
        self.total_tokens += remaining_tokens
        self.token_context_products += remaining_tokens * context_tokens

    def remove(self, remaining_tokens: float, context_tokens: float) -> None:
        """Remove a trajectory. `longest_tokens` stays as it was: an upper bound."""
        self.total_tokens -= remaining_tokens
        self.token_context_products -= remaining_tokens * context_tokens

    def clear(self) -> None:
        """Remove all trajectories."""
        self.longest_tokens = self.total_tokens = self.token_context_products = self.vague_tokens = 0.0


def vague_tokens(mean_tokens: float, p90_tokens: float) -> float:
    """How much of a prediction's 90th percentile is a guess, in tokens; 0 if the mean is 0."""
    told, vague = mean_tokens * TELLING_RATIO, mean_tokens * VAGUE_RATIO
    if p90_tokens <= told or not mean_tokens:
        return 0.0
    if p90_tokens >= vague:
        return p90_tokens
    return p90_tokens * ((p90_tokens - told) / (vague - told))


def estimate_finish_s(
    profile: EngineProfile,
    work: Work,
    remaining_tokens: float = 0.0,
    context_tokens: float = 0.0,
    p90_tokens: float = 0.0,
) -> float:
    """Seconds until an engine would finish `work` and one more trajectory. A KV capacity of 0 is unknown and sets no
    limit.

    Cost: no max(), which takes as long as all the rest, because a move compares all engines at every turn.
    """
    total_tokens = work.total_tokens + remaining_tokens
    products = work.token_context_products + remaining_tokens * context_tokens
    steps = work.longest_tokens
    if remaining_tokens > steps:
        steps = remaining_tokens
    if p90_tokens > steps:
        steps = p90_tokens
    if (waves := total_tokens / profile.slots) > steps:
        steps = waves
    room_tokens = USABLE_KV_SHARE * profile.kv_capacity_tokens
    if room_tokens and (waves := work.room_share * products / room_tokens) > steps:
        steps = waves
    per_token_ms, per_product_ms = profile.decode_per_sequence_ms, profile.decode_per_kv_ktoken_ms / 1000
    decoded_s = (profile.decode_base_ms * steps + per_token_ms * total_tokens + per_product_ms * products) / 1000
    return decoded_s + profile.prefill_per_ktoken_ms * work.prefill_tokens / 1e6 + work.tool_s
