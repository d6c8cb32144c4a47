"""What a gateway keeps of what it learned."""

from gateway.config import load_settings
from gateway.memory import restored
from predictor.progress import Progress
from store import StoreSettings, open_store


async def test_what_was_learned_is_written_once() -> None:
    """It can be megabytes, and a gateway may be idle for days."""
    store = open_store("memory:", StoreSettings())
    memory = await restored(load_settings(), store, lambda: 0.0)
    learned = memory.save_predictor()
    assert await store.get_state("predictor") == learned
    store.put_state("predictor", b"")
    assert memory.save_predictor(learned) == learned
    assert await store.get_state("predictor") == b""
    memory.predictor.ended(Progress("t", "g", output_tokens=100))
    assert memory.save_predictor(learned) == await store.get_state("predictor") != learned
