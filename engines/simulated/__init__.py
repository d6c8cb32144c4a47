"""A model server without a model: the timing, KV cache and protocol of vLLM or SGLang, at any speed."""
