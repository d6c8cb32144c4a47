"""Trajectories, rollouts and engines as resources."""

import asyncio
from typing import Any

import httpx
import orjson
import pytest

from tests.api.conftest import CHAT, GENERATE, HELLO, MODEL, Site, running_site, toy
from tests.support.engine import RecordedEngine, recorded_engine
from tests.support.gateway import ADMIN, eventually

pytestmark = pytest.mark.usefixtures("token_legs")
LONG = {"max_tokens": 4000, "ignore_eos": True}
LEGS = (CHAT, GENERATE, "/generate")


@pytest.mark.parametrize(
    "declared", [{}, {"id": "d", "group_id": "g", "rollout_id": "r", "expected_output_tokens": 99}]
)
async def test_a_declared_trajectory_is_there_before_its_first_turn(site: Site, declared: dict[str, Any]) -> None:
    """201 with its id, which turns may then use; the declaration is kept."""
    made = await site.client.post("/v1/trajectories", json={**declared, "metadata": {"task": 7}})
    assert made.status_code == 201
    shown = await site.trajectory(made.json()["id"])
    assert (shown["state"], shown["num_turns"], shown["turns"]) == ("active", 0, [])
    assert shown["group_id"] == declared.get("group_id", "")
    assert shown["rollout_id"] == declared.get("rollout_id")
    assert shown["declared"] == {
        "expected_output_tokens": declared.get("expected_output_tokens"),
        "metadata": {"task": 7},
    }
    answer = await site.chat(f"/t/{shown['id']}/v1/chat/completions")
    assert answer.headers["x-trajectory-id"] == shown["id"]
    assert (await site.trajectory(shown["id"]))["num_turns"] == 1


@pytest.mark.parametrize("group", ["", "step-2/a"], ids=["no group", "a group"])
async def test_a_declaration_changes_no_prediction(group: str) -> None:
    """A declared trajectory is predicted as if it had come undeclared: from its siblings, or from the same prompt in an
    earlier rollout. Those declared without a group used to count as siblings, whatever their prompts."""
    predicted = {}
    for declares in (False, True):
        async with running_site(toy(speed_up=100)) as site:
            for number in range(6):
                for task, num_tokens in (("a", 600), ("b", 2)):
                    name = f"{task}-{number}"
                    await first_turn(site, name, task, group and f"step-1/{task}", num_tokens, declares)
                    await site.client.post(f"/v1/trajectories/{name}/finish")
            await first_turn(site, "new", "a", group, 2, declares)
            predicted[declares] = (await site.trajectory("new"))["turns"][0]["predicted_tokens"]
    assert predicted[True] == predicted[False]


async def test_declaring_twice_is_a_conflict(site: Site) -> None:
    """409, and the client is told not to retry."""
    answers = [await site.client.post("/v1/trajectories", json={"id": "d"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 409]
    assert answers[1].headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    "bad", [{"id": ""}, {"id": " a"}, {"id": "\u00e9"}, {"id": 7}, {"unknown": 1}, {"expected_output_tokens": 0}, []]
)
async def test_an_invalid_declaration_is_refused(site: Site, bad: Any) -> None:
    """400 in OpenAI's form."""
    answer = await site.client.post("/v1/trajectories", json=bad)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_any_id_that_turns_may_use_can_be_declared(site: Site) -> None:
    """An id with a space and a slash is printable ASCII: a turn with that id belongs to the declared trajectory."""
    made = await site.client.post("/v1/trajectories", json={"id": "task 8/sample 1"})
    assert made.status_code == 201
    answer = await site.chat("/t/task%208%2Fsample%201/v1/chat/completions")
    assert answer.headers["x-trajectory-id"] == "task 8/sample 1"
    assert (await site.client.get("/v1/trajectories/task%208%2Fsample%201")).json()["num_turns"] == 1


async def test_trajectories_are_listed_in_pages(site: Site) -> None:
    """By rollout and state; further requests with `after` give the rest, each once."""
    for number in range(5):
        await site.client.post("/v1/trajectories", json={"id": f"a{number}", "rollout_id": "r"})
    await site.client.post("/v1/trajectories", json={"id": "b", "rollout_id": "other"})
    await site.client.post("/v1/trajectories/a3/finish")
    seen, query = [], {"rollout": "r", "limit": 2}
    while True:
        page = (await site.client.get("/v1/trajectories", params=query)).json()
        seen += [one["id"] for one in page["data"]]
        if not page["has_more"]:
            break
        query["after"] = page["last_id"]
    assert seen == ["a0", "a1", "a2", "a3", "a4"]
    finished = (await site.client.get("/v1/trajectories", params={"state": "finished"})).json()["data"]
    assert [one["id"] for one in finished] == ["a3"]


@pytest.mark.parametrize("query", ["limit=0", "limit=100000", "limit=many", "state=nope"])
async def test_an_invalid_query_is_refused(site: Site, query: str) -> None:
    """400 in OpenAI's form, naming the parameter."""
    answer = await site.client.get(f"/v1/trajectories?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


async def test_a_trajectory_shows_its_turns(site: Site) -> None:
    """Each turn with its times in order, its tokens as the engine counted them, its engine, and why it was chosen."""
    headers = (await site.chat("/t/a/v1/chat/completions", stream=True)).headers
    usage = (await site.chat("/t/a/v1/chat/completions")).json()["usage"]
    shown = await site.trajectory("a")
    first, second = shown["turns"]
    for turn in (first, second):
        assert turn["arrived_at"] <= turn["dispatched_at"] <= turn["first_byte_at"] <= turn["ended_at"]
        assert (turn["prompt_tokens"], turn["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
        assert (turn["outcome"], turn["finish_reason"], turn["legs"]) == ("finished", "length", 1)
        assert turn["engine"] == headers["x-heddle-engine"]
        assert turn["why"]
    assert (first["turn_id"], shown["output_tokens"]) == (headers["x-request-id"], 8)


@pytest.mark.parametrize("form", ["resource", "finish_session", "programs/release"])
async def test_a_trajectory_can_be_finished_in_three_forms(site: Site, form: str) -> None:
    """It is then finished; finishing it again changes nothing; an unknown one is 404. Parameters that other gateways'
    clients add are ignored."""

    async def finish(trajectory_id: str) -> httpx.Response:
        match form:
            case "resource":
                return await site.client.post(f"/v1/trajectories/{trajectory_id}/finish")
            case "finish_session":
                return await site.client.post("/finish_session", params={"session_id": trajectory_id, "reason": "done"})
            case _:
                return await site.client.post("/programs/release", json={"program_id": trajectory_id})

    await site.chat("/t/a/v1/chat/completions")
    for _ in range(2):
        answer = await finish("a")
        assert (answer.status_code, answer.json()["state"]) == (200, "finished")
    assert (await finish("nope")).status_code == 404


async def test_a_program_whose_id_is_a_number_is_released_by_that(site: Site) -> None:
    """Requests may name it so, too. What is no id is refused."""
    await site.chat(program_id=7)
    answer = await site.client.post("/programs/release", json={"program_id": 7})
    assert (answer.status_code, answer.json()) == (200, answer.json() | {"id": "7", "state": "finished"})
    for wrong in (None, True, 7.5, ["7"], {}):
        assert (await site.client.post("/programs/release", json={"program_id": wrong})).status_code == 400


async def test_a_trajectory_with_a_slash_in_its_id_can_be_finished(site: Site) -> None:
    """Ids such as `task/7` are common; escaped in the path, they work on every route here."""
    await site.chat(headers={"x-trajectory-id": "task/7"})
    assert (await site.trajectory("task%2F7"))["id"] == "task/7"
    assert (await site.client.post("/v1/trajectories/task%2F7/finish")).json()["state"] == "finished"
    assert (await site.client.delete("/v1/trajectories/task%2F7")).status_code == 200


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("path", ["trajectories/a/finish", "trajectories/a/reward", "rollouts/r/export"])
async def test_another_method_on_a_route_that_takes_post_is_a_405(site: Site, method: str, path: str) -> None:
    """Not the 404 of an id that ends so, unless there is such a one: ids may contain slashes."""
    await site.chat(headers={"x-trajectory-id": "a", "x-rollout-id": "r"})
    answer = await site.client.request(method, f"/v1/{path}")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"] == f"{method} is not allowed on /v1/{path}."
    resource, _, name = path.partition("/")
    await site.chat(headers={f"x-{'trajectory' if resource == 'trajectories' else 'rollout'}-id": name})
    known = await site.client.request(method, f"/v1/{path}")
    assert (known.status_code, known.json()["id"]) == (200, name)
    alone = await site.client.request(method, f"/v1/{resource}/{path.rpartition('/')[2]}")
    assert alone.status_code == 404


@pytest.mark.parametrize("what", ["trajectories/a", "rollouts/r"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_deleting_a_trajectory_or_rollout_stops_its_running_turn(site: Site, what: str, stream: bool) -> None:
    """The client gets a 409 (in a stream that has begun: an error event), and the engine is free within a second."""
    headers = {"x-trajectory-id": "a", "x-rollout-id": "r"}
    turn = asyncio.create_task(site.chat(headers=headers, stream=stream, **LONG))
    await eventually(lambda: engine_runs(site, 1))
    if stream:
        await eventually(lambda: has_chunks(site, "a"))
    deleted = await site.client.delete(f"/v1/{what}")
    assert deleted.status_code == 200
    answer = await asyncio.wait_for(turn, 60)
    if stream:
        assert answer.status_code == 200
        last = answer.text.strip().rpartition("\n\n")[2]
        error = orjson.loads(last.removeprefix("data: "))["error"]
        assert "[DONE]" not in answer.text
    else:
        assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")
        error = answer.json()["error"]
    assert error["code"] == "trajectory_aborted"
    await eventually(lambda: engine_runs(site, 0), 1.0)
    later = await site.chat(headers=headers)
    assert (later.status_code, later.json()["error"]["code"]) == (409, "trajectory_aborted")
    assert (await site.trajectory("a"))["state"] == "aborted"
    assert (await site.trajectory("a"))["turns"][0]["outcome"] == "aborted"


async def test_a_large_rollout_is_aborted_while_other_requests_are_served(site: Site) -> None:
    """20,000 trajectories took 0.7 s, in which nobody else was served."""
    for number in range(1000):
        await site.client.post("/v1/trajectories", json={"id": f"t{number}", "rollout_id": "r"})
    host, _, port = site.url.removeprefix("http://").partition(":")
    connections = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
    for (_, writer), method in zip(connections, (b"DELETE", b"GET"), strict=True):
        writer.write(method + b" /v1/rollouts/r HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n")
    answers = [await reader.read() for reader, _ in connections]
    deleted, meanwhile = (orjson.loads(answer.partition(b"\r\n\r\n")[2]) for answer in answers)
    for _, writer in connections:
        writer.close()
    assert deleted == {"id": "r", "num_aborted": 1000}
    assert 0 < meanwhile["num_trajectories"]["aborted"] < 1000


async def test_deleting_a_trajectory_refuses_its_waiting_turn() -> None:
    """At once, and the engine never receives it."""
    async with running_site(toy(slots=1)) as site:
        running = asyncio.create_task(site.chat("/t/first/v1/chat/completions", **LONG))
        await eventually(lambda: engine_runs(site, 1))
        waiting = asyncio.create_task(site.chat("/t/second/v1/chat/completions", **LONG))
        await eventually(lambda: has_live_turns(site, "second", 1))
        await site.client.delete("/v1/trajectories/second")
        assert (await asyncio.wait_for(waiting, 60)).status_code == 409
        await site.client.delete("/v1/trajectories/first")
        await running
        assert len(site.engine.turns) == 1


async def test_deleting_a_rollout_refuses_a_waiting_turn_that_named_it() -> None:
    """Also if its trajectory was declared without a rollout: it is of that rollout once its turn has arrived. It was
    only once that was dispatched, so the turn went on to an engine."""
    async with running_site(toy(slots=1)) as site:
        running = asyncio.create_task(site.chat("/t/first/v1/chat/completions", **LONG))
        await eventually(lambda: engine_runs(site, 1))
        await site.client.post("/v1/trajectories", json={"id": "second"})
        named = {"x-rollout-id": "r"}
        waiting = asyncio.create_task(site.chat("/t/second/v1/chat/completions", headers=named, **LONG))
        await eventually(lambda: has_live_turns(site, "second", 1))
        deleted = await site.client.delete("/v1/rollouts/r")
        await site.client.delete("/v1/trajectories/first")
        assert (deleted.status_code, deleted.json()) == (200, {"id": "r", "num_aborted": 1})
        assert (await asyncio.wait_for(waiting, 60)).status_code == 409
        await running
        assert len(site.engine.turns) == 1


async def test_a_rollout_sums_up_its_trajectories(site: Site) -> None:
    """States, turns and tokens; an unknown one is 404."""
    for name in ("a", "b"):
        await site.chat(headers={"x-trajectory-id": name, "x-rollout-id": "r"})
    await site.client.post("/v1/trajectories/a/finish")
    rollout = (await site.client.get("/v1/rollouts/r")).json()
    assert rollout["num_trajectories"] == {"active": 1, "finished": 1, "aborted": 0}
    assert (rollout["num_turns"], rollout["output_tokens"]) == (2, 8)
    assert (await site.client.delete("/v1/rollouts/r")).json()["num_aborted"] == 1
    assert (await site.client.get("/v1/rollouts/nope")).status_code == 404


async def test_engines_show_their_state_and_load(site: Site) -> None:
    """As the scheduler knows them."""
    turn = asyncio.create_task(site.chat("/t/a/v1/chat/completions", **LONG))
    await eventually(lambda: engine_runs(site, 1))
    (engine,) = (await site.client.get("/v1/engines")).json()["data"]
    assert (engine["kind"], engine["slots"], engine["models"], engine["num_legs"]) == ("vllm", 8, [MODEL], 1)
    assert (engine["state"], engine["is_cordoned"], engine["last_fault"]) == ("ready", False, None)
    assert engine["kv_capacity_tokens"] == 16_384
    assert "transit_s" in engine, "its value depends on when the engine is looked at (tests/gateway/test_transit.py)"
    await site.client.delete("/v1/trajectories/a")
    await turn


async def test_one_engine_is_shown_as_the_list_shows_it(site: Site) -> None:
    """By its id; an unknown id is named in the error, a long one only in part."""
    (listed,) = (await site.client.get("/v1/engines")).json()["data"]
    shown = await site.client.get(f"/v1/engines/{listed['id']}")
    assert shown.status_code == 200 and set(shown.json()) == set(listed)
    assert {name: shown.json()[name] for name in ("id", "url", "state")} == {
        name: listed[name] for name in ("id", "url", "state")
    }
    for unknown in ("127.0.0.1:1", "x" * 300):
        missed = await site.client.get(f"/v1/engines/{unknown}")
        assert missed.status_code == 404
        assert missed.json()["error"]["message"] == f"No engine '{unknown[:256]}'; GET /v1/engines lists them."


async def test_a_cordoned_engine_gets_no_new_turns(site: Site) -> None:
    """Turns wait until it is uncordoned; cordoning needs the admin key."""
    (engine,) = (await site.client.get("/v1/engines")).json()["data"]
    refused = await site.client.post(f"/v1/engines/{engine['id']}/cordon")
    assert refused.status_code == 401
    cordoned = await site.client.post(f"/v1/engines/{engine['id']}/cordon", headers=ADMIN)
    assert cordoned.json()["is_cordoned"] is True
    turn = asyncio.create_task(site.chat("/t/a/v1/chat/completions"))
    await eventually(lambda: has_live_turns(site, "a", 1))
    assert not site.engine.turns
    await site.client.post(f"/v1/engines/{engine['id']}/uncordon", headers=ADMIN)
    assert (await asyncio.wait_for(turn, 60)).status_code == 200


async def test_draining_waits_for_running_turns(site: Site) -> None:
    """It returns when the engine is empty, or after its timeout with turns still running."""
    (engine,) = (await site.client.get("/v1/engines")).json()["data"]
    turn = asyncio.create_task(site.chat("/t/a/v1/chat/completions", **LONG))
    await eventually(lambda: engine_runs(site, 1))
    drain = f"/v1/engines/{engine['id']}/drain"
    assert (await site.client.post(drain, params={"timeout_s": 0.05}, headers=ADMIN)).json()["is_drained"] is False
    draining = asyncio.create_task(site.client.post(drain, params={"timeout_s": 10}, headers=ADMIN))
    await site.client.delete("/v1/trajectories/a")
    assert (await turn).status_code == 409
    drained = (await asyncio.wait_for(draining, 60)).json()
    assert (drained["is_drained"], drained["is_cordoned"]) == (True, True)


async def test_an_engine_that_is_uncordoned_while_it_drains_keeps_its_turns(site: Site) -> None:
    """The drain ends, also one whose caller has given up. It cordoned the engine again once its turns had ended."""
    (engine,) = (await site.client.get("/v1/engines")).json()["data"]
    path = f"/v1/engines/{engine['id']}"
    turn = asyncio.create_task(site.chat("/t/a/v1/chat/completions", **LONG | {"max_tokens": 8000}))
    await eventually(lambda: engine_runs(site, 1))
    draining = asyncio.create_task(
        site.client.post(f"{path}/drain", params={"timeout_s": 600}, headers=ADMIN, timeout=60)
    )

    async def is_cordoned() -> bool:
        return bool((await site.client.get(path)).json()["is_cordoned"])

    await eventually(is_cordoned)
    uncordoned = await site.client.post(f"{path}/uncordon", headers=ADMIN)
    assert uncordoned.json()["is_cordoned"] is False
    drained = (await asyncio.wait_for(draining, 60)).json()
    assert (drained["is_drained"], drained["is_evacuated"], drained["is_cordoned"]) == (False, False, False)
    await site.client.delete("/v1/trajectories/a")
    assert (await turn).status_code == 409
    assert not await is_cordoned()


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_an_engine_can_be_added_and_removed(site: Site, dialect: Any) -> None:
    """A new engine is probed and takes turns; the turns of a removed one continue on another."""
    (first,) = (await site.client.get("/v1/engines")).json()["data"]
    async with recorded_engine(toy(dialect)) as second:
        added = await site.client.post("/v1/engines", json={"url": second.url}, headers=ADMIN)
        assert added.status_code == 201
        await eventually(lambda: is_ready(site, added.json()["id"]))
        turn = asyncio.create_task(site.chat("/t/a/v1/chat/completions", max_tokens=500, ignore_eos=True))
        await eventually(lambda: num_legs(site.engine) + num_legs(second))
        busy, other = (site.engine, second) if num_legs(site.engine) else (second, site.engine)
        leaving = first["id"] if busy is site.engine else added.json()["id"]
        removed = await site.client.delete(f"/v1/engines/{leaving}", headers=ADMIN)
        assert removed.json() == {"id": leaving, "removed": True}
        assert (await asyncio.wait_for(turn, 60)).status_code == 200
        assert num_legs(other) == 1
        left = (await site.client.get("/v1/engines")).json()["data"]
        assert leaving not in {engine["id"] for engine in left}
        assert (await site.trajectory("a"))["turns"][0]["legs"] == 2


async def test_json_without_its_content_type_is_refused(site: Site) -> None:
    """As `curl -d` sends it if the header is forgotten; the error names the header."""
    for path in ("/v1/engines", "/v1/trajectories"):
        answer = await site.client.post(path, content=b'{"id": "a"}', headers={**ADMIN, "content-type": "text/plain"})
        assert answer.status_code == 400
        assert "'content-type: application/json'" in answer.json()["error"]["message"]


async def test_an_engine_of_an_unknown_kind_is_refused_with_the_known_ones(site: Site) -> None:
    """In words, not as a pattern."""
    answer = await site.client.post("/v1/engines", json={"url": "http://127.0.0.1:1", "kind": "tgi"}, headers=ADMIN)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kind")
    assert answer.json()["error"]["message"] == "kind: must be 'vllm' or 'sglang', not 'tgi'."


@pytest.mark.parametrize("url", ["", "nonsense", "ftp://host", "http://host?q=1", "http://host:x"])
async def test_an_invalid_engine_url_is_refused(site: Site, url: str) -> None:
    """400, and the fleet stays as it was."""
    answer = await site.client.post("/v1/engines", json={"url": url}, headers=ADMIN)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "url")
    assert answer.json()["error"]["message"] == f"{url!r} is not a base URL such as http://host:8000"
    assert len((await site.client.get("/v1/engines")).json()["data"]) == 1


@pytest.mark.parametrize("user", ["user", ""])
async def test_an_engine_url_with_a_password_is_refused_without_showing_it(site: Site, user: str) -> None:
    """An engine's key is a setting of its own."""
    answer = await site.client.post("/v1/engines", json={"url": f"http://{user}:secret@host"}, headers=ADMIN)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "url")
    assert "without user and password" in answer.text and "secret" not in answer.text
    assert len((await site.client.get("/v1/engines")).json()["data"]) == 1


CHANGES = [("POST", "/v1/engines"), ("DELETE", "/v1/engines/x")] + [
    ("POST", f"/v1/engines/x/{verb}") for verb in ("cordon", "uncordon", "drain")
]


@pytest.mark.parametrize(("method", "path"), CHANGES)
async def test_changes_of_the_fleet_need_the_admin_key(method: str, path: str) -> None:
    """Without a key it is 401, with a client's key 403; without a configured admin key nobody may."""
    async with running_site(api_keys=("client-key",)) as site:
        request = {"method": method, "url": path, "json": {"url": "http://127.0.0.1:1"}}
        client_key = {"authorization": "Bearer client-key"}
        statuses = [(await site.client.request(**request, headers=headers)).status_code for headers in ({}, client_key)]
        assert statuses == [401, 403]
        known = (await site.client.request(**request, headers=ADMIN)).status_code
        assert known == (201 if path == "/v1/engines" else 404)
    async with running_site(admin_key=None) as site:
        assert (await site.client.request(**request, headers=ADMIN)).status_code == 403


async def test_the_event_feed_has_the_schedulers_events_and_actions(site: Site) -> None:
    """As server-sent events, live, in order."""
    heard: list[str] = []
    async with site.client.stream("GET", "/v1/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-accel-buffering"] == "no"
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith(":")
        await site.chat("/t/watched/v1/chat/completions")
        while "TurnFinished" not in heard:
            if (line := await anext(lines)).startswith("data: "):
                heard.append(orjson.loads(line.removeprefix("data: "))["type"])
    assert [name for name in heard if name != "Save"] == ["TurnArrived", "Dispatch", "TurnFinished"]


async def test_models_can_be_listed_and_retrieved(site: Site) -> None:
    """vLLM has no /v1/models/{id}; the gateway has, like OpenAI, with 404 for a model that nobody serves."""
    (card,) = (await site.client.get("/v1/models")).json()["data"]
    assert card == (await site.client.get(f"/v1/models/{MODEL}")).json()
    assert {"id", "object", "created", "owned_by"} <= set(card)
    assert card["object"] == "model"
    unknown = await site.client.get("/v1/models/org/nope")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_tokenisation_and_embeddings_pass_through(dialect: Any) -> None:
    """Routes that belong to no trajectory are served by any engine, and create none."""
    async with running_site(toy(dialect)) as site:
        tokens = (await site.client.post("/tokenize", json={"model": MODEL, "prompt": "Hé 🙂"})).json()
        text = (await site.client.post("/detokenize", json={"model": MODEL, "tokens": tokens["tokens"]})).json()
        assert text["prompt" if dialect == "vllm" else "text"] == "Hé 🙂"
        counted = await site.client.post("/v1/messages/count_tokens", json={"model": MODEL, "messages": HELLO})
        assert counted.json()["input_tokens"] > 0
        embedded = (await site.client.post("/v1/embeddings", json={"model": MODEL, "input": ["a", "b"]})).json()
        assert [one["index"] for one in embedded["data"]] == [0, 1]
        unknown = await site.client.post("/v1/embeddings", json={"model": "nope", "input": "a"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert (await site.client.get("/v1/trajectories")).json()["data"] == []


# --- what the tests wait for -----------------------------------------------------------------------------------------


async def first_turn(site: Site, name: str, task: str, group_id: str, num_tokens: int, declares: bool) -> None:
    """A trajectory's first turn, after its declaration if `declares`; an empty group is not named."""
    if declares:
        made = await site.client.post("/v1/trajectories", json={"id": name, "group_id": group_id})
        assert made.status_code == 201
    headers = {"x-group-id": group_id} if group_id else {}
    lengths = {"max_tokens": num_tokens, "min_tokens": num_tokens, "ignore_eos": True}
    asked = [{"role": "user", "content": task}]
    assert (await site.chat(f"/t/{name}/v1/chat/completions", headers=headers, messages=asked, **lengths)).is_success


async def engine_runs(site: Site, expected: int) -> bool:
    """Whether the engine itself runs this many requests."""
    async with httpx.AsyncClient(base_url=site.engine.url) as engine:
        page = (await engine.get("/metrics")).text
    return f'vllm:num_requests_running{{engine="0",model_name="{MODEL}"}} {float(expected)}' in page or (
        f'vllm:num_requests_running{{engine="0",model_name="{MODEL}"}} {expected}\n' in page
    )


def num_legs(engine: RecordedEngine) -> int:
    """How many legs the engine received."""
    return sum(request.path in LEGS for request in engine.turns)


async def has_live_turns(site: Site, trajectory_id: str, expected: int) -> bool:
    answer = await site.client.get(f"/v1/trajectories/{trajectory_id}")
    return answer.status_code == 200 and len(answer.json()["live_turns"]) == expected


async def has_chunks(site: Site, trajectory_id: str) -> bool:
    return any(turn["chunks"] > 1 for turn in (await site.trajectory(trajectory_id))["live_turns"])


async def is_ready(site: Site, engine_id: str) -> bool:
    engines = (await site.client.get("/v1/engines")).json()["data"]
    return any(engine["id"] == engine_id and engine["state"] == "ready" for engine in engines)
