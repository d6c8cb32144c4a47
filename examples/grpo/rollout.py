"""Plays rollouts: agents that know only an OpenAI client, and a verifier that scores what they wrote.

The task is one that the smallest model learns in a few steps: write lower-case letters. An agent's tool counts them
between its turns.
"""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import httpx
from openai import AsyncOpenAI

LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to play in each step.

    Args:
        num_groups: tasks of a step.
        group_size: siblings: agents that work on the same task.
        num_turns: turns of an agent.
        max_tokens: tokens of a turn, at most.
        seed: of the first agent's turns, and one more for each further agent; None leaves it to the engines.
    """

    num_groups: int = 4
    group_size: int = 6
    num_turns: int = 3
    max_tokens: int = 24
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Played:
    """One agent's trajectory, as the agent saw it."""

    trajectory_id: str
    answers: list[str]
    completion_tokens: int
    reward: float


async def play(gateway: str, api_key: str, plan: Plan, rollout_id: str, step: int) -> list[Played]:
    """Play all agents of a step, post their rewards, and finish their trajectories."""
    async with _http(gateway, api_key) as http, _openai(gateway, api_key) as client:
        model = (await client.models.list()).data[0].id

        async def one(group: int, sibling: int) -> Played:
            played = await _trajectory(client, gateway, model, plan, rollout_id, step, group, sibling)
            path = f"/v1/trajectories/{played.trajectory_id}"
            (await http.post(f"{path}/reward", json={"reward": played.reward})).raise_for_status()
            (await http.post(f"{path}/finish")).raise_for_status()
            return played

        agents = [one(group, sibling) for group in range(plan.num_groups) for sibling in range(plan.group_size)]
        return list(await asyncio.gather(*agents))


async def export(gateway: str, api_key: str, rollout_id: str) -> list[dict[str, Any]]:
    """The records of a rollout, one for each branch of each trajectory."""
    async with _http(gateway, api_key) as http:
        answer = await http.post(f"/v1/rollouts/{rollout_id}/export", params={"format": "jsonl"})
        answer.raise_for_status()
        return [json.loads(line) for line in answer.text.splitlines()]


async def _trajectory(
    client: AsyncOpenAI, gateway: str, model: str, plan: Plan, rollout_id: str, step: int, group: int, sibling: int
) -> Played:
    task, trajectory_id = step * plan.num_groups + group, f"{rollout_id}-{group}-{sibling}"
    client = client.with_options(
        base_url=f"{gateway}/t/{trajectory_id}/v1",
        default_headers={"X-Rollout-Id": rollout_id, "X-Group-Id": f"{rollout_id}-{group}"},
    )
    number = task * plan.group_size + sibling
    messages: list[Any] = [{"role": "user", "content": f"Task {task}: write letters."}]
    answers, completion_tokens = list[str](), 0
    for _ in range(plan.num_turns):
        answer = await client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=plan.max_tokens,
            temperature=1.0,  # the recorded log-probabilities are those of temperature 1: see docs/training.md
            seed=None if plan.seed is None else plan.seed + number,
        )
        text = answer.choices[0].message.content or ""
        answers.append(text)
        completion_tokens += answer.usage.completion_tokens if answer.usage else 0
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": _count_letters(text)}]
    return Played(trajectory_id, answers, completion_tokens, _reward(answers))


def _openai(gateway: str, api_key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{gateway}/v1", api_key=api_key, timeout=14_400)  # by default, turns fail after 600 s


def _http(gateway: str, api_key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=gateway, headers={"authorization": f"Bearer {api_key}"}, timeout=600)


def _count_letters(text: str) -> str:
    """The agent's tool."""
    return f"{sum(character in LETTERS for character in text)} letters of {len(text)} characters. Go on."


def _reward(answers: list[str]) -> float:
    """The share of lower-case letters among all characters."""
    text = "".join(answers)
    return sum(character in LETTERS for character in text) / max(len(text), 1)
