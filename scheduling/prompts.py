"""Which residents of an engine hold the same beginning: an engine's prefix cache holds it once.

A first prompt may have several parts that others hold as well: a preamble (system prompt and tools, common to agents of
many groups), the prompt that siblings answer, and what branches of one conversation have in common. If shared parts
counted for each holder, sixteen siblings with a prompt of 20,000 tokens would claim 320,000 of which the engine holds
20,000, and turns would wait beside free KV.
"""

from collections.abc import Iterable, Iterator

from scheduling.state import PartName, Trajectory


class Prompts:
    """The first prompts of an engine's residents, part by part.

    Args:
        shared_tokens: tokens that claims count more than once: for each part, the length that all its holders have,
            times the number of holders less one.
    """

    def __init__(self) -> None:
        self.shared_tokens = 0
        self._held: dict[PartName, tuple[int, int]] = {}  # how many hold it, and its length
        self._parts_of: dict[str, list[PartName]] = {}

    def add(self, trajectory: Trajectory) -> None:
        """Add a trajectory's prompt. One of an earlier process has no known parts, and is skipped."""
        if not trajectory.prompt:
            return
        for name, tokens in trajectory.prompt:
            num_holders, held = self._held.get(name, (0, tokens))
            if num_holders:
                self.shared_tokens += held
            self._held[name] = num_holders + 1, held
            if tokens < held:
                self._cut(name, tokens)
        self._parts_of[trajectory.trajectory_id] = [name for name, _ in trajectory.prompt]

    def remove(self, trajectory_id: str) -> None:
        """Remove a trajectory's prompt."""
        for name in self._parts_of.pop(trajectory_id, ()):
            num_holders, tokens = self._held.pop(name)
            if num_holders > 1:
                self._held[name] = num_holders - 1, tokens
                self.shared_tokens -= tokens

    def fit(self, trajectory_id: str, context_tokens: int) -> None:
        """Limit a holder's prompt to its context, each part in proportion, because lengths were estimated. If the
        context has less than half the prompt's tokens, its agent has cut the context down, and it no longer holds this
        prompt."""
        names = self._parts_of.get(trajectory_id, ())
        tokens = sum([self._held[name][1] for name in names])
        if context_tokens >= tokens:
            return
        if 2 * context_tokens < tokens:
            self.remove(trajectory_id)
            return
        for name in names:
            self._cut(name, self._held[name][1] * context_tokens // tokens)

    def found_by(self, trajectory: Trajectory) -> int:
        """Tokens of its prompt that are already held here, if it came as one more holder."""
        found = 0
        for name, tokens in trajectory.prompt:
            held = self._held.get(name)
            if held is not None:
                found += held[1] if held[1] < tokens else tokens
        return found

    def left_by(self, leaving: Iterable[str], entrant: Trajectory | None = None) -> Iterator[int]:
        """For each trajectory that leaves, after those before it: tokens of its prompt that stay, for others or for an
        entrant."""
        wanted = () if entrant is None else [name for name, _ in entrant.prompt]
        num_gone: dict[PartName, int] = {}
        for trajectory_id in leaving:
            left = 0
            for name in self._parts_of.get(trajectory_id, ()):
                num_holders, tokens = self._held[name]
                num_gone[name] = gone = num_gone.get(name, 0) + 1
                if num_holders > gone or name in wanted:
                    left += tokens
            yield left

    def _cut(self, name: PartName, tokens: int) -> None:
        num_holders, held = self._held[name]
        self._held[name] = num_holders, tokens
        self.shared_tokens -= (num_holders - 1) * (held - tokens)
