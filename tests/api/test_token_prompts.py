"""A trajectory's later prompts: its own earlier tokens, as they were made, and what is new after them."""

from typing import Any

from tests.api.conftest import MODEL, Site, running_site

MESSAGE = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}


def generated(site: Site) -> list[dict[str, Any]]:
    """What the engine was sent to generate from."""
    return [asked.json for asked in site.engine.turns if asked.path == "/inference/v1/generate"]


async def tokens_of(site: Site, trajectory_id: str) -> list[dict[str, Any]]:
    answer = await site.client.get(f"/v1/trajectories/{trajectory_id}/tokens")
    assert answer.status_code == 200, answer.text
    turns: list[dict[str, Any]] = answer.json()["turns"]
    return turns


async def test_the_next_prompt_begins_with_the_tokens_that_were_made() -> None:
    """Though a template renders a tool call otherwise than the model wrote it; a changed history begins a branch."""
    async with running_site(token_legs="auto") as site:
        headers = {"x-trajectory-id": "spliced"}
        messages: list[dict[str, Any]] = [{"role": "user", "content": "look around"}]
        for number in range(4):
            fields: dict[str, Any] = {"tools": [TOOL], "max_tokens": 200, "headers": headers}
            answer = await site.chat(messages=messages, **fields, tool_choice="required" if number == 1 else "auto")
            assert answer.status_code == 200, answer.text
            message = answer.json()["choices"][0]["message"]
            messages.append({name: message[name] for name in ("role", "content", "tool_calls") if message.get(name)})
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = " " + call["function"]["arguments"]  # as some frameworks spell it
            role = "tool" if message.get("tool_calls") else "user"
            messages.append({"role": role, "content": f"result {number}", "tool_call_id": "1"})
        turns = await tokens_of(site, "spliced")
        prompts = [asked["token_ids"] for asked in generated(site)]
        assert [turn["parent"] for turn in turns] == [None, *(turn["turn_id"] for turn in turns[:-1])]
        whole: list[int] = []
        for turn, prompt in zip(turns, prompts, strict=True):
            whole += turn["prompt_ids"]  # what is new in it
            assert prompt == whole
            whole += turn["output_ids"]
        changed = [{"role": "user", "content": "look elsewhere"}, *messages[1:]]
        assert (await site.chat(messages=changed, **fields)).status_code == 200
        assert (await tokens_of(site, "spliced"))[-1]["parent"] is None


async def test_who_wants_no_tokens_kept_has_none() -> None:
    """`Prefer: tokens=none`, for a turn."""
    async with running_site(token_legs="auto") as site:
        headers = {"x-trajectory-id": "private", "prefer": "tokens=none"}
        assert (await site.chat(headers=headers)).status_code == 200
        assert generated(site)
        answer = await site.client.get("/v1/trajectories/private/tokens")
        assert answer.status_code == 404 or not answer.json()["turns"]


async def test_an_engine_says_which_requests_pass_through() -> None:
    """In `GET /v1/engines`, with the reason."""
    async with running_site(token_legs="auto") as site:
        assert (await site.client.post("/v1/messages", json=MESSAGE)).status_code == 200
        assert not generated(site)
        [engine] = (await site.client.get("/v1/engines")).json()["data"]
    assert engine["token_legs"] is True and "/v1/messages" in engine["token_legs_note"]


async def test_requests_that_token_routes_cannot_serve_pass_through() -> None:
    """Fields whose effect is not in a token answer."""
    async with running_site(token_legs="auto") as site:
        for fields in ({"best_of": 1}, {"return_token_ids": True}, {"tools": [TOOL], "stop": ["x"]}):
            answer = await site.chat(**fields)
            assert answer.status_code == 200 and answer.json()["model"] == MODEL
        assert not generated(site)
