"""Small helpers that read a simulated engine's answers."""

import asyncio
import json
from typing import Any

import httpx2

CHAT = {"messages": [{"role": "user", "content": "Tell me about looms."}]}


def events(text: str) -> list[Any]:
    """The JSON of each server-sent event; `[DONE]` as that text."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


async def metric(client: httpx2.AsyncClient, name: str) -> float:
    """The value of the first sample of that name."""
    text = (await client.get("/metrics")).text
    return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))


async def until_metric(client: httpx2.AsyncClient, name: str, value: float) -> None:
    """Returns once the metric has the value; asks again as fast as the engine answers."""
    async with asyncio.timeout(60):
        while await metric(client, name) != value:
            pass
