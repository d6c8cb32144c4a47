"""What a gateway that has stopped had learned."""

from store import open_store


async def learned_by(store_url: str) -> bytes:
    """Its predictor's dump."""
    store = open_store(store_url)
    await store.open()
    learned = await store.get_state("predictor")
    await store.close()
    assert learned is not None
    return learned
