"""Streams and headers on the wire: heartbeats, errors before and after the first event, nothing delayed or leaked."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest

from tests.api.conftest import CHAT, DONE, GENERATE, HELLO, MODEL, Site, Wire, event, running_site, toy
from tests.api.differential import assembled, events_of, normalised
from tests.support.engine import Script, fixed
from tests.support.gateway import eventually

pytestmark = pytest.mark.usefixtures("token_legs")
APIS = ("chat/completions", "completions", "responses", "messages")
HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "upgrade", "proxy-authenticate", "proxy-connection"}


def body_of(api: str, **fields: Any) -> dict[str, Any]:
    prompt = {"completions": {"prompt": "a"}, "responses": {"input": "a"}}.get(api, {"messages": HELLO})
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    return {"model": MODEL, limit: 4, "stream": True, **prompt, **fields}


PAUSED = event(
    {"error": {"message": "Generation is paused.", "type": "Service Unavailable", "param": None, "code": 503}}
)


def pieces(*parts: bytes) -> Script:
    """A stream that arrives in these writes."""

    async def play(_: Any, write: Any) -> None:
        for part in parts:
            await write(part)
            await asyncio.sleep(0)

    return Script(play)


class Busy:
    """A site whose only slot is taken until `free`."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._turn = asyncio.create_task(site.chat(f"/t/first{CHAT}", max_tokens=8000, ignore_eos=True))

    async def free(self) -> None:
        await self.site.client.delete("/v1/trajectories/first")
        await self._turn


@pytest.fixture
async def busy() -> AsyncIterator[Busy]:
    async with running_site(toy(slots=1), heartbeat_s=0.02) as site:
        taken = Busy(site)
        await eventually(lambda: site.engine.turns)
        yield taken
        await taken.free()


@pytest.mark.parametrize("api", APIS)
async def test_a_queued_stream_is_kept_open_by_comments(busy: Busy, api: str) -> None:
    """Comments while it waits, then exactly the answer that it would have had at once."""
    site = busy.site
    async with site.client.stream("POST", f"/t/second/v1/{api}", json=body_of(api)) as answer:
        assert answer.headers["x-trajectory-id"] == "second"
        text = ""
        async for piece in answer.aiter_text():
            text += piece
            if text.count(": waiting") == 2:
                await busy.free()
    comments, _, rest = text.rpartition(": waiting\n\n")
    assert set(comments.split("\n\n")) <= {"", ": waiting"}
    at_once = await site.client.post(f"/t/third/v1/{api}", json=body_of(api))
    assert normalised(assembled(events_of(rest))) == normalised(assembled(events_of(at_once.text)))


@pytest.mark.parametrize("api", APIS)
async def test_an_error_after_a_comment_is_an_event(busy: Busy, api: str) -> None:
    """The status line was sent, so the stream ends with an error event in its API's form, and the SDKs raise."""
    base_url = f"{busy.site.url}/t/second"
    if api == "messages":
        import anthropic

        client: Any = anthropic.AsyncAnthropic(base_url=base_url, api_key="none", max_retries=0)
        create, raised = client.messages.create, anthropic.APIStatusError
    else:
        import openai

        client = openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)
        place = {"chat/completions": client.chat.completions, "completions": client.completions}
        create, raised = place.get(api, client.responses).create, openai.APIError
    async with client:
        stream = await create(**body_of(api))  # returns with the head, hence after the first comment
        await busy.site.client.delete("/v1/trajectories/second")
        with pytest.raises(raised) as caught:
            async for _ in stream:
                pass
    assert "aborted" in str(caught.value)


@pytest.mark.parametrize(
    ("error", "status", "num_attempts"),
    [
        ({"message": "Generation is paused.", "code": 503}, 503, None),
        ({"message": "Bad sampling.", "type": "BadRequestError", "code": 400}, 400, 1),
        ({"message": "EngineCore encountered an issue.", "code": 500}, 502, 2),
    ],
)
async def test_an_error_in_the_first_event_has_a_status(
    wire: Wire, error: dict[str, Any], status: int, num_attempts: int | None
) -> None:
    """vLLM answers 200 before it accepts; its refusal comes as an event, and the client gets a status instead. An
    engine that is only busy is asked again until `queue_timeout_s`."""
    async with running_site(max_attempts=2, queue_timeout_s=2, retry_pause_s=0) as site:
        site.engine.scripts[wire.path] = pieces(event({"error": error}), DONE)
        answer = await site.chat(stream=True)
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
        assert error["message"] in answer.json()["error"]["message"]
        assert len(site.engine.turns) == num_attempts or (num_attempts is None and len(site.engine.turns) > 1)
        assert status == 400 or answer.headers["retry-after"]


async def test_an_engines_own_comments_are_no_answer(wire: Wire) -> None:
    """vLLM's `--sse-keep-alive-interval` sends comments while it waits; an error after them still has a status."""
    alive = b": keep-alive\n\n"
    async with running_site(queue_timeout_s=0.1) as site:
        for parts in ((alive, PAUSED, DONE), (alive + PAUSED + DONE,)):
            site.engine.scripts[wire.path] = pieces(*parts)
            assert (await site.chat(stream=True)).status_code == 503
        site.engine.scripts[wire.path] = pieces(alive, wire.chunk("a"), alive, wire.chunk("b", "stop"), DONE)
        events = events_of((await site.chat(stream=True)).text)
        texts = [data["choices"][0]["delta"]["content"] for _, data in events[:-1]]
        assert [text for text in texts if text] == ["a", "b"]


async def test_an_error_in_a_later_event_ends_the_stream(wire: Wire) -> None:
    """What came before it stays, the error is in OpenAI's form, and [DONE] does not follow. What was passed through is
    not made twice; at token level, the turn continues from it as long as there are engines to try."""
    async with running_site(queue_timeout_s=0.1) as site:
        site.engine.scripts[wire.path] = pieces(wire.chunk("a"), PAUSED, DONE)
        events = events_of((await site.chat(stream=True)).text)
        texts = [data["choices"][0]["delta"]["content"] for _, data in events[:-1]]
        assert [text for text in texts if text] == (["a"] if wire.path == CHAT else ["a"] * len(site.engine.turns))
        assert set(events[-1][1]["error"]) == {"message", "type", "param", "code"}
        assert wire.path != CHAT or len(site.engine.turns) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_aborted_answer_is_made_again(site: Site, wire: Wire, stream: bool) -> None:
    """vLLM ends an aborted request with 200 and finish_reason `abort`: that is no end, so the turn gets another leg."""

    async def play(_: Any, write: Any) -> None:
        del site.engine.scripts[wire.path]
        message = {"role": "assistant", "content": "half"}
        whole = {"id": "c", "choices": [{"index": 0, "message": message, "finish_reason": "abort"}]}
        await write(wire.chunk("", "abort") + DONE if is_stream else orjson.dumps(whole))

    is_stream = stream or wire.path == GENERATE
    kind = b"text/event-stream" if is_stream else b"application/json"
    site.engine.scripts[wire.path] = Script(play, headers=((b"content-type", kind),))
    answer = await site.chat("/t/a" + CHAT, stream=stream)
    assert answer.status_code == 200
    assert "abort" not in answer.text
    assert (await site.trajectory("a"))["turns"][0]["legs"] == 2


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (400, b'{"object":"error","message":"bad","type":"BadRequest","param":null,"code":400}', 400),
        (400, b'{"error":{"message":"bad","type":"BadRequestError","param":"n","code":400}}', 400),
        (422, b'{"detail":[{"loc":["body","n"],"msg":"bad","type":"int"}]}', 400),
        (401, b'{"error":"Unauthorized"}', 502),
        (404, b'{"detail":"Not Found"}', 404),
        (500, b"Internal Server Error", 502),
        (503, b'{"error":"scaling"}', 503),
        (502, b"<html>bad gateway</html>", 502),
        (500, b"", 502),
    ],
)
@pytest.mark.parametrize("api", ["chat/completions", "messages"])
async def test_every_error_of_an_engine_has_one_form(api: str, status: int, body: bytes, expected: int) -> None:
    """Flat, nested, a string, FastAPI's, HTML or nothing: clients see OpenAI's form, or Anthropic's on its route."""
    async with running_site(max_attempts=1, queue_timeout_s=0.1) as site:
        failing = fixed(status, body, b"text/html" if body[:1] == b"<" else b"application/json")
        site.engine.scripts |= {f"/v1/{api}": failing, GENERATE: failing}
        answer = await site.client.post(f"/v1/{api}", json=body_of(api, stream=False))
        assert answer.status_code == expected
        error = answer.json()["error"]
        assert {"message", "type"} <= set(error)
        assert answer.json().get("type") == ("error" if api == "messages" else None)
        assert "<html" not in error["message"]


@pytest.mark.parametrize("api", APIS)
async def test_the_first_chunk_arrives_before_the_last_is_made(site: Site, api: str) -> None:
    """Nothing is buffered on the way: the engine waits until the client has read its first content."""
    seen = asyncio.Event()
    body = body_of(api)
    whole = normalised(assembled(events_of((await site.client.post(f"/v1/{api}", json=body)).text)))
    path = site.engine.turns[-1].path
    async with httpx.AsyncClient(base_url=site.engine.url, timeout=60) as engine:
        made = (await engine.post(path, content=site.engine.turns[-1].body)).content
    parts = [part + b"\n\n" for part in made.split(b"\n\n") if part]
    num_first = 1 if path == GENERATE else {"completions": 1, "responses": 3}.get(api, 2)

    async def play(_: Any, write: Any) -> None:
        await write(b"".join(parts[:num_first]))
        await seen.wait()
        await write(b"".join(parts[num_first:]))

    site.engine.scripts[path] = Script(play)
    async with asyncio.timeout(60), site.client.stream("POST", f"/v1/{api}", json=body) as answer:
        received = ""
        async for piece in answer.aiter_text():
            received += piece
            seen.set()
    assert ": waiting" not in received
    assert normalised(assembled(events_of(received))) == whole


@pytest.mark.parametrize("wants_usage", [True, False])
async def test_a_client_may_stop_reading_at_the_finish_reason(site: Site, wire: Wire, wants_usage: bool) -> None:
    """It has its whole answer then, so its turn has finished, although the engine's stream goes on with usage."""
    usage = {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}
    rest = [event({"id": "c", "request_id": "g", "choices": [], "usage": usage}), DONE]

    async def play(_: Any, write: Any) -> None:
        await write(wire.chunk("a") + wire.chunk("b", "stop"))
        for piece in rest:
            for _ in range(20):  # by then, what was passed on has been read
                await site.client.get("/healthz")
            await write(piece)

    site.engine.scripts[wire.path] = Script(play)
    body: dict[str, Any] = body_of("chat/completions") | {"stream_options": {"include_usage": wants_usage}}
    async with asyncio.timeout(60), site.client.stream("POST", "/t/hasty/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if '"finish_reason":"stop"' in line:
                break
    (turn,) = (await site.trajectory("hasty"))["turns"]
    assert (turn["outcome"], turn["finish_reason"], turn["output_tokens"]) == ("finished", "stop", 2)


@pytest.mark.parametrize("wanted", [True, False, None, 1, 0, "true", "false", "0", "off"])
async def test_usage_is_recorded_however_the_client_spells_that_it_wants_none(
    site: Site, wire: Wire, wanted: Any
) -> None:
    """The engine reads `"false"` as a boolean, too, and told no usage: the record had no prompt tokens. Nor did such a
    turn have token legs."""
    answer = await site.chat("/t/one" + CHAT, stream=True, stream_options={"include_usage": wanted})
    assert ('"usage":{' in answer.text) is (wanted in (True, 1, "true")), answer.text
    (turn,) = (await site.trajectory("one"))["turns"]
    assert turn["prompt_tokens"] and turn["output_tokens"] == 4, turn
    assert site.engine.turns[-1].path == wire.path


async def test_events_cut_anywhere_arrive_whole(site: Site, wire: Wire) -> None:
    """Network reads end within events, lines and characters. The client gets the same text, and the same bytes if the
    stream is passed through."""
    stream = wire.chunk("世界🙂") + wire.chunk("é") + wire.chunk("!", "stop") + DONE
    site.engine.scripts[wire.path] = pieces(*(stream[place : place + 7] for place in range(0, len(stream), 7)))
    answer = await site.chat(stream=True)
    assert answer.content == stream or wire.path != CHAT
    assert assembled(events_of(answer.text))["choices"][0]["delta"]["content"] == "世界🙂é!"


async def test_the_headers_of_a_stream_keep_proxies_from_buffering(site: Site, wire: Wire) -> None:
    """No compression, no hop-by-hop header, and none of the engine's own headers."""

    async def play(_: Any, write: Any) -> None:
        await write(wire.chunk("a", "stop") + DONE)

    headers = ((b"content-type", b"text/event-stream"), (b"x-engine-secret", b"1"), (b"keep-alive", b"timeout=5"))
    site.engine.scripts[wire.path] = Script(play, headers=headers)
    given = (await site.chat(stream=True, headers={"accept-encoding": "gzip, br"})).headers
    assert given["content-type"] == "text/event-stream; charset=utf-8"
    assert (given["cache-control"], given["x-accel-buffering"]) == ("no-cache", "no")
    assert not (HOP_BY_HOP | {"content-encoding", "x-engine-secret", "content-length", "server"}) & set(given)
