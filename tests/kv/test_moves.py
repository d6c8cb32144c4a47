"""A trajectory's KV follows it to another engine. KV that cannot be moved is computed again, and no turn is
affected."""

import asyncio
from typing import Any

import httpx
import pytest

from engines.kv import LEASE_S
from engines.simulated.settings import Fault, SimulatedEngineSettings
from tests.kv.kv_fleet import TASK, Fleet, engine, first_messages, running_fleet, undisturbed_answers
from tests.support.gateway import ADMIN, eventually

TOKEN_LEGS = pytest.mark.parametrize("token_legs", ["off", "auto"])


@TOKEN_LEGS
async def test_the_new_home_fetches_the_kv_in_a_tool_call(token_legs: str) -> None:
    """Before the next turn arrives, at least 90 % of its context is there, and the answers stay the same."""
    expected = await undisturbed_answers(3)
    async with running_fleet(engine(), engine(), token_legs=token_legs) as fleet:
        messages = first_messages()
        answers = [await fleet.turn("t", messages) for _ in range(2)]
        home = (await fleet.last("t"))["engine"]
        evacuated = await fleet.act(home, "evacuate")
        assert evacuated["is_evacuated"] and await fleet.moves() == {"fetched": 1}
        answers.append(await fleet.turn("t", messages))
        assert (await fleet.last("t"))["engine"] != home
        assert await fleet.cached_share("t") >= 0.9
        assert await fleet.moves() == {"fetched": 1}, "the turn found all that it needs"
        assert all(one["kv_offered_tokens"] == 0 for one in (await fleet.engines()).values())
    assert answers == expected


@TOKEN_LEGS
async def test_kv_is_fetched_before_a_turn_that_arrives_first(token_legs: str) -> None:
    """Its home gets no more turns, and there was no time to move it in the tool call."""
    expected = await undisturbed_answers(3)
    async with running_fleet(engine(), engine(), token_legs=token_legs) as fleet:
        messages = first_messages()
        answers = [await fleet.turn("t", messages) for _ in range(2)]
        home = (await fleet.last("t"))["engine"]
        await fleet.act(home, "cordon")
        answers.append(await fleet.turn("t", messages))
        assert await fleet.cached_share("t") >= 0.9 and await fleet.moves() == {"fetched": 1}
    assert answers == expected


async def test_a_turn_drained_in_mid_generation_moves_with_its_kv() -> None:
    """The other engine gets the prompt and the answer so far, except for the last block."""
    async with running_fleet(engine(), engine(), token_legs="auto") as undisturbed:
        expected = await undisturbed.turn("t", first_messages(), tokens=400)
    async with running_fleet(engine(speed_up=2.0), engine(speed_up=2.0), token_legs="auto") as fleet:
        running = asyncio.create_task(fleet.turn("t", first_messages(), tokens=400))

        async def has_made_some() -> bool:
            return max([await fleet.generated_tokens(url) for url in fleet.urls]) > 0

        await eventually(has_made_some, 60)
        home = next(id for id, one in (await fleet.engines()).items() if one["num_legs"])
        while not (await fleet.act(home, "drain", timeout_s=60))["is_drained"]:
            pass
        assert await running == expected
        row = await fleet.last("t")
        assert row["engine"] != home and row["legs"] == 2
        assert await fleet.moves() == {"fetched": 1}


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(engine(max_model_len=200), id="too small"),
        pytest.param(engine(Fault("html", path="/v1/completions/render")), id="no token routes"),
    ],
)
async def test_a_turn_that_no_other_engine_can_continue_ends_on_a_drained_one(other: SimulatedEngineSettings) -> None:
    """It was paused. An engine that is too small for it refused it, and one without token routes began it again."""
    async with running_fleet(engine(speed_up=2.0), other, token_legs="auto") as fleet:
        home, other_id = (url.removeprefix("http://") for url in fleet.urls)
        await fleet.act(other_id, "cordon")
        running = asyncio.create_task(fleet.turn("t", first_messages(), tokens=400))

        async def has_made_some() -> bool:
            return await fleet.generated_tokens(fleet.urls[0]) > 0

        await eventually(has_made_some, 60)
        await fleet.act(other_id, "uncordon")
        assert (await fleet.act(home, "drain"))["is_drained"]
        await running
        row = await fleet.last("t")
        assert (row["engine"], row["legs"]) == (home, 1)


@pytest.mark.parametrize("how", ["uncordoned", "added"])
async def test_a_turn_on_a_drained_engine_moves_when_another_one_comes(how: str) -> None:
    """At the drain none could take it: it would run for minutes on the slow engine."""
    messages = [{"role": "user", "content": "Weave on."}]
    async with running_fleet(engine(), token_legs="auto") as undisturbed:
        expected = await undisturbed.turn("t", list(messages), tokens=400)
    async with running_fleet(engine(speed_up=0.001), engine(), token_legs="auto") as fleet:
        slow, fast = (url.removeprefix("http://") for url in fleet.urls)
        await fleet.act(fast, "cordon")
        running = asyncio.create_task(fleet.turn("t", list(messages), tokens=400))

        async def has_begun() -> bool:
            return bool((await fleet.engines())[slow]["num_legs"])

        await eventually(has_begun, 60)
        if how == "added":
            (await fleet.client.delete(f"/v1/engines/{fast}", headers=ADMIN)).raise_for_status()
        assert not (await fleet.act(slow, "drain", timeout_s=0))["is_drained"] and not running.done()
        if how == "added":
            (await fleet.client.post("/v1/engines", json={"url": fleet.urls[1]}, headers=ADMIN)).raise_for_status()
        else:
            await fleet.act(fast, "uncordon")
        assert await running == expected
        row = await fleet.last("t")
        assert row["engine"].startswith(fast) and row["legs"] == 2


@pytest.mark.parametrize("fault", ["refuse", "reset", "hang"])
async def test_kv_that_cannot_be_fetched_is_prefilled_in_the_tool_call(fault: Any) -> None:
    """The transfer fails at once or times out: it is counted, and the next turn still finds its context."""
    broken = Fault(fault, path="/simulate/kv")
    engines = [engine(broken, kv_lease_s=1e6) for _ in range(2)]
    timeout_s = 3.0 if fault == "hang" else 25.0  # the offer must come within it
    async with running_fleet(*engines, kv_move_timeout_s=timeout_s) as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        home = (await fleet.last("t"))["engine"]
        await fleet.act(home, "evacuate")
        assert (await fleet.engines())[home]["kv_offered_tokens"] > 500, "its lease has not expired"

        async def counts_as_used() -> bool:
            one = (await fleet.engines())[home]
            whole = engine().profile.kv_capacity_tokens
            return bool(one["kv_capacity_tokens"] == whole - one["kv_offered_tokens"])

        await eventually(counts_as_used, 60)
        await fleet.turn("t", messages)
        assert await fleet.moves() == {"failed": 1, "prefilled": 1} and await fleet.cached_share("t") >= 0.85


@pytest.mark.parametrize("fault", ["refuse", "hang"])
async def test_an_offer_that_was_not_fetched_is_released(fault: Any) -> None:
    """A move that failed or timed out leaves nothing pinned at the old home, long before the lease expires."""
    once = Fault(fault, path="/simulate/kv", count=1)
    engines = [engine(once, kv_lease_s=1e6) for _ in range(2)]
    async with running_fleet(*engines, kv_move_timeout_s=2.0) as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        home = (await fleet.last("t"))["engine"]
        await fleet.act(home, "evacuate")
        assert await fleet.moves() == {"failed": 1, "prefilled": 1}
        await eventually(lambda: is_kv_free(fleet, home), LEASE_S - 5)
        await fleet.turn("t", messages)
        assert await fleet.cached_share("t") >= 0.85


@pytest.mark.parametrize("fault", ["refuse", "reset"])
async def test_an_offer_that_cannot_be_given_back_counts_until_its_lease_is_over(fault: Any) -> None:
    """The new home computes what it cannot fetch, also the token with which the offer is given back."""
    engines = [engine(Fault(fault, path="/simulate/kv"), kv_lease_s=1e6) for _ in range(2)]
    async with running_fleet(*engines) as fleet:
        home, target = (url.removeprefix("http://") for url in fleet.urls)
        await fleet.begin_at_first()
        await fleet.act(target, "uncordon")
        await fleet.act(home, "evacuate")

        async def has_ended() -> bool:  # the fetch, the prefill and the giving back were a token each
            made = await fleet.generated_tokens(fleet.urls[1])
            return made == 3 and not (await fleet.engines())[target]["num_legs"]

        await eventually(has_ended)
        assert (await fleet.engines())[home]["kv_offered_tokens"] > 500


async def test_kv_that_the_old_home_evicted_and_computes_for_the_offer_is_fetched() -> None:
    """In the answer to the fetch, vLLM reports what the old home had cached, which is nothing."""
    async with running_fleet(engine(), engine()) as fleet:
        home, target = (url.removeprefix("http://") for url in fleet.urls)
        messages = await fleet.begin_at_first()
        await fleet.client.post(f"{fleet.urls[0]}/reset_prefix_cache")
        await fleet.act(target, "uncordon")
        await fleet.act(home, "evacuate")
        assert await fleet.moves() == {"fetched": 1}
        await fleet.turn("t", messages)
        assert (await fleet.last("t"))["kv_by"] == "fetched" and await fleet.cached_share("t") >= 0.85


async def test_kv_whose_lease_has_expired_is_computed_again() -> None:
    """The blocks are free again at the old home, and the fetch counts as failed."""
    async with running_fleet(engine(kv_lease_s=0.0), engine(kv_lease_s=0.0)) as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        home = (await fleet.last("t"))["engine"]
        await fleet.act(home, "cordon")
        await fleet.turn("t", messages)
        assert await fleet.moves() == {"failed": 1}
        await eventually(lambda: is_kv_free(fleet, home), 60)


async def is_kv_free(fleet: Fleet, engine_id: str) -> bool:
    one = (await fleet.engines())[engine_id]
    return one["kv_used_share"] == 0.0 and one["kv_offered_tokens"] == 0


async def test_a_lost_home_costs_a_prefill_but_no_turn() -> None:
    """It is lost in a tool call: nothing can be fetched, and nothing fails."""
    async with running_fleet(engine(), engine(), faults_to_open=1) as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        home = (await fleet.last("t"))["engine"]
        assert (await fleet.client.delete(f"/v1/engines/{home}", headers=ADMIN)).status_code == 200
        await fleet.turn("t", messages)
        assert await fleet.cached_share("t") == 0.0 and await fleet.moves() == {}


@pytest.mark.parametrize("kinds", [(False, False), (True, False), (False, True)])
@TOKEN_LEGS
async def test_without_nixl_the_new_home_prefills_in_the_tool_call(kinds: tuple[bool, bool], token_legs: str) -> None:
    """If one of the two cannot use NIXL, the next turn still finds its context."""
    engines = [engine(kv_transfer=kind) for kind in kinds]
    async with running_fleet(*engines, token_legs=token_legs) as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        home = (await fleet.last("t"))["engine"]
        await fleet.act(home, "evacuate")
        await fleet.turn("t", messages)
        assert await fleet.moves() == {"prefilled": 1} and await fleet.cached_share("t") >= 0.85
        await fleet.act(home, "uncordon")


async def test_sglang_prefills_in_the_tool_call() -> None:
    """It does not hand out KV over NIXL."""
    async with running_fleet(engine(dialect="sglang"), engine(dialect="sglang")) as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        await fleet.act((await fleet.last("t"))["engine"], "evacuate")
        await fleet.turn("t", messages)
        assert await fleet.moves() == {"prefilled": 1} and await fleet.cached_share("t") >= 0.85


async def _message(fleet: Fleet, trajectory: str) -> str:
    """A turn by Anthropic's API with a budget for thoughts; returns its engine."""
    body = {"model": "simulated", "messages": first_messages(), "max_tokens": 4096, "temperature": 0}
    body |= {"thinking": {"type": "enabled", "budget_tokens": 2048}}
    response = await fleet.client.post(f"/t/{trajectory}/v1/messages", json=body)
    assert response.status_code == 200, response.text
    return str((await fleet.last(trajectory))["engine"])


@pytest.mark.parametrize(("kv_transfer", "outcome"), [(True, "fetched"), (False, "prefilled")])
async def test_contexts_of_anthropics_api_move_whatever_the_budget_for_thoughts(
    kv_transfer: bool, outcome: str
) -> None:
    """The budget would be above the limit of a request for one token, which vLLM refuses."""
    async with running_fleet(engine(kv_transfer=kv_transfer), engine(kv_transfer=kv_transfer)) as fleet:
        await fleet.act(await _message(fleet, "t"), "evacuate")
        assert await fleet.moves() == {outcome: 1}


async def test_contexts_of_the_responses_api_are_fetched() -> None:
    """The offer comes in the response, as in a chat's answer."""
    async with running_fleet(engine(), engine()) as fleet:
        body = {"model": "simulated", "input": TASK, "max_output_tokens": 40}
        assert (await fleet.client.post("/t/t/v1/responses", json=body)).status_code == 200
        await fleet.act((await fleet.last("t"))["engine"], "evacuate")
        assert await fleet.moves() == {"fetched": 1}


async def test_an_offer_counts_whole_whichever_api_reports_it() -> None:
    """Anthropic's counts cached tokens apart from the others."""
    broken = Fault("hang", path="/simulate/kv")
    async with running_fleet(engine(broken), engine(broken), kv_move_timeout_s=1.0) as fleet:
        home = await _message(fleet, "t")
        await fleet.act(home, "evacuate")
        assert (await fleet.engines())[home]["kv_offered_tokens"] > 500


async def test_an_engine_wrongly_declared_to_have_nixl_is_asked_only_at_first() -> None:
    """Its first answers show that it cannot offer KV. The trajectories are prefilled."""
    async with running_fleet(engine(kv_transfer=False), engine()) as fleet:
        first, other = (url.removeprefix("http://") for url in fleet.urls)
        await fleet.client.delete(f"/v1/engines/{first}", headers=ADMIN)
        declared = {"url": fleet.urls[0], "kv_transfer": "nixl"}
        assert (await fleet.client.post("/v1/engines", json=declared, headers=ADMIN)).status_code == 201
        first += "~2"
        await eventually(lambda: is_ready(fleet, first), 60)
        await fleet.act(other, "cordon")
        messages = {name: first_messages(name) for name in ("a", "b")}
        for name in messages:
            await fleet.turn(name, messages[name])
            assert (await fleet.last(name))["engine"] == first
        await fleet.act(other, "uncordon")
        await fleet.act(first, "evacuate")
        moves = await fleet.moves()
        assert moves["prefilled"] == 2 and 1 <= moves["failed"] <= 2
        assert not (await fleet.engines())[first]["moves_kv"]


async def is_ready(fleet: Fleet, engine_id: str) -> bool:
    found = (await fleet.engines()).get(engine_id)
    return found is not None and found["state"] == "ready"


async def test_short_contexts_and_ended_trajectories_are_not_moved() -> None:
    """A short context is prefilled just as fast, and nobody continues an ended trajectory."""
    async with running_fleet(engine(), engine(), kv_move_min_tokens=100_000) as fleet:
        messages = first_messages()
        await fleet.turn("short", messages)
        await fleet.act((await fleet.last("short"))["engine"], "evacuate")
        assert await fleet.moves() == {}
    async with running_fleet(engine(), engine()) as fleet:
        await fleet.turn("ended", first_messages())
        home = (await fleet.last("ended"))["engine"]
        await fleet.client.post("/v1/trajectories/ended/finish")
        await fleet.act(home, "evacuate")
        assert await fleet.moves() == {}


async def test_kv_of_other_weights_is_not_fetched() -> None:
    """An engine never gets KV from an engine with other weights."""
    async with running_fleet(engine(), engine(weight_version="other")) as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        home = (await fleet.last("t"))["engine"]
        await fleet.act(home, "cordon")
        await fleet.turn("t", messages)
        assert await fleet.moves() == {} and await fleet.cached_share("t") == 0.0


async def test_kv_of_old_weights_is_not_computed_again_at_the_old_home() -> None:
    """All engines got new weights in the tool call, under which none has the context: the new home computes it."""
    async with running_fleet(engine(), engine()) as fleet:
        home, target = (url.removeprefix("http://") for url in fleet.urls)
        messages = await fleet.begin_at_first()
        weights = {"version": "step-1", "path": "/weights/step-1", "mode": "keep"}
        updated = await fleet.client.post("/v1/weights", json=weights, headers=ADMIN)
        assert updated.json()["status"] == "done", updated.text
        made = await fleet.generated_tokens(fleet.urls[0])
        await fleet.act(target, "uncordon")
        await fleet.act(home, "evacuate")
        assert await fleet.moves() == {"prefilled": 1}
        assert await fleet.generated_tokens(fleet.urls[0]) == made
        await fleet.act(home, "uncordon")
        await fleet.act(target, "evacuate")
        assert await fleet.moves() == {"prefilled": 1, "fetched": 1}, "it has the KV of the new weights"
        await fleet.turn("t", messages)
        assert (await fleet.last("t"))["kv_by"] == "fetched" and await fleet.cached_share("t") >= 0.85


async def test_kv_of_another_model_is_not_fetched() -> None:
    """A trajectory's turns use two models, each on an engine of its own: neither has KV for the other."""
    async with running_fleet(engine(), engine(model="another")) as fleet:
        messages = first_messages()
        for model in ("simulated", "another", "simulated"):
            await fleet.turn("t", messages, model=model)
            assert (await fleet.last("t"))["kv_by"] is None
        assert await fleet.moves() == {}


async def test_one_drain_moves_many_trajectories() -> None:
    """Six are in tool calls at the drain: all KV is fetched, and their next turns find it."""
    async with running_fleet(engine(), engine(), kv_moves_at_once=2) as undisturbed:
        expected = [await undisturbed.turn(f"t{number}", first_messages(f"{number}")) for number in range(6)]
    async with running_fleet(engine(), engine(), kv_moves_at_once=2) as fleet:
        first, second = (url.removeprefix("http://") for url in fleet.urls)
        await fleet.act(second, "cordon")
        conversations = [first_messages(f"{number}") for number in range(6)]
        answers = await asyncio.gather(
            *(fleet.turn(f"t{number}", messages) for number, messages in enumerate(conversations))
        )
        assert answers == expected
        await fleet.act(second, "uncordon")
        drained = await fleet.act(first, "drain")
        assert drained["is_drained"] and drained["is_evacuated"] and await fleet.moves() == {"fetched": 6}
        await asyncio.gather(*(fleet.turn(f"t{number}", messages) for number, messages in enumerate(conversations)))
        for number in range(6):
            assert await fleet.cached_share(f"t{number}") >= 0.9


async def test_evacuate_requires_the_admin_key() -> None:
    """It changes the fleet."""
    async with running_fleet(engine(), engine()) as fleet:
        engine_id = fleet.urls[0].removeprefix("http://")
        answer: httpx.Response = await fleet.client.post(f"/v1/engines/{engine_id}/evacuate")
        assert answer.status_code == 401


async def test_a_turn_whose_context_is_short_fetches_nothing() -> None:
    """It runs on another engine, where prefilling a context below `kv_move_min_tokens` takes no longer."""
    async with running_fleet(engine(), engine(), kv_move_min_tokens=100_000) as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        home = (await fleet.last("t"))["engine"]
        await fleet.act(home, "cordon")
        await fleet.turn("t", messages)
        last = await fleet.last("t")
        assert last["engine"] != home and last["kv_by"] is None and await fleet.moves() == {}
