"""Records that outlive a process: one port, an embedded store and Redis behind it."""

from store.factory import open_store
from store.port import (
    BadStoreUrl,
    Store,
    StoreAway,
    StoreCorrupt,
    StoredTrajectory,
    StoreError,
    StoreHealth,
    StoreInUse,
)
from store.settings import StoreSettings

__all__ = [
    "BadStoreUrl",
    "Store",
    "StoreAway",
    "StoreCorrupt",
    "StoreError",
    "StoreHealth",
    "StoreInUse",
    "StoreSettings",
    "StoredTrajectory",
    "open_store",
]
