"""Token ids as the digits in which they came and as numbers: both forms agree, and ids are cut from an answer only at
their own list."""

from array import array

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.token_ids import TokenIds, cut_ids, messages, put_together, with_ids, with_prompt

IDS = st.lists(st.integers(0, 2**31 - 1))
# A name, a text and a list that look like the field, but are not.
WORDS = st.sampled_from(["token_ids", '"token_ids":[1]', "text", '","token_ids":[7],"'])


@given(IDS, IDS)
def test_ids_are_the_same_in_each_form(ids: list[int], more: list[int]) -> None:
    """Read from JSON or from a list, extended or not."""
    _, read = cut_ids(orjson.dumps({"ids": ids}), "ids")
    assert read is not None and read == TokenIds.of(ids) == TokenIds.of(array("I", ids))
    both = read + more
    assert list(both) == ids + more and len(both) == len(ids + more) and both[-3:] == (ids + more)[-3:]
    assert both == TokenIds.of(ids + more) and both.numbers.tolist() == ids + more
    assert orjson.loads(with_ids({"a": [both]})) == {"a": [ids + more]}
    assert orjson.loads(b"".join(with_prompt({"a": 1}, "b", both))) == {"a": 1, "b": ids + more}


@given(IDS, st.dictionaries(WORDS, st.one_of(WORDS, IDS)), st.booleans())
def test_an_answer_is_the_same_with_its_ids_cut_out(ids: list[int], others: dict[str, object], is_last: bool) -> None:
    """Whatever the names and values of its other fields."""
    others.pop("token_ids", None)
    answer = others | {"token_ids": ids} if is_last else {"token_ids": ids} | others
    made, cut = cut_ids(orjson.dumps(answer), "token_ids")
    assert cut is not None and list(cut) == ids
    assert made == answer | {"token_ids": []}


FEW = st.lists(st.integers(0, 12), max_size=30)  # so that the digits of one id often begin or end those of another


@given(FEW, FEW)
def test_begins_with_compares_numbers_not_digits(ids: list[int], others: list[int]) -> None:
    """The digits of 1, 2 begin those of 1, 23."""
    for start in (others, ids[: len(others)]):
        assert TokenIds.of(ids).begins_with(TokenIds.of(start)) is (ids[: len(start)] == start)


@given(FEW, st.integers(0, 12))
def test_a_prompt_is_split_after_each_end_token(ids: list[int], end: int) -> None:
    """Also if two follow each other, and nowhere else. Joined, the messages are the prompt."""
    wanted: list[list[int]] = [[]]
    for token in ids:
        wanted[-1].append(token)
        if token == end:
            wanted.append([])
    cut = messages(TokenIds.of(ids), end)
    assert list(map(list, cut)) == wanted
    assert put_together(cut) == TokenIds.of(ids) and len(put_together(cut)) == len(ids)


@given(st.lists(st.integers(0, 999_999)), st.integers(1, 20))
def test_a_tail_has_at_least_the_requested_length(ids: list[int], number: int) -> None:
    """And it is a suffix of the ids."""
    tail = list(TokenIds.of(ids).tail(number))
    assert len(tail) >= min(number, len(ids)) and tail == ids[len(ids) - len(tail) :]


@pytest.mark.parametrize(
    "answer", ['{"token_ids":[1,"2"]}', '{"token_ids":[[1],[2]]}', '{"token_ids":[1.5]}', '{"token_ids":[-1]}', "[]"]
)
def test_a_list_that_does_not_hold_ids_is_not_cut(answer: str) -> None:
    """Neither is one of several lists; the reader sees the answer unchanged."""
    assert cut_ids(answer.encode(), "token_ids") == (orjson.loads(answer), None)
    twice = b'[{"token_ids":[1]},{"token_ids":[2]}]'
    assert cut_ids(twice, "token_ids") == (orjson.loads(twice), None)


def test_an_answer_with_spaces_between_its_ids_is_read() -> None:
    """As numbers, because an engine may change its spacing."""
    made, cut = cut_ids(b'{"token_ids": [1, 23]}', "token_ids")
    assert (made, cut) == ({"token_ids": [1, 23]}, None)
    made, cut = cut_ids(b'{"token_ids":[1, 23]}', "token_ids")
    assert (made, cut) == ({"token_ids": [1, 23]}, None)


@pytest.mark.parametrize("ids", [[-1], [2**32], ["1"], [None]])
def test_an_invalid_id_is_refused(ids: list[int]) -> None:
    """As nonsense from an engine."""
    with pytest.raises((TypeError, ValueError)):
        TokenIds.of(ids)


def test_an_answer_that_is_not_json_is_refused() -> None:
    """Also if its list of ids is valid."""
    for ids in (b"[1,2", b"[1-2]", b"[1 2]"):
        with pytest.raises(ValueError, match=r"\w"):
            cut_ids(b'{"token_ids":' + ids + b"}", "token_ids")
    for ids in (b"[1,2", b"[1,,2]", b"[,1]", b"[1,]", b"[,]", b"[1/2]", b"[1-2]"):
        with pytest.raises(ValueError, match=r"\w"):
            cut_ids(b'{"token_ids":' + ids + b"}", "token_ids")
    for answer in (b'{"token_ids":[1,2]', b'{"token_ids":[1,2}'):
        with pytest.raises(ValueError, match=r"\w"):
            cut_ids(answer, "token_ids")
