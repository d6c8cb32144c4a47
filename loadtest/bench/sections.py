"""What is measured: each section loads one server in one way, and defines its table's columns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from loadtest.bench.answers import NUM_CHUNKS
from loadtest.bench.peers import NO_IDS, RUST, STICKY, TOKEN_LEGS_TOOLS
from loadtest.bench.rig import Failed, Rig
from loadtest.bench.tables import Column, Sample, added, cost, plain

CONNECTIONS = 32
BODIES = {"1 KB": 1_000, "5.5 KB": 5_500, "100 KB": 100_000, "1 MB": 1_000_000}
CONTEXTS = {"20 KB": 20_000, "100 KB": 100_000, "400 KB": 400_000, "1 MB": 1_000_000}
LIVE_TRAJECTORIES = 10_000
SLOW_STREAMS = (500, 2_000)
SLOW_INTERVAL_MS = 20
IDLE_STREAMS = 10_000
WARM_UP_S = 0.3
_FIRST_TURNS_S = 120.0  # 10,000 answers of the slowest server take some ten seconds
_SETTLE_S = 0.5  # until a server's work after a burst is done
_SPARE_FILES = 2_000  # in addition to two per stream: nginx drops connections when only a sixteenth is left


@dataclass(frozen=True, slots=True)
class Section:
    """One measurement and its table.

    Args:
        name: as in `--sections`, and in the marks of the file.
        title: of its table.
        about: what is done, in one or two sentences.
        measure: one repeat of one server. Raises Failed, NotStarted.
        repeats: the most repeats, if more would show the same or take too long.
        without: servers that are not measured; `about` says why.
    """

    name: str
    title: str
    about: str
    measure: Callable[[Rig], Sample]
    columns: tuple[Column, ...]
    repeats: int | None = None
    without: tuple[str, ...] = ()


def _answers(rig: Rig) -> Sample:
    return _by_size(rig, BODIES)


def _contexts(rig: Rig) -> Sample:
    return _by_size(rig, CONTEXTS, contexts=True, trajectories=CONNECTIONS)


def _by_size(rig: Rig, sizes: dict[str, int], **options: int | bool) -> Sample:
    sample: Sample = {}
    options["connections"] = CONNECTIONS
    with rig.serving() as served:
        rig.load(served, WARM_UP_S, **options)
        for name, num_bytes in sizes.items():
            sample[name], seen = rig.cpu_per_answer(served, body=num_bytes, **options)
            sample[f"{name} rate"] = seen["answers_per_s"]
    return sample


def _concurrency(rig: Rig) -> Sample:
    sample: Sample = {}
    with rig.serving() as served:
        rig.load(served, WARM_UP_S)
        for connections in (1, 32, 256, 2_000):
            seen = rig.load(served, connections=rig.scaled(connections))
            sample |= {f"{name} {connections}": value for name, value in seen.items()}
    return sample


def _streams(rig: Rig) -> Sample:
    with rig.serving("--interval-ms", "5") as served:
        rig.load(served, WARM_UP_S, connections=CONNECTIONS, stream=True)
        paced_us, _ = rig.cpu_per_answer(served, connections=CONNECTIONS, stream=True)
    with rig.serving() as served:
        rig.load(served, WARM_UP_S, connections=CONNECTIONS, stream=True)
        fast_us, seen = rig.cpu_per_answer(served, connections=CONNECTIONS, stream=True)
    return {
        "paced": paced_us,
        "chunk": paced_us / NUM_CHUNKS,
        "fast": fast_us,
        "rate": seen["answers_per_s"],
        "p50_ms": seen["p50_us"] / 1e3,
        "p99_ms": seen["p99_us"] / 1e3,
    }


def _slow(rig: Rig) -> Sample:
    sample: Sample = {}
    for wanted in SLOW_STREAMS:
        number = rig.scaled(wanted)
        backend = ("--interval-ms", str(SLOW_INTERVAL_MS), "--endless", str(number))
        with rig.serving(*backend) as served, rig.holding(served, number) as client:
            rig.listen(client)
            before_us, own_before_us, began_at = served.cpu_us(), served.own_cpu_us(), time.monotonic()
            seen = rig.listen(client)
            spent_us, seconds = served.cpu_us() - before_us, time.monotonic() - began_at
            own_us = served.own_cpu_us() - own_before_us
        sample |= {
            f"p50 {wanted}": seen["p50_us"] / 1e3,
            f"p99 {wanted}": seen["p99_us"] / 1e3,
            f"share {wanted}": seen["chunks_per_s"] * SLOW_INTERVAL_MS / 1e3 / number * 100,
            f"cpu {wanted}": spent_us / max(1.0, seen["num_chunks"]),
            f"own {wanted}": own_us / max(1.0, seen["num_chunks"]),
            f"busy {wanted}": spent_us / seconds / 1e4,
        }
    return sample


def _memory(rig: Rig) -> Sample:
    number = min(rig.scaled(IDLE_STREAMS), (rig.max_files - _SPARE_FILES) // 2)
    with rig.serving("--endless", str(number)) as served:
        rig.load(served, WARM_UP_S)
        time.sleep(_SETTLE_S)
        before_bytes = served.memory_bytes()
        with rig.holding(served, number):
            time.sleep(_SETTLE_S)
            after_bytes = served.memory_bytes()
    return {
        "streams": number,
        "kb": (after_bytes - before_bytes) / 1e3 / number,
        "before_mb": before_bytes / 1e6,
        "total_mb": after_bytes / 1e6,
    }


def _live(rig: Rig) -> Sample:
    number = rig.scaled(LIVE_TRAJECTORIES)
    with rig.serving() as served:
        rig.load(served, _FIRST_TURNS_S, connections=CONNECTIONS, trajectories=number, answers=number)
        before_us = served.cpu_us()
        seen = rig.load(served, connections=CONNECTIONS, trajectories=number)
        spent_us = served.cpu_us() - before_us
    if not seen["num_answers"]:
        raise Failed("no answer")
    return {"cpu": spent_us / seen["num_answers"], "rate": seen["answers_per_s"], "p99_ms": seen["p99_us"] / 1e3}


_PER_ANSWER = tuple(column for name in BODIES for column in cost(f"{name}, us", name, STICKY))

SECTIONS = (
    Section(
        "answers",
        "CPU per answer, by the size of the request",
        f"{CONNECTIONS} agents; answers are not streamed. x: ratio to {STICKY} in the same repeat.",
        _answers,
        (*_PER_ANSWER, plain("answers/s at 5.5 KB", "5.5 KB rate"), plain("at 1 MB", "1 MB rate")),
        without=(NO_IDS,),
    ),
    Section(
        "contexts",
        "CPU per answer, contexts of coding agents",
        f"{CONNECTIONS} agents, each on a trajectory that has begun before. A request is a context of up to a thousand "
        "tool calls, with files and logs as their results; with each turn it grows by the last answer and its call's "
        f"result, from three quarters to five quarters of the size, then begins again. x: ratio to {STICKY} in the "
        "same repeat. No ids: the gateway must recognise each trajectory by its conversation.",
        _contexts,
        tuple(column for name in CONTEXTS for column in cost(f"{name}, us", name, STICKY)),
    ),
    Section(
        "concurrency",
        "Throughput and added latency",
        "Requests of 5.5 KB, by the number of concurrent agents (c). Added: latency above the backend's own at one "
        "agent, in the same repeat.",
        _concurrency,
        (
            plain("answers/s, c=1", "answers_per_s 1"),
            added("added P50 us, c=1", "p50_us 1"),
            added("added P99 us, c=1", "p99_us 1"),
            *(
                plain(f"{title}, c={number}", f"{key} {number}", scale)
                for number in (32, 256, 2_000)
                for title, key, scale in (("answers/s", "answers_per_s", 1.0), ("P99 ms", "p99_us", 1e-3))
            ),
        ),
        without=(NO_IDS,),
    ),
    Section(
        "streams",
        "CPU per stream",
        f"{CONNECTIONS} agents; streams of {NUM_CHUNKS} chunks, 5 ms apart or back to back. x: ratio to {STICKY}; "
        "x best: ratio to the cheapest router in Rust; both in the same repeat.",
        _streams,
        (
            *cost("5 ms apart: us", "paced", STICKY),
            *cost("us per chunk", "chunk", RUST, "x best"),
            *cost("back to back: us", "fast", STICKY),
            plain("streams/s", "rate"),
            plain("P50 ms", "p50_ms"),
            plain("P99 ms", "p99_ms"),
        ),
        without=(NO_IDS,),
    ),
    Section(
        "slow",
        "Many slow streams",
        f"All streams are open at once; each gets a chunk every {SLOW_INTERVAL_MS} ms. Delay: from the backend's write "
        "to the client's read; backend and client share a core, so compare it with `direct`. Seen: chunks that "
        "arrived, as a share of those due in that time. First process: CPU us per chunk of the server's first "
        "process alone; byte workers are other processes. Busy: share of the server's core. Token legs with tools are "
        "left out, because the backend itself would have to parse 100,000 tokens a second.",
        _slow,
        tuple(
            column
            for number in SLOW_STREAMS
            for column in (
                plain(f"{number:,} open: delay P50 ms", f"p50 {number}", digits=1),
                plain("P99 ms", f"p99 {number}", digits=1),
                plain("seen %", f"share {number}"),
                plain("us per chunk", f"cpu {number}", digits=1),
                plain("first process", f"own {number}", digits=1),
                plain("busy %", f"busy {number}"),
            )
        ),
        repeats=2,
        without=(NO_IDS, TOKEN_LEGS_TOOLS),
    ),
    Section(
        "memory",
        "Memory of idle open streams",
        "Each stream has received one chunk and waits for the next. Resident memory of the process tree, without the "
        "kernel's memory for sockets.",
        _memory,
        (
            plain("streams", "streams"),
            plain("KB per stream", "kb", digits=1),
            plain("MB before", "before_mb"),
            plain("MB with them", "total_mb"),
        ),
        repeats=1,
        without=(NO_IDS, TOKEN_LEGS_TOOLS),
    ),
    Section(
        "live",
        "With 10,000 live trajectories",
        f"{CONNECTIONS} agents send turns of {LIVE_TRAJECTORIES:,} trajectories; each trajectory has had its first "
        f"answer, and none has ended. x: ratio to {STICKY} in the same repeat.",
        _live,
        (*cost("CPU us per answer", "cpu", STICKY), plain("answers/s", "rate"), plain("P99 ms", "p99_ms")),
        repeats=2,
        without=(NO_IDS,),
    ),
)
