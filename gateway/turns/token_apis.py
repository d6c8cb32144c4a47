"""Which APIs an engine serves at token level, and why the others pass through: by route, for people to read."""

from engines.dialect import Dialect
from gateway.http.errors import Api


def token_apis(dialect: Dialect | None, routes: dict[str, Api], is_on: bool) -> tuple[list[str], dict[str, str]]:
    """The turn routes that are served at token level, and the reason for each other route.

    Args:
        dialect: None for an engine that has not been seen yet.
        routes: those of all turns, with their APIs; routes whose clients send tokens themselves are left out.
        is_on: the setting enables token legs.
    """
    routes = {path: api for path, api in routes.items() if api != "generate"}
    if not is_on:
        return [], dict.fromkeys(routes, "the setting token_legs is off")
    if dialect is None:
        return [], dict.fromkeys(routes, "it was not seen yet")
    if dialect.tokens is None:
        return [], dict.fromkeys(routes, dialect.tokens_note)
    passed = {path: why for path, api in routes.items() if (why := dialect.tokens.passed.get(api))}
    return [path for path in routes if path not in passed], passed
