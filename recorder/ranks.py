"""A rank in one word."""

from __future__ import annotations

from typing import Any


def rank_name(rank: dict[str, Any]) -> str:
    """A header's `rank` as it stands in file names and tables: `tp0-pp0-dp0`, what it has of them; empty for none."""
    return "-".join(f"{name}{rank[name]}" for name in ("tp", "pp", "dp") if name in rank)
