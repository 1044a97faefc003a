"""A hierarchical KV cache for JAX LLM serving, written as a pure state machine."""
