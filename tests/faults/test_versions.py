"""A store that a newer version of the gateway wrote, as after a rollback."""

import asyncio
import re
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import orjson

from engines.simulated.server import serve_engine
from tests.support.gateway import ADMIN, eventually, running_gateway
from tests.weights.gateway_client import body_of, complete, engine, engines, update

NEW = {"of_a_newer_version": {"any": [1]}}


def newer(row: Any, said: dict[str, Any]) -> dict[str, Any]:
    """What the store has in a row, with further fields."""
    if row == "fleet":
        return {url: process | NEW for url, process in said.items()}
    return said | NEW | ({"current": said["current"] | NEW} if row == "weights" else {})


def write_as_a_newer_version(path: Path) -> None:
    """Add fields to everything in the store."""
    with sqlite3.connect(path) as database:
        for table, key in (("record", "number"), ("turn", "number"), ("state", "name")):
            rows = database.execute(f"SELECT {key}, value FROM {table}").fetchall()
            assert rows, f"the test's premise: {table}"
            for row, value in rows:
                statement = f"UPDATE {table} SET value = ? WHERE {key} = ?"
                assert database.execute(statement, (orjson.dumps(newer(row, orjson.loads(value))), row)).rowcount == 1
    database.close()


async def test_a_store_of_a_newer_version_is_read_without_what_is_new(tmp_path: Path) -> None:
    """Trajectories, rewards, cordons and weights are there after a rollback. A new field in a record stopped the start
    with `choose another store`, so that all of them were lost."""
    path = tmp_path / "heddle.sqlite3"
    async with serve_engine(engine("vllm")) as url, serve_engine(engine("vllm")) as other:
        async with (
            running_gateway(url, other, store=f"sqlite:{path}") as gateway,
            httpx.AsyncClient(base_url=gateway.url, headers=ADMIN) as client,
        ):
            assert (await update(client, "v1")).json()["status"] == "done"
            await client.post(f"/v1/engines/{url.removeprefix('http://')}/cordon")
            await complete(client, "one", "Tell me about looms.", 20)
            await client.post("/v1/trajectories/one/reward", json={"reward": 0.5})
            before = (await client.get("/v1/trajectories/one")).json()
        write_as_a_newer_version(path)
        async with (
            running_gateway(url, other, store=f"sqlite:{path}") as gateway,
            httpx.AsyncClient(base_url=gateway.url, headers=ADMIN) as client,
        ):
            after = (await client.get("/v1/trajectories/one")).json()
            assert [turn.pop("of_a_newer_version") for turn in after["turns"]] == list(NEW.values())
            assert after == before and after["reward"]["reward"] == 0.5
            assert (await client.get("/v1/weights")).json()["version"] == "v1"
            assert [one["is_cordoned"] for one in await engines(client)] == [True, False]
            await complete(client, "one", "Tell me about looms. And on.", 20)
            assert len((await client.get("/v1/trajectories/one")).json()["turns"]) == 2


async def test_a_turn_goes_on_from_what_a_newer_version_saved_of_it(tmp_path: Path) -> None:
    """A part with a further field ended each such turn with a 500."""
    store = {"store": f"sqlite:{tmp_path / 'heddle.sqlite3'}", "token_legs": "auto", "save_tokens_s": 0.01}
    body = body_of("Tell me about looms.", 1_000)
    async with serve_engine(engine("vllm", speed_up=1.0)) as url, httpx.AsyncClient(timeout=120) as client:

        async def num_generated() -> int:
            page = (await client.get(url + "/metrics")).text
            return int(float(re.findall(r"^vllm:generation_tokens_total{.*} (.*)$", page, re.MULTILINE)[0]))

        async with running_gateway(url, **store, shutdown_timeout_s=0.1) as gateway:
            turn = asyncio.create_task(client.post(gateway.url + "/t/one/v1/completions", json=body))

            async def has_made_many() -> bool:
                return await num_generated() >= 200

            await eventually(has_made_many)
        assert (await turn).status_code == 503
        with sqlite3.connect(tmp_path / "heddle.sqlite3-pieces") as database:
            parts = database.execute("SELECT number, value FROM piece WHERE name LIKE 'partial/%'").fetchall()
            for row, data in parts:
                said = [[*c[:3], [[*span, NEW] for span in c[3]], *c[4:], NEW] for c in orjson.loads(data)]
                database.execute("UPDATE piece SET value = ? WHERE number = ?", (orjson.dumps(said), row))
        database.close()
        assert parts, "the test's premise"
        async with running_gateway(url, **store) as gateway:
            answer = await client.post(gateway.url + "/t/one/v1/completions", json=body)
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 1_000
        assert await num_generated() < 1_200, "what was saved was made again"
