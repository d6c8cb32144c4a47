"""The benchmark: each section measures the gateway, a server that fails is reported, tables and checks are right."""

import re
import sys
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import orjson
import pytest

from loadtest.bench import answers, token_answers
from loadtest.bench.check import Checker
from loadtest.bench.goals import GOALS, goals_table
from loadtest.bench.peers import DIRECT, GATEWAY, PEERS, PROGRAMS, RUST, STICKY, Peer
from loadtest.bench.processes import NotStarted, raise_file_limit
from loadtest.bench.requests import bodies, contexts, in_turn
from loadtest.bench.rig import Rig
from loadtest.bench.run import Record, run_section
from loadtest.bench.sections import SECTIONS, Section
from loadtest.bench.tables import added, cost, plain, table, write

pytestmark = pytest.mark.timeout(400)


def rig_for(peer: Peer, directory: Path) -> Rig:
    return Rig(peer, 0.2, 1, directory, None, raise_file_limit(4_096), scale=0.01)


def peer_named(name: str) -> Peer:
    return next(peer for peer in PEERS if peer.name == name)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_each_section_measures_the_gateway(section: Section, tmp_path: Path) -> None:
    """Every column has a figure; figures of processor time and memory are above zero."""
    sample = section.measure(rig_for(peer_named(GATEWAY), tmp_path))
    cells = [column.cell(GATEWAY, {GATEWAY: [sample], DIRECT: [sample]}) for column in section.columns]
    titles = [column.title for column in section.columns]
    missing = [title for title, cell in zip(titles, cells, strict=True) if cell == "-" and not title.startswith("x")]
    assert not missing
    costs = {name: value for name, value in sample.items() if name.startswith(("cpu", "paced", "fast", "5.5 KB", "kb"))}
    assert all(value > 0 for value in costs.values()), sample


def test_token_legs_are_measured_at_token_level(tmp_path: Path) -> None:
    """The backend has the routes and answers with the same words: each answer is checked, with tools and without."""
    for name in ("gateway, token legs", "gateway, token legs, tools"):
        rig = rig_for(peer_named(name), tmp_path)
        with rig.serving() as served:
            assert rig.load(served, connections=2)["num_answers"] > 0
            assert rig.load(served, connections=2, stream=True)["num_answers"] > 0
            # Answers of token legs have ids from the gateway; the backend's own chat always has the same id.
            assert answers.ABOUT["id"] not in _one_answer(served.port, rig.peer.has_tools)


def test_token_legs_continue_the_contexts_of_agents(tmp_path: Path) -> None:
    """Each turn's prompt is what its trajectory was given and made before, except when a conversation begins again."""
    rig = rig_for(peer_named("gateway, token legs"), tmp_path)
    with rig.serving() as served, httpx.Client(base_url=f"http://127.0.0.1:{served.port}") as client:
        rig.load(served, connections=1, contexts=True, body=20_000, trajectories=1)
        (row,) = client.get("/v1/trajectories").json()["data"]
        turns = client.get(f"/v1/trajectories/{row['id']}/tokens").json()["turns"]
    begun = [turn for turn in turns if turn["parent"] is None]
    (requests,) = contexts(1, False, 20_000, 1)
    assert len(turns) > 2 and len(begun) == -(-len(turns) // len(requests))


def test_slow_streams_are_measured_at_token_level(tmp_path: Path) -> None:
    """Chunks carry their timestamps there, too, so their delays have figures."""
    slow = next(section for section in SECTIONS if section.name == "slow")
    sample = slow.measure(rig_for(peer_named("gateway, token legs"), tmp_path))
    assert sample["share 2000"] > 0 and sample["p50 2000"] > 0


def _one_answer(port: int, has_tools: bool) -> str:
    body = bodies(1, False, 2_000, has_tools)[0]
    headers = {"content-type": "application/json"}
    return httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", content=body, headers=headers, timeout=60).text


def test_a_server_that_does_not_start_is_listed_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output is in the table and the others are measured. A resumed run measures nothing again."""
    monkeypatch.setattr("loadtest.bench.run.WORK", tmp_path)
    broken = Peer("broken", lambda *_: [sys.executable, "-c", "raise SystemExit('no such model')"])
    absent = Peer("absent", lambda *_: [], needs=tmp_path / "nowhere")
    measured = []

    def measure(rig: Rig) -> dict[str, float]:
        measured.append(rig.peer.name)
        with rig.serving() as served:
            return {"answers": rig.load(served, connections=2)["num_answers"]}

    section = Section("some", "Some", "", measure, (plain("answers", "answers"),))
    options = Namespace(repeats=2, seconds=0.1, scale=1.0, seed=1, resume=False)
    rig: dict[str, Any] = {"seconds": 0.1, "seed": 1, "directory": tmp_path, "redis": None, "max_files": 1_024}
    text = run_section(section, [broken, absent, peer_named(DIRECT)], options, rig)
    assert measured == ["broken", DIRECT, DIRECT]
    assert "| broken | - |" in text and "no such model" in text
    assert "* absent: is not here" in text
    measured.clear()
    options.resume = True
    assert run_section(section, [broken, absent, peer_named(DIRECT)], options, rig).startswith(text[:60])
    assert measured == []


def test_a_server_that_ends_at_once_is_not_waited_for(tmp_path: Path) -> None:
    """The error shows its output."""
    broken = Peer("broken", lambda *_: [sys.executable, "-c", "raise SystemExit('no such option')"])
    with pytest.raises(NotStarted, match="no such option"), rig_for(broken, tmp_path).serving():
        pass


def test_ratios_and_differences_are_taken_within_a_repeat() -> None:
    """Medians and spreads are computed by hand; a repeat that failed does not count."""
    samples: dict[str, list[dict[str, float] | None]] = {
        DIRECT: [{"us": 10.0}, {"us": 30.0}, {"us": 20.0}],
        "fast": [{"us": 50.0}, {"us": 60.0}, {"us": 100.0}],
        "slow": [{"us": 100.0}, {"us": 60.0}, None],
    }
    value, ratio = cost("us", "us", "fast")
    assert [value.cell(name, samples) for name in samples] == ["-", "60 (50 to 100)", "80 (60 to 100)"]
    assert [ratio.cell(name, samples) for name in samples] == ["-", "1.00", "1.50"]
    assert added("added", "us").cell("slow", samples) == "60 (30 to 90)"
    assert cost("us", "us", ("fast", "slow"))[1].cell("slow", samples) == "1.50"
    text = table((value, ratio), samples, {"slow": "a | b"})
    assert text.splitlines()[4] == "| slow | 80 (60 to 100) | 1.50 |"
    assert text.splitlines()[-1] == "* slow: a / b"


def test_a_record_is_resumed_only_with_the_same_settings(tmp_path: Path) -> None:
    """Samples measured with another duration are not mixed in."""
    path = tmp_path / "some.jsonl"
    record = Record(path, {"seconds": 1.0})
    record.begin()
    record.add(0, "a", {"us": 1.0}, None)
    record.add(0, "b", None, "it failed")
    same, other = Record(path, {"seconds": 1.0}), Record(path, {"seconds": 2.0})
    same.restore()
    other.restore()
    assert (same.samples(), same.failures) == ({"a": [{"us": 1.0}], "b": [None]}, {"b": "it failed"})
    assert other.samples() == {}


def test_a_table_goes_between_its_marks(tmp_path: Path) -> None:
    """The rest of the file stays; a file without the marks is an error."""
    path = tmp_path / "page.md"
    path.write_text("a\n<!-- bench:slow:begin -->\nold\n<!-- bench:slow:end -->\nz\n")
    write(path, "slow", "new")
    assert path.read_text() == "a\n<!-- bench:slow:begin -->\nnew\n<!-- bench:slow:end -->\nz\n"
    with pytest.raises(ValueError, match="bench:fast"):
        write(path, "fast", "new")


def test_goals_are_compared_with_the_measurements() -> None:
    """The median of the repeats counts. A goal that was not measured is neither met nor missed."""
    assert all("not measured" in line for line in goals_table({}).splitlines()[2:])
    repeats = [{"5.5 KB": 30.0, "100 KB": 70.0}, {"5.5 KB": 90.0, "100 KB": 71.0}, {"5.5 KB": 40.0, "100 KB": 72.0}]
    rival = [{"5.5 KB": 100.0, "100 KB": 70.0}] * 3
    lines = goals_table({"answers": {GATEWAY: repeats, STICKY: rival, PROGRAMS: rival}}).splitlines()
    assert lines[2].endswith("| 0.75x | 0.40 | yes |")
    assert lines[3].endswith("| 0.25x | 0.40 | **no** |")
    assert lines[5].endswith("| 1x | 1.01 | **no** |")


def test_goals_name_existing_servers_and_figures(tmp_path: Path) -> None:
    """Otherwise a goal would stay unmeasured forever."""
    names = {peer.name for peer in PEERS}
    assert names >= {STICKY, PROGRAMS, *RUST}
    keys = {"5.5 KB": 1.0, "100 KB": 1.0, "1 MB": 1.0, "chunk": 1.0, "p99_us 1": 1.0, "p99 2000": 1.0}
    sample = keys | {"before_mb": 1.0, "kb": 1.0}
    assert {goal.section for goal in GOALS} <= {section.name for section in SECTIONS}
    table = goals_table({section.name: {name: [sample] for name in names} for section in SECTIONS})
    assert "not measured" not in table


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


def test_an_answer_that_differs_from_the_backends_is_detected() -> None:
    """Whole or streamed: a word lost, doubled or swapped, a missing end, another status."""
    good = [*answers.STREAM, answers.STREAM_END]
    checker = Checker(stream=True)
    checker.check(HEAD + b"".join(good))
    checker.check(HEAD + b"".join(good))
    swapped = [good[0], good[2], good[1], *good[3:]]
    for bad in ([*good[:5], *good[6:]], [*good[:5], good[5], *good[5:]], swapped, good[:-1]):
        with pytest.raises(ValueError):
            checker.check(HEAD + b"".join(bad))
    with pytest.raises(ValueError, match="not an answer"):
        checker.check(b"HTTP/1.1 503 Busy\r\n\r\n" + b"".join(good))
    Checker(stream=False).check(answers.CHAT)
    with pytest.raises(ValueError):
        Checker(stream=False).check(answers.CHAT.replace(b"word7 ", b""))


@pytest.mark.parametrize("num_bytes", [1_000, 5_500, 100_000, 1_000_000])
def test_requests_have_exactly_the_size_asked_for(num_bytes: int) -> None:
    """All requests of a run differ, also those of one trajectory, and the same seed makes the same requests."""
    some = bodies(1, True, num_bytes)
    asked = [b"".join(in_turn(body, turn)) for body in some for turn in range(3)]
    assert {len(body) for body in asked} == {num_bytes}
    assert len(set(asked)) == 3 * len(some) and some == bodies(1, True, num_bytes)
    assert [message["content"] for message in read_messages(asked[0])][:3] == [
        message["content"] for message in read_messages(asked[1])
    ][:3]


@pytest.mark.parametrize("num_bytes", [20_000, 100_000, 1_000_000])
def test_contexts_grow_around_the_size_asked_for(num_bytes: int) -> None:
    """Each turn repeats the messages before it, and adds the answer that the backend gave and what followed. Most bytes
    are text of messages."""
    some = contexts(1, True, num_bytes, 3)
    assert some == contexts(1, True, num_bytes, 3)
    assert len({b"".join(conversation[0]) for conversation in some}) == 3
    for conversation in some:
        turns = [b"".join(body) for body in conversation]
        assert fmean(map(len, turns)) == pytest.approx(num_bytes, rel=0.3)
        assert all(turn.endswith(b"]}") for turn in turns)
        num_messages = len(read_messages(turns[0]))
        for before, after in pairwise(turns):
            assert after.startswith(before.removesuffix(b"]}") + b",")
            # What follows is read alone: to read all 289 of a megabyte took 8 s.
            answer, result = orjson.loads(b"[" + after[len(before) - 1 : -1])
            assert answer == answered(answers.CALLING_CHAT) and result["tool_call_id"] == answers.CALL["id"]
        messages = read_messages(turns[-1])
        assert len(messages) == num_messages + 2 * (len(turns) - 1)
        assert sum(len(message["content"]) for message in messages) > len(turns[-1]) / 2


def test_a_context_is_rendered_as_a_continuation() -> None:
    """Each prompt begins with the prompt and the answer before it, token by token. Once each began anew: prompts had as
    many numbers as their requests had bytes, and what token legs cost was mostly that of branches."""
    (conversation,) = contexts(1, False, 20_000, 1)
    prompts = [rendered_ids(b"".join(body)) for body in conversation]
    generated = b"".join(token_answers.generated(b'"stream_interval":32'))
    made = [number for ids in re.findall(rb'"token_ids":\[([\d,]+)\]', generated) for number in ids.split(b",")]
    assert len(made) == answers.NUM_CHUNKS
    for before, after in pairwise(prompts):
        assert after[: len(before) + len(made)] == before + list(map(int, made))
        assert len(after) > len(before) + len(made)


def rendered_ids(body: bytes) -> list[int]:
    head, _, content = token_answers.rendered(body).partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(content) in head + b"\r\n"
    ids: list[int] = orjson.loads(content)["token_ids"]
    return ids


def answered(answer: bytes) -> dict[str, Any]:
    """A whole answer's message, as its agent sends it back."""
    message = orjson.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["message"]
    return {name: value for name, value in message.items() if value is not None}


def read_messages(body: bytes) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = orjson.loads(body)["messages"]
    return messages
