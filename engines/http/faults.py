"""What a request may raise, and whose fault it is. Foreign exceptions end here: no caller sees a socket's errors."""


class EngineUnreachable(Exception):
    """No connection: refused, unknown host or timed out. Nothing was sent; safe to repeat."""


class NothingListens(EngineUnreachable):
    """The connection was refused, so no server is there."""


class NoMoreConnections(Exception):
    """This process may open no more connections. Not the engine's fault, and nothing was sent; safe to repeat later."""


class ConnectionBroken(Exception):
    """The connection ended inside a response."""


class StaleConnection(ConnectionBroken):
    """A reused connection ended before a byte of the answer, at once: it had been closed or given up (408) before the
    request arrived. Nothing was served; safe to repeat on a new connection.
    """


class BadResponse(Exception):
    """The answer is not HTTP, or not what was asked for."""


class AnswerTooLarge(Exception):
    """The body is larger than its reader allows. The request asked for it, so the engine is not at fault."""


class ResponseTimeout(Exception):
    """The engine was silent for longer than the timeout."""


CONNECTION_FAULTS = (EngineUnreachable, ConnectionBroken, BadResponse)
"""The faults that show that a server is not well."""

FAULTS = (*CONNECTION_FAULTS, ResponseTimeout, AnswerTooLarge, NoMoreConnections)
"""Everything that a request may raise."""
