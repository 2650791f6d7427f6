"""Failures that the replayer expects, each with the exit code that ``replayer.main`` ends with.

The trace format has its own (``recorder.trace.errors``), and so has the allocator; an exception class with an
integer class attribute ``exit_code`` is reported as one plain line, whichever package it comes from.
"""

from __future__ import annotations

from typing import ClassVar


class ReplayError(Exception):
    """A replay that could not go on for a reason on our side; the message says what, where and what to do."""

    exit_code: ClassVar[int] = 70


class UsageError(ReplayError):
    """Arguments that argparse accepts one by one and make no sense together, or name what is not there."""

    exit_code: ClassVar[int] = 2
