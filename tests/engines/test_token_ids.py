"""Token ids as the digits they came in and as numbers: both say the same, and an answer is cut at its list only."""

from array import array

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.token_ids import TokenIds, cut_ids, messages, put_together, with_ids, with_prompt

IDS = st.lists(st.integers(0, 2**31 - 1))
# A name, a text and a list that look like the one that is sought, where none is.
WORDS = st.sampled_from(["token_ids", '"token_ids":[1]', "text", '","token_ids":[7],"'])


@given(IDS, IDS)
def test_ids_are_the_same_in_each_form(ids: list[int], more: list[int]) -> None:
    """Read from JSON or from a list, gone on with or not."""
    _, read = cut_ids(orjson.dumps({"ids": ids}), "ids")
    assert read is not None and read == TokenIds.of(ids) == TokenIds.of(array("I", ids))
    both = read + more
    assert list(both) == ids + more and len(both) == len(ids + more) and both[-3:] == (ids + more)[-3:]
    assert both == TokenIds.of(ids + more) and both.numbers.tolist() == ids + more
    assert orjson.loads(with_ids({"a": [both]})) == {"a": [ids + more]}
    assert orjson.loads(b"".join(with_prompt({"a": 1}, "b", both))) == {"a": 1, "b": ids + more}


@given(IDS, st.dictionaries(WORDS, st.one_of(WORDS, IDS)), st.booleans())
def test_an_answer_is_the_same_with_its_ids_cut_out(ids: list[int], others: dict[str, object], is_last: bool) -> None:
    """Whatever its other fields are called and say."""
    others.pop("token_ids", None)
    answer = others | {"token_ids": ids} if is_last else {"token_ids": ids} | others
    made, cut = cut_ids(orjson.dumps(answer), "token_ids")
    assert cut is not None and list(cut) == ids
    assert made == answer | {"token_ids": []}


FEW = st.lists(st.integers(0, 12), max_size=30)  # so that one is often the beginning or the end of another's digits


@given(FEW, FEW)
def test_ids_begin_with_others_as_numbers_do_and_not_as_digits(ids: list[int], others: list[int]) -> None:
    """The digits of 1, 2 begin those of 1, 23."""
    for start in (others, ids[: len(others)]):
        assert TokenIds.of(ids).begins_with(TokenIds.of(start)) is (ids[: len(start)] == start)


@given(FEW, st.integers(0, 12))
def test_a_prompt_is_cut_behind_each_end_of_a_turn(ids: list[int], end: int) -> None:
    """Also where two follow each other, and nowhere else; put together the messages are the prompt."""
    wanted: list[list[int]] = [[]]
    for token in ids:
        wanted[-1].append(token)
        if token == end:
            wanted.append([])
    cut = messages(TokenIds.of(ids), end)
    assert list(map(list, cut)) == wanted
    assert put_together(cut) == TokenIds.of(ids) and len(put_together(cut)) == len(ids)


@given(st.lists(st.integers(0, 999_999)), st.integers(1, 20))
def test_a_tail_is_at_least_as_long_as_wanted(ids: list[int], number: int) -> None:
    """And ends as all of them do."""
    tail = list(TokenIds.of(ids).tail(number))
    assert len(tail) >= min(number, len(ids)) and tail == ids[len(ids) - len(tail) :]


@pytest.mark.parametrize(
    "answer", ['{"token_ids":[1,"2"]}', '{"token_ids":[[1],[2]]}', '{"token_ids":[1.5]}', '{"token_ids":[-1]}', "[]"]
)
def test_a_list_that_is_none_of_ids_stays_where_it_is(answer: str) -> None:
    """So does each of several; the reader sees what it is."""
    assert cut_ids(answer.encode(), "token_ids") == (orjson.loads(answer), None)
    twice = b'[{"token_ids":[1]},{"token_ids":[2]}]'
    assert cut_ids(twice, "token_ids") == (orjson.loads(twice), None)


def test_an_answer_with_blanks_between_its_ids_is_read_all_the_same() -> None:
    """As numbers, for an engine may come to space its answers otherwise."""
    made, cut = cut_ids(b'{"token_ids": [1, 23]}', "token_ids")
    assert (made, cut) == ({"token_ids": [1, 23]}, None)
    made, cut = cut_ids(b'{"token_ids":[1, 23]}', "token_ids")
    assert (made, cut) == ({"token_ids": [1, 23]}, None)


@pytest.mark.parametrize("ids", [[-1], [2**32], ["1"], [None]])
def test_what_is_no_id_is_refused(ids: list[int]) -> None:
    """As an engine's nonsense."""
    with pytest.raises((TypeError, ValueError)):
        TokenIds.of(ids)


def test_an_answer_that_is_no_json_is_refused() -> None:
    """Also where its list of ids is a good one."""
    for ids in (b"[1,2", b"[1-2]", b"[1 2]"):
        with pytest.raises(ValueError, match=r"\w"):
            cut_ids(b'{"token_ids":' + ids + b"}", "token_ids")
    for ids in (b"[1,2", b"[1,,2]", b"[,1]", b"[1,]", b"[,]", b"[1/2]", b"[1-2]"):
        with pytest.raises(ValueError, match=r"\w"):
            cut_ids(b'{"token_ids":' + ids + b"}", "token_ids")
    for answer in (b'{"token_ids":[1,2]', b'{"token_ids":[1,2}'):
        with pytest.raises(ValueError, match=r"\w"):
            cut_ids(answer, "token_ids")
