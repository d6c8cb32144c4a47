"""Prompts that continue a trajectory of which a limit cut some answers, with a template and a model of a few tokens."""

import re
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128

from engines.token_ids import TokenIds
from gateway.clock import started_clock
from gateway.messages.transcripts import History
from gateway.state.ledger import Ledger
from gateway.tokens.book import TokenBook
from gateway.tokens.turn_tokens import ONLY_WHOLE, TurnTokens
from gateway.turns.splice import spliced
from store import StoreSettings, open_store
from tests.gateway.test_token_branches import LIMITS

ASK, ANSWER, END, THINK, THOUGHT = 7, 8, 9, 60, 61
"""What begins a question and an answer, what ends both, what begins and ends thoughts."""
BROKEN = 99
"""The character that stands in a text for half of one."""


@dataclass(frozen=True)
class Said:
    """An answer, and the question that follows it; all are tokens.

    Args:
        is_split: the model makes each word in two halves, which the template renders as one token.
        cut: how many tokens its limit leaves; None for all of them, with the end.
    """

    thoughts: list[int]
    words: list[int]
    is_split: bool
    cut: int | None
    question: list[int]

    def made(self, thinks: str) -> list[int]:
        begun = {"not": [], "in the answer": [THINK, *self.thoughts, THOUGHT], "opened": [*self.thoughts, THOUGHT]}
        words = [half for word in self.words for half in ((100 + word, 200 + word) if self.is_split else (word,))]
        return [*begun[thinks], *words, END][: self.cut]


WORDS = st.lists(st.integers(1, 3), min_size=1, max_size=3)
ANSWERS = st.builds(Said, WORDS, WORDS, st.booleans(), st.none() | st.integers(1, 4), WORDS)


class World:
    """A trajectory whose client sends each answer back.

    Args:
        thinks: whether the model thinks, and whether the template opens its thoughts.
        keeps_thoughts: the client and the template keep thoughts.
    """

    def __init__(self, thinks: str, keeps_thoughts: bool) -> None:
        self._thinks, self._keeps_thoughts = thinks, keeps_thoughts
        store = open_store("memory:", StoreSettings())
        self.book = TokenBook(store, Ledger(store, 100), started_clock(), LIMITS)
        self._opening = [ANSWER, THINK] if thinks == "opened" else [ANSWER]
        self._rendered = [ASK, 1, END]
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": "1"}]
        self.turns: list[TurnTokens] = []

    def play(self, said: Said) -> tuple[list[int], list[int]]:
        """A turn with this answer; what the template rendered for it, and the engine got."""
        rendered = [*self._rendered, *self._opening]
        history = History({"messages": self._messages}, xxh3_128())
        prompt, parent = spliced(self.book, "t", history, TokenIds.of(rendered))
        made, number = said.made(self._thinks), len(self.turns)
        is_cut = END not in made
        thoughts, text = self._read(made)
        answer = {"role": "assistant", "content": " ".join(map(str, text))}
        if thoughts:
            answer["reasoning"] = " ".join(map(str, thoughts))
        words = " ".join((*history.digests_of(answer), *([ONLY_WHOLE] if is_cut else [])))
        reason = "length" if is_cut else "stop"
        turn = TurnTokens("t", f"{number}", list(prompt), made, None, (), reason, parent, words, float(number))
        self.book.add(turn)
        self.turns.append(turn)
        if not self._keeps_thoughts:
            thoughts = []
            answer.pop("reasoning", None)
        asked = {"role": "user", "content": " ".join(map(str, said.question))}
        self._messages += [answer, asked]
        thought = [THINK, *thoughts, THOUGHT] if thoughts else []
        self._rendered += [ANSWER, *thought, *text, END, ASK, *said.question, END]
        return rendered, list(prompt)

    def _read(self, made: list[int]) -> tuple[list[int], list[int]]:
        """An answer's thoughts and its words, as a client gets them."""
        thoughts: list[int] = []
        if self._thinks != "not":
            begun, end = made.index(THINK) + 1 if THINK in made else 0, (*made, THOUGHT).index(THOUGHT)
            thoughts, made = made[begun:end], made[end + 1 :]
        return thoughts, meant([id for id in made if id != END])


def meant(ids: list[int]) -> list[int]:
    """Halves of words put together, without thoughts."""
    text = re.sub(r"\b1(\d\d) 2\1\b", lambda found: str(int(found[1])), " ".join(f"{id}" for id in ids))
    text = re.sub(rf"\b{THINK}( \d+)*? {THOUGHT}( |$)", "", text)
    return [BROKEN if int(id) > 100 else int(id) for id in text.split()]


@pytest.mark.parametrize("keeps_thoughts", [False, True])
@pytest.mark.parametrize("thinks", ["not", "in the answer", "opened"])
@given(plan=st.lists(ANSWERS, min_size=2, max_size=6))
def test_a_prompt_says_what_is_rendered_in_the_tokens_that_were_made(
    thinks: str, keeps_thoughts: bool, plan: list[Said]
) -> None:
    """Whatever was cut and wherever: it begins with all tokens of its parent, and nothing is lost or there twice."""
    world = World(thinks, keeps_thoughts)
    for said in plan:
        rendered, prompt = world.play(said)
        turn = world.turns[-1]
        assert meant(prompt) == meant(rendered)
        if turn.parent is None:
            assert prompt == rendered
        else:
            parent = world.turns[int(turn.parent)]
            begun = [*parent.prompt_ids, *parent.output_ids]
            assert prompt[: len(begun)] == begun


@given(plan=st.lists(ANSWERS, min_size=2, max_size=6))
def test_a_cut_answer_is_continued_if_its_own_tokens_are_rendered(plan: list[Said]) -> None:
    """Once an answer of its branch was not cut. Earlier answers need not be rendered in the tokens that were made: each
    turn after a cut answer began a branch, however small the difference."""
    world = World("not", False)
    has_ended = is_other = False  # an answer of the branch was not cut; the last one was, and is rendered otherwise
    for said in plan:
        world.play(said)
        *before, turn = world.turns
        if has_ended and not is_other:
            assert turn.parent == before[-1].turn_id
        is_cut = turn.finish_reason == "length"
        has_ended = not is_cut or (has_ended and turn.parent is not None)
        is_other = is_cut and said.is_split
