"""Which residents of an engine hold the same prompt: siblings answer one, and an engine's prefix cache has it once.

Without this, sixteen siblings with a prompt of 20,000 tokens claim 320,000 where the engine holds 20,000 of them, and
turns wait beside free KV.
"""

from scheduling.state import Prompt, Trajectory


class Prompts:
    """The first prompts of an engine's residents.

    Args:
        shared_tokens: what claims count twice and more: of each prompt the length that all its holders have, for every
            holder but one.
    """

    def __init__(self) -> None:
        self.shared_tokens = 0
        self._held: dict[Prompt, tuple[int, int]] = {}  # how many hold it, and its length
        self._prompt_of: dict[str, Prompt] = {}

    def add(self, trajectory: Trajectory) -> None:
        """A trajectory holds its prompt here; of one without a group, or of an earlier process, nothing is known."""
        prompt = trajectory.prompt
        if prompt is None:
            return
        num_holders, tokens = self._held.get(prompt, (0, trajectory.first_prompt_tokens))
        if num_holders:
            self.shared_tokens += tokens
        self._held[prompt] = num_holders + 1, tokens
        self._prompt_of[trajectory.trajectory_id] = prompt
        self.fit(trajectory.trajectory_id, trajectory.first_prompt_tokens)

    def remove(self, trajectory_id: str) -> None:
        """A trajectory holds it no more."""
        prompt = self._prompt_of.pop(trajectory_id, None)
        if prompt is None:
            return
        num_holders, tokens = self._held.pop(prompt)
        if num_holders > 1:
            self._held[prompt] = num_holders - 1, tokens
            self.shared_tokens -= tokens

    def fit(self, trajectory_id: str, context_tokens: int) -> None:
        """A holder's context has so many tokens: its prompt has no more. Where it has less than half of them, its agent
        has cut its context down, and it holds another prompt."""
        prompt = self._prompt_of.get(trajectory_id)
        if prompt is None or context_tokens >= self._held[prompt][1]:
            return
        num_holders, tokens = self._held[prompt]
        if 2 * context_tokens < tokens:
            self.remove(trajectory_id)
            return
        self._held[prompt] = num_holders, context_tokens
        self.shared_tokens -= (num_holders - 1) * (tokens - context_tokens)

    def found_by(self, trajectory: Trajectory) -> int:
        """Tokens of its prompt that are held already, where it would be one more holder."""
        held = self._held.get(trajectory.prompt) if trajectory.prompt is not None else None
        return min(held[1], trajectory.first_prompt_tokens) if held is not None else 0

    def left_by(self, trajectory_id: str, entrant: Trajectory | None = None) -> int:
        """Tokens of its prompt that stay when it leaves: for others that hold it, or for one that enters."""
        prompt = self._prompt_of.get(trajectory_id)
        if prompt is None:
            return 0
        num_holders, tokens = self._held[prompt]
        is_kept = num_holders > 1 or (entrant is not None and entrant.prompt == prompt)
        return tokens if is_kept else 0
