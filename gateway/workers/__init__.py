"""Byte workers: processes that pass streams on, while the gateway's own process decides.

A stream is *lent*: a worker gets the descriptors of both its sockets, the engine's to read and the client's to write.
It passes on what says nothing but text. Anything else (a finish reason, usage, an error, the end, a slow client, a cut)
goes *back* unread, with all that the gateway has to know of what was passed: nothing is decided twice, and a worker has
no opinion. Who listens, accepts, reads requests and ends answers is the gateway alone: one port, one scheduler.
"""
