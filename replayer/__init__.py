"""Runs a recorded KV-cache allocator trace against an allocator, checks what it does and reports."""

from __future__ import annotations

__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    """Read the version from the installed distribution when it is asked for, not at import.

    ``importlib.metadata`` costs more than the rest of ``kvtape --help`` together, and hardly anybody asks.
    """
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kvtape")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0+unknown"
