"""`kvtape record`: run a command and record the KV-cache allocators of the engine in it."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from pathlib import Path

NAME = "record"
HELP = "run a serving engine and record what its KV-cache allocators do"


EXIT_STATUS = """\
exit status:
  that of COMMAND, 128 + n where signal n ended it; 2 usage; 126 it may not be run; 127 there is no such command
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EXIT_STATUS
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="PATH",
        help="run.msgpack.zst gives run.RANK.PID.msgpack.zst for each process that owns an allocator; a folder (ending in / or there "
        "already) gives ENGINE.RANK.PID.msgpack.zst in it",
    )
    parser.add_argument(
        "--on-overflow",
        choices=("drop", "block"),
        help="when the engine is faster than the writer: drop events and count them (default), or make the engine wait",
    )
    parser.add_argument("--memory", help="most memory the recorder may use (default 64M)")
    parser.add_argument(
        "--keep-request-ids",
        action="store_true",
        help="write request ids as they are, not as hashes with a salt that is thrown away",
    )
    parser.add_argument("--chunk-events", metavar="N", help="write a chunk after N events (4096)")
    parser.add_argument("--chunk-ms", metavar="T", help="or after T milliseconds (1000): a kill loses that")
    parser.add_argument("--state-every", metavar="N", help="record the state every N calls (1024; 0: never)")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="what to run, after --"
    )


def run(args: argparse.Namespace) -> int:
    """Run it. The exit status is the command's own."""
    from recorder import launch, settings

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise settings.BadSetting("no command to record: kvtape record -o FILE -- COMMAND ...")
    given = {
        settings.ON_OVERFLOW: args.on_overflow,
        settings.MEMORY: args.memory,
        settings.CHUNK_EVENTS: args.chunk_events,
        settings.CHUNK_MS: args.chunk_ms,
        settings.STATE_EVERY: args.state_every,
    }
    # What is not given stays as the environment has it.
    options = {name: value for name, value in given.items() if value is not None}
    if args.keep_request_ids:
        options[settings.KEEP_REQUEST_IDS] = "1"
    environment = launch.environment_for(args.output, options)
    settings.read_settings(
        environment
    )  # says now what each process would say in the midst of the engine's output
    before = launch.existing(args.output)
    status = launch.run(command, environment)
    try:
        left = launch.files_of(args.output, before, environment[settings.RUN])
        _report(*launch.close_what_was_left(left))
    except Exception as problem:  # the command has ended, and its status is what the caller asked for
        with contextlib.suppress(Exception):
            print(f"kvtape: what was recorded cannot be shown: {problem}", file=sys.stderr, flush=True)
    return status


def _report(files: list[Path], notes: list[str]) -> None:
    """What was recorded, on stderr: stdout is the command's."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from recorder.summary import summarize
    from recorder.trace import TraceError

    if sys.stderr is None:
        return
    terminal = sys.stderr.isatty()
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=None if terminal else 160, highlight=False)
    table = Table(title="recorded", title_justify="left")
    for name in ("file", "engine", "rank", "pools", "events", "dropped", "bytes", "ended"):
        table.add_column(name, justify="right" if name in ("events", "dropped", "bytes") else "left")
    for path in files:
        try:
            summary = summarize(path)
        except TraceError as problem:
            notes.append(str(problem))
            continue
        header = summary.header
        table.add_row(
            Text(str(path)),
            Text(f"{header.engine} {header.engine_version}"),
            Text(" ".join(f"{name}{value}" for name, value in header.rank.items())),
            Text(", ".join(pool.name for pool in header.pools)),
            f"{summary.events:,}",
            f"{summary.dropped:,}",
            f"{summary.size:,}",
            Text(summary.reason or "as it should"),
        )
    if table.row_count:
        console.print(table)
    elif not notes:
        console.print(
            "kvtape: nothing was recorded. Is kvtape installed in the environment that the command runs in, and does the engine there "
            "own a KV-cache allocator kvtape knows (SGLang with its unified memory pool, vLLM, transformers' continuous batching)? "
            "Lines that begin with kvtape: above say more.",
            style=None,
            markup=False,
            soft_wrap=True,
        )
    for note in notes:
        console.print(f"kvtape: {note}", markup=False, soft_wrap=True)
    print(text.getvalue(), end="", file=sys.stderr, flush=True)
