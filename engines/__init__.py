"""One model server seen from outside: how vLLM and SGLang are spoken to, and a simulated server of both dialects."""
