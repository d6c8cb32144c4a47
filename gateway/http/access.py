"""Who may do what: agent keys to ask for turns, client keys to use the gateway, the admin key to change its fleet."""

import hmac
from collections.abc import Iterable

from pydantic import SecretStr

from gateway.http.refusals import forbidden, unauthorised

_BEARER = b"bearer "


class Access:
    """Checks keys. They are compared in constant time, and never logged.

    Args:
        api_keys: of clients; without any, nor any of agents, the client API is open.
        agent_keys: of clients that may only ask for turns.
        admin_key: without it, everything that needs it is refused.
    """

    def __init__(
        self, api_keys: Iterable[SecretStr], agent_keys: Iterable[SecretStr], admin_key: SecretStr | None
    ) -> None:
        self._admin_key = admin_key.get_secret_value().encode() if admin_key else None
        clients, agents = _named("key", api_keys), _named("agent", agent_keys)
        self._is_open, self._has_agents = not clients and not agents, bool(agents)
        self._clients = clients if self._admin_key is None else [*clients, ("admin", self._admin_key)]
        self._keys = [*self._clients, *agents]

    def client(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """The name of the client's key, or of its agent's; "" if the gateway is open. Raises Refused (401)."""
        if self._is_open:
            return ""
        has_key = False
        for name, value in headers:
            given = _key_in(name, value)
            if not given:
                continue
            has_key = True
            for known, key in self._keys:
                if hmac.compare_digest(given, key):
                    return known
        if has_key:
            raise unauthorised("The API key is not valid.")
        raise unauthorised("No API key: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")

    def beyond_turns(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises Refused (403) if what the client sent are only keys of agents."""
        if self._has_agents and not any(
            hmac.compare_digest(_key_in(name, value), key) for name, value in headers for _, key in self._clients
        ):
            raise forbidden("This needs a client key (api_keys) or the admin key; an agent key only asks for turns.")

    def admin(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises Refused (401, 403) unless the admin key was sent."""
        if self._admin_key is None:
            raise forbidden("This needs the admin key, and the gateway was started without one (HEDDLE_ADMIN_KEY).")
        keys = [key for name, value in headers if (key := _key_in(name, value))]
        if not keys:
            raise unauthorised("No admin key: send 'Authorization: Bearer ADMIN_KEY'.")
        if not any(hmac.compare_digest(key, self._admin_key) for key in keys):
            raise forbidden("This needs the admin key.")


def _named(kind: str, keys: Iterable[SecretStr]) -> list[tuple[str, bytes]]:
    return [(f"{kind}-{number}", key.get_secret_value().encode()) for number, key in enumerate(keys)]


def _key_in(name: bytes, value: bytes) -> bytes:
    """The key that a header bears; b"" if none. Clients may send both headers, with a key of another service in one."""
    if name == b"authorization" and value[:7].lower() == _BEARER:
        return value[7:].strip()
    if name == b"x-api-key":
        return value.strip()
    return b""
