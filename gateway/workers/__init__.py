"""Byte workers: processes that pass streams on, while the gateway's own process decides.

A stream is *lent*: a worker gets the descriptors of both its sockets, the engine's to read and the client's to write.
It passes on plain text only. Anything else (a finish reason, usage, an error, the end, a slow client, a cut) goes
*back* unread, with everything that the gateway must know of what was passed: nothing is decided twice, and a worker
decides nothing. The gateway alone listens, accepts, reads requests and ends answers: one port, one scheduler.
"""
