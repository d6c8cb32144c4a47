"""Requests to a gateway before simulated engines that can get new weights, and the text that given weights generate."""

import itertools
from collections.abc import Sequence
from typing import Any

import httpx

from engines.simulated.answers import Wish, answer
from engines.simulated.settings import Fault, SimulatedEngineSettings
from engines.simulated.text import Tokenizer
from tests.support.gateway import ADMIN

TOKENIZER = Tokenizer()
MEAN_TOKENS = SimulatedEngineSettings().mean_output_tokens


def engine(kind: str, *faults: Fault, **settings: Any) -> SimulatedEngineSettings:
    """A fast engine of this kind."""
    return SimulatedEngineSettings(dialect=kind, faults=faults, **{"speed_up": 50.0} | settings)  # type: ignore[arg-type]


def body_of(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy completion of this many tokens."""
    return {"model": "simulated", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True} | more


async def complete(client: httpx.AsyncClient, trajectory: str, prompt: str, tokens: int, **more: Any) -> str:
    """The text of one turn, which must finish."""
    response = await client.post(f"/t/{trajectory}/v1/completions", json=body_of(prompt, tokens, **more))
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


async def update(client: httpx.AsyncClient, version: str, **order: Any) -> httpx.Response:
    """POST /v1/weights. The last part of the path names the weights to a simulated engine."""
    source = {} if "transfer" in order else {"path": f"/weights/{version}"}
    return await client.post("/v1/weights", json={"version": version, **source, **order}, headers=ADMIN)


async def engines(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """The list of GET /v1/engines."""
    listed: list[dict[str, Any]] = (await client.get("/v1/engines")).json()["data"]
    return listed


async def last_turn(client: httpx.AsyncClient, trajectory: str) -> dict[str, Any]:
    """The last row of a trajectory's history."""
    row: dict[str, Any] = (await client.get(f"/v1/trajectories/{trajectory}")).json()["turns"][-1]
    return row


def is_generated_by(weights: Sequence[str], prompt: str, text: str) -> bool:
    """Whether this text can be one generation in which each token comes from one of these weights, in this order."""
    ids, made = TOKENIZER.encode(text), 0
    for name in weights:
        wish = Wish(max_tokens=max(len(ids) - made, 1), ignore_eos=True)
        rest = answer([*TOKENIZER.encode(prompt), *ids[:made]], wish, TOKENIZER, name, MEAN_TOKENS).token_ids
        made += sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(rest, ids[made:], strict=False))
        )
    return made == len(ids)
