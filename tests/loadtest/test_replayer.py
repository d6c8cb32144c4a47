"""The replayer against a server that speaks the protocol: every turn once, faults survived or reported."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from engines.profiles import load_profile
from engines.simulated.settings import SimulatedEngineSettings
from loadtest.clients import RequestFailed
from loadtest.raw_client import MAX_LINE_BYTES
from loadtest.replayer import ReplaySettings, replay, streams
from loadtest.results import RolloutResult, TurnResult
from tests.engines.raw_server import Peer, raw_server
from tests.support.engine import recorded_engine
from tests.support.gateway import ADMIN, running_gateway
from tests.support.toy_chat import Faults, ToyChat, serve
from workloads.laws import CODING, draw
from workloads.trajectories import Trajectory, Turn, Workload

WORKLOAD = draw(CODING, 6, seed=1, scale=0.02, tool_scale=0.001)
ONE_TURN = Workload("one", (Trajectory("t", "g", 40, (Turn(0, 10, 0.0),)),))


@pytest.fixture(params=["sdk", "raw"])
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def app() -> ToyChat:
    return ToyChat()


@pytest.fixture
def settings(app: ToyChat, client: Any) -> Iterator[ReplaySettings]:
    with serve(app) as url:
        yield ReplaySettings(f"{url}/v1", client=client, calibrate=False, max_retries=2, rollout_id="r")


@pytest.mark.parametrize("stream_share", [0.0, 0.5, 1.0])
async def test_every_turn_is_played_once_and_counted(
    app: ToyChat, settings: ReplaySettings, stream_share: float
) -> None:
    """Streamed or whole, each turn is sent once with the trajectory's length, and all figures add up."""
    seen: list[TurnResult] = []
    result = await replay(WORKLOAD, replace(settings, stream_share=stream_share), on_turn=seen.append)
    assert result.errors == ()
    assert len(app.seen) == len(seen) == WORKLOAD.num_turns
    assert result.output_tokens == WORKLOAD.output_tokens
    asked = sorted(body["max_tokens"] for _, _, body in app.seen)
    assert asked == sorted(turn.output_tokens for t in WORKLOAD.trajectories for turn in t.turns)
    assert all(body["ignore_eos"] and body["temperature"] == 0 for _, _, body in app.seen)
    for trajectory, played in zip(WORKLOAD.trajectories, result.trajectories, strict=True):
        for turn in played.turns:
            assert (turn.first_token_at is not None) == streams(trajectory, stream_share)
            assert turn.started_at <= (turn.first_token_at or turn.started_at) <= turn.ended_at
        assert played.time_s >= played.llm_s
    assert result.makespan_s == max(t.ended_at for t in result.trajectories)
    assert result.turns[0].cached_tokens == 3


async def test_a_conversation_grows_by_its_answers(app: ToyChat, settings: ReplaySettings) -> None:
    """Each turn repeats all before it unchanged, including the last answer, so an engine's prefix cache can hit."""
    await replay(Workload("w", WORKLOAD.trajectories[:1]), settings)
    sent = [body["messages"] for _, _, body in app.seen]
    for before, after in pairwise(sent):
        assert after[: len(before)] == before
        assert after[len(before)] == {
            "role": "assistant",
            "content": "abc " * (len(after[len(before)]["content"]) // 4),
        }
        assert len(after) == len(before) + 2


async def test_tool_calls_are_answered_with_their_ids(app: ToyChat, settings: ReplaySettings) -> None:
    """A streamed tool call comes back whole in the assistant's message, followed by the tool's message."""
    app.with_tool_calls = True
    result = await replay(Workload("w", WORKLOAD.trajectories[:1]), settings)
    assert result.errors == ()
    messages = app.seen[1][2]["messages"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "run", "arguments": "{}"}
    assert (messages[2]["role"], messages[2]["tool_call_id"]) == ("tool", "call_1")


@pytest.mark.parametrize("identity", ["header", "session", "path", "body", "none"])
async def test_identity_reaches_the_server(app: ToyChat, settings: ReplaySettings, identity: Any) -> None:
    """Only the chosen form is sent. An agent without an id finishes by the name that the server gave it."""
    app.answer_headers = {"x-trajectory-id": "r-t" if identity != "none" else "inferred-1"}
    await replay(ONE_TURN, replace(settings, identity=identity))
    [(path, headers, body)] = app.seen
    assert path == ("/t/r-t/v1/chat/completions" if identity == "path" else "/v1/chat/completions")
    assert headers.get("x-trajectory-id") == ("r-t" if identity == "header" else None)
    assert headers.get("x-session-id") == ("r-t" if identity == "session" else None)
    assert headers.get("x-group-id") == ("g" if identity in ("header", "session", "path") else None)
    assert ("metadata" in body) == (identity == "body")
    known_as = "inferred-1" if identity == "none" else "r-t"
    assert app.calls[-1] == ("POST", f"/v1/trajectories/{known_as}/finish")


async def test_finish_can_be_left_out(app: ToyChat, settings: ReplaySettings) -> None:
    """Then no trajectory is reported as ended."""
    await replay(ONE_TURN, replace(settings, finish=False))
    assert not [path for method, path in app.calls if method == "POST"]


async def test_queueing_comes_from_headers_or_the_trajectory(app: ToyChat, settings: ReplaySettings) -> None:
    """The header wins; without it, the trajectory's route is asked. A server with neither leaves it unknown."""
    assert (await replay(ONE_TURN, settings)).mean_queued_s is None
    app.seen.clear()
    app.knows_trajectories = True
    assert (await replay(ONE_TURN, settings)).mean_queued_s == 0.5
    app.answer_headers = {"x-heddle-queued-ms": "250"}
    result = await replay(ONE_TURN, settings)
    assert result.mean_queued_s == 0.25


async def test_a_busy_server_is_retried(app: ToyChat, settings: ReplaySettings) -> None:
    """A 503 costs a retry, which is counted, and no turn."""
    app.faults = Faults(num_unavailable=1)
    result = await replay(ONE_TURN, settings)
    assert (result.errors, result.num_retries, len(app.seen)) == ((), 1, 2)


@pytest.mark.parametrize("headers", [{"x-should-retry": "false"}, {"retry-after": "3600"}])
async def test_a_refusal_that_another_attempt_cannot_change_is_not_repeated(
    app: ToyChat, settings: ReplaySettings, headers: dict[str, str]
) -> None:
    """As a gateway marks them. The raw client repeated them for half a minute."""
    app.faults, app.answer_headers = Faults(num_unavailable=1_000), headers
    result = await replay(ONE_TURN, settings)
    assert (result.errors, len(app.seen)) == (("t, turn 0: HTTP 503: no engine",), 1)


async def test_a_server_is_asked_again_when_it_says(app: ToyChat, settings: ReplaySettings) -> None:
    """`Retry-After` outlasts the usual half second, which is what the raw client waited."""
    app.faults, app.answer_headers = Faults(num_unavailable=1), {"retry-after": "1"}
    result = await replay(ONE_TURN, settings)
    assert (result.errors, result.num_retries) == ((), 1)
    assert result.makespan_s >= 1.0


async def test_a_broken_stream_is_retried(app: ToyChat, settings: ReplaySettings) -> None:
    """A stream that ends in the middle costs a retry, and the chunks that had come are not in the answer twice."""
    app.faults = Faults(num_broken_streams=1)
    two_turns = Workload("w", (Trajectory("t", "g", 40, (Turn(0, 10, 0.0), Turn(20, 10, 0.0))),))
    result = await replay(two_turns, settings)
    assert (result.errors, result.num_retries) == ((), 1)
    assert app.seen[-1][2]["messages"][1]["content"] == "abc " * 10


async def test_retries_end_and_the_turn_fails_with_its_reason(app: ToyChat, settings: ReplaySettings) -> None:
    """When they are used up, the trajectory ends; turns that could not be sent count as failed, too."""
    app.faults = Faults(num_unavailable=1_000)
    result = await replay(Workload("w", WORKLOAD.trajectories[:1]), replace(settings, max_retries=0))
    assert result.num_failed_turns == len(WORKLOAD.trajectories[0].turns)
    assert len(result.turns) == 1
    assert result.errors[0].endswith(", turn 0: HTTP 503: no engine")


async def test_a_short_answer_fails_its_turn_and_not_the_trajectory(app: ToyChat, settings: ReplaySettings) -> None:
    """Lost tokens are detected: each short turn fails with both numbers, and the conversation continues."""
    app.faults = Faults(short_by=2)
    workload = Workload("w", (Trajectory("t", "g", 40, (Turn(0, 10, 0.0), Turn(9, 10, 0.0))),))
    result = await replay(workload, settings)
    assert (result.num_failed_turns, len(result.turns)) == (2, 2)
    assert "asked for 10 tokens, got 8" in result.errors[0]


@pytest.mark.parametrize("stream_share", [0.0, 1.0])
async def test_nonsense_answers_fail_trajectories_and_not_the_rollout(
    app: ToyChat, settings: ReplaySettings, stream_share: float
) -> None:
    """A server that answers 200 with something else fails each trajectory with a message; the result still comes."""
    app.faults = Faults(nonsense=True)
    result = await replay(WORKLOAD, replace(settings, stream_share=stream_share, max_retries=0))
    assert len(result.trajectories) == len(result.errors) == len(WORKLOAD.trajectories)
    assert result.num_failed_turns == WORKLOAD.num_turns


@pytest.mark.parametrize("stream_share", [0.0, 1.0])
async def test_an_answer_that_counts_no_tokens_fails_its_turn(
    app: ToyChat, settings: ReplaySettings, stream_share: float
) -> None:
    """It ended the replay: with a traceback, or without a word about the server."""
    for wrong in (None, "forty", -1, {}):
        app.faults = Faults(prompt_tokens=wrong)
        result = await replay(ONE_TURN, replace(settings, stream_share=stream_share, max_retries=0, calibrate=True))
        assert result.num_failed_turns == 1
        assert "usage: prompt_tokens must be a whole number from 0" in result.errors[0]


@pytest.mark.parametrize("models", [["toy"], [{}], {"a": {"id": "toy"}}, [None]])
async def test_a_list_of_models_in_another_form_is_refused_in_words(
    app: ToyChat, settings: ReplaySettings, models: Any
) -> None:
    """It was a traceback."""
    app.faults = Faults(models=models)
    with pytest.raises(RequestFailed, match="the server does not list its models: not an answer of this API"):
        await replay(ONE_TURN, settings)


async def test_a_server_that_accepts_connections_and_answers_nothing_is_named_soon(client: Any) -> None:
    """As a hung one, or one of another protocol. The question for its models waited as long as a turn: an hour."""
    async with raw_server(lambda peer: peer.until_client_leaves()) as server:
        settings = ReplaySettings(f"{server.url}/v1", client=client, max_retries=0, models_timeout_s=0.3)
        with pytest.raises(RequestFailed) as failed:
            await replay(ONE_TURN, settings)
    wrong = f"the server does not list its models: no answer to GET {server.url}/v1/models within 0.3 s"
    assert str(failed.value) == wrong


async def test_an_endless_head_fails_its_turn(client: Any) -> None:
    """As of a server of another kind. The raw client ended the whole replay with a traceback."""

    async def pour(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nx: " + b"x" * (MAX_LINE_BYTES + 1))

    async with raw_server(pour) as server:
        settings = ReplaySettings(f"{server.url}/v1", model="toy", client=client, calibrate=False, max_retries=0)
        result = await replay(ONE_TURN, replace(settings, finish=False), queued_source=None)
    assert result.num_failed_turns == 1
    assert result.errors[0].startswith("t, turn 0: no")


async def test_a_finish_may_be_answered_without_a_body(app: ToyChat, settings: ReplaySettings) -> None:
    """204 is as good as 200."""
    app.empty_finish = True
    assert (await replay(ONE_TURN, settings)).errors == ()


async def test_a_restart_of_the_server_is_survived(client: Any) -> None:
    """The server stops after the third turn and comes back at its old port once a client has been refused."""
    app = ToyChat()
    loop = asyncio.get_running_loop()
    with ExitStack() as first, ExitStack() as second:
        url = first.enter_context(serve(app))
        port = int(urlsplit(url).port or 0)
        num_turns = 0
        stopped = asyncio.Event()

        def on_turn(_: TurnResult) -> None:
            nonlocal num_turns
            num_turns += 1
            if num_turns == 3:
                first.close()
                stopped.set()

        async def come_back() -> None:
            await stopped.wait()
            # The port refuses connections now: that is what a client meets while a gateway restarts.
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
            loop.call_later(0.3, lambda: second.enter_context(serve(app, port)))

        back = asyncio.create_task(come_back())
        settings = ReplaySettings(f"{url}/v1", client=client, calibrate=False, max_retries=6)
        workload = Workload("w", WORKLOAD.trajectories[:3])
        result = await replay(workload, settings, on_turn=on_turn)
        await back
    assert result.errors == ()
    assert result.num_retries > 0
    assert result.output_tokens == workload.output_tokens


async def test_concurrency_is_bounded(app: ToyChat, settings: ReplaySettings) -> None:
    """With a limit of one, trajectories do not overlap, and waiting to start does not count as their time."""
    result = await replay(WORKLOAD, replace(settings, concurrency=1))
    spans = sorted((t.started_at, t.ended_at) for t in result.trajectories)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    unbounded = await replay(WORKLOAD, settings)
    assert max(t.started_at for t in unbounded.trajectories) < unbounded.makespan_s / 2


async def test_tool_times_are_divided_by_the_speed_up(settings: ReplaySettings) -> None:
    """A tool of 10 s at 50 times the speed holds its trajectory for 0.2 s and is not counted as the model's time."""
    workload = Workload("w", (Trajectory("t", "g", 40, (Turn(0, 5, 10.0), Turn(9, 5, 99.0))),))
    result: RolloutResult = await replay(workload, replace(settings, speed_up=50))
    [played] = result.trajectories
    assert played.time_s - played.llm_s == pytest.approx(0.2, abs=0.1)
    # The tool after the last turn does not count.
    assert played.time_s < 1.0


async def test_calibration_gives_first_prompts_the_right_size(app: ToyChat, settings: ReplaySettings) -> None:
    """All first turns are sent before any answer, and still have the wanted size."""
    workload = Workload("w", tuple(Trajectory(f"{n}", f"g{n}", 300, (Turn(0, 5, 0.0),)) for n in range(4)))
    result = await replay(workload, replace(settings, calibrate=True))
    for turn in result.turns:
        assert turn.prompt_tokens == pytest.approx(300, abs=3)


@pytest.mark.parametrize("identity", ["header", "none"])
async def test_a_gateway_learns_nothing_from_calibration(client: Any, identity: Any) -> None:
    """Probes are not trajectories: from their single tokens, a new predictor would conclude that all are short."""
    workload = Workload("w", tuple(Trajectory(f"{n}", f"g{n}", 300, (Turn(0, 5, 0.0),)) for n in range(3)))
    engine_settings = SimulatedEngineSettings(profile=load_profile("toy-cpu-tp1"))
    async with recorded_engine(engine_settings) as engine, running_gateway(engine.url) as gateway:
        settings = ReplaySettings(f"{gateway.url}/v1", client=client, identity=identity, rollout_id="r")
        await replay(workload, settings)
        async with httpx.AsyncClient(base_url=gateway.url, headers=ADMIN, timeout=60.0) as http:
            demand = (await http.get("/v1/demand")).json()
            rollout = (await http.get("/v1/rollouts/r")).json()
    assert demand["trajectories"] == []
    if identity != "none":  # which names no rollout
        assert rollout["num_trajectories"]["aborted"] == 0
    assert [one["output_tokens"] for one in demand["last_rollout"]["trajectories"]] == [5, 5, 5]


async def test_a_rollout_id_can_be_used_again(client: Any) -> None:
    """The gateway refuses probes that it has aborted, so the second replay knew no lengths; the raw client asked for a
    minute. A trajectory may also be called as a probe was."""
    names = ("calibration-16", "calibration-256")
    workload = Workload("w", tuple(Trajectory(name, name, 300, (Turn(0, 5, 0.0),)) for name in names))
    engine_settings = SimulatedEngineSettings(profile=load_profile("toy-cpu-tp1"))
    async with recorded_engine(engine_settings) as engine, running_gateway(engine.url) as gateway:
        settings = ReplaySettings(f"{gateway.url}/v1", client=client, max_retries=0, rollout_id="r")
        first, second = await replay(workload, settings), await replay(workload, settings)
    assert first.errors == second.errors == ()
    assert [turn.prompt_tokens for turn in second.turns] == [turn.prompt_tokens for turn in first.turns]


@pytest.mark.parametrize("identity", ["header", "path", "body", "none"])
async def test_ids_that_no_header_can_carry_are_sent_and_stay_distinct(
    app: ToyChat, settings: ReplaySettings, identity: Any
) -> None:
    """Traces from anywhere have ids in any script, with slashes and line breaks, a page long: all are played."""
    names = ["Bahn/é?#1", "轨迹-1", "轨迹-2", "a\r\nX-Group-Id: b", "x" * 300, "x" * 301, " a", "a%2Fb"]
    workload = Workload("any", tuple(Trajectory(name, name, 40, (Turn(0, 10, 0.0),)) for name in names))
    result = await replay(workload, replace(settings, identity=identity))
    assert result.errors == ()
    assert [played.trajectory_id for played in result.trajectories] == names
    if identity in ("header", "path"):
        assert len({headers["x-group-id"] for _, headers, _ in app.seen}) == len(names)
    if identity == "path":
        assert len({path for path, _, _ in app.seen}) == len(names)
