"""What agents do, as data: a workload is trajectories, a trajectory is turns. No clock, no sockets.

Lengths are in tokens, times in seconds. The prompt of turn k is everything before it: the first prompt, then the answer
and the tool output of each earlier turn. A turn's `new_tokens` are those that joined the prompt just before it, so they
are 0 at the first turn.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

# A chat template writes role marks around every message, which lengths here do not include. ChatML, the form of Qwen's
# templates, writes 5 tokens per message and 3 to begin an answer, and a turn adds two messages; the rest is a margin.
TEMPLATE_TOKENS_PER_TURN = 20
# Larger factors of lengths and tool times are a slip, not a workload; some overflow.
MAX_SCALE = 1e6


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the model and the tool call that follows it.

    Args:
        new_tokens: Tokens that join the prompt before this turn: the last tool's output. 0 at the first turn.
        output_tokens: Tokens that the model writes, at least 1.
        tool_s: Seconds that the tool takes after this turn; 0 if none follows.
    """

    new_tokens: int
    output_tokens: int
    tool_s: float


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One agent episode. `context_tokens` is the prompt of the first turn; siblings have the same `group_id`.

    Args:
        preamble_tokens: The part of the first prompt that is the same in all groups: system prompt and tools.
        prompt_id: Stays the same for the same prompt in a later rollout, where its group is another. Empty: unknown.
    """

    trajectory_id: str
    group_id: str
    context_tokens: int
    turns: tuple[Turn, ...]
    preamble_tokens: int = 0
    prompt_id: str = ""

    @property
    def output_tokens(self) -> int:
        return sum(turn.output_tokens for turn in self.turns)

    @property
    def prompt_tokens(self) -> int:
        """Distinct tokens that were given to the model and not written by it."""
        return self.context_tokens + sum(turn.new_tokens for turn in self.turns)

    @property
    def total_tokens(self) -> int:
        """The length of the context when the last turn has ended."""
        return self.prompt_tokens + self.output_tokens

    @property
    def tool_s(self) -> float:
        return sum(turn.tool_s for turn in self.turns)

    def scaled(self, *, prompts: float = 1.0, outputs: float = 1.0, tools: float = 1.0) -> Trajectory:
        """Lengths and tool times multiplied; an answer and a first prompt keep at least one token."""
        turns = tuple(
            Turn(
                new_tokens=round(turn.new_tokens * prompts),
                output_tokens=max(1, round(turn.output_tokens * outputs)),
                tool_s=turn.tool_s * tools,
            )
            for turn in self.turns
        )
        context_tokens = max(1, round(self.context_tokens * prompts))
        preamble_tokens = min(context_tokens, round(self.preamble_tokens * prompts))
        return replace(self, context_tokens=context_tokens, turns=turns, preamble_tokens=preamble_tokens)


@dataclass(frozen=True)
class Workload:
    """Trajectories in the order in which they start, under a name that tells their source.

    Args:
        left_out: what else the source has, in words; empty if nothing.
    """

    name: str
    trajectories: tuple[Trajectory, ...]
    left_out: str = ""

    @cached_property
    def num_turns(self) -> int:
        return sum(len(trajectory.turns) for trajectory in self.trajectories)

    @cached_property
    def output_tokens(self) -> int:
        return sum(trajectory.output_tokens for trajectory in self.trajectories)

    @cached_property
    def prompt_tokens(self) -> int:
        return sum(trajectory.prompt_tokens for trajectory in self.trajectories)

    @cached_property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @cached_property
    def max_context_tokens(self) -> int:
        """The longest context that any trajectory reaches, without the chat template."""
        return max((trajectory.total_tokens for trajectory in self.trajectories), default=0)

    @cached_property
    def groups(self) -> dict[str, tuple[Trajectory, ...]]:
        """Siblings by group, groups in the order of their first trajectory."""
        members: dict[str, list[Trajectory]] = {}
        for trajectory in self.trajectories:
            members.setdefault(trajectory.group_id, []).append(trajectory)
        return {group_id: tuple(siblings) for group_id, siblings in members.items()}

    def scaled(self, *, prompts: float = 1.0, outputs: float = 1.0, tools: float = 1.0) -> Workload:
        """Every trajectory multiplied by the same factors, so orders and tails stay, except for rounding.

        Raises:
            ValueError: If a factor is above `MAX_SCALE`.
        """
        if prompts == outputs == tools == 1.0:
            return self  # a copy of a large trace takes seconds, and its memory once more
        if (largest := max(prompts, outputs, tools)) > MAX_SCALE:
            raise ValueError(f"lengths and tool times can be multiplied by a million at most, not by {largest:g}")
        return self._with(t.scaled(prompts=prompts, outputs=outputs, tools=tools) for t in self.trajectories)

    def within(
        self, max_turns: int | None = None, max_context_tokens: int | None = None, max_tool_s: float | None = None
    ) -> Workload:
        """Cut to these bounds, in their order: `with_max_turns`, `fitted`, `with_max_tool_s`; None for no bound.

        Raises:
            ValueError: as `fitted`.
        """
        workload = self if max_turns is None else self.with_max_turns(max_turns)
        workload = workload if max_context_tokens is None else workload.fitted(max_context_tokens)
        return workload if max_tool_s is None else workload.with_max_tool_s(max_tool_s)

    def with_max_turns(self, max_turns: int) -> Workload:
        """Trajectories cut after their first `max_turns` turns. The long ones lose most: the tail is shorter."""
        return self._with(replace(t, turns=t.turns[:max_turns]) for t in self.trajectories)

    def with_preamble(self, tokens: int) -> Workload:
        """Puts `tokens` common tokens before every first prompt: system prompt and tools."""
        if not tokens:
            return self
        return self._with(
            replace(t, context_tokens=t.context_tokens + tokens, preamble_tokens=t.preamble_tokens + tokens)
            for t in self.trajectories
        )

    def with_max_tool_s(self, max_tool_s: float) -> Workload:
        """Limits every tool call to this time; shorter ones stay as they are."""
        return self._with(
            replace(t, turns=tuple(replace(turn, tool_s=min(turn.tool_s, max_tool_s)) for turn in t.turns))
            for t in self.trajectories
        )

    def sampled(self, limit: int, seed: int) -> Workload:
        """At most `limit` trajectories: whole groups drawn at random, the last group cut short."""
        group_ids = list(self.groups)
        random.Random(seed).shuffle(group_ids)
        chosen = [trajectory for group_id in group_ids for trajectory in self.groups[group_id]][:limit]
        chosen_ids = {trajectory.trajectory_id for trajectory in chosen}
        return self._with(t for t in self.trajectories if t.trajectory_id in chosen_ids)

    def fitted(self, max_context_tokens: int) -> Workload:
        """The workload with every trajectory within a model's context, template included.

        There are two factors, the same for all trajectories. Answers are scaled only if the answers of some trajectory
        alone fill more than half of the room. Then prompts and tool outputs are scaled until every trajectory fits. So
        the order of total answers and the order of total prompts stay, except for rounding; the share of each in the
        whole may change.

        Raises:
            ValueError: If a trajectory has so many turns that no factor helps. The message gives the least context.
        """
        longest = max(self.trajectories, key=lambda trajectory: len(trajectory.turns))
        # One token per answer and per tool output is the least possible.
        least_tokens = (TEMPLATE_TOKENS_PER_TURN + 2) * len(longest.turns) + 1
        if max_context_tokens < least_tokens:
            raise ValueError(
                f"{longest.trajectory_id}: {len(longest.turns)} turns do not fit into a context of "
                f"{max_context_tokens:,} tokens; allow at least {least_tokens:,}, or set max_turns"
            )
        outputs = min(
            _factor([turn.output_tokens for turn in t.turns], _room(t, max_context_tokens) // 2, least=1)
            for t in self.trajectories
        )
        shorter = self.scaled(outputs=outputs)
        prompts = min(
            _factor(
                [t.context_tokens, *(turn.new_tokens for turn in t.turns)],
                _room(t, max_context_tokens) - t.output_tokens,
                least=0,
            )
            for t in shorter.trajectories
        )
        return shorter.scaled(prompts=prompts)

    def _with(self, trajectories: Iterable[Trajectory]) -> Workload:
        return replace(self, trajectories=tuple(trajectories))


def _room(trajectory: Trajectory, max_context_tokens: int) -> int:
    return max_context_tokens - TEMPLATE_TOKENS_PER_TURN * len(trajectory.turns)


def _factor(lengths: list[int], room: int, least: int) -> float:
    """A factor of at most 1 with which the lengths, rounded and none below `least`, fit into `room`."""
    if sum(max(least, length) for length in lengths) <= room:
        return 1.0
    # Rounding and the least length add at most one token to each.
    return max(0, room - len(lengths)) / sum(lengths)
