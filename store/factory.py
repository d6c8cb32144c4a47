"""The store that a URL names: the only place where stores are chosen.

Redis's client is imported only for a store that needs it: it takes a quarter of the time in which the gateway is
imported.
"""

from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from store.embedded import EmbeddedStore
from store.memory import MemoryStore
from store.port import BadStoreUrl, Store
from store.settings import StoreSettings
from store.stream import Stream

FORMS = "sqlite:PATH, memory:, redis://[user:password@]host[:port][/db] or rediss://...[?ssl_ca_certs=FILE&...]"

REDIS = ("redis", "rediss")

# Other options of the client library would allow another client, or a password where nobody looks for one.
TLS_OPTIONS = frozenset(
    {"ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"}
)


def open_store(url: str, settings: StoreSettings | None = None) -> Store:
    """The store that the URL names, not opened yet.

    Args:
        url: `sqlite:PATH`, `memory:`, `redis://host:port/db` or `rediss://...`, which may have TLS_OPTIONS.

    Raises:
        BadStoreUrl: the URL has none of these forms. The message contains no password.
    """
    settings = settings or StoreSettings()
    scheme, _, rest = url.partition(":")
    match scheme:
        case "memory" if not rest:
            return MemoryStore(settings)
        case "sqlite" if rest.strip("/") and not rest.endswith("/"):
            return EmbeddedStore(Path(rest.removeprefix("//")), settings)
        case _ if scheme in REDIS and _names_a_server(url):
            from store.redis import RedisStore

            return RedisStore(url, settings)
        case _:
            raise BadStoreUrl(f"store URL {_without_secrets(url)!r} is not one of: {FORMS}")


def open_stream(url: str, name: str, settings: StoreSettings | None = None) -> Stream | None:
    """The stream of that name on the server that the store URL names. None: the store has none, because it belongs to a
    single process, which can be asked directly.

    Raises:
        BadStoreUrl: see `open_store`.
    """
    settings = settings or StoreSettings()
    open_store(url, settings)  # a URL of no form is refused
    if url.partition(":")[0] not in REDIS:
        return None
    from store.redis_stream import RedisStream

    return RedisStream(url, name, settings)


def _names_a_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        database = parts.path.strip("/")
        options = {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)}
        is_plain = options <= TLS_OPTIONS and not parts.fragment
        return bool(parts.hostname) and parts.port != 0 and (not database or database.isdecimal()) and is_plain
    except ValueError:
        return False


def _without_secrets(url: str) -> str:
    head, at, tail = url.rpartition("@")
    place = tail.partition("?")[0]
    return f"{head.partition(':')[0]}://...@{place}" if at else place
