"""Imports of allocator call logs in JSON lines: one module per engine's form. See docs/import-format.md."""
