"""Which URL opens which store, and how other URLs are refused."""

import subprocess
import sys

import pytest

from store import BadStoreUrl, StoreError, StoreSettings, open_store


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("memory:", "MemoryStore"),
        ("sqlite:heddle.sqlite3", "EmbeddedStore"),
        ("sqlite:///var/lib/heddle.sqlite3", "EmbeddedStore"),
        ("redis://localhost", "RedisStore"),
        ("redis://user:secret@localhost:6379/3", "RedisStore"),
        ("rediss://localhost:6380/0", "RedisStore"),
        (f"rediss://localhost:6380/0?ssl_ca_certs={__file__}&ssl_cert_reqs=required", "RedisStore"),
    ],
)
def test_each_form_of_url_opens_its_store(url: str, name: str) -> None:
    """One setting chooses the store."""
    assert type(open_store(url)).__name__ == name


@pytest.mark.parametrize(
    "url",
    [
        *("", "heddle.sqlite3", "sqlite:", "sqlite:/", "memory:x", "postgres://localhost/db", "http://u:secret@h"),
        *("redis:", "redis:///0", "redis://localhost:port", "redis://localhost/name", "redis://u:secret@h:99999/0"),
        *("redis://h/0?password=secret", "redis://h/0?decode_responses=true", "redis://h:port/0?password=secret"),
        *("redis://h/0?db", "redis://h/0#1", "rediss://h/0?ssl_colour=blue"),
    ],
)
def test_any_other_url_is_one_clear_error(url: str) -> None:
    """The message lists the forms that exist, and repeats no password."""
    with pytest.raises(BadStoreUrl, match="is not one of: sqlite:PATH") as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


def test_a_wrong_tls_option_is_one_clear_error() -> None:
    """Otherwise the error appears only when the client connects, and looks like a Redis that is away."""
    with pytest.raises(StoreError, match="Redis URL for h:6380/0: Invalid SSL"):
        open_store("rediss://u:secret@h:6380/0?ssl_cert_reqs=perhaps")


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"])
def test_a_tls_file_that_is_not_there_is_one_clear_error(option: str) -> None:
    """Otherwise the start waits for a Redis that is away, and names neither the option nor the file."""
    with pytest.raises(StoreError, match=f"Redis URL for h:6380/0: {option}: there is no /nowhere/ca.pem"):
        open_store(f"rediss://u:secret@h:6380/0?{option}=/nowhere/ca.pem")


def test_a_limit_of_zero_is_refused() -> None:
    """Every limit is positive: a store that may keep nothing is a mistake."""
    with pytest.raises(AssertionError, match="max_turns_kept"):
        StoreSettings(max_turns_kept=0)


@pytest.mark.parametrize(("url", "is_imported"), [("sqlite:heddle.sqlite3", False), ("redis://localhost", True)])
def test_the_client_of_redis_is_imported_only_for_redis(url: str, is_imported: bool) -> None:
    """It takes a quarter of the time in which the gateway is imported."""
    program = f"import sys, gateway.app; gateway.app.open_store({url!r}); print('redis' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
    assert printed == f"{is_imported}\n"
