"""What can go wrong with a parity run for a reason that is not a difference found."""

from __future__ import annotations

from typing import ClassVar

from replayer.errors import ReplayError


class MissingExtra(ReplayError):
    """The model's packages are not installed; the message has the pip command."""

    exit_code: ClassVar[int] = 2


class PoolTooSmall(ReplayError):
    """One request alone does not fit the pools: no eviction and no waiting would ever make room (sgl-project/sglang#35158)."""

    exit_code: ClassVar[int] = 2


class ScheduleMismatch(ReplayError):
    """A recorded schedule could not be carried out as it stands: the engine that follows it would compute something else."""


class ReferenceMoved(ReplayError):
    """Pages moved in the reference run, which is there to show what comes out when none do."""
