"""One turn at token level: its tokens so far, the weights that made them, and the text that the client was told.

A chain outlives its legs. If a leg ends early, the next one continues from the prompt and the tokens made so far:

1. Trailing tokens of an incomplete character are made again: an engine would begin its text in the middle of it.
2. A stop string that begins before the seam is found here, because the next engine sees only the text after the seam.
3. Output that is held to a grammar is made again from its beginning, because the grammar's state is lost. If some of it
   was told, the same output must come again, as it does without sampling; otherwise the turn fails like any broken
   stream.
4. If the weights may have changed within an event of several tokens, the tokens from that event on are made again,
   unless they were told: an engine reports only at a leg's end which version made which tokens.
5. Output that is sampled by the output before it (penalties, bad words) is made again from its beginning too, unless
   some of it was told: then it goes on, and the engine counts from the seam.
6. After a seam, a seed of vLLM's does not reproduce the tokens of an uninterrupted run.
"""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from engines.token_ids import TokenIds
from engines.tokens import Piece, Rendered
from gateway.tokens.turn_tokens import VersionSpan
from gateway.turns.seam import Seam

_CHARACTER_TOKENS = 4
"""At most this many tokens make one UTF-8 character; all but the last of them have no text."""


class Diverged(Exception):
    """What was made again differs from what the client was told before."""


class NewText(NamedTuple):
    """What is new for the client."""

    text: str
    ids: Sequence[int]
    logprobs: Sequence[dict[str, Any]]


class Chain:
    """The tokens of a turn.

    Args:
        parent: the turn whose prompt and output this prompt begins with.
        tells: the client is told as tokens come, so none of them can be taken back.
        tells_logprobs: the client asked for log-probabilities; others may be for the record only.

    Attributes:
        finish_reason: set once the answer is complete.
    """

    def __init__(
        self, rendered: Rendered, prompt_ids: TokenIds, parent: str | None, tells: bool, tells_logprobs: bool
    ) -> None:
        self.rendered = rendered
        self.prompt_ids = prompt_ids
        self.parent = parent
        self.output_ids: list[int] = []
        self.logprobs: list[Any] = []  # entries if the client is told of them, else numbers or entries
        self._versions: list[tuple[str, int]] = []  # each with the index of the first token that it made
        self._texts: list[str] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.cached_tokens: int | None = None
        self._tells = tells
        self.tells_logprobs = tells_logprobs
        self._told_ids: list[int] = []
        self._leg_start = 0
        self._doubtful_start: int | None = None
        self._seam: Seam | None = None
        self._text_again = ""  # told to the client before, so it must come again
        self._ids_again: list[int] = []

    def restore(self, ids: list[int], logprobs: list[Any], versions: list[VersionSpan]) -> None:
        """Take up what an earlier process made; none of it was told."""
        self.output_ids, self.logprobs = ids, logprobs
        self._versions = [(span.version, span.start) for span in versions]

    @property
    def text(self) -> str:
        """The text of all tokens, as far as it may be told."""
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    @property
    def num_sure(self) -> int:
        """How many tokens the next leg may continue from: all but those that `drop_doubtful` would drop."""
        return len(self.output_ids) if self._doubtful_start is None or self._tells else self._doubtful_start

    @property
    def versions(self) -> list[VersionSpan]:
        """Which weights made the tokens, without gaps."""
        spans, end = [], len(self.output_ids)
        for version, start in reversed(self._versions):
            if start < end:
                spans.append(VersionSpan(version, start, end))
                end = start
        return spans[::-1]

    @property
    def chosen_logprobs(self) -> "array[float] | None":
        """The tokens' log-probabilities; None if the engine did not give all, or an earlier process did not ask for
        them. In JSON, a NaN is null.
        """
        if not self.logprobs or len(self.logprobs) != len(self.output_ids):
            return None
        try:
            return array("f", self.logprobs)
        except TypeError:
            numbers = [entry["logprob"] if isinstance(entry, dict) else entry for entry in self.logprobs]
            return None if None in numbers else array("f", numbers)

    @property
    def told_logprobs(self) -> list[dict[str, Any]]:
        """The log-probabilities that the client may be told."""
        return self.logprobs if self.tells_logprobs else []

    @property
    def needs_its_leg(self) -> bool:
        """Whether another leg would not go on exactly as this one does."""
        return bool(self.output_ids) and (self.rendered.has_grammar or self.rendered.counts_output)

    # --- at a seam ------------------------------------------------------------------------------------------

    def candidates(self) -> list[list[int]]:
        """The output without its last 0, 1, ... 4 tokens; `mend` needs the text of each. [] if it needs none.
        The output may start over.
        """
        ids = self.output_ids
        if self.rendered.has_grammar or (self.rendered.counts_output and not self._told_ids):
            self._begin_again()
        elif not self.rendered.needs_parser:
            return [ids[: len(ids) - cut] for cut in range(min(_CHARACTER_TOKENS + 1, len(ids)))]
        return []

    def mend(self, texts: Sequence[str]) -> NewText:
        """Drop the last tokens that have no text yet, and give what was held back or never told.

        Args:
            texts: the texts of `candidates`.

        Raises:
            Diverged: these texts do not begin with what was told.
        """
        num_told = len(self._told_ids)
        if not texts:
            return self._tell("", num_told)
        cut = 0
        while cut + 1 < len(texts) and texts[cut] == texts[cut + 1]:
            cut += 1
        if len(texts) == len(self.output_ids) and cut + 1 == len(texts) and not texts[cut]:
            cut += 1  # not even the first token has text
        text = texts[0]
        if not text.startswith(self.text):
            raise Diverged
        length = len(self.output_ids) - cut
        self._ids_again = self._told_ids[length:]
        self._cut(length)
        held = text[len(self.text) :]
        if self._seam is not None:
            since = max(length + cut - self.rendered.stops_after, 0)
            self._seam.move(held, len(text) - len(texts[since]) if since < len(texts) else len(text))
            held = ""
        elif self.rendered.stop:
            self._seam = Seam(text, held, self.rendered.stop, self.rendered.includes_stop)
            held = self._seam.free_at_once()
        return self._tell(held, num_told)

    def drop_doubtful(self) -> None:
        """Drop the first event after a change of weights and all that follows it, if it can be made again."""
        if self.num_sure < len(self.output_ids):
            self._texts, self._seam = [], None
            self._cut(self.num_sure)
        self._doubtful_start = None

    def begin_leg(self) -> None:
        """The tokens that come now belong to another leg."""
        self._leg_start = len(self.output_ids)

    def _begin_again(self) -> None:
        if not self._tells:
            self._texts = []
        self._text_again, self._ids_again = self.text, list(self._told_ids)
        self._cut(0)

    def _cut(self, length: int) -> None:
        self._versions = self._versions_before(length)
        self.output_ids = self.output_ids[:length]
        self.logprobs = self.logprobs[:length]

    # --- as tokens come -------------------------------------------------------------------------------------

    def add(self, piece: Piece, version: str) -> NewText:
        """Take tokens that a leg made.

        Args:
            version: of the weights, unless the engine reports it.

        Raises:
            Diverged: they differ from what the client was told before.
        """
        if piece.cached_tokens is not None and self.cached_tokens is None and not self._leg_start:
            self.cached_tokens = piece.cached_tokens
        ids, text, start = piece.ids, piece.text, len(self.output_ids)
        may_stop = start >= self.rendered.stops_after
        if piece.versions:
            self._note_versions(piece)
        elif ids and (not self._versions or self._versions[-1][0] != version):
            if len(ids) > 1 and start > self._leg_start and self._doubtful_start is None:
                self._doubtful_start = start
            self._versions.append((version, start))
        if self._ids_again:
            start += self._again(ids)
        self.output_ids += ids
        if piece.logprobs:
            self.logprobs += piece.logprobs
        if self._text_again:
            text = self._untold(text)
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
        if self._seam is not None:
            text = self._through_seam(text, may_stop)
        return self._tell(text, start)

    def finish(self, reason: str) -> NewText:
        """End the output: no more tokens are needed."""
        self.finish_reason = reason
        return self._tell(self._through_seam("", True) if self._seam is not None else "", len(self.output_ids))

    def _tell(self, text: str, start: int) -> NewText:
        if text:
            self._texts.append(text)
        if not self._tells:
            return NewText(text, (), ())
        ids = self.output_ids[start:]
        self._told_ids += ids
        return NewText(text, ids, self.logprobs[start:] if self.tells_logprobs else ())

    def _note_versions(self, piece: Piece) -> None:
        """Replace the assumed versions of a whole leg with those that the engine reports."""
        self._doubtful_start = None
        self._versions = self._versions_before(self._leg_start)
        for version, first, last in piece.versions:
            if last > first and (not self._versions or self._versions[-1][0] != version):
                self._versions.append((version, self._leg_start + first))

    def _versions_before(self, end: int) -> list[tuple[str, int]]:
        return [begun for begun in self._versions if begun[1] < end]

    def _again(self, ids: list[int]) -> int:
        """How many of these tokens the client was told before."""
        num_again = min(len(ids), len(self._ids_again))
        if ids[:num_again] == self._ids_again[:num_again]:
            self._ids_again = self._ids_again[num_again:]
        elif self.rendered.has_grammar:
            raise Diverged
        else:
            start = len(self.output_ids)  # the rest of a character came out differently, which nobody has seen
            self._told_ids[start:], self._ids_again = ids[:num_again], []
        return num_again

    def _untold(self, text: str) -> str:
        num_again = min(len(text), len(self._text_again))
        if text[:num_again] != self._text_again[:num_again]:
            raise Diverged
        self._text_again = self._text_again[num_again:]
        return text[num_again:]

    def _through_seam(self, text: str, may_stop: bool) -> str:
        assert self._seam is not None
        # One across the seam may end within the one that the engine has found.
        left_out = "" if self.rendered.includes_stop or not isinstance(self.stop_reason, str) else self.stop_reason
        text, stop = self._seam.feed(text, may_stop, self.finish_reason is not None, left_out)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        if self._seam.is_passed:
            self._seam = None
        return text
