"""The chain of a turn's tokens: seams between legs, and what the client is told of the tokens."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.token_ids import TokenIds
from engines.tokens import Piece, Rendered
from gateway.tokens.turn_tokens import ONLY_WHOLE, TurnTokens, VersionSpan
from gateway.turns.answer_writers import ParsedWriter
from gateway.turns.ask import Ask
from gateway.turns.chain import Chain, Diverged, NewText
from gateway.turns.frames import Frame
from gateway.turns.splice import joined


def chain_of(
    stop: tuple[str, ...] = (),
    includes: bool = False,
    grammar: bool = False,
    tells: bool = True,
    counts: bool = False,
    stops_after: int = 0,
) -> Chain:
    ids = TokenIds.of([1, 2])
    rendered = Rendered("vllm", ids, {}, 100, 0, stop, includes, False, grammar, {}, False, counts, stops_after)
    return Chain(rendered, ids, None, tells, tells_logprobs=True)


def add_pieces(chain: Chain, *pieces: tuple[list[int], str]) -> str:
    """Adds these pieces; returns the text that the client is told."""
    return "".join(chain.add(Piece(ids, text), "v1").text for ids, text in pieces)


def test_a_character_cut_by_a_seam_is_made_again_and_told_once() -> None:
    """Its first bytes have no text, and an engine would begin its text in the middle of the character."""
    chain = chain_of()
    assert add_pieces(chain, ([10], "a"), ([11, 0xE4, 0xB8], "b")) == "ab"
    assert chain.candidates() == [[10, 11, 0xE4, 0xB8], [10, 11, 0xE4], [10, 11], [10]]
    assert chain.mend(["ab", "ab", "ab", "a"]).text == ""
    assert chain.output_ids == [10, 11]
    chain.begin_leg()
    assert add_pieces(chain, ([0xE4, 0xB8, 0x96], "世"), ([12], "c")) == "世c"
    assert chain.output_ids == [10, 11, 0xE4, 0xB8, 0x96, 12] and chain.text == "ab世c"


def test_an_answer_with_only_part_of_a_character_starts_over() -> None:
    """Not even the first token can stay."""
    chain = chain_of()
    assert add_pieces(chain, ([0xE4], ""), ([0xB8], "")) == ""
    chain.mend(["", ""])
    assert chain.output_ids == []


@settings(max_examples=300)
@given(st.text("ab\u00e9\u4e16\U0001f702", min_size=1, max_size=8), st.booleans(), st.booleans(), st.data())
def test_each_token_is_told_once_however_legs_break_off(
    text: str, tells: bool, grammar: bool, data: st.DataObject
) -> None:
    """Tokens are the bytes of the text, several to an event. Legs break off anywhere, the gateway is killed, and
    weights change meanwhile. Text, tokens and log-probabilities equal those of one uninterrupted leg, and each token's
    version is one that may have made it."""
    made = list(text.encode())
    chain, version, told = chain_of(grammar=grammar, tells=tells), 1, Told()
    possible_versions: list[set[str]] = [set() for _ in made]
    for num_left in reversed(range(data.draw(st.integers(1, 5)))):
        if chain.output_ids:
            if data.draw(st.sampled_from([False, False, True]), "the gateway is killed"):
                told, saved = Told(), chain
                chain = chain_of(grammar=grammar, tells=tells)
                chain.restore(saved.output_ids[: saved.num_sure], saved.logprobs[: saved.num_sure], saved.versions)
            chain.drop_doubtful()
            assert tells or all(len(possible_versions[at]) == 1 for at in range(len(chain.output_ids))), (
                "nothing is in doubt"
            )
            told.add(chain.mend([complete(ids) for ids in chain.candidates()]))
        chain.begin_leg()
        first = at = len(chain.output_ids)
        assert made[:at] == chain.output_ids and (not grammar or at == 0)
        while chain.finish_reason is None and (not num_left or data.draw(st.integers(0, 5), "goes on")):
            older, version = version, version + data.draw(st.sampled_from([0, 0, 1]))
            until = min(at + data.draw(st.sampled_from([1, 2, 3, 0])), len(made))
            is_sure = at == first or until == at + 1
            possible_versions[at:until] = [{f"v{version}"} if is_sure else {f"v{older}", f"v{version}"}] * (until - at)
            entries = [{"logprob": -1.0 * place} for place in range(at, until)]
            new_text = complete(made[:until])[len(complete(made[:at])) :]
            reason = "stop" if until == len(made) else None
            told.add(chain.add(Piece(made[at:until], new_text, entries, finish_reason=reason), f"v{version}"))
            at = until
        if chain.finish_reason is not None:
            break
    assert (chain.output_ids, chain.text) == (made, text)
    assert list(chain.chosen_logprobs or ()) == [-1.0 * place for place in range(len(made))]
    assert [span.start for span in chain.versions] + [len(made)] == [0] + [span.end for span in chain.versions]
    assert all(span.version in possible_versions[at] for span in chain.versions for at in range(span.start, span.end))
    if tells:
        assert ("".join(told.texts), told.ids) == (text, made)
        assert told.logprobs == chain.told_logprobs == chain.logprobs


def test_cached_prompt_tokens_are_those_of_the_first_leg() -> None:
    """Its first report counts. A later leg finds the whole prompt, and the output so far, in its own engine's cache."""
    chain = chain_of()
    chain.begin_leg()
    for piece in (Piece([1], "a"), Piece([2], "b", cached_tokens=64), Piece([3], "c", cached_tokens=80)):
        chain.add(piece, "v1")
    assert chain.cached_tokens == 64
    without_report = chain_of()
    add_pieces(without_report, ([1], "a"))
    without_report.begin_leg()
    without_report.add(Piece([2], "b", cached_tokens=80), "v1")
    assert without_report.cached_tokens is None


class Told:
    """What a client has been told."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.ids: list[int] = []
        self.logprobs: list[Any] = []

    def add(self, new: NewText) -> None:
        self.texts.append(new.text)
        self.ids += new.ids
        self.logprobs += new.logprobs


def complete(ids: list[int]) -> str:
    """The text of these bytes, without incomplete characters."""
    return bytes(ids).decode(errors="ignore")


@pytest.mark.parametrize("includes", [False, True])
@pytest.mark.parametrize("cut", range(1, 6))
def test_a_stop_string_across_a_seam_ends_the_answer(cut: int, includes: bool) -> None:
    """Wherever the seam is, nothing after the stop string is told."""
    text, stop = "xxENDyy", "END"
    chain = chain_of((stop,), includes)
    held = 0 if includes else min(len(stop) - 1, cut)
    heard = add_pieces(chain, ([1] * cut, text[: cut - held]))
    heard += chain.mend([text[:cut], text[: cut - 1]]).text
    chain.begin_leg()
    for i in range(cut, len(text)):
        if chain.finish_reason is None:
            is_last = i + 1 == len(text)
            heard += chain.add(Piece([1], text[i], finish_reason="length" if is_last else None), "v1").text
    is_across_the_seam = 2 < cut < 5
    assert heard == ("xx" + "END" * includes if is_across_the_seam else text)
    assert chain.finish_reason == ("stop" if is_across_the_seam else "length")
    assert chain.text == heard and chain.stop_reason == (stop if is_across_the_seam else None)


@pytest.mark.parametrize("stops", [*itertools.permutations(("yy", "ND", "bEND"))])
def test_of_several_stop_strings_across_a_seam_the_first_that_ends_there_ends_the_answer(
    stops: tuple[str, ...],
) -> None:
    """However long they are; of two that end together it is the first that the client names, as in vLLM. One event may
    hold the ends of two."""
    chain = chain_of(stops)
    heard = add_pieces(chain, ([1] * 4, "a"))
    heard += chain.mend(["abEN", "abE"]).text
    chain.begin_leg()
    heard += add_pieces(chain, ([1], "Dyy"))
    told, stop = ("a", "bEND") if stops.index("bEND") < stops.index("ND") else ("abE", "ND")
    assert (heard, chain.finish_reason, chain.stop_reason) == (told, "stop", stop)


@settings(max_examples=300)
@given(
    st.text("abc", min_size=1, max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_stop_strings_end_an_answer_where_they_would_without_seams(
    text: str, stops: tuple[str, ...], includes: bool, tells: bool, data: st.DataObject
) -> None:
    """Tokens are the text's characters. Legs break off anywhere, also soon after another, while their engine holds back
    text that may be part of a stop string; and stop strings overlap, or contain others. An earlier process may have
    made the first tokens, which nobody was told."""
    chain, heard, expected = chain_of(stops, includes, tells=tells), "", pieces_of_leg(text, stops, includes, False)
    num_before = data.draw(st.integers(0, len(expected) - 1), "tokens of an earlier process")
    chain.restore(list(map(ord, text[:num_before])), [], [])
    while chain.finish_reason is None:
        if chain.output_ids:
            heard += chain.mend(["".join(map(chr, ids)) for ids in chain.candidates()]).text
        chain.begin_leg()
        num_tokens = data.draw(st.integers(1, 6), "tokens of this leg")
        holds_least = data.draw(st.booleans(), "this leg's engine holds back no more than it has to")
        for piece in pieces_of_leg(text[len(chain.output_ids) :], stops, includes, holds_least)[:num_tokens]:
            if chain.finish_reason is None:
                heard += chain.add(piece, "v1").text
    assert chain.text == "".join(piece.text for piece in expected)
    assert heard == chain.text or not tells
    assert (chain.finish_reason, chain.stop_reason) == (expected[-1].finish_reason, expected[-1].stop_reason)


def pieces_of_leg(text: str, stops: tuple[str, ...], includes: bool, holds_least: bool) -> list[Piece]:
    """What an engine sends that makes this text, a token for each character, and sees no text before it. It holds back
    the beginnings of stop strings, or always as much as these may take.
    """
    told, pieces = 0, []
    for end in range(1, len(text) + 1):
        stop = next((stop for stop in stops if text[:end].endswith(stop)), None)
        reason = "stop" if stop else "length" if end == len(text) else None
        begun = [n for stop in stops for n in range(len(stop)) if text[:end].endswith(stop[:n])]
        most = max(begun) if holds_least else max(map(len, stops)) - 1
        held = 0 if includes or reason == "length" else len(stop) if stop else most
        free = max(end - held, told)
        pieces.append(Piece([ord(text[end - 1])], text[told:free], finish_reason=reason, stop_reason=stop))
        told = free
        if stop:
            break
    return pieces


def test_text_that_a_second_engine_holds_back_is_told_behind_the_next_seam() -> None:
    """The first one tells all, because none of it can be part of the stop string; the second one waits all the same."""
    chain = chain_of(("END",))
    heard = add_pieces(chain, ([1], "a"), ([1], "b")) + chain.mend(["ab", "a"]).text
    chain.begin_leg()
    heard += add_pieces(chain, ([1], ""), ([1], "")) + chain.mend(["abcd", "abc", "ab", "a"]).text
    chain.begin_leg()
    heard += add_pieces(chain, ([1], "efgh"))
    assert heard == chain.text == "abcdefgh"


def test_text_held_back_at_a_seam_is_told_if_no_more_tokens_are_needed() -> None:
    """The leg before it had made as many as the client wants."""
    chain = chain_of(("END",))
    heard = add_pieces(chain, ([1], "a"), ([1], "")) + chain.mend(["aE", "a"]).text
    heard += chain.finish("length").text
    assert heard == chain.text == "aE"


def test_text_of_doubtful_tokens_is_dropped_with_them_behind_a_seam_too() -> None:
    """A long stop string makes the gateway keep it."""
    chain = chain_of(("a long one",), tells=False)
    add_pieces(chain, ([97], "a"))
    chain.mend(["a"])
    chain.begin_leg()
    add_pieces(chain, ([98], "b"))
    chain.add(Piece([99, 100], "cd"), "v2")
    chain.drop_doubtful()
    chain.mend(["ab", "a"])
    chain.begin_leg()
    chain.add(Piece([101], "e", finish_reason="length"), "v2")
    assert (bytes(chain.output_ids), chain.text) == (b"abe", "abe")


def test_a_stop_string_that_its_engine_passed_over_is_text_behind_the_next_seam() -> None:
    """It ended among the first `min_tokens` tokens; a longer stop string makes the gateway keep that much text."""
    chain = chain_of(("\n", "\nObs"), includes=True, stops_after=3)
    heard = add_pieces(chain, ([1], "a"), ([1], "\n"), ([1], "b"))
    heard += chain.mend(["a\nb", "a\n", "a"]).text
    chain.begin_leg()
    heard += add_pieces(chain, ([1], "c"), ([1], "d"), ([1], "e"), ([1], "f"))
    assert (heard, chain.finish_reason) == ("a\nbcdef", None)


@pytest.mark.parametrize("stops_after", range(9))
@pytest.mark.parametrize("cut", [3, 4])
def test_a_stop_string_across_a_seam_counts_only_after_the_least_number_of_tokens(cut: int, stops_after: int) -> None:
    """As vLLM does: one that ends among the first `min_tokens` tokens is text, also for a later one."""
    text = "xxENDyENDz"
    chain = chain_of(("END",), stops_after=stops_after)
    heard = add_pieces(chain, ([1] * cut, text[: cut - 2]))
    heard += chain.mend([text[:cut], text[: cut - 1]]).text
    chain.begin_leg()
    for i in range(cut, len(text)):
        if chain.finish_reason is None:
            heard += chain.add(Piece([1], text[i], finish_reason="length" if i + 1 == len(text) else None), "v1").text
    is_stopped = stops_after < 5
    assert heard == chain.text == ("xx" if is_stopped else text)
    assert (chain.finish_reason, chain.stop_reason) == (("stop", "END") if is_stopped else ("length", None))


@pytest.mark.parametrize("stops_after", range(8))
def test_a_stop_string_that_two_legs_in_a_row_broke_off_at_counts_only_after_the_least_number(stops_after: int) -> None:
    """Its end was held back by the second engine, and counted although it was among the first `min_tokens` tokens."""
    chain = chain_of(("END",), stops_after=stops_after)
    heard = add_pieces(chain, ([1] * 3, "x")) + chain.mend(["xxE", "xx", "x"]).text
    chain.begin_leg()
    heard += add_pieces(chain, ([1], ""), ([1], "")) + chain.mend(["xxEND", "xxEN", "xxE", "xx", "x"]).text
    chain.begin_leg()
    for i, letter in enumerate("yzyz"):
        if chain.finish_reason is None:
            heard += chain.add(Piece([1], letter, finish_reason="length" if i == 3 else None), "v1").text
    assert heard == chain.text == ("xx" if stops_after < 5 else "xxENDyzyz")


def test_output_held_to_a_grammar_is_made_again_and_must_match() -> None:
    """The client is told only what is new. If different output comes, the chain has diverged."""
    chain = chain_of(grammar=True)
    assert add_pieces(chain, ([1], "{"), ([2], '"a"')) == '{"a"'
    assert chain.candidates() == [] and chain.mend(()).text == ""
    chain.begin_leg()
    assert add_pieces(chain, ([1], "{"), ([2], '"a"'), ([3], ":1}")) == ":1}"
    assert chain.output_ids == [1, 2, 3] and chain.text == '{"a":1}'
    chain.candidates()
    with pytest.raises(Diverged):
        add_pieces(chain, ([1], "{"), ([7], '"b"'))


def test_output_that_was_not_told_may_differ_when_made_again() -> None:
    """An answer that is told only at its end starts over."""
    chain = chain_of(grammar=True, tells=False)
    add_pieces(chain, ([1], "{"))
    chain.candidates()
    add_pieces(chain, ([9], "[]"))
    assert (chain.output_ids, chain.text) == ([9], "[]")


@pytest.mark.parametrize("tells", [False, True])
def test_output_that_counts_itself_starts_over_unless_it_was_told(tells: bool) -> None:
    """An engine's penalties count only the output of its own leg. A stream just goes on."""
    chain = chain_of(tells=tells, counts=True)
    assert not chain.candidates() and not chain.output_ids, "nothing was made"
    add_pieces(chain, ([1], "a"), ([2], "b"))
    assert chain.needs_its_leg
    assert chain.candidates() == ([[1, 2], [1]] if tells else [])
    assert chain.output_ids == ([1, 2] if tells else []) and chain.text == ("ab" if tells else "")


def test_versions_cover_the_tokens_of_all_legs_without_gaps() -> None:
    """An engine's report counts from the beginning of its leg; without one, the version known for the leg counts."""
    chain = chain_of()
    add_pieces(chain, ([10], "a"), ([11], "b"))
    chain.mend(["ab", "a"])
    chain.begin_leg()
    chain.add(Piece([12], "c"), "v1")
    chain.add(Piece([13, 14], "de", finish_reason="stop", versions=(("v1", 0, 1), ("v2", 1, 3))), "v2")
    assert chain.versions == [VersionSpan("v1", 0, 3), VersionSpan("v2", 3, 5)]


@pytest.mark.parametrize("tells", [False, True])
def test_tokens_of_unknown_weights_are_made_again_unless_told(tells: bool) -> None:
    """Weights changed within an event of several tokens, of a leg that then broke off. Tokens that were told stay."""
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
    assert (chain.output_ids, chain.text) == ([10, 11, 22, 23], "abCD"), "the second leg's weights made all its tokens"
    assert chain.versions == [VersionSpan("v1", 0, 2), VersionSpan("v2", 2, 4)]


def test_an_engines_version_report_leaves_no_token_in_doubt() -> None:
    """It states for each token of its leg which weights made it."""
    chain = chain_of(tells=False)
    chain.add(Piece([10], "a"), "v1")
    chain.add(Piece([11, 12], "bc", finish_reason="stop", versions=(("v1", 0, 2), ("v2", 2, 3))), "v2")
    chain.drop_doubtful()
    assert chain.output_ids == [10, 11, 12]


def test_tokens_of_an_earlier_process_are_all_told() -> None:
    """With their log-probabilities, because the client was told none of them."""
    chain = chain_of()
    chain.restore([5, 6], [{"logprob": -1.0}, {"logprob": -2.0}], [VersionSpan("v1", 0, 2)])
    new_text = chain.mend(["hi", "h"])
    assert (new_text.text, list(new_text.ids), len(new_text.logprobs)) == ("hi", [5, 6], 2)


def test_log_probabilities_of_only_some_tokens_are_none() -> None:
    """An earlier process asked for none (`keep_logprobs`, `Prefer: tokens=none`); this one did."""
    chain = chain_of(tells=False)
    chain.restore([5, 6], [], [VersionSpan("v1", 0, 2)])
    chain.mend(["hi", "h"])
    chain.begin_leg()
    chain.add(Piece([7], "!", [-0.5], finish_reason="stop"), "v1")
    assert chain.output_ids == [5, 6, 7] and chain.chosen_logprobs is None


@pytest.mark.parametrize("of_a_nan", [None, {"token": "b", "logprob": None}])
def test_log_probabilities_with_a_nan_among_them_are_none(of_a_nan: Any) -> None:
    """Engines write NaN as null. The answer is whole; a trainer could not tell what the token's weight is."""
    chain = chain_of()
    chain.add(Piece([5], "a", [-0.5]), "v1")
    chain.add(Piece([6], "b", [of_a_nan]), "v1")
    chain.add(Piece([7], "c", [-0.5], finish_reason="stop"), "v1")
    assert chain.output_ids == [5, 6, 7] and chain.chosen_logprobs is None


def turn(prompt: list[int], output: list[int], history: str = "h") -> TurnTokens:
    return TurnTokens("t", "u", prompt, output, None, (), "stop", None, history, 0.0)


END, ASK, ANSWER = 9, 7, 8
"""The token that ends a message, and those that begin a question and an answer."""


@pytest.mark.parametrize(
    ("rendered", "expected"),
    [
        pytest.param([ASK, 1, END, ANSWER, 3, 4, END, ASK, 5], [ASK, 1, END, ANSWER, 3, 4, END, ASK, 5], id="same"),
        pytest.param([ASK, 1, END, ANSWER, 34, END, ASK, 5], [ASK, 1, END, ANSWER, 3, 4, END, ASK, 5], id="others"),
        pytest.param([ASK, 2, END, ANSWER, 3, 4, END, ASK, 5], None, id="a different question"),
        pytest.param([ASK, 1, END, ASK, 34, END, ANSWER], None, id="no answer"),
        pytest.param([ASK, 1, END, ANSWER, 34, ASK, 5], None, id="no end of the answer"),
    ],
)
def test_a_prompt_continues_from_the_generated_tokens(rendered: list[int], expected: Any) -> None:
    """Whatever the template makes of the answer's text. If the messages do not match, the rendered prompt stands."""
    prompt = joined(turn([ASK, 1, END, ANSWER], [3, 4, END]), TokenIds.of(rendered))
    assert (list(prompt) if prompt else None) == expected


@pytest.mark.parametrize(
    ("rendered", "continues"),
    [
        pytest.param([ASK, 1, END, ANSWER, 3, 4, 5, END, ASK, 5, END, ANSWER], True, id="all of its tokens"),
        pytest.param([ASK, 1, END, ANSWER, 3, 4, END, ASK, 5, END, ANSWER], False, id="without the stop string"),
        pytest.param([ASK, 1, END, ANSWER, 34, 56, END, ASK, 5, END, ANSWER], False, id="its last token written else"),
    ],
)
def test_a_turn_that_its_clients_stop_ended_is_continued_only_as_a_whole(rendered: list[int], continues: bool) -> None:
    """Its last token (5) is also in the next question, of which all before it would be lost."""
    prompt = joined(turn([ASK, 1, END, ANSWER], [3, 4, 5], f"h {ONLY_WHOLE}"), TokenIds.of(rendered))
    assert (list(prompt) if prompt else None) == (rendered if continues else None)


def test_a_spliced_prompt_is_continued_too() -> None:
    """The answers in it are not as the template renders them, and need not be."""
    before = turn([ASK, 1, END, ANSWER, 3, 4, END, ASK, 5, END, ANSWER], [6, 0, END])
    rendered = [ASK, 1, END, ANSWER, 34, END, ASK, 5, END, ANSWER, 60, END, ASK, 2, END, ANSWER]
    assert list(joined(before, TokenIds.of(rendered)) or ()) == [*before.prompt_ids, 6, 0, END, ASK, 2, END, ANSWER]


THINK, THOUGHT = 60, 61
"""What a template puts before an answer only where it asks for one, and what ends the thoughts."""


@pytest.mark.parametrize(
    ("output", "rendered", "continues"),
    [
        pytest.param([50, THOUGHT, 3, 4, END], [ANSWER, 3, 4, END], True, id="without its thoughts"),
        pytest.param([3, 4, END], [ANSWER, 3, 4, END], True, id="without what opens them"),
        pytest.param([50, THOUGHT, 3, 4, END], [ANSWER, 34, END], False, id="in other tokens"),
        pytest.param([50, THOUGHT, 3, 4, END], [ASK, 3, 4, END], False, id="a question in its place"),
        pytest.param([50, THOUGHT, 3, 4, END], [THOUGHT, 3, 4, END], False, id="without its beginning"),
        pytest.param([3, 4, END], [ANSWER, 50, 3, 4, END], False, id="with more"),
    ],
)
def test_an_answer_is_continued_with_the_thoughts_that_a_template_leaves_out(
    output: list[int], rendered: list[int], continues: bool
) -> None:
    """So is the next one after it, with both. Each turn began a branch."""
    before, asked = [ASK, 1, END, ANSWER, THINK], [ASK, 2, END, ANSWER, THINK]
    prompt = joined(turn(before, output), TokenIds.of([ASK, 1, END, *rendered, *asked]))
    assert (list(prompt) if prompt else None) == ([*before, *output, *asked] if continues else None)
    if prompt is not None:
        again = TokenIds.of([ASK, 1, END, *rendered, ASK, 2, END, ANSWER, 5, END, ASK, 4, END, ANSWER, THINK])
        longer = joined(turn(list(prompt), [5, END]), again)
        assert list(longer or ()) == [*prompt, 5, END, ASK, 4, END, ANSWER, THINK]


@pytest.mark.parametrize(
    ("rendered", "new"),
    [
        pytest.param([ANSWER, 3, END, 4, 5, END], [ASK, 2, END, ANSWER], id="and goes on"),
        pytest.param([ANSWER, 3, END, ASK, 0, 4, 5, END], [ASK, 2, END, ANSWER], id="and asks itself"),
        pytest.param([ANSWER, 3, 40, END, 5, END], [ANSWER], id="in other tokens"),
        pytest.param([ANSWER, 3, 4, END, END], [ASK, 2, END, ANSWER], id="at its end"),
    ],
)
def test_an_answer_that_spells_the_end_of_a_message_is_not_continued(rendered: list[int], new: list[int]) -> None:
    """In ordinary tokens, as a model may write a chat template. The template makes several messages of such a text. The
    later ones were in the prompt a second time, after the whole answer."""
    output = [3, 30, 31, 32, 4, 5, END]
    assert joined(turn([ASK, 1, END, ANSWER], output), TokenIds.of([ASK, 1, END, *rendered, *new])) is None


def test_a_prompt_is_not_continued_with_what_a_template_moves_to_its_end() -> None:
    """Tools (9 ends answers only, as with Mistral): they would be in the next prompt twice."""
    tools = [70, 71]
    before = turn([1, *tools, ASK, 5, ANSWER], [3, END])
    assert joined(before, TokenIds.of([1, ASK, 5, ANSWER, 3, END, *tools, ASK, 6, ANSWER])) is None


def test_an_engines_version_report_replaces_the_gateways() -> None:
    """The gateway notes versions as tokens come, across a restart and a seam. An engine reports them at a leg's end."""
    chain = chain_of()
    chain.restore([1, 2], [], [VersionSpan("1", 0, 2)])
    chain.begin_leg()
    chain.add(Piece([3], "c"), "1")
    assert chain.versions == [VersionSpan("1", 0, 3)]
    chain.begin_leg()
    chain.add(Piece([4], "d"), "2")
    assert chain.versions == [VersionSpan("1", 0, 3), VersionSpan("2", 3, 4)]
    reported = (("1", 0, 1), ("3", 1, 3))
    chain.add(Piece([5, 6], "e", finish_reason="length", versions=reported), "2")
    assert chain.versions == [VersionSpan("1", 0, 4), VersionSpan("3", 4, 6)]


def test_a_parsed_writer_is_due_at_its_first_token_and_after_a_pause() -> None:
    """Each part of the answer costs a request to an engine."""
    ask = Ask("chat", "", "m", b"", {"stream": True}, "t", "g", None, 0, False, wants_stream=True)
    writer = ParsedWriter(ask, Frame(ask, "turn", 0.0), 0)
    assert not writer.is_due(0.0)
    writer.add([1])
    assert writer.is_due(0.0)
    writer.pause(10.0)
    writer.add([2])
    assert not writer.is_due(10.05) and writer.is_due(10.11)
