"""Agents that send one turn after the other, as fast as they are answered, and check every answer.

    python -m loadtest.bench.load --port 8080 --connections 32 --seconds 3 [--stream] [--body 5500] [--seed 1]

Each connection is an agent with its own trajectory and begins a new one every ten turns; with `--trajectories` the
agents share that many trajectories, none of which ends: each has its own if there are as many. Prints one JSON line.
Ends with an error at the first answer that is not the backend's.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, cast

import orjson
import uvloop

from loadtest.bench.check import Checker
from loadtest.bench.requests import Body, bodies, contexts, head, in_turn
from loadtest.results import percentile

TURNS_PER_TRAJECTORY = 10

# The request of each turn of a conversation.
Conversation = Callable[[int], Body]
# What to send for the next turn of the agent with this number, after this many answers.
NextTurn = Callable[[int, int], list[bytes | memoryview]]


class Clock:
    """When to stop: at an instant, or after this many answers of all agents."""

    def __init__(self, num_answers: int) -> None:
        self.until = 0.0
        self._left = num_answers

    def goes_on(self) -> bool:
        """Whether another turn may begin."""
        self._left -= 1
        return self._left >= 0 and perf_counter() < self.until


class Agent(asyncio.Protocol):
    """One connection; `done` is set after its last answer."""

    def __init__(self, number: int, next_turn: NextTurn, checker: Checker, stream: bool, clock: Clock) -> None:
        self.latencies_s: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._number = number
        self._next_turn = next_turn
        self._checker = checker
        self._stream = stream
        self._clock = clock
        self._pieces: list[bytes] = []
        self._size = self._wanted = 0
        self._asked_at = 0.0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or EOFError("the server closed the connection"))

    def go_on(self) -> None:
        """Ask the next turn, or stop."""
        if self._clock.goes_on():
            turn = self._next_turn(self._number, len(self.latencies_s))
            self._pieces, self._size, self._wanted = [], 0, 0
            self._asked_at = perf_counter()
            self._transport.writelines(turn)
        else:
            self.done.set_result(None)
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        self._size += len(data)
        if self._stream:
            if not data.endswith(b"0\r\n\r\n"):
                return
        elif not self._is_whole():
            return
        self.latencies_s.append(perf_counter() - self._asked_at)
        try:
            self._checker.check(b"".join(self._pieces))
        except ValueError as error:
            self.done.set_exception(error)
            self._transport.close()
            return
        self.go_on()

    def _is_whole(self) -> bool:
        if not self._wanted:
            start = b"".join(self._pieces)
            head_end = start.find(b"\r\n\r\n")
            if head_end < 0:
                return False
            length = start[:head_end].lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            self._wanted = head_end + 4 + int(length or 0)
        return self._size >= self._wanted


def next_turn(options: argparse.Namespace, conversations: list[Conversation]) -> NextTurn:
    """Turns of trajectories that are replaced every ten turns, or of a fixed number that go on."""
    # A trajectory must not recur in a later run against the same server, except those that go on.
    run = f"{options.seed}-{random.SystemRandom().randrange(16**6):06x}"
    turns = itertools.count()

    def asked(name: str, conversation: Conversation, turn: int) -> list[bytes | memoryview]:
        body = conversation(turn)
        return [head(options.port, None if options.no_ids else name, sum(map(len, body))), *body]

    def fresh(number: int, num_answers: int) -> list[bytes | memoryview]:
        trajectory, turn = divmod(num_answers, TURNS_PER_TRAJECTORY)
        conversation = conversations[(7 * number + trajectory) % len(conversations)]
        return asked(f"{run}-{number}-{trajectory}", conversation, turn)

    def kept(number: int, num_answers: int) -> list[bytes | memoryview]:
        turn, trajectory = num_answers, number
        if options.trajectories != options.connections:
            turn, trajectory = divmod(next(turns), options.trajectories)
        return asked(f"{options.seed}-kept-{trajectory}", conversations[trajectory % len(conversations)], turn)

    return kept if options.trajectories else fresh


async def load(options: argparse.Namespace) -> dict[str, Any]:
    """Ask for this long, or this often; returns the number of answers, their rate, and latencies in microseconds."""
    loop = asyncio.get_running_loop()
    conversations: list[Conversation]
    if options.contexts:
        growing = contexts(options.seed, options.stream, options.body, options.connections)
        conversations = [partial(_in_turn_of, requests) for requests in growing]
    else:
        payloads = bodies(options.seed, options.stream, options.body, not options.no_tools)
        conversations = [partial(in_turn, payload) for payload in payloads]
    turn = next_turn(options, conversations)
    checker, clock = Checker(options.stream), Clock(options.answers)
    agents = []
    for number in range(options.connections):
        _, agent = await loop.create_connection(
            lambda number=number: Agent(number, turn, checker, options.stream, clock),  # type: ignore[misc]
            "127.0.0.1",
            options.port,
        )
        agents.append(agent)
    began_at = perf_counter()
    clock.until = began_at + options.seconds
    for agent in agents:
        agent.go_on()
    await asyncio.gather(*(agent.done for agent in agents))
    seconds = perf_counter() - began_at
    latencies = [latency for agent in agents for latency in agent.latencies_s]
    return {
        "num_answers": len(latencies),
        "answers_per_s": len(latencies) / seconds,
        "p50_us": percentile(latencies, 50) * 1e6,
        "p99_us": percentile(latencies, 99) * 1e6,
    }


def _in_turn_of(requests: list[Body], turn: int) -> Body:
    """A conversation begins again after its last request."""
    return requests[turn % len(requests)]


def main() -> None:
    """Run it as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=3.0, help="after which no turn begins")
    parser.add_argument("--answers", type=int, default=10**9, help="after which no turn begins")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--body", type=int, default=5_500, metavar="BYTES", help="size of a request")
    parser.add_argument("--contexts", action="store_true", help="requests are contexts of coding agents")
    parser.add_argument("--no-tools", action="store_true", help="requests without tools")
    parser.add_argument("--no-ids", action="store_true", help="requests do not name their trajectory")
    parser.add_argument("--trajectories", type=int, help="so many that go on")
    parser.add_argument("--seed", type=int, default=1)
    print(orjson.dumps(uvloop.run(load(parser.parse_args()))).decode())


if __name__ == "__main__":
    main()
