"""How predictors are compared: figures match their definitions, replays know no future, no group is on both sides."""

import gzip
import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.cli import main
from predictor.evaluation import evaluate, folds, markdown
from predictor.named import PREDICTORS, predictor_named
from predictor.progress import Progress
from predictor.replay import Arrival, ReplayedPrediction, play
from predictor.scoring import kendall, log_pearson, recall, score
from predictor.siblings import SiblingPredictor
from predictor.tabular import TabularPredictor
from predictor.training import learn_events, learn_trajectories
from workloads.laws import CODING, draw
from workloads.trajectories import Trajectory, Turn


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=25))
def test_kendalls_tau_equals_counting_pairs(pairs: list[tuple[int, int]]) -> None:
    """Tau-b: agreeing less disagreeing pairs, over the geometric mean of the pairs that are untied in each."""
    xs, ys = [float(x) for x, _ in pairs], [float(y) for _, y in pairs]

    def sign(number: float) -> int:
        return (number > 0) - (number < 0)

    both = [(sign(xs[i] - xs[j]), sign(ys[i] - ys[j])) for i, j in itertools.combinations(range(len(xs)), 2)]
    untied = math.sqrt(sum(x != 0 for x, _ in both) * sum(y != 0 for _, y in both))
    assert kendall(xs, ys) == pytest.approx(sum(x * y for x, y in both) / untied if untied else 0.0)


def test_more_folds_than_groups_are_as_many_as_there_are() -> None:
    """A fold without trajectories to predict takes time and gives nothing: a million folds would not end."""
    trajectories = [Trajectory(f"t{n}", f"g{n % 3}", 100, (Turn(0, 50, 0.0),)) for n in range(9)]
    assert [len(after) for _, after in folds(trajectories, 10**6)] == [3, 3, 3]


def test_each_predictor_and_feature_is_announced_with_its_place() -> None:
    """For a progress bar: predictors first, and their number from the beginning."""
    trajectories = [Trajectory(f"t{n}", f"g{n % 3}", 100, (Turn(0, 50, 0.0),)) for n in range(9)]
    seen: list[tuple[str, int, int]] = []
    evaluate(folds(trajectories, 3), "together", ["siblings"], lambda *told: seen.append(told))
    assert seen[0] == ("siblings", 0, len(seen)) and len(seen) > 1
    assert [num_before for _, num_before, _ in seen] == list(range(len(seen)))


def test_recall_counts_the_longest_that_were_found() -> None:
    """One of the two longest is among the two predicted longest; both are in the predicted longer half."""
    truth, predicted = [1, 2, 3, 4, 5, 6, 7, 8, 90, 100], [1, 2, 3, 4, 5, 6, 50, 8, 7, 100]
    assert recall(predicted, truth, 0.2, 0.2) == 0.5
    assert recall(predicted, truth, 0.2, 0.5) == 1.0


def test_recall_of_a_constant_is_chance_and_ties_at_the_limit_all_count() -> None:
    """A constant finds as many as a blind draw. Three that reached the limit all belong to the longest tenth."""
    truth = [float(n) for n in range(100)]
    assert recall([7.0] * 100, truth, 0.2, 0.2) == pytest.approx(0.2)
    capped = [1.0] * 7 + [40.0] * 3
    assert recall([0.0] * 7 + [1.0, 2.0, 3.0], capped, 0.1, 0.1) == 1.0
    assert recall([9.0] + [0.0] * 6 + [1.0, 2.0, 3.0], capped, 0.1, 0.1) == pytest.approx(2 / 3)


def test_log_pearson_correlates_logarithms() -> None:
    """A power of the truth correlates as well as the truth; a constant does not correlate."""
    truth = [10.0, 300.0, 2_000.0, 50_000.0]
    assert log_pearson([x**0.5 for x in truth], truth) == pytest.approx(1.0)
    assert log_pearson([5.0] * 4, truth) == 0.0


@pytest.mark.parametrize(("arrival", "known"), [("together", 0), ("chained", 2)])
def test_a_replay_reports_the_ends_of_siblings_in_time(arrival: Arrival, known: int) -> None:
    """Started together, the third member's first turn knows of no end. Started one after the other, it knows of two."""
    turns = (Turn(0, 10, 1.0), Turn(5, 10, 0.0))
    trajectories = [Trajectory(f"t{number}", "g", 100, turns) for number in range(3)]
    ended: list[Progress] = []
    seen: dict[tuple[str, int], int] = {}

    class EndRecorder(SiblingPredictor):
        def ended(self, progress: Progress) -> None:
            ended.append(progress)

    def ask(progress: Progress) -> tuple[float, None]:
        seen[progress.trajectory_id, progress.num_turns] = len(ended)
        return 1.0, None

    list(play(trajectories, EndRecorder(), ask, arrival))
    assert seen["t2", 0] == known and len(ended) == 3
    assert ended[0] == Progress("t0", "g", "", 100, 125, 20, 10, 2)


def test_folds_never_learn_from_a_group_that_they_predict() -> None:
    """Each trajectory is predicted once, by a predictor that never saw its group."""
    trajectories = draw(CODING, 320, 1).trajectories
    asked: list[str] = []
    for before, after in folds(trajectories, 4):
        assert not {t.group_id for t in before} & {t.group_id for t in after}
        asked += [t.trajectory_id for t in after]
    assert sorted(asked) == sorted(t.trajectory_id for t in trajectories)


@pytest.mark.parametrize("num_groups", [2, 3, 4, 7])
def test_every_fold_learns_from_other_groups(num_groups: int) -> None:
    """However few there are, and whatever their names."""
    for start in range(0, 700, num_groups):
        names = range(start, start + num_groups)
        splits = folds([Trajectory(f"t{n}", f"task-{n}", 10, (Turn(0, 5, 0.0),)) for n in names], 5)
        assert len(splits) == min(num_groups, 5) and all(before and after for before, after in splits)


def test_one_group_is_evaluated_only_cold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table would say that other groups were learned before."""
    trace = tmp_path / "trace.jsonl"
    turn = {"new_tokens": 0, "output_tokens": 50, "tool_s": 0.0}
    rows = [{"trajectory_id": f"t{n}", "group_id": "g", "context_tokens": 100, "turns": [turn]} for n in range(30)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    asked = ["predictor", "evaluate", "--trace", str(trace), "--predictor", "tabular"]
    assert main(asked) == 2
    assert "trace.jsonl: all trajectories are of one group" in capsys.readouterr().err
    assert main([*asked, "--cold"]) == 0
    assert "nothing learned before" in capsys.readouterr().out


def test_the_tabular_predictor_beats_every_single_feature() -> None:
    """On another draw of the law, in correlation, order and the longest fifth, after one turn and after four. About
    as many end below its percentiles as should."""
    splits = [(draw(CODING, 640, 101).trajectories, draw(CODING, 640, 2).trajectories)]
    rows = evaluate(splits, "chained", ["tabular"])
    for step in (1, 4):
        tabular, *singles = (row.score for row in rows if row.step == step)
        for figure in ("pearson", "remaining_pearson", "kendall", "recall_20"):
            assert getattr(tabular, figure) > max(abs(getattr(single, figure)) for single in singles)
        assert (tabular.under_p50, tabular.under_p90) == pytest.approx((0.5, 0.9), abs=0.1)
    assert "against the best single feature" in markdown(rows)


@pytest.mark.parametrize("name", PREDICTORS)
def test_every_predictor_learns_drops_and_restores(name: str) -> None:
    """A restored predictor predicts more than the output so far, with the 90th percentile at or above the mean."""
    predictor, dice = predictor_named(name), random.Random(1)
    for number in range(40):
        total = dice.randint(50, 5_000)
        predictor.predict(Progress(f"t{number}", "g", "p", 100, 100))
        predictor.predict(Progress(f"t{number}", "g", "p", 100, 400, total // 2, total // 2, 1))
        predictor.ended(Progress(f"t{number}", "g", "p", 100, 700, total, total // 2, 2))
    predictor.predict(Progress("gone", "g", "p", 100, 100))
    predictor.dropped("gone")
    predictor.dropped("never seen")
    predicted = predictor_named(name, predictor.dump()).predict(Progress("new", "g", "", 100, 900, 700, 300, 2))
    assert 700 < predicted.total_tokens <= predicted.p90_tokens


def test_an_unknown_predictor_name_lists_the_known_ones() -> None:
    """The error is a ValueError."""
    with pytest.raises(ValueError, match="tabular"):
        predictor_named("no-such")


@pytest.mark.parametrize("is_gzipped", [False, True])
def test_learning_from_an_event_log_equals_learning_while_serving(is_gzipped: bool, tmp_path: Path) -> None:
    """A log of the same trajectories makes the same model as the trajectories themselves."""
    served, read = TabularPredictor(), TabularPredictor()
    lines: list[bytes] = []
    for number, total in enumerate((300, 900, 20_000)):
        progress = Progress(f"t{number}", "g", "", 100, 100)
        served.predict(progress)
        served.ended(Progress(f"t{number}", "g", "", 100, 100 + total, total, total, 1))
        lines += logged(f"t{number}", total, "finished")
    lines += logged("aborted", 50, "aborted")
    served.predict(Progress("aborted", "g", "", 100, 100))
    served.dropped("aborted")
    log = b"\n".join(lines)
    (tmp_path / "events").write_bytes(gzip.compress(log) if is_gzipped else log)
    assert learn_events(read, tmp_path / "events") == (3, 0)
    assert read.dump() == served.dump()


def test_a_trajectory_that_goes_on_after_its_end_is_learned_as_it_is_served(tmp_path: Path) -> None:
    """It was finished after a long silence, and a later turn opened it again: its record counts all turns. A turn that
    ends after its trajectory does not end it once more."""
    read, served = TabularPredictor(), TabularPredictor()
    first, again, late = logged("t", 900, "finished"), logged("t", 40, "active"), logged("t", 40, "finished")
    records = [
        {"trajectory_id": "t", "state": state, "num_turns": turns, "output_tokens": total}
        for state, turns, total in (("active", 1, 900), ("active", 2, 940), ("finished", 2, 940), ("finished", 3, 980))
    ]
    opened, active, ended, later = (
        json.dumps({"kind": "action", "type": "Save", "record": record}).encode() for record in records
    )
    lines = [*first, again[0], opened, again[2], active, late[0], ended, late[2], later]
    (tmp_path / "events").write_bytes(b"\n".join(lines))
    begun = Progress("t", "g", "", 100, 100)
    served.predict(begun)
    served.ended(replace(begun, context_tokens=1_000, output_tokens=900, last_output_tokens=900, num_turns=1))
    served.predict(replace(begun, output_tokens=900, last_output_tokens=900, num_turns=1))
    served.predict(replace(begun, output_tokens=940, last_output_tokens=40, num_turns=2))
    served.ended(replace(begun, context_tokens=100, output_tokens=940, last_output_tokens=40, num_turns=2))
    assert learn_events(read, tmp_path / "events") == (2, 0)
    assert read.dump() == served.dump()


def logged(trajectory_id: str, total: int, state: str) -> list[bytes]:
    """The lines of an event log about a trajectory of one turn."""
    turn = {"at": 1.0, "kind": "event", "turn_id": f"{trajectory_id}/0"}
    record = {"trajectory_id": trajectory_id, "state": state, "num_turns": 1, "output_tokens": total}
    arrived = {**turn, "type": "TurnArrived", "trajectory_id": trajectory_id, "group_id": "g", "prompt_tokens": 100}
    finished = {**turn, "type": "TurnFinished", "leg": 1, "prompt_tokens": 100, "output_tokens": total}
    saved = {"at": 2.0, "kind": "action", "type": "Save", "record": record}
    dispatch = {"at": 1.0, "kind": "action", "type": "Dispatch", "turn_id": f"{trajectory_id}/0"}
    return [json.dumps(line).encode() for line in (arrived, dispatch, finished, saved)]


@pytest.mark.parametrize("line", [b"nonsense", b"[]", b'{"type": "TurnArrived"}', b"{}"])
def test_a_line_that_is_not_an_event_is_named(line: bytes, tmp_path: Path) -> None:
    """The message names the line and its file, because several files may be given."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"\n".join([*logged("t", 10, "finished")[:1], line]))
    with pytest.raises(ValueError, match=r"events\.jsonl, line 2: "):
        learn_events(TabularPredictor(), path)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ({"trajectory_id": "t", "turns": []}, "not a line of an event log but of a trace, which --trace takes"),
        ({"kind": "event"}, "not a line of an event log"),
    ],
)
def test_a_file_that_is_no_event_log_is_refused_in_words(
    line: dict[str, object], fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace is told apart, since it can be learned from too."""
    path = tmp_path / "agents.jsonl"
    path.write_text(json.dumps(line) + "\n")
    assert main(["predictor", "train", "--events", str(path), "--out", str(tmp_path / "model")]) == 2
    assert capsys.readouterr().err == f"heddle predictor train: {path}, line 1: {fault}\n"


WHOLE = "must be a whole number from 0 to 10^20, not "


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ({"kind": "start", "records": [{"trajectory_id": "t", "num_turns": -1}]}, f"records[0], num_turns: {WHOLE}-1"),
        ({"kind": "start", "records": "t"}, "records: must be a list, not 't'"),
        ({"kind": "start", "records": [None]}, "records[0]: must be a JSON object"),
        ({"kind": "lost"}, f"num_lines: {WHOLE}None"),
        ({"prompt_tokens": -7}, f"prompt_tokens: {WHOLE}-7"),
        ({"prompt_tokens": 1e308}, f"prompt_tokens: {WHOLE}1e+308"),
        ({"trajectory_id": ["t"]}, "trajectory_id: must be a string, not ['t']"),
        ({"turn_id": None}, "turn_id: must be a string, not None"),
        ({"group_id": 7}, "group_id: must be a string, not 7"),
        ({"type": "TurnFinished", "output_tokens": -7}, f"output_tokens: {WHOLE}-7"),
        ({"type": "TurnFinished", "prompt_tokens": "9", "output_tokens": 7}, f"prompt_tokens: {WHOLE}'9'"),
        ({"type": "Save"}, "record: must be a JSON object"),
        ({"type": "Save", "record": {"trajectory_id": "t"}}, "record, state: must be a string, not None"),
        (
            {"type": "Save", "record": {"trajectory_id": "t", "state": "finished", "num_turns": "?"}},
            f"record, num_turns: {WHOLE}'?'",
        ),
        ({"type": "Forget", "trajectory_id": {}}, "trajectory_id: must be a string, not {}"),
    ],
)
@pytest.mark.parametrize("name", ["tabular", "siblings"])
def test_a_wrong_field_of_an_event_log_is_named(
    name: str, line: dict[str, object], fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A negative number was learned from, or was a "math domain error" lines later, or a traceback. Others were told in
    Python's words."""
    path = tmp_path / "events.jsonl"
    arrived, *others = logged("t", 10, "finished")
    wrong = json.dumps(json.loads(arrived) | line).encode()
    path.write_bytes(b"\n".join([arrived, wrong, *others]))
    given = ["--predictor", name, "--events", str(path), "--out", str(tmp_path / "model")]
    assert main(["predictor", "train", *given]) == 2
    assert capsys.readouterr().err == f"heddle predictor train: {path}, line 2, {fault}\n"


def test_a_line_with_a_number_too_large_for_a_float_is_named(tmp_path: Path) -> None:
    """A broken engine may report anything."""
    path = tmp_path / "events.jsonl"
    arrived, _, finished, _ = logged("t", 7, "active")
    turn = arrived, finished.replace(b": 7", b": 1e308")
    path.write_bytes(b"\n".join([*turn, *turn, arrived]))
    with pytest.raises(ValueError, match=r"events\.jsonl, line 2, output_tokens: "):
        learn_events(TabularPredictor(), path)


def test_the_commands_train_and_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`train` writes a model from a law and an event log; `evaluate` prints a table that includes single features."""
    model, events = tmp_path / "model.json", tmp_path / "events.jsonl"
    events.write_bytes(b"\n".join(logged("t", 900, "finished")) + b"\n")
    given = ["--law", "coding", "--trajectories", "64"]
    assert main(["predictor", "train", "--events", str(events), *given, "--out", str(model)]) == 0
    assert "65 trajectories" in capsys.readouterr().out
    assert predictor_named("tabular", model.read_bytes()).predict(Progress("t")).total_tokens > 1_000
    assert main(["predictor", "evaluate", *given, "--predictor", "tabular", "--markdown"]) == 0
    shown = capsys.readouterr().out
    assert "| tabular |" in shown and "| *three siblings* |" in shown


def test_a_last_line_that_is_cut_off_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log may be copied while the gateway writes it. A broken line in the middle is an error."""
    events, model = tmp_path / "events.jsonl", tmp_path / "model.json"
    train = ["predictor", "train", "--events", str(events), "--out", str(model)]
    whole, cut = b"\n".join(logged("t", 900, "finished")), logged("u", 9, "finished")[0][:40]
    events.write_bytes(whole + b"\n" + cut)
    assert main(train) == 0
    printed = capsys.readouterr().out
    assert f"{events}, line 5, the last, is cut off and was skipped." in printed and "on 1 trajectories" in printed
    events.write_bytes(cut + b"\n" + whole)
    assert main(train) == 2
    assert f"{events}, line 1: not JSON: " in capsys.readouterr().err


def test_a_rollout_of_single_turns_teaches_the_next_one() -> None:
    """Nothing is reported between a single turn's start and its end; that lengths follow prompt lengths is learned all
    the same."""
    trajectories = [Trajectory(f"t{n}", f"g{n}", 100 + n, (Turn(0, 50 + 3 * n, 0.0),)) for n in range(300)]
    [row] = [row for row in evaluate(folds(trajectories, 5), "together", ["tabular"]) if not row.is_single]
    assert (row.step, row.score.num) == (0, 300)
    assert row.score.pearson > 0.8 and row.score.kendall > 0.8


def test_the_event_log_of_a_simulated_rollout_can_be_learned_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log is read as written, including its first line, which describes the scheduler."""
    scenario, events, model = tmp_path / "small.toml", tmp_path / "events.jsonl", tmp_path / "model"
    scenario.write_text(
        'policies = ["heddle"]\n[workload]\nlaw = "coding"\ntrajectories = 24\n'
        '[fleet]\nprofile = "qwen3-14b-h100"\ngpus = 4\ntp = [4]\n'
    )
    assert main(["simulate", str(scenario), "--log", str(events)]) == 0
    assert main(["predictor", "train", "--events", str(events), "--out", str(model)]) == 0
    assert "trained on 24 trajectories" in capsys.readouterr().out


def test_a_trajectory_that_began_before_its_log_is_not_learned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gateway that rotates its log begins the new file in the midst of trajectories. Those were learned as short
    ones. The command says how many it skipped, and that the older file's lines help."""
    scenario, older, newer = tmp_path / "small.toml", tmp_path / "events.jsonl.1", tmp_path / "events.jsonl"
    scenario.write_text(
        'policies = ["heddle"]\n[workload]\nlaw = "coding"\ntrajectories = 24\n'
        '[fleet]\nprofile = "qwen3-14b-h100"\ngpus = 4\ntp = [4]\n'
    )
    assert main(["simulate", str(scenario), "--log", str(older)]) == 0
    lines = older.read_bytes().splitlines(keepends=True)
    # A turn takes four lines to begin: those of a dozen trajectories are in the older file.
    newer.write_bytes(b"".join([b'{"kind":"continued"}\n', *lines[1 + 4 * 12 :]]))
    truth = {
        said["record"]["trajectory_id"]: (said["record"]["num_turns"], said["record"]["output_tokens"])
        for said in map(json.loads, lines)
        if said.get("type") == "Save" and said["record"]["state"] == "finished"
    }
    learned: list[Progress] = []

    class Noting(TabularPredictor):
        def ended(self, progress: Progress) -> None:
            learned.append(progress)
            super().ended(progress)

    num_ended, num_partial = learn_events(Noting(), newer)
    assert (num_ended, num_partial) == (len(learned), 12) == (12, 12)
    assert all(truth[one.trajectory_id] == (one.num_turns, one.output_tokens) for one in learned)
    capsys.readouterr()
    assert main(["predictor", "train", "--events", str(newer), "--out", str(tmp_path / "model")]) == 0
    printed = capsys.readouterr().out
    assert f"trained on {num_ended} trajectories" in printed
    assert f"events.jsonl: skipped {num_partial} trajectories whose first turns are not in it" in printed


def test_lines_that_a_watcher_lost_are_told_and_what_they_leave_is_not_learned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A saved `/v1/events` says where its reader fell behind. All of it was refused, as no event log."""
    events, read, served = tmp_path / "events.jsonl", TabularPredictor(), TabularPredictor()
    lost = b'{"kind":"lost","num_lines":2000}'
    arrived, *end = logged("a", 900, "finished")
    events.write_bytes(b"\n".join([arrived, lost, *logged("b", 70, "finished"), lost, end[-1]]))
    served.predict(Progress("a", "g", "", 100, 100))
    served.predict(Progress("b", "g", "", 100, 100))
    served.ended(Progress("b", "g", "", 100, 170, 70, 70, 1))
    served.dropped("a")
    assert learn_events(read, events) == (1, 1)
    assert read.dump() == served.dump()
    assert main(["predictor", "train", "--events", str(events), "--out", str(tmp_path / "model")]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"{events}: 4,000 lines were lost where whoever saved it fell behind the gateway.",
        f"{events}: skipped 1 trajectories that lack turns",
    ]


def test_turns_that_a_killed_gateway_logged_and_did_not_keep_are_not_learned(tmp_path: Path) -> None:
    """Its clients asked for them again. With them, the trajectory was skipped, as one that began in an older file."""
    arrived, dispatch, finished, saved = logged("t", 900, "finished")
    unfinished = logged("t", 900, "active")[-1]
    begins = {"at": 3.0, "kind": "start", "records": [{"trajectory_id": "t", "num_turns": 0}]}
    events = tmp_path / "events.jsonl"
    again = [arrived, dispatch, finished, saved]
    events.write_bytes(b"\n".join([arrived, dispatch, finished, unfinished, json.dumps(begins).encode(), *again]))
    learned: list[Progress] = []

    class Noting(TabularPredictor):
        def ended(self, progress: Progress) -> None:
            learned.append(progress)

    assert learn_events(Noting(), events) == (1, 0)
    [progress] = learned
    assert (progress.num_turns, progress.output_tokens, progress.context_tokens) == (1, 900, 1000)


def test_an_id_that_the_next_process_does_not_know_is_another_trajectory(tmp_path: Path) -> None:
    """As of the same task in the next epoch, after a gateway whose store did not survive it. The second trajectory was
    not learned from."""
    read, served = TabularPredictor(), TabularPredictor()
    begins = json.dumps({"at": 3.0, "kind": "start", "records": []}).encode()
    lines = [*logged("t", 900, "finished"), *logged("u", 70, "active"), begins, *logged("t", 40, "finished")]
    (tmp_path / "events").write_bytes(b"\n".join(lines))
    begun = Progress("t", "g", "", 100, 100)
    served.predict(begun)
    served.ended(replace(begun, context_tokens=1_000, output_tokens=900, last_output_tokens=900, num_turns=1))
    served.predict(Progress("u", "g", "", 100, 100))
    served.dropped("u")
    served.predict(begun)
    served.ended(replace(begun, context_tokens=140, output_tokens=40, last_output_tokens=40, num_turns=1))
    assert learn_events(read, tmp_path / "events") == (2, 0)
    assert read.dump() == served.dump()


@pytest.mark.parametrize(("number", "is_shown"), [(99, False), (100, True)])
def test_the_longest_hundredth_needs_a_hundred_trajectories(number: int, is_shown: bool) -> None:
    """Of fewer, it would be a single one, found or not; its columns stay empty, and the summary leaves them out."""
    trajectories = [Trajectory(f"t{n}", f"g{n % 9}", 100 + n, (Turn(0, 50 + n, 0.0),)) for n in range(number)]
    shown = markdown(evaluate(folds(trajectories, 3), "together", ["tabular"]))
    rows = [line.split("|")[1:-1] for line in shown.splitlines() if line.startswith("| ")]
    assert all(bool(cell.strip()) is is_shown for _, *cells in rows[1:] for cell in cells[4:6])
    assert all(cell.strip() for _, *cells in rows for cell in cells[:4])
    assert ("top 1 %" in shown.partition("against")[2]) is is_shown


def test_the_commands_report_missing_data_and_unknown_laws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without data there is nothing to learn from, and a law must exist."""
    assert main(["predictor", "train", "--out", str(tmp_path / "m")]) == 2
    assert main(["predictor", "evaluate", "--law", "no-such"]) == 2
    assert "no trajectory" in (errors := capsys.readouterr().err) and "no-such" in errors


def test_what_is_left_is_the_total_less_the_output_made() -> None:
    """Of a prediction of the total, but not of a feature, which may follow what is left by itself."""
    lengths = [(9, 1_000), (500, 600), (3_000, 3_010), (40, 400), (1_000, 9_000)]
    exact = [ReplayedPrediction(1, "t", made, total, total, None) for made, total in lengths]
    feature = [replace(one, predicted_tokens=float(one.total_tokens - one.made_tokens)) for one in exact]
    assert score(exact).remaining_pearson == score(feature, is_total=False).remaining_pearson == pytest.approx(1.0)
    assert score(feature).remaining_pearson < 0.95


def test_learning_counts_trajectories_and_scores_need_no_quantiles() -> None:
    """A predictor without quantiles gets no calibration figure."""
    predictor = SiblingPredictor()
    trajectories = draw(CODING, 32, 1).trajectories
    assert learn_trajectories(predictor, trajectories) == 32
    predicted = play(trajectories, predictor, lambda p: (predictor.predict(p).total_tokens, None), "together")
    assert score([one for one in predicted if one.step == 0]).under_p90 is None
