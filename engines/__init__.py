"""A model server seen from outside: how to talk to vLLM and SGLang, and a simulated server of both dialects."""
