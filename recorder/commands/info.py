"""`kvtape info`: what a trace file is, where it comes from, what is in it and how it ends."""

from __future__ import annotations

import argparse
import io
import json
import sys
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="trace, or folder of traces")
    parser.add_argument("--json", action="store_true", help="the same figures as JSON")


def trace_files(paths: list[Path]) -> list[Path]:
    """`paths` with each folder replaced by the traces in it. Raises TraceNotFound for a folder without one."""
    from recorder.trace import TraceNotFound

    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        found = sorted(entry for entry in path.iterdir() if entry.name.endswith(_SUFFIXES))
        if not found:
            raise TraceNotFound(f"{path}: there is no trace in this folder")
        files.extend(found)
    return files


def run(args: argparse.Namespace) -> int:
    """Print the figures; 0 when every file could be read. Errors are for `main` to print."""
    from recorder.summary import summarize, summary_to_map

    reports = (summary_to_map(summarize(path)) for path in trace_files(args.files))
    if args.json:
        print(json.dumps({"traces": list(reports)}, indent=2))
        return 0
    from rich.console import Console

    # Drawn into memory and written by us: rich ends the process itself when the reader of a pipe goes away.
    terminal = sys.stdout.isatty()
    for number, report in enumerate(reports):
        text = io.StringIO()
        console = Console(
            file=text, force_terminal=terminal, width=None if terminal else 160, highlight=False
        )
        if number:
            console.print()
        _print(console, report)
        print(text.getvalue(), end="")
    return 0


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
        ("time", f"{report['first_us']} to {report['last_us']} us, {span}"),
        ("marks", _pairs(report["marks"])),
        ("ended", _ending(report)),
    ):
        if value:
            console.print(f"  {name:<11}{escape(str(value))}", soft_wrap=True)
    console.print(_pools(report))
    console.print(_kinds(report))


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
