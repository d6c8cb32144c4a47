"""Which residents of an engine hold the same beginning: an engine's prefix cache holds it once.

A first prompt may have several parts that others hold as well: a preamble (system prompt and tools, common to agents of
many groups), the prompt that siblings answer, and what branches of one conversation have in common. If shared parts
counted for each holder, sixteen siblings with a prompt of 20,000 tokens would claim 320,000 of which the engine holds
20,000, and turns would wait beside free KV.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from scheduling.state import PartName, PromptPart, Trajectory


class Prompts:
    """The first prompts of an engine's residents, part by part.

    Holders may have different lengths of a part, because it ends with a prompt and because lengths were estimated. The
    engine holds the longest, and the others within it.

    Args:
        shared_tokens: tokens that claims count more than once: for each part, the sum of its holders' lengths less the
            longest one.
    """

    def __init__(self) -> None:
        self.shared_tokens = 0
        self._lengths: dict[PartName, list[int]] = {}  # of its holders, the longest last
        self._parts_of: dict[str, tuple[PromptPart, ...]] = {}

    def add(self, trajectory: Trajectory) -> None:
        """Add a trajectory's prompt. One of an earlier process has no known parts, and is skipped."""
        if not trajectory.prompt:
            return
        self.shared_tokens += self.found_by(trajectory.prompt)
        for name, tokens in trajectory.prompt:
            insort(self._lengths.setdefault(name, []), tokens)
        self._parts_of[trajectory.trajectory_id] = trajectory.prompt

    def remove(self, trajectory_id: str) -> None:
        """Remove a trajectory's prompt."""
        for name, tokens in self._parts_of.pop(trajectory_id, ()):
            lengths = self._lengths[name]
            self.shared_tokens -= _left_of(lengths, tokens)
            if not lengths:
                del self._lengths[name]

    def found_by(self, prompt: Iterable[PromptPart]) -> int:
        """Tokens of a prompt that are already held here, if it came with one more holder."""
        found = 0
        for name, tokens in prompt:
            if name in self._lengths:
                held = self._lengths[name][-1]
                found += held if held < tokens else tokens
        return found

    def left_by(self, leaving: Iterable[str], wanted: Iterable[PromptPart] = ()) -> Iterator[int]:
        """For each trajectory that leaves, after those before it: tokens of its prompt that stay, for others or for an
        entrant's prompt."""
        entrant = dict(wanted)
        lengths_of: dict[PartName, list[int]] = {}
        for trajectory_id in leaving:
            left = 0
            for name, tokens in self._parts_of.get(trajectory_id, ()):
                lengths = lengths_of.get(name)
                if lengths is None:
                    lengths = lengths_of[name] = self._lengths[name].copy()
                    if name in entrant:
                        insort(lengths, entrant[name])
                left += _left_of(lengths, tokens)
            yield left


def _left_of(lengths: list[int], tokens: int) -> int:
    """Remove a holder's length of a part. Returns how much of it the others hold."""
    del lengths[bisect_left(lengths, tokens)]
    if not lengths:
        return 0
    held = lengths[-1]
    return held if held < tokens else tokens
