"""Everything except the hot routes, in FastAPI."""
