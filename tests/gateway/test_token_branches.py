"""Trees of turns and their export: every token of every turn, marked once, in its place."""

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.clock import started_clock
from gateway.state.ledger import Entry, Ledger
from gateway.tokens.book import TokenBook, TokenLimits, choice_id
from gateway.tokens.branches import records, tree
from gateway.tokens.export import rows
from gateway.tokens.turn_tokens import TurnTokens
from scheduling.types import TrajectoryRecord, TrajectoryState
from store import StoreSettings, open_store
from tests.support.conversations import Step, conversation, steps

LIMITS = TokenLimits(keep=True, memory_bytes=2**30, stored_bytes=2**30, age_s=3600)


async def tree_and_records(
    turns: list[TurnTokens], rows: list[dict[str, Any]] | None = None
) -> tuple[dict[str, Any], Any]:
    """The tree of these turns, and the records of its branches, after JSON."""
    store = open_store("memory:", StoreSettings())
    ledger = Ledger(store, 100)
    ledger.save(record("t"))
    for row in rows or []:
        ledger.add_turn("t", row)
    book = TokenBook(store, ledger, started_clock(), LIMITS)
    for turn in turns:
        book.add(turn)
    entry = ledger.get("t")
    assert isinstance(entry, Entry)
    kept = await book.turns("t")
    return _json(tree(entry, kept)), _json(list(records(entry, kept)))


def record(trajectory_id: str) -> TrajectoryRecord:
    """A trajectory of the rollout `r` that has just ended."""
    now = started_clock()()
    return TrajectoryRecord(trajectory_id, "g", "r", TrajectoryState.FINISHED, None, 10, 5, 1, 9.0, now, now)


@given(plan=st.lists(steps(), max_size=8))
async def test_every_branch_has_its_leafs_prompt_and_output(plan: list[Step]) -> None:
    """A turn that no other continues is one record, with exactly the tokens that the engine read and generated."""
    turns = conversation(plan)
    parents = {turn.parent for turn in turns}
    leaves = [turn for turn in turns if turn.turn_id not in parents]
    _, exported = await tree_and_records(turns)
    if not turns:
        assert [(one["num_branches"], one["token_ids"]) for one in exported] == [(0, [])]
        return
    assert [(one["branch"], one["num_branches"]) for one in exported] == [(n, len(leaves)) for n in range(len(leaves))]
    for one, leaf in zip(exported, leaves, strict=True):
        assert one["token_ids"] == [*leaf.prompt_ids, *leaf.output_ids]
        assert len(one["loss_mask"]) == len(one["token_ids"])
        assert one["turns"][-1]["turn_id"] == leaf.turn_id
        assert one["finish_reason"] == leaf.finish_reason


@given(plan=st.lists(steps(), min_size=1, max_size=8))
async def test_every_generated_token_is_marked_exactly_once(plan: list[Step]) -> None:
    """Across all records of a trajectory; prompt and tool tokens never are. Marks, log-probabilities and versions are
    aligned with their tokens."""
    turns = {turn.turn_id: turn for turn in conversation(plan)}
    _, exported = await tree_and_records(list(turns.values()))
    times_marked: Counter[str] = Counter()
    for one in exported:
        outside = set(range(len(one["token_ids"])))
        for bounds in one["turns"]:
            turn, (start, end) = turns[bounds["turn_id"]], (bounds["output_start"], bounds["end"])
            outside -= set(range(start, end))
            assert one["token_ids"][:start] == list(turn.prompt_ids)
            assert one["token_ids"][start:end] == list(turn.output_ids)
            assert one["loss_mask"][start:end] == [0 if bounds["is_repeated"] else 1] * (end - start)
            times_marked[turn.turn_id] += one["loss_mask"][start]
            versions = [span for span in one["versions"] if start <= span["start"] and span["end"] <= end]
            expected = [(span.version, span.start + start, span.end + start) for span in turn.versions]
            assert [(span["version"], span["start"], span["end"]) for span in versions] == expected
            if one["logprobs"] is not None:
                assert turn.logprobs is not None
                assert np.array_equal(np.float32(one["logprobs"][start:end]), np.float32(turn.logprobs))
        assert one["prompt_length"] == one["turns"][0]["output_start"]
        assert not any(one["loss_mask"][position] for position in outside)
        if one["logprobs"] is None:
            assert any(turns[bounds["turn_id"]].logprobs is None for bounds in one["turns"])
        else:
            assert not any(one["logprobs"][position] for position in outside)
    assert times_marked == dict.fromkeys(turns, 1)


@given(plan=st.lists(steps(), max_size=8))
async def test_prompts_can_be_rebuilt_from_the_tree(plan: list[Step]) -> None:
    """As docs/tokens.md states: the parent's prompt and output, then what is new; masks and spans are the turn's."""
    turns = conversation(plan)
    turn_tree, _ = await tree_and_records(turns)
    by_id = {one["turn_id"]: one for one in turn_tree["turns"]}

    def prompt(one: dict[str, Any]) -> list[int]:
        parent = by_id.get(one["parent"])
        before = prompt(parent) + parent["output_ids"] if parent else []
        assert len(before) == one["num_before"]
        return before + one["prompt_ids"]

    assert [one["turn_id"] for one in turn_tree["turns"]] == [turn.turn_id for turn in turns]
    for one, turn in zip(turn_tree["turns"], turns, strict=True):
        assert prompt(one) == list(turn.prompt_ids)
        assert one["output_ids"] == list(turn.output_ids)
        assert one["loss_mask"] == [0] * len(one["prompt_ids"]) + [1] * len(one["output_ids"])
        assert [(each["version"], each["start"], each["end"]) for each in one["versions"]] == [
            (each.version, each.start, each.end) for each in turn.versions
        ]
        assert (one["finish_reason"], one["ended_at"], one["parent"]) == (
            turn.finish_reason,
            turn.ended_at,
            turn.parent,
        )
    assert [branch[-1] for branch in turn_tree["branches"]] == [
        turn.turn_id for turn in turns if turn.turn_id not in {each.parent for each in turns}
    ]


@given(plan=st.lists(steps(), min_size=2, max_size=6), data=st.data())
async def test_a_prompt_that_does_not_extend_its_parent_is_a_new_root(plan: list[Step], data: st.DataObject) -> None:
    """It is kept whole, without a parent: a prompt is never rebuilt from tokens that were not in it."""
    turns = conversation(plan)
    at = data.draw(st.integers(0, len(turns) - 1))
    broken = turns[at]
    if broken.parent is None:
        return
    prompt = list(broken.prompt_ids)
    prompt[data.draw(st.integers(0, len(prompt) - len(plan[at].new) - 1))] ^= 1
    turns = [*turns[:at], _with(broken, prompt)]
    turn_tree, exported = await tree_and_records(turns)
    last = turn_tree["turns"][-1]
    assert (last["parent"], last["num_before"], last["prompt_ids"]) == (None, 0, prompt)
    assert exported[-1]["token_ids"] == prompt + list(broken.output_ids)


async def test_choices_of_a_turn_are_branches() -> None:
    """Each of n answers is a branch of its own; the output before them is marked only in the first."""
    first = conversation([Step(None, [1, 2], [3], None, 0)])[0]
    both = [
        TurnTokens("t", choice_id("x", n), [1, 2, 3, 4], [5 + n], None, (), "stop", first.turn_id, f"{n}", 2000.0 + n)
        for n in range(2)
    ]
    turn_tree, exported = await tree_and_records(
        [first, *both], [{"turn_id": "x", "outcome": "finished", "tokens": "kept"}]
    )
    assert turn_tree["branches"] == [["t-0", "x"], ["t-0", "x/1"]]
    assert [one["token_ids"] for one in exported] == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]
    assert [one["loss_mask"] for one in exported] == [[0, 0, 1, 0, 1], [0, 0, 0, 0, 1]]
    assert turn_tree["missing"] == []


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"outcome": "finished", "tokens": "kept"}, "dropped"),
        ({"outcome": "finished", "tokens": "not_wanted"}, "not_wanted"),
        ({"outcome": "finished", "tokens": "none"}, "no_token_legs"),
        ({"outcome": "finished"}, "no_token_legs"),
        ({"outcome": "failed"}, None),
        ({"outcome": "left", "tokens": "none"}, None),
    ],
)
async def test_a_finished_turn_without_tokens_is_listed_with_the_reason(row: dict[str, Any], why: str | None) -> None:
    """In the tree and in every record of its trajectory; in a record of its own if no turn has tokens."""
    turns = conversation([Step(None, [1], [2], None, 0)])
    rows = [{"turn_id": "t-0", "outcome": "finished", "tokens": "kept"}, {"turn_id": "gone", **row}]
    expected = [{"turn_id": "gone", "why": why}] if why else []
    turn_tree, exported = await tree_and_records(turns, rows)
    assert turn_tree["missing"] == expected
    assert [one["missing"] for one in exported] == [expected]
    turn_tree, exported = await tree_and_records([], rows[1:])
    assert [(one["token_ids"], one["num_branches"], one["missing"]) for one in exported] == [([], 0, expected)]


async def test_turns_are_served_between_two_branches_of_an_export() -> None:
    """All branches of a trajectory were made at once: 128 with 100,000 tokens kept everybody waiting for 2 s."""
    ledger, now = Ledger(store := open_store("memory:", StoreSettings()), 100), started_clock()
    ledger.save(record("t"))
    book = TokenBook(store, ledger, now, LIMITS)
    for turn in conversation([Step(None, [1], [number], None, 0) for number in range(3)]):
        book.add(turn)
    served: list[int] = []
    async for row in rows(list(ledger), book):
        assert served == list(range(row["branch"]))
        asyncio.get_running_loop().call_soon(served.append, row["branch"])
    assert served == [0, 1, 2]


def _with(turn: TurnTokens, prompt: list[int]) -> TurnTokens:
    values = {name: getattr(turn, name) for name in TurnTokens.__dataclass_fields__}
    return TurnTokens(**values | {"prompt_ids": prompt})


def _json(value: Any) -> Any:
    return orjson.loads(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))
