"""A client's request and the path of its answer: bytes, errors, refusals."""
