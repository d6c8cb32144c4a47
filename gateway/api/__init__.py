"""Everything beside the hot routes, in FastAPI."""
