"""What happened in public reports about KV allocators, as small traces: a correct allocator passes, and does what the report asks for."""
