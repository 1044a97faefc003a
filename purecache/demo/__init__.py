"""A small serving engine that runs a real language model on top of the cache. Everything here is optional."""
