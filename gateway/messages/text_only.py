"""Recognises chunks of a stream that differ from an earlier one only in their text, as nearly all do."""

import re

# The text of an OpenAI event; an event with an escaped quote in its text is no example.
_TEXT = re.compile(rb'"(?:content|text|reasoning|reasoning_content)":"([^"\\]*)"')
_LEARN_EVERY = 16
# As numbers: bytes look for one at a tenth of the cost of finding a string.
_QUOTE, _LINE_END = b'"\n'


class TextOnlyEvents:
    """Compares the events of one stream with an example.

    An event that begins and ends like a text-only example, with no quote and no line end between, is text only too: it
    has no room for another JSON name. Cost: a third of searching for those names.
    """

    __slots__ = ("_end", "_least", "_num_unlike", "_start", "_text_at", "_text_to")

    def __init__(self) -> None:
        self._start, self._end = b"none yet", b""  # no event is this
        self._text_at = self._text_to = self._num_unlike = 0
        self._least = 0

    def matches(self, event: bytes) -> bool:
        """Whether this is one whole event, and like the example."""
        if len(event) < self._least:  # mypyc fails at slices whose end is before their begin
            return False
        text = event[self._text_at : self._text_to]
        return _QUOTE not in text and _LINE_END not in text and self._start + text + self._end == event

    def learn(self, event: bytes) -> None:
        """Take a whole text-only event that is unlike the example; now and then it becomes the next example.

        Not every time, because in some streams no event is like another.
        """
        self._num_unlike += 1
        if self._num_unlike % _LEARN_EVERY != 1:
            return
        text = _TEXT.search(event)
        if text is not None and event.find(b"\n") == len(event) - 2:
            self._start, self._end = event[: text.start(1)], event[text.end(1) :]
            self._text_at, self._text_to = len(self._start), -len(self._end)
            self._least = len(self._start) + len(self._end)
