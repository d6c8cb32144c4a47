"""Which trajectories begin alike: GRPO siblings whose client names no group, and a task that comes again.

A group is what a first request says, answers included: examples of some other conversation, or a greeting that an agent
puts there, and all its tasks would be one without what follows. But a conversation that goes on from a prompt that was
asked before is one of that prompt, though nobody knows whose: its history was edited, say.

Bounded: the prompt that was met longest ago is forgotten first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from gateway.messages.transcripts import digests_of_prompts


class PromptGroups:
    """The prompts asked lately.

    Args:
        known: groups of an earlier process; names that clients gave do no harm.
        limit: prompts kept, about 150 bytes each.
    """

    def __init__(self, known: Iterable[str] = (), limit: int = 20_000) -> None:
        self._limit = limit
        self._met: OrderedDict[str, None] = OrderedDict.fromkeys(known)
        self._last: tuple[Mapping[str, Any], str] = ({}, "")

    def of(self, body: Mapping[str, Any]) -> str:
        """The name of a request's group: 32 hexadecimal digits.

        Of the same object as the last time at no cost: a turn's beginning asks twice.
        """
        if body is self._last[0]:
            return self._last[1]
        *beginnings, whole = digests_of_prompts(body)
        group = next((beginning for beginning in beginnings if beginning in self._met), whole)
        self._met[group] = None
        self._met.move_to_end(group)
        while len(self._met) > self._limit:
            self._met.popitem(last=False)
        self._last = body, group
        return group
