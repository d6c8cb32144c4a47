"""Reads what clients and engines say: whose a request is, and what an answer holds."""
