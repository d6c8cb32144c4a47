"""The type of a table of routes."""

from collections.abc import Awaitable, Callable

from engines.simulated.exchange import Exchange

Handler = Callable[[Exchange], Awaitable[None]]
Routes = dict[tuple[str, str], Handler]
"""By method and path."""
