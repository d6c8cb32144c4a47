"""Trains a model with GRPO on rollouts through a gateway.

Run: python -m examples.grpo.train http://127.0.0.1:8080 CHECKPOINT OUT --steps 20
"""

import argparse
import asyncio
import json
import os
import secrets
from dataclasses import asdict
from pathlib import Path

import httpx

from examples.grpo.learner import Learner
from examples.grpo.rollout import Plan, Played, export, play


async def train(
    gateway: str, admin_key: str, learner: Learner, plan: Plan, out: Path, num_steps: int, is_asynchronous: bool
) -> None:
    """Play, learn, give the fleet the new weights, and again.

    The gateway remembers rollouts and versions, so their names are of this run only.

    Args:
        out: gets the checkpoint, the records and what agents saw of each step.
        is_asynchronous: the next rollout begins while the trainer learns from the last one, and its turns run through
            the update: their first tokens are one step off-policy.
    """
    run = secrets.token_hex(4)
    version = await _give_weights(gateway, admin_key, learner, out, f"{run}-0")
    playing = _begin(gateway, admin_key, plan, run, 0)
    for step in range(num_steps):
        played = await playing
        records = await export(gateway, admin_key, f"{run}-{step}")
        if is_asynchronous and step + 1 < num_steps:
            playing = _begin(gateway, admin_key, plan, run, step + 1)
        report = await asyncio.to_thread(learner.update, records, version)
        version = await _give_weights(gateway, admin_key, learner, out, f"{run}-{step + 1}")
        if not is_asynchronous and step + 1 < num_steps:
            playing = _begin(gateway, admin_key, plan, run, step + 1)
        shown = {"step": step, **asdict(report)}
        print(json.dumps(shown), flush=True)
        seen = {"report": shown, "records": records, "played": [asdict(one) for one in played]}
        (out / f"rollout-{step}.json").write_text(json.dumps(seen))


def _begin(gateway: str, api_key: str, plan: Plan, run: str, step: int) -> "asyncio.Task[list[Played]]":
    return asyncio.create_task(play(gateway, api_key, plan, f"{run}-{step}", step))


async def _give_weights(gateway: str, admin_key: str, learner: Learner, out: Path, version: str) -> str:
    """Save the weights, give them to all engines, and return their version."""
    path = await asyncio.to_thread(learner.save, out / version)
    order = {"version": version, "path": str(path.absolute()), "mode": "restart"}
    async with httpx.AsyncClient(timeout=3600) as http:
        headers = {"authorization": f"Bearer {admin_key}"}
        answer = await http.post(f"{gateway}/v1/weights", json=order, headers=headers)
    if answer.is_error or answer.json()["status"] != "done":
        raise RuntimeError(f"not all engines took {version}: {answer.text}")
    return version


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gateway", help="its URL; it runs with token_legs=auto")
    parser.add_argument("checkpoint", type=Path, help="the model that the engines were started with")
    parser.add_argument("out", type=Path, help="folder for checkpoints and rollouts, which the engines can read")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--max-tokens", type=int, default=24, help="of a turn")
    parser.add_argument("--seed", type=int, help="of the agents' samples (default: the engines')")
    parser.add_argument("--asynchronous", action="store_true", help="play the next rollout while learning")
    args = parser.parse_args()
    if not (admin_key := os.environ.get("HEDDLE_ADMIN_KEY", "")):
        parser.error("HEDDLE_ADMIN_KEY is not set; it must be the gateway's")
    args.out.mkdir(parents=True, exist_ok=True)
    learner, plan = Learner(args.checkpoint, args.learning_rate), Plan(max_tokens=args.max_tokens, seed=args.seed)
    asyncio.run(train(args.gateway, admin_key, learner, plan, args.out, args.steps, args.asynchronous))


if __name__ == "__main__":
    main()
