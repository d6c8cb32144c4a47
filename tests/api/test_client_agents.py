"""An agent framework (openai-agents) of which only the base_url is set."""

import pytest

from tests.api.conftest import MODEL, Site

pytestmark = pytest.mark.usefixtures("token_legs")


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_an_agent_runs_its_tool_loop(site: Site, api: str, streamed: bool) -> None:
    """Turn, tool, turn, ...: all turns are in one trajectory, in order, each prompt longer than the one before."""
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        RunConfig,
        Runner,
        function_tool,
    )
    from openai import AsyncOpenAI

    model_class = OpenAIChatCompletionsModel if api == "chat" else OpenAIResponsesModel
    called: list[str] = []

    @function_tool
    def look_up(word: str) -> str:
        """What a word means."""
        called.append(word)
        return "It has many meanings."

    async with AsyncOpenAI(base_url=f"{site.url}/t/agent-1/v1", api_key="none") as client:
        agent = Agent(
            name="looker",
            instructions="Look words up.",
            tools=[look_up],
            model=model_class(MODEL, client),
            model_settings=ModelSettings(tool_choice="required", max_tokens=80),
            reset_tool_choice=True,
        )
        config = RunConfig(tracing_disabled=True)
        if streamed:
            running = Runner.run_streamed(agent, "What is a heddle?", run_config=config)
            async for _ in running.stream_events():
                pass
            output = running.final_output
        else:
            output = (await Runner.run(agent, "What is a heddle?", run_config=config)).final_output
    shown = await site.trajectory("agent-1")
    assert output
    assert called
    assert shown["num_turns"] == len(called) + 1 == len(site.engine.turns)
    prompts = [turn["prompt_tokens"] for turn in shown["turns"]]
    assert prompts == sorted(set(prompts))
    assert {turn["outcome"] for turn in shown["turns"]} == {"finished"}
    (listed,) = (await site.client.get("/v1/trajectories")).json()["data"]
    assert listed["id"] == "agent-1"
