"""Pools of the scenes."""

from __future__ import annotations

from tests.scenario import PoolShape

PAGED = (PoolShape("full", "down", page_size=4), PoolShape("swa", "up", page_size=4, layer_num=2))
SHARED = (PoolShape("full", "down"), PoolShape("swa", "up", layer_num=2, owner="full"))
EAGER = (PoolShape("full", "down", lazy=False), PoolShape("swa", "up", layer_num=2, lazy=False))
ALONE = (PoolShape("full", "down"),)
FLOATING = (
    PoolShape("full", "down"),
    PoolShape("mid", "float", layer_num=2),
    PoolShape("mamba", "up", kind="mamba", layer_num=2),
)
PAGED_FLOATING = (
    PoolShape("full", "down", page_size=4),
    PoolShape("mid", "float", page_size=4, layer_num=2),
    PoolShape("mamba", "up", kind="mamba", layer_num=2),
)
