"""The files of one recorded run side by side: which process recorded what, how each file ends, and what they add up to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from .ranks import rank_name
from .trace import TraceError, TraceReader

_PID_IN_NAME: Final = re.compile(r"\.(\d+)\.msgpack\.zst(\.partial)?$")
TOTALS: Final = ("events", "states", "dropped", "request_ids", "bytes")


def run_of(path: Path) -> str:
    """The run that the trace at `path` belongs to; empty when it names none or its header cannot be read."""
    try:
        with TraceReader(path) as reader:
            return _text(reader.header.extra.get("run"))
    except TraceError:
        return ""


def file_row(report: dict[str, Any]) -> dict[str, Any]:
    """What a run says about one of its files, from that file's own report (`summary_to_map`)."""
    extra = report["extra"]
    path = Path(report["file"])
    named = _PID_IN_NAME.search(path.name)
    pid = extra.get("pid")
    if type(pid) is not int:
        pid = int(named[1]) if named else None
    return {
        "file": report["file"],
        "rank": rank_name(report["rank"]),
        "pid": pid,
        "engine": f"{report['engine']} {report['engine_version']}".strip(),
        "pools": [pool["name"] for pool in report["pools"]],
        **{name: report[name] for name in TOTALS},
        "span_us": report["span_us"],
        "ended": report["ended"],
        "reason": report["reason"],
        "error": "",
    }


def unreadable_row(path: Path, problem: TraceError) -> dict[str, Any]:
    """The row of a file that cannot be read: its name, and why."""
    named = _PID_IN_NAME.search(path.name)
    return {
        "file": str(path),
        "rank": "",
        "pid": int(named[1]) if named else None,
        "engine": "",
        "pools": [],
        **dict.fromkeys(TOTALS, 0),
        "span_us": None,
        "ended": "",
        "reason": "",
        "error": str(problem),
    }


def run_report(run: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A run: its files' rows, and the totals over them."""
    return {
        "run": run,
        "files": rows,
        "total": {"files": len(rows), **{name: sum(row[name] for row in rows) for name in TOTALS}},
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
