"""Records allocator calls of a serving engine, and reads and writes the trace files that hold them."""
