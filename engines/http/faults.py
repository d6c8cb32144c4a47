"""What a request may raise, by whose fault it is. Foreign exceptions end here: nobody else sees a socket's errors."""


class EngineUnreachable(Exception):
    """No connection: refused, unknown host or timed out. Nothing was sent; safe to repeat."""


class NoMoreConnections(Exception):
    """This process may open no more connections: no fault of the engine, and nothing was sent; safe to repeat later."""


class ConnectionBroken(Exception):
    """The connection ended inside a response."""


class BadResponse(Exception):
    """What came is not HTTP, or not what was asked for."""


class AnswerTooLarge(Exception):
    """The body is larger than its reader allows. The request asked for it, so the engine is not at fault."""


class ResponseTimeout(Exception):
    """The engine was silent for longer than the timeout."""


CONNECTION_FAULTS = (EngineUnreachable, ConnectionBroken, BadResponse)
"""What says that a server is not well."""

FAULTS = (*CONNECTION_FAULTS, ResponseTimeout, AnswerTooLarge, NoMoreConnections)
"""All that a request may raise."""
