"""Who may do what: client keys to use the gateway, the admin key to change its fleet."""

import hmac
from collections.abc import Iterable

from pydantic import SecretStr

from gateway.http.refusals import forbidden, unauthorised

_BEARER = b"bearer "


class Access:
    """Checks keys. They are compared in constant time, and never logged.

    Args:
        api_keys: of clients; without any, the client API is open.
        admin_key: without it, everything that needs it is refused.
    """

    def __init__(self, api_keys: Iterable[SecretStr], admin_key: SecretStr | None) -> None:
        self._api_keys = [key.get_secret_value().encode() for key in api_keys]
        self._admin_key = admin_key.get_secret_value().encode() if admin_key else None

    def client(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """The name of the client's key; "" if the gateway is open. Raises Refused (401)."""
        if not self._api_keys:
            return ""
        given = _given(headers)
        if given is None:
            raise unauthorised("No API key: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")
        for number, key in enumerate(self._api_keys):
            if hmac.compare_digest(given, key):
                return f"key-{number}"
        if self._admin_key is not None and hmac.compare_digest(given, self._admin_key):
            return "admin"
        raise unauthorised("The API key is not valid.")

    def admin(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises Refused (401, 403) unless the admin key was sent."""
        if self._admin_key is None:
            raise forbidden("This needs the admin key, and the gateway was started without one (HEDDLE_ADMIN_KEY).")
        given = _given(headers)
        if given is None:
            raise unauthorised("No admin key: send 'Authorization: Bearer ADMIN_KEY'.")
        if not hmac.compare_digest(given, self._admin_key):
            raise forbidden("This needs the admin key.")


def _given(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == _BEARER:
            return value[7:].strip()
        if name == b"x-api-key":
            return value.strip()
    return None
