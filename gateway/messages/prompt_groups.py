"""Which trajectories begin alike: GRPO siblings whose client names no group, and a task that comes again.

A group is everything that a first request says, including answers in it. These may be examples from another
conversation, or a greeting that an agent puts there; without what follows them, all tasks of that agent would be one
group. But a conversation that continues a prompt asked before belongs to that prompt's group, even if its trajectory is
unknown because, for example, its history was edited.

Bounded: the least recently seen prompt is forgotten first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from gateway.messages.transcripts import digests_of_prompts


class PromptGroups:
    """The prompts asked recently.

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

        Repeating the call with the same object costs nothing: a beginning turn asks twice.
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
