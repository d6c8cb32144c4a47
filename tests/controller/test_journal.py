"""What the journal keeps, and what happens after servers end."""

import json
import resource
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from controller import rollouts
from controller.journal import Journal, JournalAway, State, dumped, fold, read_state
from controller.lease import Lease
from controller.records import new_ids, spares_record, step_record, wanted_record
from controller.restarts import Ended, RetryRule, held_back, tend
from controller.rollouts import MAX_POINTS, MAX_ROLLOUTS, History, Sample
from controller.steps import DesiredServer, Drain, Launch, MoveKv, Register, Remove, Reopen, Sleep, Stop, Wake

ONES = (DesiredServer("a", 1, ("0",)), DesiredServer("b", 1, ("1",)))
TWO = (DesiredServer("c", 2, ("0", "1")),)


def write_all(journal: Journal) -> None:
    journal.write(kind="fleet", fleet="toy")
    journal.write(**wanted_record(ONES, 2, 10.0, "first"))
    journal.write(kind="proven")
    for kind in ("begun", "done"):
        journal.write(**step_record(kind, Launch(ONES[0]), 11.0))
        journal.write(**step_record(kind, Register("a"), 12.0, url="http://a"))
    journal.write(kind="phase", phase="start", tp=1, seconds=33.0)
    journal.write(**wanted_record(TWO, 3, 20.0, "two", is_manual=True, resting={"7"}))
    journal.write(**step_record("begun", Drain("a"), 21.0))
    journal.write(**step_record("begun", Stop("b"), 22.0))
    journal.write(**step_record("done", Stop("b"), 23.0))
    journal.write(
        kind="failed",
        failure={"server_id": "c", "tp": 2, "at": 30.0, "cause": "exit status 1", "last_lines": ["no memory"]},
    )


def test_a_reader_finds_the_writers_state(tmp_path: Path) -> None:
    """This holds for every kind of record. A drain counts from its beginning, a stop from its end."""
    journal = Journal(tmp_path / "journal.jsonl")
    write_all(journal)
    state = journal.state
    assert (
        state.fleet == "toy"
        and state.wanted == TWO
        and state.proven == ONES
        and state.is_manual
        and state.resting == {"7"}
    )
    assert state.drained == {"a"} and state.stopped == {"b"} and state.begun == {"a": "Drain"}
    assert state.urls == {"a": "http://a"} and state.phase_s == {("start", 1): (33.0,)}
    assert state.failures[0].last_lines == ("no memory",)
    assert Journal(tmp_path / "journal.jsonl").state == state


@pytest.mark.parametrize("room", [0, 50])
def test_a_record_that_could_not_be_written_is_not_written_later(tmp_path: Path, room: int) -> None:
    """On a full disk it stayed in a buffer. An operator who was told that a change failed found it made by the next
    controller."""
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.write(**wanted_record(ONES, 2, 10.0, "first"))
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, before[1][1]))
    try:
        for number in range(2):
            with pytest.raises(JournalAway):
                journal.write(**wanted_record(TWO, 3, 20.0, f"not written {number}" * 20, is_manual=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[1])
        signal.signal(signal.SIGXFSZ, before[0])
    assert journal.state.wanted == ONES
    journal.write(kind="proven")
    assert read_state(path) == journal.state and journal.state.proven == ONES


def test_a_torn_record_is_ignored(tmp_path: Path) -> None:
    """A file cut anywhere counts up to the last whole record, and the torn rest does not spoil later records."""
    path = tmp_path / "journal.jsonl"
    write_all(Journal(path))
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        expected = State()
        for line in whole[:cut].split(b"\n")[:-1]:
            expected = fold(expected, json.loads(line))
        again = Journal(path)
        assert again.state == expected
        later = again.write(kind="phase", phase="stop", tp=1, seconds=1.0)
        assert Journal(path).state == later


@pytest.mark.parametrize(
    "damaged", [b"{]", b"5", b"[]", b"{}", b'{"kind": "wanted"}', b'{"kind": "state", "state": 1}']
)
def test_damage_before_the_end_is_refused(tmp_path: Path, damaged: bytes) -> None:
    """The message states the line, and what to do."""
    path = tmp_path / "journal.jsonl"
    write_all(Journal(path))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], damaged + b"\n", *lines[3:]]))
    with pytest.raises(ValueError, match="line 3, is damaged; move the file away"):
        Journal(path)


def test_a_dumped_state_loses_nothing(tmp_path: Path) -> None:
    """A long journal is replaced by this short form."""
    journal = Journal(tmp_path / "journal.jsonl")
    write_all(journal)
    short = Journal(tmp_path / "short.jsonl")
    assert short.write(kind="state", state=dumped(journal.state)) == journal.state


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    """After a rollback the controller goes on with its fleet. The file counted as damaged."""
    journal = Journal(tmp_path / "journal.jsonl")
    write_all(journal)

    def later(one: dict[str, Any]) -> dict[str, Any]:
        return one | {"of_a_later_version": 1}

    state = dumped(journal.state)
    state |= {name: [later(asdict(one)) for one in getattr(journal.state, name)] for name in ("wanted", "failures")}
    short = Journal(tmp_path / "short.jsonl")
    assert short.write(**later({"kind": "state", "state": later(state)})) == journal.state
    failure = asdict(journal.state.failures[0])
    assert short.write(kind="failed", failure=later(failure)) == journal.write(kind="failed", failure=failure)
    assert read_state(tmp_path / "short.jsonl") == journal.state


def test_reopened_engines_lose_their_cordon_and_removed_ones_their_url(tmp_path: Path) -> None:
    """Neither must be taken for another engine's."""
    journal = Journal(tmp_path / "journal.jsonl")
    write_all(journal)
    journal.write(**step_record("done", Reopen("a"), 40.0))
    assert journal.state.drained == frozenset()
    journal.write(**step_record("done", Remove("a"), 41.0))
    assert journal.state.urls == {}


def test_the_journal_tracks_sleeping_servers_and_spares(tmp_path: Path) -> None:
    """A server that was told to sleep or wake and has not confirmed it may be either. A server that is gone is
    forgotten. The journal's short form has the same state."""
    journal = Journal(tmp_path / "journal.jsonl")

    def after(**record: Any) -> State:
        state = journal.write(**record)
        as_read = json.loads(json.dumps({"kind": "state", "state": dumped(state)}))
        assert fold(State(), as_read) == state and read_state(tmp_path / "journal.jsonl") == state
        return state

    after(**wanted_record(ONES, 2, 10.0, "first", spares=list(TWO), sleepless=""))
    after(**step_record("begun", Sleep("c"), 11.0, level=2))
    assert journal.state.rest == {"c": "between"} and journal.state.levels == {"c": 2}
    assert after(**step_record("done", Sleep("c"), 12.0, level=2)).rest == {"c": "asleep"}
    assert after(**step_record("begun", Wake("c"), 13.0)).rest == {"c": "between"}
    assert journal.state.spares == TWO and journal.state.wanted == ONES
    after(**wanted_record(TWO, 3, 14.0, "larger", spares=[*TWO, *ONES]))
    assert journal.state.spares == ONES and journal.state.wanted == TWO, "what is wanted is no spare"
    assert after(**step_record("done", Wake("c"), 15.0)).rest == {}
    after(**step_record("begun", Drain("a"), 16.0))
    assert after(**step_record("done", MoveKv("a"), 17.0)).moved == {"a"}
    assert after(**step_record("begun", Drain("a"), 18.0)).moved == frozenset(), "others came since"
    after(**step_record("done", MoveKv("a"), 19.0))
    after(**step_record("begun", Register("a"), 20.0, url="http://a"))
    assert after(kind="served", server_id="a", at=20.5).served_at == {"a": 20.5}
    after(**step_record("done", Stop("a"), 21.0))
    assert after(**spares_record((), sleepless="too little memory")).spares == ()
    assert after(**wanted_record(TWO, 3, 22.0, "again", is_manual=True)).sleepless == "too little memory"
    assert after(**step_record("begun", Sleep("a"), 23.0, level=1)).served_at == {}, "it has not served since it woke"
    after(kind="served", server_id="a", at=23.5)
    forgotten = after(kind="gone", server_ids=["a", "b"])
    for ids in (forgotten.drained, forgotten.moved, forgotten.stopped, forgotten.urls, forgotten.rest, forgotten.begun):
        assert "a" not in ids
    assert forgotten.served_at == {}
    assert forgotten.levels == {"c": 2} and forgotten.is_manual
    assert not after(**wanted_record(TWO, 3, 24.0, "plans decide", is_manual=False)).is_manual


def test_only_one_holds_a_lease(tmp_path: Path) -> None:
    """The other gets it when it is given back."""
    first, second = Lease(tmp_path / "lease"), Lease(tmp_path / "lease")
    assert first.try_take() and not second.try_take()
    first.give_back()
    assert second.try_take() and not first.try_take()


RULE = RetryRule(3, 5.0)


def tended(
    state: State, ended: list[Ended], now: float = 100.0, *alive: DesiredServer, rule: RetryRule = RULE
) -> State:
    new_id, serial = new_ids("fleet", state)
    journal_state = state
    for record in tend(state, ended, {one.server_id for one in alive}, now, rule, new_id, serial):
        journal_state = fold(journal_state, record)
    return journal_state


def test_a_server_that_does_not_start_is_retried_and_then_given_up() -> None:
    """Pauses double. After the third try, the fleet before is wanted again, and this size is no longer planned."""
    state = State(wanted=TWO, proven=ONES)
    died = "exit status 1"
    state = tended(state, [Ended("c", died, ("no memory",))])
    (second,) = state.wanted
    assert (second.tp, second.devices) == (2, ("0", "1")) and second.server_id not in ("a", "b", "c")
    assert held_back(state, 104.9, RULE) == {second.server_id} and held_back(state, 105.0, RULE) == set()
    state = tended(state, [Ended(second.server_id, died)])
    (third,) = state.wanted
    assert held_back(state, 109.9, RULE) == {third.server_id} and held_back(state, 110.0, RULE) == set()
    state = tended(state, [Ended(third.server_id, died)], 100.0, ONES[0])
    assert [one.devices for one in state.wanted] == [("0",), ("1",)]
    assert state.wanted[0].server_id == "a" and state.wanted[1].server_id != "b"  # a lives, b does not
    assert state.blocked_tps == {2} and len(state.failures) == 3 and state.failures[0].last_lines == ("no memory",)


def test_a_pause_ends_when_the_clock_is_set_back() -> None:
    """By an hour: the dead server would stay down for that hour."""
    state = tended(State(wanted=ONES, proven=ONES), [Ended("b", "exit status 1")], 5_000.0)
    assert held_back(state, 5_004.9, RULE) == {state.wanted[1].server_id}
    assert held_back(state, 1_400.0, RULE) == set()


def test_a_fleet_continues_without_a_server_that_was_given_up() -> None:
    """There is no other fleet to go back to."""
    state = State(wanted=ONES, proven=ONES, num_tries={"b": 2})
    state = tended(state, [Ended("b", "exit status 1")])
    assert state.wanted == ONES[:1] and state.blocked_tps == {1}


def test_servers_that_are_given_up_one_after_the_other_stay_away() -> None:
    """Devices 0 and 1 break for good. The end of each one's tries used to bring the other back, with all tries anew."""
    fleet = tuple(DesiredServer(name, 1, (device,)) for name, device in zip("abcd", "0123", strict=True))
    state = State(wanted=fleet, proven=fleet, urls={one.server_id: f"http://{one.server_id}" for one in fleet})
    num_ends = 0
    while (broken := [one for one in state.wanted if one.devices in (("0",), ("1",))]) and num_ends < 100:
        turn = broken[num_ends % len(broken)]
        state = tended(state, [Ended(turn.server_id, "exit status 1")], 100.0, *fleet[2:])
        num_ends += 1
    assert num_ends == 2 * RULE.max_tries
    assert state.wanted == state.proven == fleet[2:] and state.blocked_tps == {1}


def test_a_fleet_that_comes_back_is_without_servers_that_were_given_up_in_it() -> None:
    """Their size is not planned any more, but its other servers served."""
    state = tended(State(wanted=ONES, proven=ONES, num_tries={"b": 2}), [Ended("b", "exit status 1")])
    state = fold(state, wanted_record(TWO, 3, 20.0, "a plan", num_tries={"c": 2}))
    assert [one.devices for one in tended(state, [Ended("c", "exit status 1")]).wanted] == [("0",)]


def test_a_fleet_that_comes_back_keeps_replacements_that_serve_on_its_devices() -> None:
    """One of its servers died and was replaced while the new shape was still tried. The replacement used to be ended
    for another one on the same device."""
    fleet = tuple(DesiredServer(name, 1, (device,)) for name, device in zip("abcd", "0123", strict=True))
    replacement, given_up = DesiredServer("e", 1, ("0",)), DesiredServer("f", 2, ("2", "3"))
    state = State(wanted=(replacement, fleet[1], given_up), proven=fleet, num_tries={"e": 1, "f": 2})
    state = tended(state, [Ended("f", "exit status 1")], 100.0, replacement, fleet[1])
    assert state.wanted[:2] == (replacement, fleet[1]) and state.num_tries == {"e": 1}
    assert [one.devices for one in state.wanted[2:]] == [("2",), ("3",)]


def test_a_fleet_that_comes_back_does_not_wait_for_a_server_that_is_being_stopped() -> None:
    """Its end is no failure: it counted as a start of the fleet before, and of a single try that was the last."""
    state = State(wanted=TWO, proven=ONES, num_tries={"c": 2}, begun={"b": "Stop", "a": "Drain"})
    state = tended(state, [Ended("c", "exit status 1")], 100.0, *ONES)
    assert state.wanted[0] == ONES[0] and state.wanted[1].devices == ONES[1].devices
    assert state.wanted[1].server_id != "b" and not state.num_tries


def test_a_fleet_of_which_nothing_is_left_gives_way_to_the_one_before() -> None:
    """The new shape serves, and runs out of memory under load until it is given up. Nobody served any more."""
    state = fold(State(wanted=ONES), {"kind": "proven", "at": 1.0})
    state = fold(fold(state, wanted_record(TWO, 3, 20.0, "a plan")), {"kind": "proven", "at": 30.0})
    assert (state.proven, state.earlier) == (TWO, ONES)
    num_ends = 0
    while len(state.wanted) == 1:
        state = tended(state, [Ended(state.wanted[0].server_id, "killed by SIGKILL")])
        if len(state.wanted) == 1:
            state = fold(state, {"kind": "proven", "at": 40.0})  # its successor served, too
        num_ends += 1
    assert num_ends == RULE.max_tries
    assert [one.devices for one in state.wanted] == [("0",), ("1",)] and state.why.endswith("back to the fleet before")
    assert state.blocked_tps == {2}


def test_a_fleet_that_still_serves_in_part_does_not_give_way() -> None:
    """One broken device among several is no reason to end the others' turns."""
    state = State(wanted=ONES, proven=ONES, earlier=TWO, num_tries={"b": 2})
    state = tended(state, [Ended("b", "exit status 1")], 100.0, ONES[0])
    assert state.wanted == ONES[:1]


def test_a_first_fleet_continues_without_a_server_that_never_starts() -> None:
    """No fleet served before it, so there is none to go back to: one bad device used to end all engines beside it."""
    state = State(wanted=ONES, num_tries={"b": 2})
    state = tended(state, [Ended("b", "exit status 1")])
    assert state.wanted == ONES[:1] and "fleet before" not in state.why


def test_a_fleet_that_comes_back_leaves_resting_devices_unused() -> None:
    """An operator has taken a device out of use since then; giving up another server does not bring it back."""
    state = State(wanted=ONES[:1], proven=ONES, resting=frozenset(ONES[1].devices), num_tries={"a": 2})
    assert tended(state, [Ended("a", "exit status 1")]).wanted == ()
    state = State(wanted=TWO, proven=ONES, resting=frozenset(ONES[1].devices), num_tries={"c": 2})
    assert tended(state, [Ended("c", "exit status 1")], 100.0, *ONES).wanted == ONES[:1]


def test_tries_start_again_for_a_server_that_served() -> None:
    """Its tries do not add up over weeks, and its death is not one of them."""
    state = State(
        wanted=ONES, proven=ONES, num_tries={"b": 2}, urls={"b": "http://b"}, served_at={"b": 100.0}, serial=7
    )
    once = tended(state, [Ended("b", "killed by SIGKILL")], 700.0, rule=RetryRule(max_tries=1))
    assert len(once.wanted) == 2 and once.blocked_tps == frozenset(), "a single try is one start, not none"
    state = tended(state, [Ended("b", "killed by SIGKILL")], 700.0)
    assert len(state.wanted) == 2 and state.blocked_tps == frozenset()
    again = state.wanted[1].server_id
    assert (
        state.num_tries == {again: 0}
        and held_back(state, 704.9, RULE) == {again}
        and held_back(state, 705.0, RULE) == set()
    )
    assert (state.serial, state.changed_at) == (8, 700.0), "no other server gets its number"
    assert [(one.server_id, one.tp, one.at, one.cause) for one in state.failures] == [
        ("b", 1, 700.0, "killed by SIGKILL")
    ]


def test_a_server_that_dies_soon_after_it_began_to_serve_is_given_up() -> None:
    """Its memory does not suffice for real turns, as an example. It was started again every five seconds, for ever."""
    state, now = State(wanted=ONES, proven=ONES), 100.0
    pauses_s = []
    for _ in range(3):
        server_id = state.wanted[1].server_id
        state = fold(state, step_record("begun", Register(server_id), now, url="http://b"))
        state = fold(state, {"kind": "served", "server_id": server_id, "at": now})
        now += 599.0
        state = tended(state, [Ended(server_id, "killed by SIGKILL")], now)
        pauses_s += [at - now for at in state.not_before.values()]
    assert pauses_s == [5.0, 10.0] and state.wanted == ONES[:1] and state.blocked_tps == {1}


def test_a_spare_that_ended_is_not_replaced() -> None:
    """Its end is recorded as a failure."""
    state = State(wanted=ONES, proven=ONES, spares=TWO, serial=7)
    state = tended(state, [Ended("c", "killed by SIGKILL")])
    assert state.spares == () and state.wanted == ONES and state.serial == 7 and state.failures[0].tp == 2


def test_pauses_between_tries_are_bounded() -> None:
    """They double up to a bound."""
    assert [RetryRule(9, 5.0, 30.0).pause_s(num_tries) for num_tries in (1, 2, 3, 4, 8)] == [
        5.0,
        10.0,
        20.0,
        30.0,
        30.0,
    ]


def test_pauses_stay_bounded_after_thousands_of_tries() -> None:
    """An operator who never wants to give up sets `max_tries` to a million, and 2 ** 1024 exceeds a float."""
    assert RetryRule(10**6, 5.0, 300.0).pause_s(5_000) == 300.0


def test_tries_of_servers_no_longer_wanted_are_forgotten() -> None:
    """Servers end now and then for weeks, and all tries are written each time."""
    state = State(wanted=ONES, proven=ONES, num_tries={"b": 1, "z": 1}, not_before={"z": 1.0})
    state = tended(state, [Ended("b", "killed by SIGKILL")])
    assert state.num_tries.keys() == state.not_before.keys() == {state.wanted[1].server_id}


def test_a_long_journal_is_shortened_while_it_is_written(tmp_path: Path) -> None:
    """A controller runs for weeks, and records tens of kilobytes for each rollout."""
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    write_all(journal)
    history = History((Sample(tuple((number, 10_000, 10_000) for number in range(MAX_POINTS)), 6_400),) * MAX_ROLLOUTS)
    for number in range(200):
        journal.write(kind="rollouts", history=rollouts.dumped(replace(history, ended_at=float(number))))
        assert path.stat().st_size < 5 * 2**20
    state = journal.write(kind="proven")
    assert state.history.ended_at == 199.0 and state.proven == TWO and state.urls == {"a": "http://a"}
    assert Journal(path).state == state


def test_a_journal_that_cannot_be_shortened_is_away_until_it_can(tmp_path: Path) -> None:
    """A full disk has no room for the short form. The file used to be closed by then, and each later record failed
    with a message about that."""
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    write_all(journal)
    path.with_suffix(".draft").mkdir()  # where the short form would be written
    state = journal.write(kind="padding", padding="x" * 5 * 2**20)
    for _ in range(2):
        with pytest.raises(JournalAway, match="cannot be written: Is a directory"):
            journal.write(kind="proven")
        assert journal.is_away and journal.state == state == read_state(path)
    path.with_suffix(".draft").rmdir()
    state = journal.write(kind="proven")
    assert not journal.is_away and state.proven == TWO and read_state(path) == state
    assert path.stat().st_size < 2**20


def test_a_long_journal_is_shortened_at_the_start(tmp_path: Path) -> None:
    """An earlier version let it grow."""
    path = tmp_path / "journal.jsonl"
    write_all(Journal(path))
    with path.open("ab") as file:
        file.write(b'{"kind": "phase", "phase": "stop", "tp": 1, "seconds": 1.0}\n' * 100_000)
    journal = Journal(path)
    assert path.stat().st_size < 2**20
    assert journal.state.wanted == TWO and journal.state.phase_s["stop", 1] == (1.0,) * 5
