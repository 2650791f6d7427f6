"""`kvtape anonymize`: the same events without what could tell users or machines apart."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

NAME = "anonymize"
HELP = "take out of a trace what could tell users or machines apart"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("file", type=Path, metavar="FILE", help="trace")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="OUT", help="trace to write (NAME.msgpack.zst)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite OUT")
    parser.add_argument(
        "--drop-request-ids",
        action="store_true",
        help="leave the requests' ids out (default: hash them with a salt that is thrown away)",
    )
    parser.add_argument("--rebase-times", action="store_true", help="let time begin at 0")
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="KEY",
        help="header key that stays although it is not known to be harmless; can be given several times",
    )
    parser.add_argument("--json", action="store_true", help="report as JSON")


def run(args: argparse.Namespace) -> int:
    """Rewrite; 0 when the trace was written. Errors are for `main` to print."""
    from recorder.anonymize import anonymize_trace

    done = anonymize_trace(
        args.file,
        args.output,
        drop_request_ids=args.drop_request_ids,
        rebase_times=args.rebase_times,
        keep=frozenset(args.keep),
        force=args.force,
    )
    if args.json:
        report = {
            "output": str(done.path),
            "bytes": done.size,
            "events": done.events,
            "states": done.states,
            "request_ids": done.request_ids,
            "removed": done.removed,
            "note": done.note,
        }
        print(json.dumps(report, indent=2))
        return 0
    if done.note:
        print(f"{args.file}: {done.note}", file=sys.stderr)
    print(f"{done.events} events and {done.states} states, {done.request_ids} request ids hashed")
    print(f"Taken out of the header: {', '.join(done.removed) or 'nothing'}")
    print("Please read what `kvtape info` shows of it before you give it away: text that you wrote stays.")
    print(f"Wrote {done.path}")
    return 0
