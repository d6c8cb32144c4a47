"""A model server without a model: the timing, the KV cache and the protocol of vLLM or SGLang, at any speed."""
