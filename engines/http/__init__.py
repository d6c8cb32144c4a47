"""The one HTTP client of this project: pooled keep-alive connections to one engine, over httptools.

An asyncio.Protocol that hands bytes to its reader as they come, because the HTTP client is most of a Python gateway's
cost per request. From the bottom up:

- `faults.py`: what a request may raise, and whose fault that is;
- `response.py`: an answer, awaited or called back, as its bytes come;
- `connection.py`: a socket's bytes, parsed into the response that they belong to;
- `addresses.py`: where the engine's host is;
- `pool.py`: the connections to one engine, idle for less than its keep-alive;
- `client.py`: requests, sent once more if a reused connection had been closed;
- `kept.py`, `tape.py`: a connection whose response outlives the process.

A caller that needs no coroutine sends with `post_now` and is called back (`Response.watch`).
"""

from engines.http.client import Body, HttpClient, can_be_asked
from engines.http.faults import (
    CONNECTION_FAULTS,
    FAULTS,
    AnswerTooLarge,
    BadResponse,
    ConnectionBroken,
    EngineUnreachable,
    NoMoreConnections,
    NothingListens,
    ResponseTimeout,
)
from engines.http.pool import HttpLimits
from engines.http.response import Response

__all__ = [
    "CONNECTION_FAULTS",
    "FAULTS",
    "AnswerTooLarge",
    "BadResponse",
    "Body",
    "ConnectionBroken",
    "EngineUnreachable",
    "HttpClient",
    "HttpLimits",
    "NoMoreConnections",
    "NothingListens",
    "Response",
    "ResponseTimeout",
    "can_be_asked",
]
