"""Which residents of an engine hold the same beginning: an engine's prefix cache has it once.

A first prompt has up to two parts that others hold as well: a preamble (system prompt and tools, the same for agents of
many groups), and the prompt that siblings answer. Without this, sixteen siblings with a prompt of 20,000 tokens claim
320,000 where the engine holds 20,000 of them, and turns wait beside free KV.
"""

from collections.abc import Iterable, Iterator

from scheduling.state import PartName, Trajectory


class Prompts:
    """The first prompts of an engine's residents, part by part.

    Args:
        shared_tokens: what claims count twice and more: of each part the length that all its holders have, for every
            holder but one.
    """

    def __init__(self) -> None:
        self.shared_tokens = 0
        self._held: dict[PartName, tuple[int, int]] = {}  # how many hold it, and its length
        self._parts_of: dict[str, list[PartName]] = {}

    def add(self, trajectory: Trajectory) -> None:
        """A trajectory holds its prompt here; of one of an earlier process nothing is known."""
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
        """A trajectory holds it no more."""
        for name in self._parts_of.pop(trajectory_id, ()):
            num_holders, tokens = self._held.pop(name)
            if num_holders > 1:
                self._held[name] = num_holders - 1, tokens
                self.shared_tokens -= tokens

    def fit(self, trajectory_id: str, context_tokens: int) -> None:
        """A holder's context has so many tokens: its prompt has no more, each part in proportion, for lengths were
        estimated. Where it has less than half of them, its agent has cut its context down, and it holds another one."""
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
        """Tokens of its prompt that are held already, where it would be one more holder."""
        found = 0
        for name, tokens in trajectory.prompt:
            held = self._held.get(name)
            if held is None:
                break
            found += held[1] if held[1] < tokens else tokens
        return found

    def left_by(self, leaving: Iterable[str], entrant: Trajectory | None = None) -> Iterator[int]:
        """Of each that leaves, after those before it: tokens of its prompt that stay, for others or for an entrant."""
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
