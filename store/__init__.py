"""Records that outlive a process: one port, with an embedded store and Redis behind it."""

from store.factory import open_store, open_stream
from store.port import (
    BadStoreUrl,
    Store,
    StoreAway,
    StoreCorrupt,
    StoredTrajectory,
    StoreError,
    StoreFenced,
    StoreHealth,
    StoreInUse,
)
from store.settings import StoreSettings
from store.stream import DEMAND, Entry, Stream

__all__ = [
    "DEMAND",
    "BadStoreUrl",
    "Entry",
    "Store",
    "StoreAway",
    "StoreCorrupt",
    "StoreError",
    "StoreFenced",
    "StoreHealth",
    "StoreInUse",
    "StoreSettings",
    "StoredTrajectory",
    "Stream",
    "open_store",
    "open_stream",
]
