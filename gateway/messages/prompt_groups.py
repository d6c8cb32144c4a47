"""Which trajectories begin alike: GRPO siblings whose client names no group, a task that comes again, and branches of
one conversation.

A group is everything that a first request says, including answers in it. These may be examples from another
conversation, or a greeting that an agent puts there; without what follows them, all tasks of that agent would be one
group. But a conversation that continues a prompt asked before belongs to that prompt's group, even if its trajectory is
unknown because, for example, its history was edited.

Bounded: the least recently seen prompt is forgotten first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway.messages.transcripts import beginnings_of, preamble_of

# A first prompt that is a long conversation shares this many of its beginnings, or all of it: they are in its event.
MAX_BEGINNINGS = 63


class PromptGroups:
    """The prompts asked recently.

    Args:
        known: groups of an earlier process; names that clients gave do no harm.
        limit: prompts kept, about 150 bytes each.
    """

    def __init__(self, known: Iterable[str] = (), limit: int = 20_000) -> None:
        self._limit = limit
        self._met: OrderedDict[str, None] = OrderedDict.fromkeys(known)
        self._last: tuple[Mapping[str, Any], str, Sequence[tuple[str, int]]] = ({}, "", ())

    def of(self, body: Mapping[str, Any]) -> str:
        """The name of a request's group: 32 hexadecimal digits.

        Repeating the call with the same object costs nothing: a beginning turn asks twice.
        """
        if body is self._last[0]:
            return self._last[1]
        beginnings = beginnings_of(body)
        group = next((digest for digest, _ in beginnings if digest in self._met), beginnings[-1][0])
        self._met[group] = None
        self._met.move_to_end(group)
        while len(self._met) > self._limit:
            self._met.popitem(last=False)
        self._last = body, group, beginnings
        return group

    def parts(self, body: Mapping[str, Any], num_bytes: int, prompt_tokens: int) -> tuple[tuple[str, int], ...]:
        """The parts of a first prompt with which others may begin, too (scheduling/types.py, TurnArrived): its
        preamble, and from there to each answer and to its end.

        Args:
            num_bytes: of the body; tokens are estimated by bytes, and beyond the preamble by characters.
        """
        preamble_id, its_bytes = preamble_of(body)
        left = prompt_tokens
        parts = []
        if preamble_id:
            left -= prompt_tokens * its_bytes // num_bytes if its_bytes < num_bytes else prompt_tokens
            parts.append((preamble_id, prompt_tokens - left))
        self.of(body)
        beginnings = self._last[2]
        whole, length = beginnings[-1]
        told = 0
        for digest, its_length in beginnings[:-1][:MAX_BEGINNINGS]:
            tokens = left * its_length // (length or 1) - told
            parts.append((preamble_id + digest, tokens))
            told += tokens
        parts.append((preamble_id + whole, left - told))
        return tuple(parts)
