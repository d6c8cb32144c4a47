"""The OpenAI-compatible gateway: the process that agents point their `base_url` at."""
