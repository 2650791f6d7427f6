"""`replay TRACE...`: drive traces against an allocator, check every flush, count its synchronisations."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replayer.console import print_rich
from replayer.errors import UsageError

if TYPE_CHECKING:
    from replayer.replay import Outcome, Progress, ReplayOptions

NAME = "replay"
HELP = "replay traces against an allocator and check every flush"

EXIT_HELD, EXIT_FAILED, EXIT_CUT, EXIT_INTERRUPTED = 0, 1, 65, 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "traces", nargs="+", type=Path, metavar="TRACE", help="trace files (NAME.msgpack.zst)"
    )
    target = parser.add_argument_group("what is driven")
    target.add_argument(
        "--allocator",
        default="kvtape",
        help="kvtape (default), sglang, or MODULE:CLASS[,MODULE:FLOAT_CLASS] with MultiEndedAllocator's arguments; for a trace of calls on "
        "a composite also MODULE:CLASS of one",
    )
    target.add_argument(
        "--strategy",
        default="batched",
        help="how a flush finds what moves: per-row, hybrid, batched (default), device",
    )
    target.add_argument(
        "--compare", metavar="STRATEGY,...", help="replay with each strategy and print one table"
    )
    target.add_argument("--device", default="cpu", help="torch device of tables and KV (default: cpu)")
    target.add_argument(
        "--kv",
        choices=("auto", "full", "stamp"),
        default="auto",
        help="keep whole KV rows, or one stamp a token (auto: rows up to 4 MiB)",
    )
    target.add_argument(
        "--ids", choices=("auto", "recorded", "mapped"), default="auto",
        help="take recorded ids as the allocator's own, or map them (an allocator that places otherwise)",
    )  # fmt: skip
    target.add_argument(
        "--flush-every",
        type=_count,
        default=0,
        metavar="N",
        help="flush all pools urgently after every N calls",
    )
    target.add_argument(
        "--flush-when-short",
        action="store_true",
        help="flush a pool before an alloc that the gap beyond its band cannot serve",
    )
    checks = parser.add_argument_group("what is checked")
    checks.add_argument(
        "--check", default="all", metavar="C1,...", help="checks to run: all (default), none, or a list"
    )
    checks.add_argument(
        "--check-every",
        default="flush",
        metavar="flush|event|N",
        help="check the whole chain after flushes, every event, or N events",
    )
    checks.add_argument(
        "--max-syncs", type=_count, metavar="N", help="fail when one flush synchronises more than N times"
    )
    checks.add_argument("--until", type=_count, metavar="N", help="drive only the first N events")
    checks.add_argument("--no-ledger", action="store_true", help="count no synchronisations (clean times)")
    output = parser.add_argument_group("output")
    output.add_argument("--per-flush", action="store_true", help="list every flush")
    output.add_argument("--json", action="store_true", help="print JSON, one object a trace")
    output.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    compares = args.compare is not None
    if args.no_ledger and (args.max_syncs is not None or compares):
        raise UsageError("--max-syncs and --compare count synchronisations; leave --no-ledger out")
    if args.max_syncs is not None and args.check == "none":
        raise UsageError("--max-syncs is a check; leave --check none out")
    if compares and args.per_flush:
        raise UsageError("--per-flush lists one strategy's flushes; leave --compare out")
    code = EXIT_HELD
    for path in args.traces:
        options = _options(args, path)
        with _Bar(
            path, shown=not (args.json or args.quiet) and sys.stderr is not None and sys.stderr.isatty()
        ) as bar:
            code = _worse(code, _compare(args, options, bar) if compares else _replay(args, options, bar))
        if code == EXIT_INTERRUPTED:
            break
    return code


def _options(args: argparse.Namespace, path: Path) -> ReplayOptions:
    from recorder.trace import TraceReader

    # Open first: a missing or foreign file is told before torch is loaded.
    with TraceReader(path):
        pass
    from replayer.checks import CheckOptions
    from replayer.replay import ReplayOptions
    from replayer.targets import TargetOptions

    enabled = _enabled(args.check) | (frozenset() if args.max_syncs is None else {"C11"})
    checks = (
        CheckOptions(enabled=enabled, every=_every(args.check_every), max_syncs=args.max_syncs)
        if enabled
        else None
    )
    return ReplayOptions(
        path=path,
        target=TargetOptions(
            allocator=args.allocator, strategy=args.strategy, device=args.device, kv=args.kv
        ),
        checks=checks,
        ledger=not args.no_ledger,
        ids=args.ids,
        until=args.until,
        flush_every=args.flush_every,
        flush_when_short=args.flush_when_short,
    )


def _replay(args: argparse.Namespace, options: ReplayOptions, progress: Progress) -> int:
    from replayer.replay import replay
    from replayer.report import figures, print_report

    outcome = replay(options, progress)
    found = figures(outcome, per_flush=args.per_flush)
    _close(progress)
    if args.json:
        _print_json(found)
    else:
        print_rich(lambda console: print_report(found, console))
        if args.per_flush:
            _print_flushes(found["per_flush"])
    return _exit_code(outcome)


def _compare(args: argparse.Namespace, options: ReplayOptions, progress: Progress) -> int:
    from replayer.compare import compare, print_comparison
    from replayer.report import figures, print_incomplete, print_report

    strategies = [name.strip() for name in args.compare.split(",") if name.strip()]
    if not strategies:
        raise UsageError("--compare names no strategy")
    rows, outcomes = compare(options, strategies, progress)
    _close(progress)
    failed = [figures(outcome) for outcome in outcomes if outcome.verdict == "failed"]
    first = figures(outcomes[0])
    if args.json:
        incomplete = {name: first[name] for name in ("missing", "gap", "recording_ended")}
        _print_json({"trace": str(options.path), "strategies": rows, "failures": failed, **incomplete})
    else:
        print_rich(lambda console: print_comparison(str(options.path), rows, console))
        print_rich(partial(print_incomplete, first))
        for found in failed:
            print_rich(partial(print_report, found))
    code = EXIT_HELD
    for outcome in outcomes:
        code = _worse(code, _exit_code(outcome))
    return code


def _exit_code(outcome: Outcome) -> int:
    if outcome.verdict == "failed":
        return EXIT_FAILED
    if outcome.verdict == "interrupted":
        return EXIT_INTERRUPTED
    return EXIT_HELD if outcome.recovery is None and outcome.gap is None else EXIT_CUT


def _worse(one: int, other: int) -> int:
    order = (EXIT_HELD, EXIT_CUT, EXIT_FAILED, EXIT_INTERRUPTED)
    return max(one, other, key=order.index)


def _enabled(text: str) -> frozenset[str]:
    from replayer.failure import CHECKS

    if text == "all":
        return frozenset(CHECKS)
    if text == "none":
        return frozenset()
    names = {name.strip().upper() for name in text.split(",") if name.strip()}
    unknown = names - set(CHECKS)
    if unknown or not names:
        raise UsageError(
            f"--check {text!r}: there is no check {', '.join(sorted(unknown)) or '(none named)'}; known: {', '.join(CHECKS)}"
        )
    return frozenset(names | {"CALL"})


def _every(text: str) -> int:
    if text in ("flush", "event"):
        return 0 if text == "flush" else 1
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise UsageError(f"--check-every {text!r}: flush, event, or a number of events")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or more")
    return int(text)


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=2, allow_nan=False, default=str))


def _print_flushes(records: list[dict[str, Any]]) -> None:
    print("event pool urgent moves bytes device_to_host host_to_device waits microseconds")
    for record in records:
        print(
            record["event"], record["pool"], int(record["urgent"]), record["moves"], record["bytes"], record["device_to_host"],
            record["host_to_device"], record["waits"], round(record["seconds"] * 1e6, 1),
        )  # fmt: skip


class _Bar:
    """A tqdm bar of events, shown once a replay takes over a second; called with the number of events just driven."""

    def __init__(self, path: Path, *, shown: bool) -> None:
        self._path, self._shown = path, shown
        self._bar: Any = None

    def __enter__(self) -> _Bar:
        return self

    def __call__(self, events: int) -> None:
        if not self._shown:
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(desc=self._path.name, unit=" events", unit_scale=True, delay=1.0, leave=False)
        self._bar.update(events)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(progress: Progress) -> None:
    if isinstance(progress, _Bar):
        progress.close()
