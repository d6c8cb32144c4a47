"""Mooncake's rows become trajectories: calls that continue each other, sessions, groups."""

from pathlib import Path

import pytest

from tests.workloads.forms import lines, mooncake, shapes, without
from workloads.importers import import_trace
from workloads.importers.calls import ASSUMED_TOKENS_PER_S
from workloads.trajectories import Turn


def test_mooncake_calls_that_repeat_prompt_and_answer_are_one_trajectory(tmp_path: Path) -> None:
    """The second call holds the first one's whole blocks and its answer. The time between them that the answer did not
    take is the tool's."""
    path = lines(
        tmp_path / "agents.jsonl",
        mooncake(0, 1_100, 100, 1, 2, 3),
        mooncake(10, 1_050, 40, 1, 7, 8),
        mooncake(9_000, 1_300, 50, 1, 2, 4),
    )
    first, other = import_trace(path).trajectories
    gap_s = 9.0 - 100 / ASSUMED_TOKENS_PER_S
    assert (first.context_tokens, first.turns) == (1_100, (Turn(0, 100, pytest.approx(gap_s)), Turn(100, 50, 0.0)))
    assert (other.context_tokens, other.turns) == (1_050, (Turn(0, 40, 0.0),))


def test_a_mooncake_call_too_short_to_hold_the_answer_is_another_trajectory(tmp_path: Path) -> None:
    """A shared system prompt alone is not a conversation."""
    path = lines(tmp_path / "t.jsonl", mooncake(0, 1_100, 400, 1, 2, 3), mooncake(5, 1_200, 10, 1, 2, 4))
    assert len(import_trace(path).trajectories) == 2


def test_mooncake_siblings_share_a_group_and_each_continues_once(tmp_path: Path) -> None:
    """Two equal prompts are a group; each of two continuations takes one of them."""
    path = lines(
        tmp_path / "t.jsonl",
        *(mooncake(0, 1_100, 20, 1, 2, 3) for _ in range(2)),
        *(mooncake(1_000, 1_200, 20, 1, 2, 4) for _ in range(2)),
        mooncake(2_000, 1_100, 20, 9, 8, 7),
    )
    workload = import_trace(path)
    assert [len(t.turns) for t in workload.trajectories] == [2, 2, 1]
    assert [len(siblings) for siblings in workload.groups.values()] == [2, 1]


def test_mooncake_sessions_and_delays_take_precedence(tmp_path: Path) -> None:
    """A session links calls even without a common block, and the delay is the tool's time."""
    path = lines(
        tmp_path / "t.jsonl",
        mooncake(0, 500, 20, session_id="s"),
        mooncake(0, 600, 30, session_id="s", delay=2_500),
    )
    assert shapes(import_trace(path)) == [(500, (Turn(0, 20, 2.5), Turn(80, 30, 0.0)))]


@pytest.mark.parametrize("with_blocks", [True, False])
def test_mooncake_rows_of_a_session_may_be_additions_to_its_prompt(tmp_path: Path, with_blocks: bool) -> None:
    """Rows that share nothing with the row before, or are as often shorter as longer, are not whole prompts."""
    blocks = [[1, 2, 3], [4, 5], [6], [7, 8, 9], [10, 11, 12]] if with_blocks else [[]] * 5
    lengths = [(900, 20), (300, 30), (40, 10), (700, 5), (650, 60)]
    path = lines(
        tmp_path / "t.jsonl",
        *(
            mooncake(0, prompt, output, *hash_ids, session_id="s", delay=1_000)
            for (prompt, output), hash_ids in zip(lengths, blocks, strict=True)
        ),
    )
    turns = (Turn(0, 20, 1.0), Turn(300, 30, 1.0), Turn(40, 10, 1.0), Turn(700, 5, 1.0), Turn(650, 60, 0.0))
    assert shapes(import_trace(path)) == [(900, turns)]


def test_mooncake_rows_of_a_session_are_whole_prompts_if_most_grow(tmp_path: Path) -> None:
    """One context that was cut down among many that grow makes a trajectory of its own, and no prompt longer."""
    path = lines(
        tmp_path / "t.jsonl",
        *(mooncake(at, 500 + 100 * at, 10, session_id="s") for at in range(9)),
        mooncake(9, 200, 10, session_id="s"),
        mooncake(10, 300, 10, session_id="s"),
    )
    assert [(t.context_tokens, t.total_tokens) for t in import_trace(path).trajectories] == [(500, 1_310), (200, 310)]


def test_mooncake_rows_of_a_session_need_not_be_sorted(tmp_path: Path) -> None:
    """If every row has its time. A row with only a delay keeps its place."""
    rows = [mooncake(at_ms, 100 + at_ms // 10, 20, session_id="s") for at_ms in (9_000, 0, 4_000)]
    [trajectory] = import_trace(lines(tmp_path / "t.jsonl", *rows)).trajectories
    assert (trajectory.context_tokens, [turn.new_tokens for turn in trajectory.turns]) == (100, [0, 380, 480])
    later = [without(row, "timestamp") | {"delay": 500.0} for row in rows[1:]]
    [trajectory] = import_trace(lines(tmp_path / "t.jsonl", rows[0], *later), "mooncake").trajectories
    assert trajectory.context_tokens == 1_000


def test_mooncake_sessions_may_name_or_number_their_group(tmp_path: Path) -> None:
    """A generator's first row of a session names the group whose prompt it shares. A session that names none is its own
    group."""
    path = lines(
        tmp_path / "t.jsonl",
        mooncake(0, 500, 20, session_id="a", group_id=46),
        mooncake(0, 600, 20, session_id="a"),
        mooncake(0, 500, 20, session_id="b", group_id=46),
        mooncake(0, 500, 20, session_id="c", group_id="x"),
        mooncake(0, 500, 20, session_id="d"),
    )
    assert [t.group_id for t in import_trace(path).trajectories] == ["46", "46", "x", "d"]


def test_bailian_chats_are_sessions_with_times_in_seconds(tmp_path: Path) -> None:
    """A chat belongs to the session of its parent, if the file has that; ids are numbers."""
    path = lines(
        tmp_path / "t.jsonl",
        mooncake(0.5, 500, 50, 1, 2, 3, chat_id=7, parent_chat_id=-1, turn=1),
        mooncake(1.0, 900, 10, 8, 9, chat_id=8, parent_chat_id=3, turn=4),
        mooncake(31.5, 600, 25, 1, 2, 4, chat_id=9, parent_chat_id=7, turn=2),
        mooncake(62.0, 700, 5, 1, 2, 4, 5, chat_id=11, parent_chat_id=9, turn=3),
    )
    workload = import_trace(path)
    gaps_s = 31 - 50 / ASSUMED_TOKENS_PER_S, 30.5 - 25 / ASSUMED_TOKENS_PER_S
    assert [t.trajectory_id for t in workload.trajectories] == ["7-0", "8-0"]
    assert shapes(workload) == [
        (500, (Turn(0, 50, pytest.approx(gaps_s[0])), Turn(50, 25, pytest.approx(gaps_s[1])), Turn(75, 5, 0.0))),
        (900, (Turn(0, 10, 0.0),)),
    ]


def test_mooncake_rows_may_have_request_ids(tmp_path: Path) -> None:
    """Dynamo names them. Their times and contents count, as long as no row waits for another."""
    rows = [mooncake(0, 500, 100, session_id="s"), mooncake(30_000, 700, 20, session_id="s")]
    named = [row | {"request_id": f"r{number}"} for number, row in enumerate(rows)]
    workload = import_trace(lines(tmp_path / "t.jsonl", *named))
    assert shapes(workload) == [(500, (Turn(0, 100, 30 - 100 / ASSUMED_TOKENS_PER_S), Turn(100, 20, 0.0)))]
    assert workload.trajectories == import_trace(lines(tmp_path / "t.jsonl", *rows)).trajectories
    alike = [mooncake(0, 1_100, 100, 1, 2, 3, request_id="a"), mooncake(9_000, 1_300, 50, 1, 2, 4, request_id="b")]
    assert [len(t.turns) for t in import_trace(lines(tmp_path / "t.jsonl", *alike)).trajectories] == [2]


def test_mooncake_rows_need_no_time(tmp_path: Path) -> None:
    """Then they are in the order of the file, and tools take no time."""
    rows = [without(mooncake(0, *numbers), "timestamp") for numbers in ((1_100, 100, 1, 2, 3), (1_300, 50, 1, 2, 4))]
    assert shapes(import_trace(lines(tmp_path / "t.jsonl", *rows))) == [
        (1_100, (Turn(0, 100, 0.0), Turn(100, 50, 0.0)))
    ]


@pytest.mark.parametrize("order", [1, -1])
def test_bailian_chats_need_not_be_sorted(tmp_path: Path, order: int) -> None:
    """A chat may come before its parent. A parent that is nobody's chat, or its own ancestor, ends the search."""
    rows = [
        mooncake(0.0, 500, 50, 1, 2, 3, chat_id=7, parent_chat_id=-1),
        mooncake(30.0, 600, 50, 1, 2, 4, 5, chat_id=8, parent_chat_id=7),
        mooncake(60.0, 700, 50, 1, 2, 4, 6, chat_id=9, parent_chat_id=8),
        mooncake(0.0, 90, 5, 8, 9, chat_id=1, parent_chat_id=2),
        mooncake(5.0, 120, 5, 8, 9, 10, chat_id=2, parent_chat_id=1),
    ]
    sizes = sorted(len(t.turns) for t in import_trace(lines(tmp_path / "t.jsonl", *rows[::order])).trajectories)
    assert sizes == [2, 3]


def test_bailian_chats_are_whole_prompts_however_often_they_shrink(tmp_path: Path) -> None:
    """A service that keeps only the last messages sends prompts that do not begin alike."""
    path = lines(
        tmp_path / "t.jsonl",
        *(
            mooncake(float(at), prompt, 10, at, 100 + at, chat_id=at, parent_chat_id=at - 1 if at else -1)
            for at, prompt in enumerate((900, 500, 300, 800))
        ),
    )
    assert sorted(t.context_tokens for t in import_trace(path).trajectories) == [300, 500, 800, 900]
