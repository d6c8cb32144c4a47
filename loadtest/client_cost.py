"""CPU time of a turn in the client, by client and form of answer, all in one run.

    python -m loadtest.client_cost --base-url http://127.0.0.1:9000/v1 [--turns 100] [--tokens 200]

The server must be another process. Only this process's CPU time is counted, so the server's speed does not matter.
Answers of `--tokens` tokens are streams of that many chunks if the server sends each token separately.
"""

from __future__ import annotations

import argparse
import time

import uvloop

from loadtest.replayer import ReplaySettings, replay
from workloads.trajectories import Trajectory, Turn, Workload


async def measure(base_url: str, num_turns: int, num_tokens: int) -> None:
    """Print milliseconds of CPU time per turn for each client, streamed and whole."""
    for client in ("sdk", "raw"):
        for stream_share in (1.0, 0.0):
            workload = Workload("cost", (Trajectory("cost", "cost", 1_000, (Turn(0, num_tokens, 0.0),)),) * num_turns)
            settings = ReplaySettings(
                base_url,
                client=client,
                stream_share=stream_share,
                concurrency=8,
                finish=False,
            )
            # The first run pays for imports and caches.
            await replay(workload, settings, queued_source=None)
            began_s = time.process_time()
            result = await replay(workload, settings, queued_source=None)
            cost_ms = (time.process_time() - began_s) * 1_000 / num_turns
            assert not result.errors, result.errors[0]
            assert result.output_tokens == num_turns * num_tokens, "not every turn was played"
            way = f"stream of {num_tokens} tokens" if stream_share else f"{num_tokens} tokens whole"
            print(f"{client}, {way}: {cost_ms:.2f} ms of CPU a turn, {num_turns / result.makespan_s:.0f} turns/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=200)
    arguments = parser.parse_args()
    uvloop.run(measure(arguments.base_url, arguments.turns, arguments.tokens))
