"""Random programs of allocator calls, run on several allocators at once and then replayed with every check.

`shapes` says which pools a program has, `sides` is one set of allocators, `program` makes each call on all of them and writes the trace,
`machine` chooses the calls (Hypothesis), `session` runs programs until the time is over and keeps what was found.
"""
