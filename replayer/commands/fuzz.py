"""`kvtape fuzz`: random programs of allocator calls until the time is over, against SGLang's own classes or against the oracle."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replayer.console import print_rich

if TYPE_CHECKING:
    from rich.console import Console

    from replayer.fuzz.session import FuzzOptions, Session

NAME = "fuzz"
HELP = "drive allocators with random programs of calls and keep what differs or fails as a trace"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=_minutes, default=1.0, metavar="N", help="how long (default 1)")
    parser.add_argument(
        "--seed", type=_seed, default=0, metavar="S", help="where random numbers start (default 0)"
    )
    parser.add_argument(
        "--against",
        choices=("oracle", "sglang"),
        default="oracle",
        help="oracle: the strategies in lockstep, then a replay with every check after every event; sglang: the same, and SGLang's own "
        "classes in the lockstep (default oracle)",
    )
    parser.add_argument(
        "--allocator",
        default="kvtape",
        metavar="NAME",
        help="kvtape or MODULE:CLASS[,MODULE:FLOAT_CLASS] (default kvtape)",
    )
    parser.add_argument(
        "--strategy", default=None, metavar="S,...", help="strategies (default: all that the allocator has)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(), metavar="DIR", help="where finds go (default: here)"
    )
    parser.add_argument(
        "--rounds", type=_rounds, metavar="N", help="stop after so many rounds of 40 programs as well"
    )
    parser.add_argument("--json", action="store_true", help="print what was covered and found as JSON")


def run(args: argparse.Namespace) -> int:
    from replayer.fuzz.session import Session, require_hypothesis

    require_hypothesis()
    options = _options(args)
    with _Bar(options, shown=sys.stderr.isatty()) as bar, Session(options, bar) as session:
        try:
            session.run()
        finally:
            # Whatever ends it, what was covered until then is worth knowing.
            bar.close()
            found = figures(session)
            if args.json:
                print(json.dumps(found, indent=1))
            else:
                print_rich(lambda console: _draw(console, found))
    return 1 if session.finds else 0


def _options(args: argparse.Namespace) -> FuzzOptions:
    from allocator import STRATEGIES
    from replayer.errors import UsageError
    from replayer.fuzz.session import FuzzOptions

    known = tuple(STRATEGIES)
    if args.strategy is not None:
        strategies = tuple(args.strategy.split(","))
        unknown = [name for name in strategies if name not in known]
        if unknown or len(set(strategies)) != len(strategies):
            raise UsageError(f"--strategy {args.strategy}: {', '.join(known)}, each once")
    else:
        strategies = known if args.allocator == "kvtape" else ("batched",)
    _require_writable(args.out)
    return FuzzOptions(
        args.minutes, args.seed, args.against, args.allocator, strategies, args.out, args.rounds
    )


def _require_writable(out: Path) -> None:
    """Said before half an hour of programs, and not after.

    Raises:
        UsageError: no file can be made in this folder, or it cannot be made.
    """
    from replayer.errors import UsageError

    there = out.absolute()
    try:
        while not there.exists():
            there = there.parent
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror}") from None
    if not there.is_dir():
        raise UsageError(f"--out {out}: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"--out {out}: no file can be made in {there}")


def figures(session: Session) -> dict[str, Any]:
    """What a session covered and found, as ``--json`` prints it."""
    counts = session.counts
    return {
        "against": session.reference_name,
        "allocators": session.own_names,
        "seed": session.options.seed,
        "minutes": round(session.seconds / 60, 2),
        "rounds": counts["rounds"],
        "programs": counts["programs"],
        "calls": counts["calls"],
        "refused": counts["refused"],
        "flushes_that_moved": counts["flushes that moved"],
        "pages_moved": counts["pages moved"],
        "states_with_pages_pending": counts["states with pages pending"],
        "calls_behind_a_shut_gate": counts["calls behind a shut gate"],
        "checks_held": counts["checks"],
        "calls_by_kind": {
            name.removeprefix("call "): count
            for name, count in sorted(counts.items())
            if name.startswith("call ")
        },
        "programs_by_chain": {
            name.removeprefix("chain "): count
            for name, count in sorted(counts.items())
            if name.startswith("chain ")
        },
        "finds": [
            {"what": find.message, "trace": str(find.trace), "replay": find.command} for find in session.finds
        ],
    }


def _draw(console: Console, found: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_header=False, title="what the programs covered", title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    for name in (
        "programs", "calls", "refused", "flushes_that_moved", "pages_moved", "states_with_pages_pending",
        "calls_behind_a_shut_gate", "checks_held",
    ):  # fmt: skip
        table.add_row(name.replace("_", " "), f"{found[name]:,}")
    console.print(table)
    for name in ("calls_by_kind", "programs_by_chain"):
        parts = "  ".join(f"{kind} {count:,}" for kind, count in found[name].items())
        console.print(f"{name.replace('_', ' ')}: {parts}", soft_wrap=True)
    console.print(
        f"{', '.join(found['allocators'])} against {found['against']}, seed {found['seed']}, {found['minutes']} minutes",
        soft_wrap=True,
    )
    if not found["finds"]:
        console.print("found nothing")
    for find in found["finds"]:
        console.print(f"FOUND  {find['what']}", soft_wrap=True, markup=False)
        console.print(f"  see it again: {find['replay']}", soft_wrap=True, markup=False)
        console.print(f"Wrote {find['trace']}", soft_wrap=True, markup=False)


class _Bar:
    """Minutes gone, with what was covered so far; only on a terminal."""

    def __init__(self, options: FuzzOptions, *, shown: bool) -> None:
        self._options, self._shown = options, shown
        self._bar: Any = None

    def __enter__(self) -> _Bar:
        if self._shown:
            from tqdm import tqdm

            self._bar = tqdm(
                total=round(self._options.minutes * 60),
                unit="s",
                desc=f"seed {self._options.seed}",
                leave=False,
            )
        return self

    def __call__(self, session: Session) -> None:
        if self._bar is None:
            return
        self._bar.set_postfix_str(
            f"{session.counts['calls']:,} calls, {session.counts['flushes that moved']:,} flushes that moved",
            False,
        )
        self._bar.update(min(round(session.seconds), self._bar.total) - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __exit__(self, *_: object) -> None:
        self.close()


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not 0 < minutes <= 100_000:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes above 0")
    return minutes


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 2**31 - 1")
    return int(text)


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of rounds above 0")
    return int(text)
