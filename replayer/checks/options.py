"""Which checks run, and how often."""

from __future__ import annotations

from dataclasses import dataclass, field

from replayer.failure import CHECKS

#: Recorded states whose digests are compared, one in so many; the figures are compared in all.
DIGEST_EVERY = 4
SWEEP_EVERY = 4096
#: Table rows and tokens a sweep may look at for each event where the chain is checked after every one, on average: small pools are swept
#: after every event, large ones as often as this affords. What a sweep finds late is narrowed to its event.
SWEEP_WORK = 1 << 15


@dataclass
class CheckOptions:
    """``every``: events between checks of the whole chain; 0 means after each flush. ``sweep_every``: events between sweeps; by default
    what `SWEEP_WORK` affords where the chain is checked after every event, else `SWEEP_EVERY`. ``first``: no check before this event."""

    enabled: frozenset[str] = field(default_factory=lambda: frozenset(CHECKS))
    every: int = 0
    sweep_every: int | None = None
    max_syncs: int | None = None
    logprob_every: int = 64
    first: int = 0
