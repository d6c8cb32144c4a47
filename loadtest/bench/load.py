"""Agents that send one turn after the other, as fast as they are answered, and check every answer.

    python -m loadtest.bench.load --port 8080 --connections 32 --seconds 3 [--stream] [--body 5500] [--seed 1]

Each connection is an agent with its own trajectory and begins a new one every ten turns; with `--trajectories` the
agents share that many trajectories, none of which ends. Prints one JSON line. Ends with an error at the first answer
that is not the backend's.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
from collections.abc import Callable
from time import perf_counter
from typing import Any, cast

import orjson
import uvloop

from loadtest.bench.check import Checker
from loadtest.bench.requests import bodies, contexts, head

TURNS_PER_TRAJECTORY = 10

# What to send for the next turn of the agent with this number, after this many answers.
NextTurn = Callable[[int, int], list[bytes]]


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


def next_turn(port: int, seed: int, payloads: list[bytes], num_trajectories: int | None) -> NextTurn:
    """Turns of trajectories that are replaced every ten turns, or of a fixed number that go on."""
    # A trajectory must not recur in a later run against the same server, except those that go on.
    run = f"{seed}-{random.SystemRandom().randrange(16**6):06x}"
    lengths = len(payloads)
    turns = itertools.count()

    def fresh(number: int, num_answers: int) -> list[bytes]:
        trajectory = num_answers // TURNS_PER_TRAJECTORY
        payload = payloads[(7 * number + trajectory) % lengths]
        return [head(port, f"{run}-{number}-{trajectory}", len(payload)), payload]

    def kept(_: int, __: int) -> list[bytes]:
        trajectory = next(turns) % cast(int, num_trajectories)
        payload = payloads[trajectory % lengths]
        return [head(port, f"{seed}-kept-{trajectory}", len(payload)), payload]

    return kept if num_trajectories else fresh


async def load(options: argparse.Namespace) -> dict[str, Any]:
    """Ask for this long, or this often; returns the number of answers, their rate, and latencies in microseconds."""
    loop = asyncio.get_running_loop()
    if options.contexts:
        payloads = contexts(options.seed, options.stream, options.body)
    else:
        payloads = bodies(options.seed, options.stream, options.body, not options.no_tools)
    turn = next_turn(options.port, options.seed, payloads, options.trajectories)
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
    latencies = sorted(latency for agent in agents for latency in agent.latencies_s)
    return {
        "num_answers": len(latencies),
        "answers_per_s": len(latencies) / seconds,
        "p50_us": latencies[len(latencies) // 2] * 1e6,
        "p99_us": latencies[len(latencies) * 99 // 100] * 1e6,
    }


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
    parser.add_argument("--trajectories", type=int, help="so many that go on")
    parser.add_argument("--seed", type=int, default=1)
    print(orjson.dumps(uvloop.run(load(parser.parse_args()))).decode())


if __name__ == "__main__":
    main()
