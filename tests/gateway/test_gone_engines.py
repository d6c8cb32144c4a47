"""What is known of engines that left does not grow forever: a controller launches new ones at new addresses."""

import orjson

from engines.http import HttpLimits
from gateway.engine_settings import EngineSettings
from gateway.fleet.known_processes import KnownProcesses
from gateway.fleet.server import Server
from store import StoreSettings, open_store


async def test_addresses_of_engines_that_left_long_ago_are_forgotten() -> None:
    """Current engines stay known, and an engine at a recently used address gets an id that was not used there."""
    store = open_store("memory:", StoreSettings())
    processes = KnownProcesses(store)
    first = engine_at(0)
    processes.note(first)
    for number in range(1, 3_000):
        member = engine_at(number)
        processes.note(member)
        processes.left(member)
    stored = orjson.loads(await store.get_state("fleet") or b"")
    assert len(stored) < 1_500
    assert processes.at(first.settings.url)["generation"] == 1
    assert processes.at(engine_at(2_999).settings.url)["generation"] == 2


def test_an_engine_that_nobody_told_of_after_a_restart_keeps_its_id() -> None:
    """It is not waited for again. If its process is told of later, its trajectories are still at home there."""
    processes = KnownProcesses(open_store("memory:", StoreSettings()))
    engines = [engine_at(number) for number in range(2)]
    for engine in engines:
        processes.note(engine)
    urls = [engine.settings.url for engine in engines]
    assert processes.present() == set(urls)
    processes.only({urls[0]})
    assert processes.present() == {urls[0]}
    assert processes.at(urls[1])["generation"] == 1
    processes.note(engines[1])
    assert processes.present() == set(urls)


def engine_at(number: int) -> Server:
    """An engine at an address of its own."""
    url = f"http://10.0.{number // 250}.{number % 250}:8000"
    return Server(EngineSettings(url=url), HttpLimits(), None, "run")
