"""`kvtape parity`: a real language model generates while its KV pages move under it, and must say what it says when nothing moves.

A small serving engine: continuous batching (`scheduler`), prefix reuse with LRU eviction (`prefix_cache`), preemption, and keys and values
in the project's own pools (`pools`), written and read by the model's attention through `virtual_to_physical` (`attention`).
"""
