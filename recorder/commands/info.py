"""`kvtape info`: what a trace file is, where it comes from, what is in it and how it ends."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

NAME = "info"
HELP = "say what a trace file is, where it comes from and what is in it"
_SUFFIXES = (".msgpack.zst", ".msgpack.zst.partial")
_SHOWN = (
    "kind",
    "grow_direction",
    "page_size",
    "entry_bytes",
    "layer_num",
    "num_pages",
    "min_page_index",
    "num_virtual_ids",
    "is_id_owner",
    "lazy_compaction",
    "layout",
    "extra",
    "tokens_allocated",
    "allocs_refused",
    "ids_freed",
    "pages_freed",
    "flushes_urgent",
    "flushes_other",
    "pages_moved",
)
"""Figures of a pool that the text shows, in this order."""
_COUNTED = {
    "events": "events",
    "states": "states",
    "dropped": "dropped",
    "requests": "request_ids",
    "bytes": "bytes",
}
"""Columns of a run's table that are added up, and their names in the report."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="trace, or folder: the files of a recorded run in it are shown as one table",
    )
    parser.add_argument("--files", dest="long", action="store_true", help="every file of a run in full, too")
    parser.add_argument("--json", action="store_true", help="the same figures as JSON: all runs, all files")


def trace_files(folder: Path) -> list[Path]:
    """The traces in `folder`, by name. Raises TraceNotFound when there is none."""
    from recorder.trace import TraceNotFound

    found = sorted(entry for entry in folder.iterdir() if entry.name.endswith(_SUFFIXES))
    if not found:
        raise TraceNotFound(f"{folder}: there is no trace in this folder")
    return found


def run(args: argparse.Namespace) -> int:
    """Print the figures; 0 when every file could be read.

    Errors are for `main` to print; that of a file of a run only after everything else is shown.
    """
    from recorder.summary import summarize, summary_to_map

    groups = [group for path in args.files for group in _groups(path)]
    problems: list[Exception] = []
    if args.json:
        runs, traces = [], []
        for name, files in groups:
            reports, report = _run(name, files, problems)
            traces.extend(reports)
            runs.extend([report] if name else [])
        print(json.dumps({"runs": runs, "traces": traces}, indent=2))
    else:
        first = True
        for name, files in groups:
            if name:
                reports, report = _run(name, files, problems)
                _show(_print_run, report, blank=not first)
                first = False
            shown = reports if name else (summary_to_map(summarize(path)) for path in files)
            for item in shown if args.long or not name else ():
                _show(_print, item, blank=not first)
                first = False
    if problems:
        raise problems[0]
    return 0


def _groups(path: Path) -> list[tuple[str, list[Path]]]:
    """(run, files) of a file or folder: in a folder the files of one run are one group; a file on its own has no run."""
    if not path.is_dir():
        return [("", [path])]
    from recorder.run_summary import run_of

    groups: dict[tuple[str, Path | None], list[Path]] = {}
    for file in trace_files(path):
        name = run_of(file)
        groups.setdefault((name, None if name else file), []).append(file)
    return [(name, files) for (name, _), files in groups.items()]


def _run(
    name: str, files: list[Path], problems: list[Exception]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(reports of the files, report of the run). A file that cannot be read is an item of `problems`, unless it is on its own."""
    from recorder.run_summary import file_row, run_report, unreadable_row
    from recorder.summary import summarize, summary_to_map
    from recorder.trace import TraceError

    reports, rows = [], []
    for path in files:
        try:
            reports.append(summary_to_map(summarize(path)))
            rows.append(file_row(reports[-1]))
        except TraceError as problem:
            if not name:
                raise
            problems.append(problem)
            rows.append(unreadable_row(path, problem))
    return reports, run_report(name, rows)


def _show(draw: Callable[[Console, dict[str, Any]], None], report: dict[str, Any], *, blank: bool) -> None:
    from rich.console import Console

    # Drawn into memory and written by us: rich ends the process itself when the reader of a pipe goes away.
    terminal = sys.stdout.isatty()
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=None if terminal else 160, highlight=False)
    if blank:
        console.print()
    draw(console, _printable(report))
    print(text.getvalue(), end="")


def _printable(value: Any) -> Any:
    """`value` with what a terminal would obey escaped in all its texts: they come from a file."""
    if isinstance(value, str):
        return "".join(character if character.isprintable() else repr(character)[1:-1] for character in value)
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_printable(item) for item in value]
    return value


def _print_run(console: Console, report: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"run {report['run']}"), title_justify="left")
    for name in ("file", "rank", "pid", "engine", "pools", *_COUNTED, "ended"):
        numeric = name == "pid" or name in _COUNTED
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in report["files"]:
        table.add_row(
            Text(Path(row["file"]).name.replace(_SUFFIXES[0], "")),
            Text(row["rank"]),
            "" if row["pid"] is None else str(row["pid"]),
            Text(row["engine"]),
            Text(", ".join(row["pools"])),
            *(f"{row[figure]:,}" for figure in _COUNTED.values()),
            Text(_file_ending(row)),
        )
    table.add_section()
    total = report["total"]
    table.add_row(
        f"{total['files']} file{'s' if total['files'] != 1 else ''}",
        "",
        "",
        "",
        "",
        *(f"{total[name]:,}" for name in _COUNTED.values()),
        "",
    )
    console.print(table)


def _file_ending(row: dict[str, Any]) -> str:
    if row["error"]:
        return "cannot be read: " + str(row["error"]).removeprefix(row["file"]).lstrip(":, ")
    return str(row["ended"]) + (f": {row['reason']}" if row["reason"] else "")


def _print(console: Console, report: dict[str, Any]) -> None:
    from rich.markup import escape

    provenance = report["provenance"]
    span = f"{report['span_us'] / 1e6:,.3f} s" if report["span_us"] is not None else "unknown"
    console.print(f"[bold]{escape(report['file'])}[/bold]")
    for name, value in (
        (
            "format",
            f"{report['format']}, {report['bytes']:,} bytes, {report['bytes_per_event']} bytes an event",
        ),
        ("provenance", f"{provenance['kind']}: {provenance['how']}"),
        ("source", provenance["source"]),
        ("hardware", provenance["hardware"]),
        ("", _pairs(provenance["extra"])),
        ("engine", f"{report['engine']} {report['engine_version']}, {report['allocator']}"),
        ("model", report["model"]),
        ("device", report["device"]),
        ("rank", _pairs(report["rank"])),
        ("settings", _pairs(report["settings"])),
        ("buffer", f"{report['total_bytes']:,} bytes"),
        ("extra", _pairs(report["extra"])),
        ("producer", f"{report['producer']}, {report['uuid']}"),
        (
            "recording",
            f"level {report['level']}, drops {report['drop_policy']}, clock in {report['clock_unit']}",
        ),
        (
            "events",
            f"{report['events']:,} in {report['chunks']} chunks, {report['nested']} nested, "
            f"{report['states']:,} states, {report['dropped']} dropped",
        ),
        ("composite", _composite(report["composite"])),
        ("time", f"{report['first_us']} to {report['last_us']} us, {span}"),
        ("marks", _pairs(report["marks"])),
        ("requests", f"{report['request_ids']:,} named" if report["request_ids"] else ""),
        ("ended", _ending(report)),
        ("reason", report["reason"]),
    ):
        if value:
            console.print(f"  {name:<11}{escape(str(value))}", soft_wrap=True)
    console.print(_pools(report))
    console.print(_kinds(report))


def _composite(figures: dict[str, Any] | None) -> str:
    """What the calls on a composite add up to; those on its members are in the table of pools."""
    if figures is None:
        return ""
    return (
        f"{figures['tokens_allocated']:,} tokens allocated, {figures['allocs_refused']:,} allocs refused, "
        f"{figures['ids_freed']:,} ids freed, {figures['pages_moved']:,} pages moved by {figures['flushes_other']:,} flushes"
    )


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in values.items())


def _ending(report: dict[str, Any]) -> str:
    recovery = report["recovery"]
    if recovery is None:
        return str(report["ended"])
    missing = f", at least {recovery['bytes_missing']} bytes missing" if recovery["bytes_missing"] else ""
    return (
        f"{report['ended']}: {recovery['reason']} (frame {recovery['frame']}, byte {recovery['byte_offset']}"
        f"{missing}); event {recovery['last_seq']} is the last one"
    )


def _pools(report: dict[str, Any]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="pools", title_justify="left")
    pools = report["pools"]
    table.add_column("")
    for pool in pools:
        table.add_column(Text(pool["name"]), justify="right")
    for name in _SHOWN:
        values = [pool[name] for pool in pools]
        if any(value != {} for value in values):
            table.add_row(name.replace("_", " "), *(Text(_cell(value)) for value in values))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return (
        "\n".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else str(value)
    )


def _kinds(report: dict[str, Any]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="events", title_justify="left")
    names = [pool["name"] for pool in report["pools"]]
    if any("-" in counts for counts in report["kinds"].values()):
        names.append("-")
    table.add_column("kind")
    for name in names:
        table.add_column(Text(name), justify="right")
    table.add_column("all", justify="right")
    for kind, counts in report["kinds"].items():
        cells = [f"{counts[name]:,}" if name in counts else "" for name in names]
        table.add_row(kind.lower(), *cells, f"{sum(counts.values()):,}")
    return table
