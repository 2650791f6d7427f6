"""`kvtape convert`: a call log in JSON lines becomes a trace file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

NAME = "convert"
HELP = "turn a JSON call log of an engine into a trace file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("log", type=Path, metavar="LOG", help="call log: JSON lines, plain or .zst")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="OUT", help="trace to write (NAME.msgpack.zst)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite OUT")
    parser.add_argument(
        "--engine", choices=("sglang", "vllm"), help="whose log it is (default: seen from the log)"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="header field to set, e.g. model=Kimi-K3, provenance.hardware='one CPU', "
        "pools.full.layout='{\"head_num\": 2}' (text for a text field, else JSON)",
    )
    parser.add_argument("--json", action="store_true", help="report as JSON")


def parse_overrides(items: list[str]) -> dict[str, str]:
    """Header overrides of `FIELD=VALUE` items. Raises BadOverride."""
    from recorder.imports.errors import BadOverride

    overrides: dict[str, str] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or not name:
            raise BadOverride(f"--set {item!r} is not FIELD=VALUE")
        overrides[name] = text
    return overrides


def run(args: argparse.Namespace) -> int:
    """Convert; 0 when the trace was written. Errors are for `main` to print."""
    from recorder.imports.convert import convert_log

    done = convert_log(
        args.log, args.output, engine=args.engine, overrides=parse_overrides(args.overrides), force=args.force
    )
    if args.json:
        report = {
            "output": str(done.path),
            "engine": done.engine,
            "events": done.events,
            "states": done.states,
            "log_ended": done.log_ended,
            "log_lines": done.last_line,
            "bytes": done.size,
        }
        print(json.dumps(report, indent=2))
        return 0
    if done.log_ended == "cut":
        print(f"{args.log}: the log was cut; its {done.events} whole calls were converted", file=sys.stderr)
    print(f"{done.events} events and {done.states} states of {done.engine}, {done.size} bytes")
    print(f"Wrote {done.path}")
    return 0
