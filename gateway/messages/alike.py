"""Chunks of a stream that differ from an earlier one in nothing but their text, as nearly all of them do."""

import re

# Where an event of OpenAI's has its text; one with an escaped quote in it is no example.
_TEXT = re.compile(rb'"(?:content|text|reasoning|reasoning_content)":"([^"\\]*)"')
_LEARN_EVERY = 16


class Alike:
    """Compares the events of one stream with an example.

    An event that begins and ends as one which says nothing but text, and has no quote and no line end between, says
    nothing but text either: no name of JSON's has room there. Cost: half of what it takes to look for those names.
    """

    __slots__ = ("_end", "_num_unlike", "_start", "_text_at", "_text_to")

    def __init__(self) -> None:
        self._start = self._end = b"\n"  # nothing that has an end begins so
        self._text_at = self._text_to = self._num_unlike = 0

    def holds(self, event: bytes) -> bool:
        """Whether this is one whole event, and like the example."""
        at = self._text_at
        return (
            event.startswith(self._start)
            and event.endswith(self._end)
            and event.find(b'"', at) == len(event) + self._text_to
            and event.find(b"\n", at) == len(event) - 2
        )

    def learn(self, event: bytes) -> None:
        """Hear of a whole event that is unlike the example and says nothing but text: now and then it is the next one.

        Not each time, for there are streams of which no event is like another.
        """
        self._num_unlike += 1
        if self._num_unlike % _LEARN_EVERY != 1:
            return
        text = _TEXT.search(event)
        if text is not None:
            self._start, self._end = event[: text.start(1)], event[text.end(1) :]
            self._text_at, self._text_to = len(self._start), -len(self._end)
