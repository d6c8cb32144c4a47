"""The OpenAI-compatible front door: the process that agents point their `base_url` at."""
