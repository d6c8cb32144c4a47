"""An answer that several clients get."""

import asyncio

import pytest

from gateway.http.client import AsgiClient, Message
from gateway.http.outlet import Outlet

MAX_KEPT = 100
BEGINNING, END = b"data: " + 80 * b"a" + b"\n\n", b"data: " + 80 * b"b" + b"\n\n"


class Received:
    """What a client at the other end of ASGI gets."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def take(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join([message.get("body", b"") for message in self.messages])


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


def begun() -> tuple[Outlet, Received, AsgiClient]:
    """A stream that is shorter than what is kept, and a client that wants it too."""
    outlet = Outlet(None, "chat", "t", max_kept_bytes=MAX_KEPT)
    outlet.stream(BEGINNING)
    received = Received()
    return outlet, received, AsgiClient({}, _never, received.take)


async def test_a_follower_gets_what_outgrows_the_limit_before_it_begins() -> None:
    """Between a repeated request and the first step of what serves it, more of the answer may come."""
    outlet, received, client = begun()
    outlet.expect_follower()
    follow = asyncio.create_task(outlet.follow(client))
    outlet.stream(END, more=False)
    await follow
    await client.drain()
    assert received.body == BEGINNING + END
    head, *pieces = received.messages
    assert head["status"] == 200 and [piece["more_body"] for piece in pieces] == [True, False]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_long_answer_is_kept_only_for_followers(is_lost: bool) -> None:
    """One that has left is none."""
    outlet, _, _ = begun()
    outlet.expect_follower()
    if is_lost:
        outlet.lose_follower()
    outlet.stream(END)
    assert outlet.kept == (None if is_lost else [BEGINNING, END])
    outlet.stream(END)
    assert outlet.kept == (None if is_lost else [BEGINNING, END, END])
