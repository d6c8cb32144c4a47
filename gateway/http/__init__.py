"""A client and the way of its answer: bytes, errors, refusals."""
