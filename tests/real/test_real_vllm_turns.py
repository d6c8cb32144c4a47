"""What a real vLLM does with turns that leave, are aborted or wait, and whether two of them agree.

On a busy machine a process may stand still for seconds, the client or the server. So nothing here hangs on when or in
which order something was seen: tokens and gauges are the engine's own word.
"""

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from engines.local_vllm import LocalEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

Json = dict[str, Any]
ENDLESS: Json = {"max_tokens": 30_000, "ignore_eos": True}  # a minute and a half


@pytest.fixture
def vllm(real_engines: list[LocalEngine]) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=real_engines[0].url, timeout=60.0) as client:
        yield client


def chat(client: httpx2.Client, **fields: Any) -> Json:
    response = client.post("/v1/chat/completions", json=chat_body(**fields))
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


def chat_body(**fields: Any) -> Json:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
        "temperature": 0,
    } | fields


def post_by_hand(url: httpx2.URL, body: Json) -> socket.socket:
    """A chat request whose answer is never read: what the socket is closed on is a client that left."""
    payload = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {url.host}\r\ncontent-type: application/json\r\n"
    connection = socket.create_connection((url.host, url.port or 80))
    connection.sendall(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
    return connection


def has_first_token(connection: socket.socket) -> None:
    """Read a stream until its turn runs. The first event is its role, and comes when the second is there."""
    connection.settimeout(60)
    heard = b""
    while heard.count(b"\ndata: ") < 2:
        piece = connection.recv(4096)
        assert piece, "the stream ended"
        heard += piece


def gauge(client: httpx2.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


def seconds_until(client: httpx2.Client, name: str, wanted: float, limit_s: float = 60.0) -> float:
    started_at = time.monotonic()
    while (seen := gauge(client, name)) != wanted:
        assert time.monotonic() - started_at < limit_s, f"{name} is {seen:g} and never came to {wanted:g}"
        time.sleep(0.02)  # asked without a pause, the server is busy with nothing else
    return time.monotonic() - started_at


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_frees_its_slot_within_a_second(real_engines: list[LocalEngine], streamed: bool) -> None:
    """About 30 ms in fact, streaming or not. The best of three counts: a busy machine may stand still for longer."""

    def leave(watcher: httpx2.Client) -> float:
        body = chat_body(stream=streamed, **ENDLESS)
        connection = post_by_hand(watcher.base_url, body)
        seconds_until(watcher, "num_requests_running", 1)
        connection.close()
        return seconds_until(watcher, "num_requests_running", 0)

    with httpx2.Client(base_url=real_engines[0].url, timeout=60.0) as watcher:
        tries = [leave(watcher)]
        while min(tries) >= 1.0 and len(tries) < 3:
            tries.append(leave(watcher))
    assert min(tries) < 1.0, tries


def test_an_aborted_request_ends_well_with_the_reason_abort(vllm: httpx2.Client) -> None:
    """HTTP 200 with what there is so far: a gateway must not take it for a finished turn."""
    answers: list[Json] = []
    with httpx2.Client(base_url=vllm.base_url, timeout=60.0, headers={"x-request-id": "doomed"}) as other:
        turn = threading.Thread(target=lambda: answers.append(chat(other, **ENDLESS)))
        turn.start()
        seconds_until(vllm, "num_requests_running", 1)
        vllm.post("/abort_requests", json={"request_ids": ["chatcmpl-doomed"]}).raise_for_status()
        turn.join(10)
    assert answers[0]["choices"][0]["finish_reason"] == "abort"
    assert 0 < answers[0]["usage"]["completion_tokens"] < 30_000


def test_turns_beyond_the_slots_wait_and_the_most_urgent_goes_first(vllm: httpx2.Client) -> None:
    """Lower numbers are more urgent, whatever the order of arrival; a turn that runs is not preempted.

    Its first token shows that a turn holds a slot: gauges may still count what another test left behind. One slot
    becomes free at a time, and an abort then shows who took it: only a turn that ran has made tokens.
    """
    answers: dict[str, Json] = {}

    def turn(name: str, priority: int) -> None:
        with httpx2.Client(base_url=vllm.base_url, timeout=120.0, headers={"x-request-id": name}) as client:
            answers[name] = chat(client, priority=priority, **ENDLESS)

    def tokens_when_aborted(name: str) -> int:
        vllm.post("/abort_requests", json={"request_ids": [f"chatcmpl-{name}"]}).raise_for_status()
        waiting[name].join(60)
        assert answers[name]["choices"][0]["finish_reason"] == "abort"
        tokens: int = answers[name]["usage"]["completion_tokens"]
        return tokens

    preemptions = gauge(vllm, "num_preemptions_total")
    slots = [post_by_hand(vllm.base_url, chat_body(priority=9, stream=True, **ENDLESS)) for _ in range(4)]
    for connection in slots:
        has_first_token(connection)
    waiting: dict[str, threading.Thread] = {}
    for name, priority in (("low", 5), ("mid", 0), ("high", -5)):
        waiting[name] = threading.Thread(target=turn, args=(name, priority))
        waiting[name].start()
        seconds_until(vllm, "num_requests_waiting", len(waiting))
    slots.pop().close()
    seconds_until(vllm, "num_requests_waiting", 2)
    assert tokens_when_aborted("high") > 0, "another turn took the first free slot"
    seconds_until(vllm, "num_requests_waiting", 1)
    assert tokens_when_aborted("low") == 0, "the least urgent turn took the second free slot"
    assert tokens_when_aborted("mid") > 0
    seconds_until(vllm, "num_requests_running", 3)
    assert gauge(vllm, "num_preemptions_total") == preemptions
    for connection in slots:
        connection.close()


def test_two_engines_agree_on_greedy_text_that_depends_on_all_of_its_context(
    real_engines: list[LocalEngine],
) -> None:
    """What later tests of moved and resumed trajectories stand on: same context, same tokens; other context, others."""
    rows = "".join(f"row {i}; " for i in range(400))
    bodies = [
        {"model": "tiny", "prompt": f"{word} {rows}", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
        for word in ("one", "two")
    ]
    texts = [
        httpx2.post(f"{engine.url}/v1/completions", json=body, timeout=60.0).json()["choices"][0]["text"]
        for body in bodies
        for engine in real_engines
    ]
    assert texts[0] == texts[1] and texts[2] == texts[3] and texts[0] != texts[2]
    windows = [texts[0][i : i + 8] for i in range(len(texts[0]) - 8)]
    assert len(set(windows)) > 0.9 * len(windows), "greedy text runs in a loop"
