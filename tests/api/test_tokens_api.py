"""What a trainer requests over HTTP: tokens, exports, rewards. The store is filled as a gateway fills it."""

import io
import itertools
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from gateway.clock import started_clock
from gateway.state.ledger import Ledger
from gateway.tokens.book import TokenBook, TokenLimits
from scheduling.types import TrajectoryRecord, TrajectoryState
from store import StoreSettings, open_store
from tests.api.conftest import Site, running_site
from tests.support.conversations import Step, conversation
from tests.support.gateway import eventually, running_gateway
from tests.support.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]

LIMITS = TokenLimits(keep=True, memory_bytes=2**30, stored_bytes=2**30, age_s=3600)
TURNS = [
    Step(None, [1, 2, 3], [4, 5], [-0.5, -0.25], 1),
    Step(0, [6], [7], [-1.5], 0),
    Step(0, [8, 9], [10], [0.0], 0),
]
"""A turn, and two that continue it."""
LONG_TURN = Step(None, list(range(100_000)), list(range(100_000)), None, 0)
LONG_ROLLOUT = {f"t{number:02d}": [LONG_TURN] for number in range(40)}
"""Some 64 MB as JSON lines: more than sockets hold."""
_databases = itertools.count(4)


@pytest.fixture(params=["sqlite", "redis"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that outlives a gateway."""
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'heddle.sqlite3'}"
    server: RedisServer = request.getfixturevalue("redis_server")
    return server.url(next(_databases) % 16)


async def fill(
    store_url: str, plans: dict[str, list[Step]], rows: dict[str, list[dict[str, Any]]] | None = None
) -> None:
    """Store trajectories of the rollout `r` with their tokens, as a gateway does; `rows`: further turns of some."""
    store = open_store(store_url, StoreSettings())
    await store.open()
    ledger, now = Ledger(store, 100), started_clock()()
    book = TokenBook(store, ledger, started_clock(), LIMITS)
    for name, plan in plans.items():
        ledger.save(TrajectoryRecord(name, f"g-{name}", "r", TrajectoryState.FINISHED, None, 9, 5, 1, 9.0, now, now))
        ledger.declare(name, {"expected_output_tokens": None, "metadata": {"task": name}})
        for turn in conversation(plan, name):
            book.add(turn)
            ledger.add_turn(name, row(turn.turn_id, "kept"))
        for more in (rows or {}).get(name, []):
            ledger.add_turn(name, more)
    assert await store.settle(60)
    await store.close()


async def fill_past(store_url: str, ended: list[tuple[str, str | None, float]], active: list[str]) -> None:
    """Store trajectories of one turn: some with their rollout, which ended so many seconds ago, and active ones of the
    rollout `r`. One named `aborted` is."""
    store = open_store(store_url, StoreSettings())
    await store.open()
    ledger, now = Ledger(store, 100), started_clock()()
    book = TokenBook(store, ledger, started_clock(), LIMITS)
    for name, rollout, ago_s in [*ended, *((name, "r", 0.0) for name in active)]:
        at = now - ago_s
        ended_as = TrajectoryState.ABORTED if name == "aborted" else TrajectoryState.FINISHED
        state = TrajectoryState.ACTIVE if name in active else ended_as
        ledger.save(TrajectoryRecord(name, "g", rollout, state, None, 9, 5, 1, 9.0, at, at))
        for turn in conversation(TURNS[:1], name):
            book.add(turn)
            ledger.add_turn(name, row(turn.turn_id, "kept"))
    assert await store.settle(60)
    await store.close()


def row(turn_id: str, tokens: str) -> dict[str, Any]:
    """A turn in the history."""
    return {"turn_id": turn_id, "model": "policy", "outcome": "finished", "tokens": tokens}


@asynccontextmanager
async def client_on(store_url: str, **settings: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a gateway on this store, without engines."""
    async with (
        running_gateway(store=store_url, **settings) as gateway,
        httpx2.AsyncClient(base_url=gateway.url, timeout=60) as client,
    ):
        yield client


def lines(answer: httpx2.Response) -> list[dict[str, Any]]:
    """The records of an export in JSON lines."""
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/jsonl"), answer.text
    return [orjson.loads(line) for line in answer.text.splitlines()]


async def test_a_trajectorys_tokens_are_returned_as_a_tree(store_url: str) -> None:
    """Each turn with what it adds to its parent, the branches by their turns, and nothing missing."""
    await fill(store_url, {"task/1": TURNS})
    async with client_on(store_url) as client:
        shown = (await client.get("/v1/trajectories/task%2F1/tokens")).json()
        first, second, third = shown.pop("turns")
        assert shown == {
            "id": "task/1",
            "object": "trajectory.tokens",
            "group_id": "g-task/1",
            "rollout_id": "r",
            "state": "finished",
            "reward": None,
            "reward_components": {},
            "reward_metadata": {},
            "branches": [["task/1-0", "task/1-1"], ["task/1-0", "task/1-2"]],
            "missing": [],
        }
        assert first == {
            "turn_id": "task/1-0",
            "model": "policy",
            "parent": None,
            "num_before": 0,
            "prompt_ids": [1, 2, 3],
            "output_ids": [4, 5],
            "logprobs": [-0.5, -0.25],
            "loss_mask": [0, 0, 0, 1, 1],
            "versions": [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}],
            "finish_reason": "tool_calls",
            "ended_at": 1000.0,
        }
        assert (second["parent"], second["num_before"], second["prompt_ids"]) == ("task/1-0", 5, [6])
        assert (third["parent"], third["num_before"], third["prompt_ids"]) == ("task/1-0", 5, [8, 9])


async def test_a_rollout_is_exported_in_json_lines(store_url: str) -> None:
    """One record for each branch of all its trajectories, in the order of their ids."""
    await fill(store_url, {"b": TURNS, "a": TURNS[:1]}, {"a": [row("x", "kept"), row("y", "none")]})
    async with client_on(store_url) as client:
        records = lines(await client.post("/v1/rollouts/r/export"))
        assert [(one["trajectory_id"], one["branch"], one["num_branches"]) for one in records] == [
            ("a", 0, 1),
            ("b", 0, 2),
            ("b", 1, 2),
        ]
        assert records[0]["missing"] == [{"turn_id": "x", "why": "dropped"}, {"turn_id": "y", "why": "no_token_legs"}]
        last = records[2]
        assert (last["token_ids"], last["loss_mask"]) == ([1, 2, 3, 4, 5, 8, 9, 10], [0, 0, 0, 0, 0, 0, 0, 1])
        assert last["logprobs"] == [0, 0, 0, -0.5, -0.25, 0, 0, 0.0]
        assert (last["group_id"], last["rollout_id"], last["state"]) == ("g-b", "r", "finished")
        assert (last["prompt_length"], last["metadata"], last["missing"]) == (3, {"task": "b"}, [])
        assert [(turn["output_start"], turn["end"], turn["is_repeated"]) for turn in last["turns"]] == [
            (3, 5, True),
            (7, 8, False),
        ]
        assert lines(await client.post("/v1/rollouts/r/export", params={"state": "active"})) == []


async def test_a_rollout_is_exported_in_parquet(store_url: str) -> None:
    """The file is complete and has the same records as the JSON lines, in typed columns."""
    import pyarrow.parquet

    await fill(store_url, {f"t{number}": TURNS[: number % 4] for number in range(9)})
    async with client_on(store_url) as client:
        for number in range(0, 9, 2):
            reward = {"reward": number / 4, "components": {"tests": 1.0}}
            assert (await client.post(f"/v1/trajectories/t{number}/reward", json=reward)).status_code == 200
        expected = lines(await client.post("/v1/rollouts/r/export"))
        forms: list[dict[str, Any]] = [
            {"params": {"format": "parquet"}},
            {"headers": {"accept": "application/vnd.apache.parquet"}},
        ]
        for form in forms:
            answer = await client.post("/v1/rollouts/r/export", **form)
            assert answer.headers["content-type"] == "application/vnd.apache.parquet"
            table = pyarrow.parquet.read_table(io.BytesIO(answer.content))
            types = {
                name: str(table.schema.field(name).type.value_type) for name in ("token_ids", "loss_mask", "logprobs")
            }
            assert types == {"token_ids": "int32", "loss_mask": "int8", "logprobs": "float"}
            rows = table.to_pylist()
            for each in rows:
                for name in ("reward_components", "reward_metadata", "metadata"):
                    each[name] = orjson.loads(each[name])
            assert rows == expected


async def test_a_large_parquet_file_has_row_groups(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written in groups of rows, so that a rollout need not fit into memory."""
    import pyarrow.parquet

    monkeypatch.setattr("gateway.tokens.export.GROUP_TOKENS", 1_000)
    steps = [Step(None, list(range(300)), list(range(300)), None, 0)]
    await fill(store_url, {f"t{number:02d}": steps for number in range(20)})
    async with client_on(store_url) as client:
        answer = await client.post("/v1/rollouts/r/export", params={"format": "parquet"})
    file = pyarrow.parquet.ParquetFile(io.BytesIO(answer.content))
    assert [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)] == [2] * 10
    assert file.read().column("token_ids").to_pylist() == [list(range(300)) * 2] * 20


async def test_a_parquet_file_of_records_without_tokens_has_row_groups(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their turns passed through. They were one group, which was held whole, however many they were."""
    import pyarrow.parquet

    monkeypatch.setattr("gateway.tokens.export.GROUP_TOKENS", 1_000)
    names = [f"t{number:02d}" for number in range(20)]
    await fill(store_url, {name: [] for name in names}, {name: [row(f"{name}-0", "none")] for name in names})
    async with client_on(store_url) as client:
        answer = await client.post("/v1/rollouts/r/export", params={"format": "parquet"})
    file = pyarrow.parquet.ParquetFile(io.BytesIO(answer.content))
    assert [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)] == [5] * 4
    assert file.read().column("trajectory_id").to_pylist() == names


async def test_parquet_without_pyarrow_is_refused_with_what_to_install(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """406, before anything is sent; JSON lines need no package."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as Python treats a package that is not installed
    await site.client.post("/v1/trajectories", json={"id": "a", "rollout_id": "r"})
    refused = await site.client.post("/v1/rollouts/r/export", params={"format": "parquet"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (406, "not_acceptable")
    assert "pip install pyarrow." in refused.json()["error"]["message"]
    assert (await site.client.post("/v1/rollouts/r/export")).status_code == 200


async def test_a_reward_is_kept_with_its_trajectory(store_url: str) -> None:
    """The last one counts, also across a restart: in the trajectory, its tokens and the export."""
    await fill(store_url, {"t": TURNS[:1]})
    rewards: list[dict[str, Any]] = [
        {"reward": 1, "components": {"tests": 1, "style": -0.5}, "metadata": {"judge": ["a", None]}},
        {"reward": -0.25},
    ]
    for reward in rewards:
        async with client_on(store_url) as client:
            answer = await client.post("/v1/trajectories/t/reward", json=reward)
            assert answer.status_code == 200, answer.text
        async with client_on(store_url) as client:
            kept = {"components": {}, "metadata": {}} | reward
            assert (await client.get("/v1/trajectories/t")).json()["reward"] == answer.json()["reward"] == kept
            shown = [(await client.get("/v1/trajectories/t/tokens")).json()]
            shown += lines(await client.post("/v1/rollouts/r/export"))
            for one in shown:
                assert one["reward"] == kept["reward"]
                assert (one["reward_components"], one["reward_metadata"]) == (kept["components"], kept["metadata"])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b'{"reward": null}',
        b'{"reward": true}',
        b'{"reward": "1"}',
        b'{"reward": NaN}',
        b'{"reward": 1e999}',
        b'{"reward": 1, "more": 2}',
        b'{"reward": 1, "components": {"a": "b"}}',
        b'{"reward": 1, "components": {"a": Infinity}}',
        b'{"reward": 1, "metadata": {"a": "\\ud800"}}',
    ],
)
async def test_an_invalid_reward_is_refused(site: Site, body: bytes) -> None:
    """400 in OpenAI's form, and the trajectory still has none."""
    await site.client.post("/v1/trajectories", json={"id": "a"})
    headers = {"content-type": "application/json"}
    answer = await site.client.post("/v1/trajectories/a/reward", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert (await site.trajectory("a"))["reward"] is None


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/trajectories/nope/tokens"),
        ("POST", "/v1/trajectories/nope/reward"),
        ("POST", "/v1/rollouts/nope/export"),
    ],
)
async def test_an_unknown_resource_is_404_and_a_missing_or_wrong_key_401(method: str, path: str) -> None:
    """As for every other route of the API."""
    async with running_site(api_keys=("client-key",)) as site:
        key = {"authorization": "Bearer client-key"}
        statuses = [
            (await site.client.request(method, path, json={"reward": 1}, headers=headers)).status_code
            for headers in ({}, {"authorization": "Bearer wrong"}, key)
        ]
        assert statuses == [401, 401, 404]


async def test_a_trajectory_can_be_declared_without_tokens(site: Site) -> None:
    """The answer confirms the preference, and the trajectory shows it."""
    request = {"json": {"id": "a"}, "headers": {"prefer": "tokens=none"}}
    made = await site.client.post("/v1/trajectories", **request)
    assert (made.status_code, made.headers["preference-applied"]) == (201, "tokens=none")
    assert (await site.trajectory("a"))["declared"]["tokens"] == "none"
    other = await site.client.post("/v1/trajectories", json={"id": "b"})
    assert "preference-applied" not in other.headers
    assert "tokens" not in other.json()["declared"]


async def test_a_record_is_one_line_to_every_reader(site: Site) -> None:
    """Also to those that end a line at Unicode's separators, as httpx's `iter_lines` does."""
    metadata = {"task": "first\u2028second\u2029third\u0085end"}
    await site.client.post("/v1/trajectories", json={"id": "a", "rollout_id": "r", "metadata": metadata})
    async with site.client.stream("POST", "/v1/rollouts/r/export") as answer:
        read = [line async for line in answer.aiter_lines()]
    assert [orjson.loads(line)["metadata"] for line in read] == [metadata]


async def test_tokens_are_forgotten_with_their_trajectory(store_url: str) -> None:
    """After its retention the trajectory is unknown, and the store holds none of its tokens."""
    await fill(store_url, {"t": TURNS})
    async with running_site(store=store_url, retention_s=0.01, observe_interval_s=0.05) as site:

        async def is_unknown() -> bool:
            return (await site.client.get("/v1/trajectories/t/tokens")).status_code == 404

        await eventually(is_unknown, 60)
    store = open_store(store_url, StoreSettings())
    await store.open()
    assert await store.piece_sizes() == {}
    await store.close()


async def test_a_rollout_that_outlasts_the_retention_is_exported_whole(store_url: str) -> None:
    """Its first trajectory ended two hours ago, its last one just now. It was forgotten an hour after its own end, so
    exports had the long trajectories only, and nothing told."""
    await fill_past(store_url, [("short", "r", 7_200.0), ("aborted", "r", 7_000.0), ("alone", None, 7_200.0)], ["long"])
    async with running_site(store=store_url, observe_interval_s=0.05) as site:
        await eventually(lambda: is_unknown(site, "alone"))
        (await site.client.post("/v1/trajectories/long/finish")).raise_for_status()
        exported = await site.client.post("/v1/rollouts/r/export")
        records = [orjson.loads(line) for line in exported.text.splitlines()]
        assert [(one["trajectory_id"], len(one["token_ids"]), one["missing"]) for one in records] == [
            ("aborted", 5, []),
            ("long", 5, []),
            ("short", 5, []),
        ]
        assert exported.headers["x-heddle-num-forgotten"] == "0"
        assert (await site.client.get("/v1/rollouts/r")).json()["num_forgotten"] == 0


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
async def test_what_a_rollout_has_lost_is_told(store_url: str, form: str) -> None:
    """A rollout that goes on for longer than `max_token_age_s` loses its first trajectories. The rollout, its export
    and a metric tell how many."""
    await fill_past(
        store_url, [("first", "r", 20_000.0), ("second", "r", 15_000.0), ("third", "r", 14_000.0)], ["long"]
    )
    async with running_site(store=store_url, observe_interval_s=0.05) as site:
        await eventually(lambda: is_unknown(site, "second"))
        shown = (await site.client.get("/v1/rollouts/r")).json()
        assert shown["num_forgotten"] == 2
        assert shown["num_trajectories"] == {"active": 1, "finished": 1, "aborted": 0}
        exported = await site.client.post(f"/v1/rollouts/r/export?format={form}")
        assert exported.headers["x-heddle-num-forgotten"] == "2"
        page = (await site.client.get("/metrics")).text
        assert 'heddle_dropped_trajectories_total{part="all"} 2.0' in page
        assert 'heddle_dropped_trajectories_total{part="tokens"} 2.0' in page


async def is_unknown(site: Site, trajectory_id: str) -> bool:
    return (await site.client.get(f"/v1/trajectories/{trajectory_id}")).status_code == 404


async def test_tokens_beyond_the_limit_are_reported_as_dropped(store_url: str) -> None:
    """The oldest trajectory's tokens are gone, and each of its turns is listed."""
    await fill(store_url, {"old": TURNS})
    await fill(store_url, {"young": [Step(None, list(range(500)), [1], None, 0)]})
    async with client_on(store_url, max_stored_token_bytes=2_100) as client:
        old = (await client.get("/v1/trajectories/old/tokens")).json()
        assert old["missing"] == [{"turn_id": f"old-{number}", "why": "dropped"} for number in range(3)]
        assert (old["turns"], old["branches"]) == ([], [])
        exported = lines(await client.post("/v1/rollouts/r/export"))
        assert [(one["trajectory_id"], len(one["token_ids"]), len(one["missing"])) for one in exported] == [
            ("old", 0, 3),
            ("young", 501, 0),
        ]
        kept = (await client.get("/healthz")).json()["tokens"]
        assert (kept["num_trajectories"], kept["num_dropped"]) == (1, 1)
        assert 1_800 < kept["stored_bytes"] <= 2_100


async def test_an_export_is_refused_or_breaks_off_without_the_store(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A 503 as long as nothing was sent; afterwards the connection breaks, so half a file is never taken for a whole
    one. The log says so, and calls neither a defect."""
    url = redis_server.url(3)
    await fill(url, LONG_ROLLOUT)
    async with client_on(url, max_token_memory_bytes=0) as client:
        redis_server.kill()
        try:
            for method, path in (("GET", "/v1/trajectories/t00/tokens"), ("POST", "/v1/rollouts/r/export")):
                answer = await client.request(method, path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_away")
            redis_server.restart()

            async def is_back() -> bool:
                return (await client.get("/v1/trajectories/t00/tokens")).status_code == 200

            await eventually(is_back, 60)
            with pytest.raises(httpx2.HTTPError):
                async with client.stream("POST", "/v1/rollouts/r/export") as answer:
                    assert answer.status_code == 200
                    lines = answer.aiter_lines()
                    await anext(lines)
                    redis_server.kill()
                    async for _ in lines:
                        pass
        finally:
            redis_server.restart()
    told = [record for record in caplog.records if record.name == "heddle"]
    assert not [record for record in told if record.levelname == "ERROR"]
    assert [record.levelname for record in told if record.message == "answer broken off"] == ["WARNING"]


async def test_an_export_is_built_while_it_is_sent(store_url: str) -> None:
    """The first record arrives before the last is read from the store: for a client that stops reading, the gateway
    holds no more than the connection's buffers."""
    await fill(store_url, LONG_ROLLOUT)
    async with (
        running_gateway(store=store_url, max_token_memory_bytes=0) as gateway,
        httpx2.AsyncClient(base_url=gateway.url, timeout=60) as client,
        client.stream("POST", "/v1/rollouts/r/export") as answer,
    ):
        lines = answer.aiter_lines()
        assert orjson.loads(await anext(lines))["trajectory_id"] == "t00"
        # The last record has this reward only if it is built after the client has read the records before it.
        assert (await client.post("/v1/trajectories/t39/reward", json={"reward": 7})).status_code == 200
        rest = [orjson.loads(line) async for line in lines]
    assert [len(one["token_ids"]) for one in rest] == [200_000] * 39
    assert [one["reward"] for one in rest] == [None] * 38 + [7]
