"""Triton kernels for the ``device`` strategy on CUDA: `plan` finds which page moves where in an urgent flush and `part_plan` in any other,
`move` moves bytes and tables, and `flush` is what an allocator uses. Only `allocator.flush_ops.flush_ops_class` imports them, when it has
chosen them; nothing else needs triton.
"""
