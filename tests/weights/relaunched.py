"""A simulated engine at a fixed address, which tests stop and start again."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings


class Server:
    """The server; `url` does not change."""

    def __init__(self) -> None:
        self.url = ""
        self._stack = AsyncExitStack()

    async def start(self, settings: SimulatedEngineSettings) -> None:
        """Start it, at the same address as before."""
        port = int(self.url.rpartition(":")[2]) if self.url else 0
        self.url = await self._stack.enter_async_context(serve_engine(settings, port=port))

    async def end(self) -> None:
        """Stop it, as if its process died."""
        await self._stack.aclose()


@asynccontextmanager
async def server(settings: SimulatedEngineSettings) -> AsyncIterator[Server]:
    """A started server."""
    one = Server()
    await one.start(settings)
    try:
        yield one
    finally:
        await one.end()
