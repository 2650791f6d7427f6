"""Allocators with one fault each. The checks of a replay are measured on them: `python -m tests.mutants` prints which check sees which."""
