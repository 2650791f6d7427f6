"""The checks: what must hold after every call, cheaply where something changed and completely in sweeps."""

from replayer.checks.options import CheckOptions
from replayer.checks.suite import Checks

__all__ = ["CheckOptions", "Checks"]
