"""How simulated vLLM servers hand KV to each other, like `NixlConnector` with `kv_both` (vLLM 0.33, nixl/).

A request with `do_remote_decode` leaves its prompt's KV pinned for a lease, and its answer tells how to fetch it. A
request with `do_remote_prefill` fetches it before it is queued, over HTTP between the two servers instead of NIXL. KV
that cannot be fetched is computed, because the real server is started with `kv_load_failure_policy: recompute`.
"""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from engines.http import FAULTS, HttpClient
from engines.simulated.exchange import ApiError, Exchange
from engines.simulated.live import LiveEngine, blocks_of
from engines.simulated.prefix_cache import Piece
from engines.simulated.running import Asked, Running

FETCH = "/simulate/kv"
_FETCH_TIMEOUT_S = 10.0
# 40K tokens of a 14B model over 100 Gbit/s take 0.5 s.
_FETCH_S_PER_TOKEN = 1.2e-5


@dataclass(frozen=True, slots=True)
class _Offer:
    pieces: tuple[Piece, ...]
    num_tokens: int
    lease: asyncio.TimerHandle


class KvTransfer:
    """One server's offers, and its fetches from others.

    Args:
        lease_s: virtual seconds for which an offer stands.
    """

    def __init__(self, live: LiveEngine, speed_up: float, lease_s: float) -> None:
        self._live = live
        self._speed_up = speed_up
        self._lease_s = lease_s
        self._engine_id = os.urandom(8).hex()
        self._offers: dict[str, _Offer] = {}

    async def fetched(self, asked: Asked) -> bool:
        """Fetch the KV to which a request refers, if it is still there. Returns whether it is here now."""
        params = asked.kv_transfer or {}
        if not params.get("do_remote_prefill"):
            return False
        peer = HttpClient(f"http://{params.get('remote_host')}:{params.get('remote_port')}")
        try:
            target = f"{FETCH}/{quote(str(params.get('remote_request_id')), safe='')}"
            status, _ = await peer.post(target, b"", _FETCH_TIMEOUT_S)
        except FAULTS:
            return False
        finally:
            peer.close()
        if status != 200:
            return False
        prompt = asked.prompts[0]
        await asyncio.sleep(len(prompt) * _FETCH_S_PER_TOKEN / self._speed_up)
        return self._live.adopt(blocks_of(prompt, self._live.block_size, asked.cache_salt))

    def report(self, running: Running, is_fetched: bool) -> None:
        """The answer to a fetch reports all of its prompt as cached, or what the offering server had, if its offer says
        how much.
        """
        if is_fetched:
            running.generations[0].cached_tokens = running.generations[0].prompt_tokens
        told = (running.asked.kv_transfer or {}).get("remote_prefill_cached_tokens")
        if told is not None:
            running.generations[0].cached_tokens = told

    def offered(self, running: Running, exchange: Exchange) -> Mapping[str, Any] | None:
        """What a request's answer tells about its KV; None if the request did not ask."""
        asked = running.asked
        if not (asked.kv_transfer or {}).get("do_remote_decode"):
            return None
        prompt = asked.prompts[0]
        pieces = tuple(blocks_of(prompt, self._live.block_size, asked.cache_salt))
        if not self._live.keep(pieces):
            return None
        lease = asyncio.get_running_loop().call_later(self._lease_s / self._speed_up, self._free, asked.id)
        self._offers[asked.id] = _Offer(pieces, len(prompt), lease)
        host, _, port = (exchange.header(b"host") or "").rpartition(":")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(len(pieces)))],
            "remote_engine_id": self._engine_id,
            "remote_request_id": asked.id,
            "remote_host": host,
            "remote_port": int(port) if port.isdecimal() else 0,
            "tp_size": 1,
            "remote_num_tokens": len(prompt),
            "remote_prefill_cached_tokens": running.generations[0].cached_tokens,
            "transfer_mode": "pull",
        }

    async def fetch(self, exchange: Exchange) -> None:
        """The route by which another server fetches; the blocks are free afterwards."""
        offer = self._free(exchange.path.rpartition("/")[2])
        if offer is None:
            raise ApiError(404, "no such offer, or its lease is over")
        await exchange.respond_json({"num_tokens": offer.num_tokens})

    def _free(self, request_id: str) -> _Offer | None:
        offer = self._offers.pop(request_id, None)
        if offer is not None:
            offer.lease.cancel()
            self._live.let_go(offer.pieces)
        return offer
