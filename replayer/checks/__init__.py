"""The checks: what must hold after every call, cheaply where something changed and completely in sweeps."""

from replayer.checks.suite import CheckOptions, Checks

__all__ = ["CheckOptions", "Checks"]
