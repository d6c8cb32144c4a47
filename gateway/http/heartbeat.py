"""Keeps a stream open before it begins: proxies cut streams that are silent for a minute."""

import asyncio

from gateway.http.outlet import Outlet


class Heartbeat:
    """Sends comments into a stream until its answer begins."""

    def __init__(self, outlet: Outlet, interval_s: float) -> None:
        self._outlet = outlet
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._beat)

    def stop(self) -> None:
        """Send no more of them."""
        self._timer.cancel()

    def _beat(self) -> None:
        if not self._outlet.has_begun:
            self._outlet.heartbeat()
            self._task = asyncio.create_task(self._outlet.drain()) if self._outlet.is_full else None
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._beat)
