"""The chain of a turn's tokens: seams, and what of them the client hears."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.token_ids import TokenIds
from engines.tokens import Piece, Rendered
from gateway.tokens.turn_tokens import TurnTokens, VersionSpan
from gateway.turns.answer_writers import ParsedWriter
from gateway.turns.ask import Ask
from gateway.turns.chain import Chain, Diverged, NewText
from gateway.turns.frames import Frame
from gateway.turns.splice import joined


def chain_of(stop: tuple[str, ...] = (), includes: bool = False, grammar: bool = False, tells: bool = True) -> Chain:
    ids = TokenIds.of([1, 2])
    rendered = Rendered("vllm", ids, {}, 100, 0, stop, includes, False, grammar, {})
    return Chain(rendered, ids, None, tells, tells_logprobs=True)


def say(chain: Chain, *pieces: tuple[list[int], str]) -> str:
    """What the client hears of these pieces."""
    return "".join(chain.add(Piece(ids, text), "v1").text for ids, text in pieces)


def test_a_character_that_a_seam_cuts_is_made_again_and_told_once() -> None:
    """Its first bytes have no text, and an engine would begin its text in the middle of it."""
    chain = chain_of()
    assert say(chain, ([10], "a"), ([11, 0xE4, 0xB8], "b")) == "ab"
    assert chain.candidates() == [[10, 11, 0xE4, 0xB8], [10, 11, 0xE4], [10, 11], [10]]
    assert chain.mend(["ab", "ab", "ab", "a"]).text == ""
    assert chain.output_ids == [10, 11]
    chain.begin_leg()
    assert say(chain, ([0xE4, 0xB8, 0x96], "世"), ([12], "c")) == "世c"
    assert chain.output_ids == [10, 11, 0xE4, 0xB8, 0x96, 12] and chain.text == "ab世c"


def test_an_answer_that_had_only_the_beginning_of_a_character_begins_anew() -> None:
    """Not even the first token can stay."""
    chain = chain_of()
    assert say(chain, ([0xE4], ""), ([0xB8], "")) == ""
    chain.mend(["", ""])
    assert chain.output_ids == []


@settings(max_examples=300)
@given(st.text("ab\u00e9\u4e16\U0001f702", min_size=1, max_size=8), st.booleans(), st.booleans(), st.data())
def test_whatever_breaks_off_each_token_is_told_once(
    text: str, tells: bool, grammar: bool, data: st.DataObject
) -> None:
    """Tokens are the bytes of the text, in events of some; legs break off anywhere, the gateway is killed, and weights
    change meanwhile. Text, tokens, log-probabilities and versions are those of one leg that never broke off."""
    made = list(text.encode())
    chain, version, told = chain_of(grammar=grammar, tells=tells), 1, Told()
    whose: list[set[str]] = [set() for _ in made]
    for num_left in reversed(range(data.draw(st.integers(1, 5)))):
        if chain.output_ids:
            if data.draw(st.sampled_from([False, False, True]), "the gateway is killed"):
                told, saved = Told(), chain
                chain = chain_of(grammar=grammar, tells=tells)
                chain.restore(saved.output_ids[: saved.num_sure], saved.logprobs[: saved.num_sure], saved.versions)
            chain.drop_doubtful()
            assert tells or all(len(whose[at]) == 1 for at in range(len(chain.output_ids))), "nothing is in doubt"
            told.hear(chain.mend([complete(ids) for ids in chain.candidates()]))
        chain.begin_leg()
        first = at = len(chain.output_ids)
        assert made[:at] == chain.output_ids and (not grammar or at == 0)
        while chain.finish_reason is None and (not num_left or data.draw(st.integers(0, 5), "goes on")):
            older, version = version, version + data.draw(st.sampled_from([0, 0, 1]))
            until = min(at + data.draw(st.sampled_from([1, 2, 3, 0])), len(made))
            is_sure = at == first or until == at + 1
            whose[at:until] = [{f"v{version}"} if is_sure else {f"v{older}", f"v{version}"}] * (until - at)
            entries = [{"logprob": -1.0 * place} for place in range(at, until)]
            fresh = complete(made[:until])[len(complete(made[:at])) :]
            reason = "stop" if until == len(made) else None
            told.hear(chain.add(Piece(made[at:until], fresh, entries, finish_reason=reason), f"v{version}"))
            at = until
        if chain.finish_reason is not None:
            break
    assert (chain.output_ids, chain.text) == (made, text)
    assert list(chain.chosen_logprobs or ()) == [-1.0 * place for place in range(len(made))]
    assert [span.start for span in chain.versions] + [len(made)] == [0] + [span.end for span in chain.versions]
    assert all(span.version in whose[at] for span in chain.versions for at in range(span.start, span.end))
    if tells:
        assert ("".join(told.texts), told.ids) == (text, made)
        assert told.logprobs == chain.told_logprobs == chain.logprobs


def test_what_of_the_prompt_was_cached_is_told_by_the_first_leg() -> None:
    """Its first word of it; a later leg finds the whole prompt, and what was made, in its own engine's cache."""
    chain = chain_of()
    chain.begin_leg()
    for piece in (Piece([1], "a"), Piece([2], "b", cached_tokens=64), Piece([3], "c", cached_tokens=80)):
        chain.add(piece, "v1")
    assert chain.cached_tokens == 64
    silent = chain_of()
    say(silent, ([1], "a"))
    silent.begin_leg()
    silent.add(Piece([2], "b", cached_tokens=80), "v1")
    assert silent.cached_tokens is None


class Told:
    """What a client has heard."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.ids: list[int] = []
        self.logprobs: list[Any] = []

    def hear(self, said: NewText) -> None:
        self.texts.append(said.text)
        self.ids += said.ids
        self.logprobs += said.logprobs


def complete(ids: list[int]) -> str:
    """The text of bytes, as far as its characters are complete."""
    return bytes(ids).decode(errors="ignore")


@pytest.mark.parametrize("includes", [False, True])
@pytest.mark.parametrize("cut", range(1, 6))
def test_a_stop_string_over_a_seam_ends_the_answer_where_it_would_have(cut: int, includes: bool) -> None:
    """Wherever the seam is; what follows it is not told."""
    text, stop = "xxENDyy", "END"
    chain = chain_of((stop,), includes)
    held = 0 if includes else min(len(stop) - 1, cut)
    heard = say(chain, ([1] * cut, text[: cut - held]))
    heard += chain.mend([text[:cut], text[: cut - 1]]).text
    chain.begin_leg()
    for i in range(cut, len(text)):
        if chain.finish_reason is None:
            is_last = i + 1 == len(text)
            heard += chain.add(Piece([1], text[i], finish_reason="length" if is_last else None), "v1").text
    is_over_the_seam = 2 < cut < 5
    assert heard == ("xx" + "END" * includes if is_over_the_seam else text)
    assert chain.finish_reason == ("stop" if is_over_the_seam else "length")
    assert chain.text == heard and chain.stop_reason == (stop if is_over_the_seam else None)


def test_what_a_grammar_holds_is_made_again_and_must_be_the_same() -> None:
    """The client hears only what is new; where something else comes, the turn fails."""
    chain = chain_of(grammar=True)
    assert say(chain, ([1], "{"), ([2], '"a"')) == '{"a"'
    assert chain.candidates() == [] and chain.mend(()).text == ""
    chain.begin_leg()
    assert say(chain, ([1], "{"), ([2], '"a"'), ([3], ":1}")) == ":1}"
    assert chain.output_ids == [1, 2, 3] and chain.text == '{"a":1}'
    chain.candidates()
    with pytest.raises(Diverged):
        say(chain, ([1], "{"), ([7], '"b"'))


def test_what_nobody_was_told_may_come_otherwise() -> None:
    """An answer that is told whole begins anew."""
    chain = chain_of(grammar=True, tells=False)
    say(chain, ([1], "{"))
    chain.candidates()
    say(chain, ([9], "[]"))
    assert (chain.output_ids, chain.text) == ([9], "[]")


def test_versions_cover_all_tokens_over_legs_without_a_gap() -> None:
    """The engine's own word counts, from the beginning of its leg; where it tells none, what is known of it."""
    chain = chain_of()
    say(chain, ([10], "a"), ([11], "b"))
    chain.mend(["ab", "a"])
    chain.begin_leg()
    chain.add(Piece([12], "c"), "v1")
    chain.add(Piece([13, 14], "de", finish_reason="stop", versions=(("v1", 0, 1), ("v2", 1, 3))), "v2")
    assert chain.versions == [VersionSpan("v1", 0, 3), VersionSpan("v2", 3, 5)]


@pytest.mark.parametrize("tells", [False, True])
def test_tokens_of_which_nobody_says_whose_they_are_are_made_again(tells: bool) -> None:
    """An event of several, on the way of which weights changed, of a leg that broke off: what is told stays."""
    chain = chain_of(tells=tells)
    chain.add(Piece([10, 11], "ab"), "v1")
    chain.add(Piece([12, 13], "cd"), "v2")
    chain.add(Piece([14], "e"), "v2")
    chain.drop_doubtful()
    if tells:
        assert chain.output_ids == [10, 11, 12, 13, 14]
        return
    assert chain.candidates() == [[10, 11], [10]]
    chain.mend(["ab", "a"])
    chain.begin_leg()
    chain.add(Piece([22, 23], "CD"), "v2")
    chain.drop_doubtful()
    assert (chain.output_ids, chain.text) == ([10, 11, 22, 23], "abCD"), "all of it is of the weights of its leg"
    assert chain.versions == [VersionSpan("v1", 0, 2), VersionSpan("v2", 2, 4)]


def test_the_word_of_an_engine_leaves_no_doubt() -> None:
    """It says of each token of its leg which weights made it."""
    chain = chain_of(tells=False)
    chain.add(Piece([10], "a"), "v1")
    chain.add(Piece([11, 12], "bc", finish_reason="stop", versions=(("v1", 0, 2), ("v2", 2, 3))), "v2")
    chain.drop_doubtful()
    assert chain.output_ids == [10, 11, 12]


def test_tokens_of_an_earlier_process_are_told_whole() -> None:
    """With their log-probabilities, to a client that has heard nothing of them."""
    chain = chain_of()
    chain.restore([5, 6], [{"logprob": -1.0}, {"logprob": -2.0}], [VersionSpan("v1", 0, 2)])
    said = chain.mend(["hi", "h"])
    assert (said.text, list(said.ids), len(said.logprobs)) == ("hi", [5, 6], 2)


def test_log_probabilities_of_a_part_are_none() -> None:
    """An earlier process asked for none (`keep_logprobs`, `Prefer: tokens=none`); this one did."""
    chain = chain_of(tells=False)
    chain.restore([5, 6], [], [VersionSpan("v1", 0, 2)])
    chain.mend(["hi", "h"])
    chain.begin_leg()
    chain.add(Piece([7], "!", [-0.5], finish_reason="stop"), "v1")
    assert chain.output_ids == [5, 6, 7] and chain.chosen_logprobs is None


def turn(prompt: list[int], output: list[int], reason: str = "stop") -> TurnTokens:
    return TurnTokens("t", "u", prompt, output, None, (), reason, None, "h", 0.0)


END, ASK, ANSWER = 9, 7, 8
"""The token that ends a message, and those that begin a question and an answer."""


@pytest.mark.parametrize(
    ("rendered", "wanted"),
    [
        pytest.param([ASK, 1, END, ANSWER, 3, 4, END, ASK, 5], [ASK, 1, END, ANSWER, 3, 4, END, ASK, 5], id="the same"),
        pytest.param([ASK, 1, END, ANSWER, 34, END, ASK, 5], [ASK, 1, END, ANSWER, 3, 4, END, ASK, 5], id="others"),
        pytest.param([ASK, 2, END, ANSWER, 3, 4, END, ASK, 5], None, id="another question"),
        pytest.param([ASK, 1, END, ASK, 34, END, ANSWER], None, id="no answer there"),
        pytest.param([ASK, 1, END, ANSWER, 34, ASK, 5], None, id="no end of the answer"),
    ],
)
def test_a_prompt_goes_on_from_the_tokens_that_were_made(rendered: list[int], wanted: Any) -> None:
    """Whatever the template makes of the answer's text; else the render stands."""
    prompt = joined(turn([ASK, 1, END, ANSWER], [3, 4, END]), TokenIds.of(rendered))
    assert (list(prompt) if prompt else None) == wanted


def test_a_prompt_that_was_spliced_is_gone_on_from_too() -> None:
    """Its own answers are not as the template renders them, and need not be."""
    before = turn([ASK, 1, END, ANSWER, 3, 4, END, ASK, 5, END, ANSWER], [6, 0, END])
    rendered = [ASK, 1, END, ANSWER, 34, END, ASK, 5, END, ANSWER, 60, END, ASK, 2, END, ANSWER]
    assert list(joined(before, TokenIds.of(rendered)) or ()) == [*before.prompt_ids, 6, 0, END, ASK, 2, END, ANSWER]


def test_versions_cover_what_was_made_whoever_tells_them() -> None:
    """The gateway's word as tokens come, over a restart and a seam; at a leg's end the engine's own in its place."""
    chain = chain_of()
    chain.restore([1, 2], [], [VersionSpan("1", 0, 2)])
    chain.begin_leg()
    chain.add(Piece([3], "c"), "1")
    assert chain.versions == [VersionSpan("1", 0, 3)]
    chain.begin_leg()
    chain.add(Piece([4], "d"), "2")
    assert chain.versions == [VersionSpan("1", 0, 3), VersionSpan("2", 3, 4)]
    told = (("1", 0, 1), ("3", 1, 3))
    chain.add(Piece([5, 6], "e", finish_reason="length", versions=told), "2")
    assert chain.versions == [VersionSpan("1", 0, 4), VersionSpan("3", 4, 6)]


def test_a_writer_that_asks_an_engine_tells_in_parts() -> None:
    """Its first token at once, then so many as are worth a request, and no sooner than a while after the last."""
    ask = Ask("chat", "", "m", b"", {"stream": True}, "t", "g", None, 0, False, False, wants_stream=True)
    writer = ParsedWriter(ask, Frame(ask, "turn", 0.0), 0)
    assert not writer.is_due(0.0)
    writer.hear([1])
    assert writer.is_due(0.0)
    writer.pause(10.0)
    writer.hear([2])
    assert not writer.is_due(10.05) and writer.is_due(10.11)
