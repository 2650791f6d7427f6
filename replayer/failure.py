"""A check that did not hold, and what each check is about."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

CHECKS: dict[str, str] = {
    "C1": "bijection: tables are each other's inverse, page 0 maps to 0, sentinels hold -1",
    "C2": "partition: every page of a band is live, hole or pending, and only one of them",
    "C3": "free lists: no duplicate, no -1, nothing reserved, nothing past the end",
    "C4": "counters: span = live + holes + pending, counted from the tables",
    "C5": "frontier: no live page beyond it, bands do not overlap in bytes",
    "C6": "content: every live token's KV bytes are its own",
    "C7": "write hazard: no page an unfinished forward writes is moved or filled",
    "C8": "read hazard: a page an unfinished reader holds keeps its bytes",
    "C9": "gate: nothing moves while a gate is shut or a lease runs",
    "C10": "capacity: available_size() equals a fresh recomputation, alloc keeps its word",
    "C11": "synchronisation budget: a flush within --max-syncs, whatever it moves",
    "C12": "progress: with holes, no gate and no hazard a flush packs; all freed leaves span 0",
    "C13": "ownership: each free names a live owner once, in the right id space",
    "C14": "log-probability: equal to an uncompacted reference, difference 0.0",
    "C15": "recorded state: results and digests equal the engine's",
    "CALL": "a valid call was refused or crashed",
}


@dataclass
class CheckFailure(Exception):
    """The first thing that was wrong. ``pages`` are virtual pages of ``pool``; seq and call are filled in by the driver."""

    check: str
    message: str
    pool: str = ""
    pages: list[int] = field(default_factory=list)
    expected: str = ""
    found: str = ""
    seq: int = -1
    call: str = ""

    exit_code: ClassVar[int] = 1

    def __str__(self) -> str:
        return f"{self.check} failed at event {self.seq} ({self.call}): {self.message}"
