"""What a run did, in order: enough to do the same again on pools of another size.

Everything that a forward computes follows from these operations and the prompts. What is in a schedule does not depend on what was
generated: only prompts enter the prefix cache, and requests end by count. So a run whose keys and values are wrong can be followed as well.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Extend:
    """Waiting requests joined and were prefilled, each from the given number of reused tokens on."""

    requests: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Decode:
    """All running requests, in this order, went on by one token."""

    requests: tuple[str, ...]


@dataclass(frozen=True)
class Evict:
    """``pages`` pages were asked back from the prefix cache, for want of room in ``pool``."""

    pool: str
    pages: int


@dataclass(frozen=True)
class Preempt:
    """A running request lost its pages and waits, first in line."""

    request: str


Operation = Extend | Decode | Evict | Preempt


def counts(schedule: list[Operation]) -> dict[str, int]:
    """How many of each there were, and tokens that were reused."""
    return {
        "forwards": sum(isinstance(each, (Extend, Decode)) for each in schedule),
        "evictions": sum(isinstance(each, Evict) for each in schedule),
        "preemptions": sum(isinstance(each, Preempt) for each in schedule),
        "reused_tokens": sum(
            prefix for each in schedule if isinstance(each, Extend) for _, prefix in each.requests
        ),
    }
