"""What the parts of the check find: verdicts, rows for the tables, what time was left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Verdict:
    """One check. ``held`` None: not measured, and ``found`` says why."""

    what: str
    held: bool | None
    found: str
    wanted: str = ""

    @property
    def word(self) -> str:
        return {True: "held", False: "FAILED", None: NOT_MEASURED}[self.held]


@dataclass
class Results:
    """Everything found so far.

    Attributes:
        deadline: of the running part, by `time.monotonic`; ``granted`` seconds after the beginning.
        skipped: what there was no time for, by name.
    """

    seconds: float
    verdicts: list[Verdict] = field(default_factory=list)
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    deadline: float = 0.0
    granted: float = 0.0

    def begin_part(self, share: float) -> None:
        """A part begins; it may take its share of all the time, and what parts before it have left over."""
        self.granted = min(self.seconds, self.granted + share * self.seconds)
        self.deadline = self.began + self.granted

    def has_time(self, what: str, needed: float = 0.0) -> bool:
        """Whether the running part may go on for ``needed`` seconds; if not, ``what`` is noted as skipped."""
        if time.monotonic() + needed <= self.deadline:
            return True
        self.skipped.append(what)
        return False

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def add(self, what: str, held: bool | None, found: str, wanted: str = "") -> None:
        self.verdicts.append(Verdict(what, held, found, wanted))

    def row(self, part: str, **cells: Any) -> None:
        self.rows.setdefault(part, []).append(cells)

    @property
    def exit_status(self) -> int:
        """0 if every check held that could be made on this device, 1 if one failed, 3 if none failed and some had to be left out."""
        if any(verdict.held is False for verdict in self.verdicts):
            return 1
        return 3 if self.skipped else 0


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Plain text, columns as wide as they need."""
    widths = [max(len(row[index]) for row in [headings, *rows]) for index in range(len(headings))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [headings, *rows]
    ]


def rows_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A part's rows; the keys are the headings."""
    headings = list(dict.fromkeys(key for row in rows for key in row))
    return table(headings, [[_text(row.get(key)) for key in headings] for row in rows])


def _text(value: Any) -> str:
    if value is None:
        return NOT_MEASURED
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
