"""Heddle's own event log becomes a trace: what agents did once can be played on another fleet."""

import json
from pathlib import Path

import pytest

from heddle.cli import main
from predictor.tabular import TabularPredictor
from predictor.training import learn_events
from simulator.replay import replay
from workloads.importers import detect_format, import_trace
from workloads.importers.native import write_trace
from workloads.laws import CODING, draw
from workloads.traces import TraceError, load_trace
from workloads.trajectories import Workload


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Of a rollout on a fleet where turns wait for each other."""
    trace, fleet, events = tmp_path / "agents.jsonl", tmp_path / "fleet.toml", tmp_path / "events.jsonl"
    write_trace(draw(CODING, 24, seed=1), trace)
    fleet.write_text(
        'policies = ["heddle"]\n[fleet]\nprofile = "qwen3-14b-h100"\ngpus = 4\ntp = [2]\nslots_per_gpu = 3\n'
    )
    assert main(["simulate", "--trace", str(trace), "--fleet", str(fleet), "--log", str(events)]) == 0
    return events


def lengths(workload: Workload) -> dict[str, tuple[str, int, list[tuple[int, int]]]]:
    """Group, prompt, new and output tokens of each trajectory, by its own name."""
    return {
        one.trajectory_id: (one.group_id, one.context_tokens, [(t.new_tokens, t.output_tokens) for t in one.turns])
        for one in workload.trajectories
    }


def test_an_event_log_gives_the_trace_that_was_played(log: Path, tmp_path: Path) -> None:
    """Lengths, groups and tool times. The time that turns waited and ran is no tool's."""
    played, imported = load_trace(tmp_path / "agents.jsonl"), import_trace(log)
    assert detect_format(log) == "event-log"
    assert lengths(imported) == {f"{name}-0": lengths_of for name, lengths_of in lengths(played).items()}
    tools_s = {one.trajectory_id: [turn.tool_s for turn in one.turns[:-1]] for one in imported.trajectories}
    for one in played.trajectories:
        assert tools_s[f"{one.trajectory_id}-0"] == pytest.approx([turn.tool_s for turn in one.turns[:-1]])


@pytest.mark.parametrize(
    ("turns", "strands"),
    [
        (  # also if the gateway noted an end after its client had asked again
            [(0.0, 10.0, 6_000), (1.0, 11.0, 5_000), (2.0, 20.0, 4_000), (10.9, 13.0, 5_200)],
            [(6_000, 6_100), (5_000, 5_300), (4_000, 4_100)],
        ),
        (
            [(0.0, 10.0, 6_000), (11.0, 12.0, 300), (13.0, 15.0, 6_200), (16.0, 17.0, 400), (18.0, 19.0, 6_400)],
            [(6_000, 6_500), (300, 500)],
        ),
    ],
    ids=["helpers at once", "side calls"],
)
def test_each_context_of_a_trajectory_goes_on_by_itself(
    turns: list[tuple[float, float, int]], strands: list[tuple[int, int]], tmp_path: Path
) -> None:
    """Helpers, titles and the like may share an agent's id. Turns: begin, end, prompt. Strands: first prompt, all
    tokens."""
    arrivals = [
        {"at": begin, "kind": "event", "type": "TurnArrived", "turn_id": str(number), "trajectory_id": "t"}
        for number, (begin, _, _) in enumerate(turns)
    ]
    ends = [
        {"at": end, "kind": "event", "type": "TurnFinished", "turn_id": str(number), "prompt_tokens": prompt}
        | {"output_tokens": 100}
        for number, (_, end, prompt) in enumerate(turns)
    ]
    saved = {"at": 20.0, "kind": "action", "type": "Save", "record": {"trajectory_id": "t", "num_turns": len(turns)}}
    events = [*sorted([*arrivals, *ends], key=lambda event: event["at"]), saved]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert [(one.context_tokens, one.total_tokens) for one in import_trace(path).trajectories] == strands


def test_trajectories_that_began_before_the_log_are_left_out(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a rotation. What is left of them would be trajectories that begin with a long prompt. The command says
    how many they are."""
    whole, events = lengths(import_trace(log)), log.read_bytes().splitlines(keepends=True)
    arrivals = [number for number, line in enumerate(events) if json.loads(line).get("type") == "TurnArrived"]
    log.write_bytes(b"".join([b'{"kind":"continued"}\n', *events[arrivals[12] :]]))
    assert detect_format(log) == "event-log"
    left = lengths(import_trace(log))
    assert len(left) == 12 and left.items() <= whole.items()
    assert main(["import", str(log), "--out", str(tmp_path / "out.jsonl")]) == 0
    assert "began in an older file, whose lines must come before it: 12." in capsys.readouterr().out


def test_a_trajectory_whose_record_the_log_lacks_is_left_out(log: Path) -> None:
    """It began in an older file, and this one, copied while the gateway wrote it, ends before its record."""
    events = log.read_bytes().splitlines(keepends=True)
    finished = next(line for line in events if json.loads(line).get("type") == "TurnFinished")
    arrived = next(line for line in events if json.loads(line).get("turn_id") == json.loads(finished)["turn_id"])
    log.write_bytes(b"".join([b'{"kind":"continued"}\n', arrived, finished]))
    with pytest.raises(TraceError, match="all trajectories in it began in an older file"):
        import_trace(log)


def test_turns_that_a_killed_gateway_logged_and_did_not_keep_are_left_out(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its clients asked for them again. With them, a trajectory seemed to have begun in an older file, and one that did
    not go on had a turn that the gateway does not know."""
    whole, events = lengths(import_trace(log)), log.read_bytes().splitlines(keepends=True)
    number, saved = next(
        (number, json.loads(line)["record"])
        for number, line in enumerate(events)
        if (json.loads(line).get("record") or {}).get("num_turns") == 2
    )
    records = (json.loads(line).get("record") for line in events[: number + 1])
    known = {record["trajectory_id"]: record for record in records if record}
    known[saved["trajectory_id"]] = {**saved, "num_turns": 1}
    start = {**json.loads(events[0]), "records": list(known.values())}
    begins = json.dumps(start).encode() + b"\n"
    turn = next(n for n in range(number, 0, -1) if json.loads(events[n]).get("type") == "TurnFinished")
    arrived = next(line for line in events if json.loads(line).get("turn_id") == json.loads(events[turn])["turn_id"])
    log.write_bytes(b"".join([*events[: number + 1], begins, arrived, *events[turn:]]))
    assert lengths(import_trace(log)) == whole
    assert main(["import", str(log), "--out", str(tmp_path / "out.jsonl")]) == 0
    assert "Left out" not in capsys.readouterr().out
    log.write_bytes(b"".join([*events[: number + 1], begins]))
    assert len(lengths(import_trace(log))[f"{saved['trajectory_id']}-0"][2]) == 1


def test_a_clock_that_was_set_back_before_a_restart_changes_no_trajectory(log: Path) -> None:
    """As by the first synchronisation after a boot. Turns of the next process came before those of the last one, and
    each trajectory that went on was divided."""
    whole, lines = import_trace(log), [json.loads(line) for line in log.read_bytes().splitlines()]
    half, known = len(lines) // 2, {}
    while lines[half]["kind"] != "event":
        half += 1
    for line in lines[:half]:
        line["at"] += 3_600.0
        if record := line.get("record"):
            known[record["trajectory_id"]] = record
    start = {**lines[0], "at": lines[half]["at"], "records": list(known.values())}
    log.write_text("".join(f"{json.dumps(line)}\n" for line in [*lines[:half], start, *lines[half:]]))
    assert lengths(import_trace(log)) == lengths(whole)


@pytest.mark.parametrize("by", ["its time", "a new process"])
def test_an_id_that_is_used_again_once_it_is_forgotten_is_another_trajectory(
    by: str, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of the same tasks in the next epoch, which may have a gateway with another store, or with none that survives.
    All of them seemed to have begun in an older file."""
    first, lines = import_trace(log), log.read_bytes().splitlines(keepends=True)
    names = dict.fromkeys(one.trajectory_id.rpartition("-")[0] for one in first.trajectories)
    forgets = [
        json.dumps({"at": 1e6, "kind": "action", "type": "Forget", "trajectory_id": name}).encode() + b"\n"
        for name in names
    ]
    begins = json.dumps({**json.loads(lines[0]), "at": 1e6, "records": []}).encode() + b"\n"
    again = [line.replace(b'"group_id":"', b'"group_id":"again-') for line in lines[1:]]
    log.write_bytes(b"".join([*lines, *(forgets if by == "its time" else [begins]), *again]))
    assert main(["import", str(log), "--out", str(tmp_path / "out.jsonl")]) == 0
    assert "Left out" not in capsys.readouterr().out
    second = {name[:-1] + "1": (f"again-{group_id}", *others) for name, (group_id, *others) in lengths(first).items()}
    assert lengths(load_trace(tmp_path / "out.jsonl")) == lengths(first) | second


@pytest.mark.parametrize(
    ("head", "cause"),
    [
        (b'{"kind":"continued"}', "began in an older file, whose lines must come before it"),
        (b'{"kind":"lost","num_lines":9000}', "all trajectories in it lack turns: whoever saved it fell behind"),
    ],
    ids=["rotated", "lost"],
)
def test_a_log_in_which_no_trajectory_began_is_refused_with_the_cause(head: bytes, cause: str, log: Path) -> None:
    """It was said to hold no trajectory, and one with lost lines to need an older file."""
    events = log.read_bytes().splitlines(keepends=True)
    arrivals = [number for number, line in enumerate(events) if json.loads(line).get("type") == "TurnArrived"]
    log.write_bytes(b"".join([head + b"\n", *events[arrivals[24] :]]))
    with pytest.raises(TraceError, match=cause):
        import_trace(log)


@pytest.mark.parametrize(("begins", "ends"), [(0.0, 0.02), (0.4, 0.5)])
def test_lines_that_a_watcher_lost_are_told(
    begins: float, ends: float, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A saved `/v1/events` says where its reader fell behind. Trajectories that lack turns were said to have begun in
    an older file, and of those that seem to end there nothing was said."""
    whole, lines = lengths(import_trace(log)), log.read_bytes().splitlines(keepends=True)
    first, end = int(begins * len(lines)), int(ends * len(lines))
    lost = f'{{"kind":"lost","num_lines":{end - first}}}\n'.encode()
    log.write_bytes(b"".join([*lines[:first], lost, *lines[end:]]))
    assert detect_format(log) == "event-log"
    capsys.readouterr()
    assert main(["import", str(log), "--out", str(tmp_path / "out.jsonl")]) == 0
    said = capsys.readouterr().out.partition("Left out: ")[2]
    assert f"lines that were lost where whoever saved it fell behind the gateway: {end - first:,}; " in said
    assert "trajectories that lack turns: " in said and "older file" not in said
    left = lengths(load_trace(tmp_path / "out.jsonl"))
    for name, (group_id, context_tokens, turns) in left.items():
        assert whole[name] == (group_id, context_tokens, [*turns, *whole[name][2][len(turns) :]])


def test_events_are_read_as_curl_saves_them(log: Path, tmp_path: Path) -> None:
    """`curl -N $B/v1/events > saved`, interrupted within an event. They were in no known form."""
    lines = log.read_bytes().splitlines()
    events = b"".join(b"data: " + line + b"\n\n: nothing yet\n\n" for line in lines)
    saved = tmp_path / log.stem / "events.sse"
    saved.parent.mkdir()
    saved.write_bytes(b": watching\n\n" + events + b"data: " + lines[0][:20])
    assert detect_format(saved) == "event-log"
    assert import_trace(saved).trajectories == import_trace(log).trajectories
    of_log, of_saved = TabularPredictor(), TabularPredictor()
    assert learn_events(of_saved, saved, lambda number: None) == learn_events(of_log, log)
    assert of_saved.dump() == of_log.dump()
    assert replay(saved).num_actions == replay(log).num_actions > 0


def test_aborted_trajectories_are_left_out(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the two questions that `heddle replay` asks first, or the rest of an oversampled rollout: nobody knows how
    they would have gone on. Training leaves them out too. The command says how many they are."""
    lines = log.read_bytes().splitlines(keepends=True)
    says = [json.loads(line) for line in lines]
    aborted = list(dict.fromkeys(said["record"]["trajectory_id"] for said in says if said.get("record")))[:2]
    for said in says:
        if said.get("record") and said["record"]["trajectory_id"] in aborted and said["record"]["state"] == "finished":
            said["record"]["state"] = "aborted"
    whole = lengths(import_trace(log))
    log.write_text("".join(f"{json.dumps(said)}\n" for said in says))
    assert lengths(import_trace(log)) == {
        name: one for name, one in whole.items() if name.rpartition("-")[0] not in aborted
    }
    assert learn_events(TabularPredictor(), log) == (22, 0)
    assert main(["import", str(log), "--out", str(tmp_path / "out.jsonl")]) == 0
    assert "Left out: trajectories that were aborted: 2.\n" in capsys.readouterr().out


def test_a_log_in_which_all_trajectories_were_aborted_is_refused(log: Path) -> None:
    """Nothing in it shows how an agent ends."""
    log.write_bytes(log.read_bytes().replace(b'"state":"finished"', b'"state":"aborted"'))
    with pytest.raises(TraceError, match=r"events\.jsonl: all trajectories in it were aborted$"):
        import_trace(log)


def test_trajectories_that_run_at_the_end_of_the_log_are_cut_there(log: Path) -> None:
    """A log can be imported while its gateway runs."""
    whole, events = import_trace(log), log.read_bytes().splitlines(keepends=True)
    arrivals = [number for number, line in enumerate(events) if json.loads(line).get("type") == "TurnArrived"]
    log.write_bytes(b"".join(events[: arrivals[len(arrivals) // 2]]))
    turns_of = {one.trajectory_id: [turn.output_tokens for turn in one.turns] for one in whole.trajectories}
    cut_of = {one.trajectory_id: [turn.output_tokens for turn in one.turns] for one in import_trace(log).trajectories}
    assert all(turns == turns_of[name][: len(turns)] for name, turns in cut_of.items())
    assert 0 < sum(map(len, cut_of.values())) < sum(map(len, turns_of.values()))


def test_an_event_log_given_as_a_trace_is_refused_with_the_importer(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The importer that the message names reads it."""
    out = tmp_path / "again.jsonl"
    assert main(["simulate", "--trace", str(log), "--fleet", str(tmp_path / "fleet.toml")]) == 2
    assert "`heddle import` reads event logs" in capsys.readouterr().err
    assert main(["import", str(log), "--out", str(out)]) == 0
    assert "24 trajectories in 2 groups" in capsys.readouterr().out
    assert main(["simulate", "--trace", str(out), "--fleet", str(tmp_path / "fleet.toml")]) == 0


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{}", "not a line of an event log"),
        ('{"trajectory_id":"t","turns":[]}', "not a line of an event log but of a trace, which --trace takes"),
    ],
)
def test_a_line_of_something_else_is_refused_as_in_training(line: str, fault: str, log: Path) -> None:
    """Two files in one, say. The import passed over it."""
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines[:5], line + "\n", *lines[5:]]))
    for read in (import_trace, lambda path: learn_events(TabularPredictor(), path)):
        with pytest.raises(TraceError) as refused:
            read(log)
        assert str(refused.value) == f"{log}, line 6: {fault}"


def test_a_log_is_not_overwritten_with_its_trace(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also under another name: what was recorded would be lost."""
    content, link = log.read_bytes(), tmp_path / "link.jsonl"
    link.symlink_to(log)
    for out in (log, link):
        assert main(["import", str(log), "--out", str(out)]) == 2
        error = f"heddle import: --out: {out} is the file to read, and would be overwritten\n"
        assert capsys.readouterr().err == error
    assert log.read_bytes() == content


def test_a_file_of_a_folder_is_not_overwritten_with_its_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was one of many recorded conversations."""
    out = tmp_path / "agents.json"
    out.write_text("{}")
    (tmp_path / "a-link.json").symlink_to(tmp_path / "gone")
    assert main(["import", str(tmp_path), "--out", str(out)]) == 2
    error = f"heddle import: --out: {out} is in the folder to read, and would be overwritten\n"
    assert capsys.readouterr().err == error
    assert out.read_text() == "{}"


def test_a_last_line_that_is_cut_off_is_left_out(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log can be copied while its gateway writes it, even in the midst of a letter. A broken line in the middle is
    an error."""
    lines, out = log.read_bytes().splitlines(keepends=True), str(tmp_path / "out.jsonl")
    whole, cut = import_trace(log), '{"type":"TurnArrived","group_id":"é'.encode()[:-1]
    log.write_bytes(b"".join([*lines, cut]))
    assert main(["import", str(log), "--out", out]) == 0
    assert f"Left out: line {len(lines) + 1:,}, the last, which is cut off.\n" in capsys.readouterr().out
    assert lengths(load_trace(out)) == lengths(whole)
    log.write_bytes(b"".join([*lines[:7], lines[7][:30] + b"\n", *lines[8:]]))
    assert main(["import", str(log), "--out", out]) == 2
    assert f"{log}, line 8: not JSON: " in capsys.readouterr().err
