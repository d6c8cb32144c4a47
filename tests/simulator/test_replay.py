"""A replayed log gives the same actions, and if it does not, the line is named."""

import gzip
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from engines.profiles import load_profile
from gateway.state.eventlog import EventLog
from predictor.siblings import SiblingPredictor
from scheduling.limits import Limits
from scheduling.policy import POLICIES
from scheduling.types import Action, Event
from simulator.conditions import Conditions, Faults
from simulator.replay import LogWriter, replay
from simulator.rollout import Rollout
from workloads.laws import draw, law_named

TP4 = load_profile("qwen3-14b-h100-tp4")
ROUGH = Conditions(faults=Faults(leaving_share=0.1, deaths_per_hour=200.0, relaunch_s=10.0))


def written(path: Path, policy: str) -> Path:
    """The log of a rollout with faults."""
    limits = Limits(queue_timeout_s=60.0, kv_watermark=0.8)
    with LogWriter(path, POLICIES[policy], limits) as log:
        workload = draw(law_named("coding"), 48, 3)
        Rollout(
            workload, [TP4] * 2, POLICIES[policy], limits, SiblingPredictor(), conditions=ROUGH, seed=3, log=log
        ).run()
    return path


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_replay_under_every_policy_gives_the_same_actions(policy: str, tmp_path: Path) -> None:
    """Events contain all that a decision depends on: no clock, no random numbers, no order of a hash table."""
    path = written(tmp_path / "events.jsonl", policy)
    replayed = replay(path)
    assert replayed.difference is None
    kinds = [orjson.loads(line)["kind"] for line in path.read_bytes().splitlines()]
    assert (replayed.num_events, replayed.num_actions) == (kinds.count("event"), kinds.count("action"))
    assert replayed.num_actions > 1_000


def test_the_first_line_that_differs_is_named(tmp_path: Path) -> None:
    """Another policy, a missing action and an extra one are each found at their line, and so is a log that ends
    early."""
    path = written(tmp_path / "events.jsonl", "heddle")
    lines = path.read_bytes().splitlines(keepends=True)
    first = next(n for n, line in enumerate(lines) if b'"Dispatch"' in line)

    path.write_bytes(lines[0].replace(b'"heddle"', b'"round-robin"') + b"".join(lines[1:]))
    assert replay(path).difference is not None

    path.write_bytes(b"".join(lines[:first] + lines[first + 1 :]))
    difference = replay(path).difference
    assert difference is not None and difference.line_number == first + 1
    assert difference.replayed == lines[first]

    path.write_bytes(b"".join(lines[: first + 1] + lines[first:]))
    difference = replay(path).difference
    assert difference is not None and difference.line_number == first + 2
    assert difference.recorded == lines[first]

    path.write_bytes(b"".join(lines[:first]))
    difference = replay(path).difference
    assert difference is not None and (difference.recorded, difference.replayed) == (None, lines[first])


@pytest.mark.parametrize("kind", ["TurnArrived", "Dispatch"])
def test_a_last_line_that_is_cut_off_is_skipped(kind: str, tmp_path: Path) -> None:
    """A log may be copied while it is written. What was due then is no difference."""
    path = written(tmp_path / "events.jsonl", "heddle")
    lines = path.read_bytes().splitlines(keepends=True)
    number = next(n for n, line in enumerate(lines, start=1) if f'"{kind}"'.encode() in line)
    path.write_bytes(b"".join(lines[: number - 1]) + lines[number - 1][:-9])
    replayed = replay(path)
    assert (replayed.difference, replayed.cut_line) == (None, number)
    assert replayed.num_events + replayed.num_actions == number - 2


@pytest.mark.parametrize("half", [b"", b'{"at":9'])
def test_actions_that_a_killed_gateway_had_no_time_to_write_are_no_difference(half: bytes, tmp_path: Path) -> None:
    """It died in the midst of a long write, and the next process goes on behind the last whole line."""
    path = written(tmp_path / "events.jsonl", "heddle")
    lines = path.read_bytes().splitlines(keepends=True)
    number = next(n for n, line in enumerate(lines) if b'"Dispatch"' in line)
    path.write_bytes(b"".join(lines[:number]) + half)
    EventLog(str(path), 2**30).close()
    with path.open("ab") as log:
        log.writelines(lines)
    replayed = replay(path)
    assert replayed.difference is None
    assert replayed.num_events + replayed.num_actions == number - 1 + len(lines) - 1


def test_a_log_of_the_gateway_is_replayed_without_a_start(tmp_path: Path) -> None:
    """The gateway's own writer produces the lines that a replay compares, for every event and action."""
    log = EventLog(str(tmp_path / "gateway.jsonl"), 2**30)
    with LogWriter(tmp_path / "own.jsonl", POLICIES["heddle"], Limits()) as own:

        def write(event: Event, actions: list[Action]) -> None:
            log.add(event, actions)
            own(event, actions)

        workload = draw(law_named("coding"), 48, 3)
        predictor = SiblingPredictor()
        Rollout(workload, [TP4] * 2, POLICIES["heddle"], Limits(), predictor, conditions=ROUGH, log=write).run()
    log.close()
    _, lines = (tmp_path / "own.jsonl").read_bytes().split(b"\n", 1)
    assert (tmp_path / "gateway.jsonl").read_bytes() == lines
    assert replay(tmp_path / "gateway.jsonl").difference is None


@pytest.mark.parametrize(
    "stored",
    [
        gzip.compress,
        lambda content: content.replace(b"\n", b"\r\n"),
        lambda content: b"\xef\xbb\xbf" + content,
        lambda content: content[:-1],
        lambda content: content.replace(b"\n", b"\n \n") + b"\n",
    ],
    ids=["gzip", "crlf", "bom", "no-end", "empty-lines"],
)
def test_a_log_replays_the_same_however_it_was_stored(stored: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """Compressed, or with an editor's line ends: only its content counts, and none of that is skipped."""
    path = written(tmp_path / "events.jsonl", "slime")
    content = path.read_bytes()
    expected = replay(path)
    path.write_bytes(stored(content))
    assert replay(path) == expected

    place = content.rindex(b'"Dispatch"')
    path.write_bytes(stored(content[:place] + b'"Dispatched"' + content[place + len(b'"Dispatch"') :]))
    assert replay(path).difference is not None


def test_a_rotated_log_is_replayed_with_its_older_file_or_from_the_next_start(tmp_path: Path) -> None:
    """Alone, the newer file's first decisions depend on what only the older file tells."""
    path = written(tmp_path / "events.jsonl", "slime")
    expected, lines = replay(path), path.read_bytes().splitlines(keepends=True)
    cut = next(n for n, line in enumerate(lines) if n > 500 and b'"kind":"event"' in line)
    newer = [b'{"kind":"continued"}\n', *lines[cut:]]
    path.write_bytes(b"".join(newer))
    with pytest.raises(ValueError, match=r"events\.jsonl: it continues an older file"):
        replay(path)
    path.write_bytes(b"".join([*newer, *lines]))
    assert replay(path) == expected
    path.write_bytes(b"".join([*lines[:cut], *newer]))
    assert replay(path) == expected


def test_a_log_with_lost_lines_is_refused_at_the_first(tmp_path: Path) -> None:
    """A saved `/v1/events` says where its reader fell behind. What differed there seemed to be decided otherwise."""
    path = written(tmp_path / "events.jsonl", "slime")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:500], b'{"kind":"lost","num_lines":7}\n', *lines[507:]]))
    with pytest.raises(ValueError, match=r"line 501: lines were lost here, where whoever saved it fell behind"):
        replay(path)


def test_a_damaged_log_is_refused(tmp_path: Path) -> None:
    """Half a gzip file, as a killed process leaves it."""
    path = tmp_path / "events.jsonl.gz"
    path.write_bytes(gzip.compress(written(tmp_path / "events.jsonl", "slime").read_bytes())[:-20])
    with pytest.raises(ValueError, match=r"events\.jsonl\.gz: a damaged gzip file"):
        replay(path)


def arrival(parts: bytes) -> bytes:
    said = (
        b'{"at":0,"kind":"event","type":"TurnArrived","turn_id":"x","trajectory_id":"t","model":"m","prompt_tokens":9,'
    )
    return said + b'"prediction":{"total_tokens":1,"p90_tokens":1},"prompt_parts":' + parts + b"}\n"


def test_a_broken_log_is_refused_with_its_line(tmp_path: Path) -> None:
    """Whatever is wrong, the message names the line."""
    path = tmp_path / "events.jsonl"
    for content, message in (
        (b"{\n", "events.jsonl, line 1: not JSON: "),
        (b"[]\n", "events.jsonl, line 1: not a JSON object"),
        (b'{"at":0.0,"kind":"event","type":"Dance"}\n', "events.jsonl, line 1: no event is called 'Dance'"),
        (b'{"at":0.0,"kind":"event","type":"EngineLost"}\n', "events.jsonl, line 1: engine_id: missing"),
        (
            b'{"at":0.0,"kind":"start","policy":"none","can_preempt":false}\n',
            "events.jsonl, line 1: .*no policy 'none'",
        ),
        (b'{"at":0.0,"kind":"event","type":["Tick"]}\n', r"line 1: no event is called \['Tick'\]"),
        (b'{"at":"0","kind":"start","policy":"slime","can_preempt":false}\n', "line 1: at: must be a number, not '0'"),
        (b'{"at":0,"kind":"start","policy":[],"can_preempt":false}\n', r"line 1: policy: must be a string, not \[\]"),
        (b'{"at":0,"kind":"start","policy":"slime","can_preempt":1}\n', "line 1: can_preempt: must be true or false"),
        (
            b'{"at":0,"kind":"start","policy":"slime","can_preempt":true,"records":5}\n',
            r"line 1: records\[0\]: must be a table, not 5",
        ),
        (arrival(b'[["p",1,2]]'), r"line 1: prompt_parts\[0\]: must be a list of 2 values, not \['p', 1, 2\]"),
        (arrival(b'[["p","1"]]'), r"line 1: prompt_parts\[0\]\[1\]: must be a whole number, not '1'"),
        (b'{"at":0.0,"kind":"action","type":"Save"}\n', "line 1: an action before any event: the log's beginning"),
        (b'{"at":0.0,"kind":"start"}\n', "events.jsonl, line 1: the line of kind start lacks 'policy'"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            replay(path)


@pytest.mark.parametrize(
    ("sound", "wrong", "number"),
    [
        (b'{"at":0.0,"kind":"event"', b'{"at":1e308,"kind":"event"', 4),
        (b'{"at":0.0,"kind":"event"', b'{"at":1e20,"kind":"event"', 4),
        (b'"slots":400', b'"slots":0', 2),
    ],
)
def test_a_number_for_which_nothing_can_be_decided_is_refused_with_the_line(
    sound: bytes, wrong: bytes, number: int, tmp_path: Path
) -> None:
    """Of the event that could not be handled, in place of the scheduler's traceback."""
    path = written(tmp_path / "events.jsonl", "heddle")
    path.write_bytes(path.read_bytes().replace(sound, wrong, 1))
    with pytest.raises(
        ValueError, match=rf"events\.jsonl, line {number}: a number there, or in an earlier line, is out"
    ):
        replay(path)
