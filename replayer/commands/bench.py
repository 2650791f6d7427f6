"""`kvtape bench`: time inside allocator calls, against SGLang's own classes where they are installed."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replayer.console import print_rich

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from recorder.trace import EventKind
    from replayer.bench import Candidate, Measurement, Spread

NAME = "bench"
HELP = "measure allocators on traces, as ratios within one run"

NOT_INSTALLED = (
    "SGLang is not installed in this environment, so ratios to it are not measured: "
    "tools/build_sglang_env.sh DIR builds an environment that has it, and DIR/bin/kvtape bench measures there"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "traces",
        nargs="*",
        metavar="TRACE",
        help="trace files (default: those in traces/ that can be timed); `kvtape bench flush` measures flushes alone",
    )
    parser.add_argument(
        "--rounds",
        type=positive,
        default=5,
        metavar="N",
        help="rounds that count, after one to warm up (default 5)",
    )
    parser.add_argument(
        "--limit", type=positive, metavar="N", help="time only the first N calls of each trace"
    )
    parser.add_argument(
        "--strategy",
        default="batched",
        metavar="S,...",
        help="strategies: batched, device, hybrid, per-row (default batched)",
    )
    parser.add_argument(
        "--allocator", default="kvtape", metavar="NAME", help="kvtape, or MODULE:CLASS (default kvtape)"
    )
    parser.add_argument(
        "--without-ranges",
        action="store_true",
        help="measure SGLang also without the profiler ranges that it opens in every call",
    )
    parser.add_argument(
        "--max-ratio", type=float, metavar="X", help="fail if a trace's median ratio to SGLang is above X"
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="measure whole replays instead: checks against the time inside the allocator, reading, file size",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    import torch

    from replayer.bench import SGLANG, kvtape_candidate, sglang_candidate
    from replayer.errors import UsageError
    from replayer.targets_sglang import sglang_version

    if args.whole:
        return _run_whole(args)
    version = sglang_version()
    if version is None and (args.max_ratio is not None or args.without_ranges):
        raise UsageError(NOT_INSTALLED)
    candidates = [kvtape_candidate(args.allocator, strategy) for strategy in args.strategy.split(",")]
    if version is not None:
        candidates.append(sglang_candidate())
        if args.without_ranges:
            candidates.append(sglang_candidate(profiler_ranges=False))
    if len({candidate.name for candidate in candidates}) != len(candidates):
        raise UsageError(f"--strategy {args.strategy}: a strategy is named twice")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measured = _measure_all(args, candidates)
    finally:
        torch.set_num_threads(threads)
    references = [candidate.name for candidate in candidates if candidate.name.startswith(SGLANG)]
    ours = [candidate.name for candidate in candidates if candidate.name not in references]
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sglang": version,
        "threads": 1,
    }
    if args.json:
        print(json.dumps(_as_json(machine, args, measured, ours, references), indent=1))
    else:
        _print_tables(machine, args.rounds, measured, ours, references)
    slow = _too_slow(args.max_ratio, measured, ours[0])
    for line in slow:
        print(line, file=sys.stderr)
    return 1 if slow else 0


def _run_whole(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from tqdm import tqdm

    from replayer.bench_whole import measure_whole

    paths = [Path(trace) for trace in args.traces] or _timeable_traces()
    with tqdm(
        total=len(paths) * (args.rounds + 1), unit="round", disable=not sys.stderr.isatty(), leave=False
    ) as bar:
        measured = [
            measure_whole(path, args.rounds, args.strategy.split(",")[0], bar.update) for path in paths
        ]
    if args.json:
        print(json.dumps({"rounds": args.rounds, "traces": [asdict(one) for one in measured]}, indent=1))
        return 0
    columns = (
        "inside allocator",
        "all checks",
        "checks and ledger",
        "file",
        "events",
        "columns/s",
        "everything/s",
    )
    table = _new_table(
        "whole replays, medians; checks as multiples of the time inside the allocator", "trace", columns
    )
    for one in measured:
        table.add_row(
            one.trace,
            f"{one.inside_seconds:.2f} s",
            f"{one.checked:.2f}x",
            f"{one.counted:.2f}x",
            f"{one.file_bytes:,} B",
            f"{one.events:,}",
            f"{one.columns_per_second / 1e6:.1f} M",
            f"{one.everything_per_second / 1e6:.1f} M",
        )
    print_rich(lambda console: console.print(table))
    return 0


def _measure_all(args: argparse.Namespace, candidates: Sequence[Candidate]) -> list[Measurement]:
    from tqdm import tqdm

    from replayer.bench import measure, turns

    paths = [Path(trace) for trace in args.traces] or _timeable_traces()
    total = len(paths) * turns(len(candidates), args.rounds)
    with tqdm(total=total, unit="pass", disable=not sys.stderr.isatty(), leave=False) as bar:
        measured = []
        for path in paths:
            bar.set_description(path.name)
            measured.append(
                measure(path, candidates, rounds=args.rounds, limit=args.limit, after_turn=bar.update)
            )
        return measured


def _timeable_traces() -> list[Path]:
    """Traces of the working folder whose ids follow the placement rule that bench's candidates share."""
    from recorder.trace import TraceReader
    from replayer.errors import UsageError

    found = []
    for path in sorted(Path("traces").glob("*.msgpack.zst")):
        with TraceReader(path) as reader:
            if reader.header.settings.get("placement") != "free":
                found.append(path)
    if not found:
        raise UsageError("no TRACE was named, and traces/ holds none that can be timed")
    return found


def _too_slow(limit: float | None, measured: Sequence[Measurement], ours: str) -> list[str]:
    from replayer.bench import SGLANG

    if limit is None:
        return []
    ratios = [(one.trace, one.ratio(ours, SGLANG).median) for one in measured]
    return [
        f"{trace}: {ratio:.3f} times SGLang's time, more than {limit}"
        for trace, ratio in ratios
        if ratio > limit
    ]


# -- figures for programs


def _as_json(
    machine: dict[str, Any],
    args: argparse.Namespace,
    measured: Sequence[Measurement],
    ours: Sequence[str],
    references: Sequence[str],
) -> dict[str, Any]:
    return {
        "machine": machine,
        "rounds": args.rounds,
        "limit": args.limit,
        "left_out_of_totals": [kind.name.lower() for kind in _kernel_kinds()],
        "traces": [_trace_as_json(one, ours, references) for one in measured],
    }


def _trace_as_json(one: Measurement, ours: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    def figures(kind: EventKind | None) -> dict[str, Any]:
        return {
            "nanoseconds": {name: one.nanoseconds(name, kind)._asdict() for name in (*ours, *references)},
            "ratios": {
                name: {other: one.ratio(name, other, kind)._asdict() for other in references} for name in ours
            },
        }

    kinds = {kind.name.lower(): {"calls": count, **figures(kind)} for kind, count in one.kinds.items()}
    return {"trace": one.trace, "calls": one.call_count, "total": figures(None), "kinds": kinds}


# -- tables for people


def _print_tables(
    machine: dict[str, Any],
    rounds: int,
    measured: Sequence[Measurement],
    ours: Sequence[str],
    references: Sequence[str],
) -> None:
    print_rich(lambda console: _draw_tables(console, machine, rounds, measured, ours, references))


def _draw_tables(
    console: Console,
    machine: dict[str, Any],
    rounds: int,
    measured: Sequence[Measurement],
    ours: Sequence[str],
    references: Sequence[str],
) -> None:
    for one in measured:
        console.print(_trace_table(one, ours, references))
    console.print(_summary_table(measured, ours, references))
    left_out = " and ".join(kind.name.lower() for kind in _kernel_kinds())
    sglang = f"SGLang {machine['sglang']}" if machine["sglang"] else "no SGLang"
    console.print(
        f"Medians over {rounds} rounds of the time inside allocator calls; ratios are within a round. CPU, one thread, page moves a "
        f"no-op; Python {machine['python']}, torch {machine['torch']}, {sglang}. Totals leave out {left_out}: SGLang's kernels for "
        "these two need a GPU, and a plain loop stands in for them.",
        highlight=False,
    )
    if not references:
        console.print(NOT_INSTALLED + ".", highlight=False)


def _new_table(title: str, first: str, headings: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _trace_table(one: Measurement, ours: Sequence[str], references: Sequence[str]) -> Table:
    kernel_kinds = _kernel_kinds()
    headings = ["calls", *ours, *references, *_ratio_headings(ours, references)]
    table = _new_table(f"{one.trace}: {one.call_count:,} calls, microseconds a call", "call", headings)
    counted = [kind for kind in one.kinds if kind not in kernel_kinds]
    left_out = [kind for kind in one.kinds if kind in kernel_kinds]

    def add(kind: EventKind | None, calls: int, **options: Any) -> None:
        each = [
            f"{one.nanoseconds(name, kind).median / max(1, calls) / 1000:.2f}"
            for name in (*ours, *references)
        ]
        ratios = [
            f"{ratio.median:.3f}" if ratio else "not measured"
            for ratio in _ratios(one, kind, ours, references)
        ]
        table.add_row("total" if kind is None else kind.name.lower(), f"{calls:,}", *each, *ratios, **options)

    for kind in counted:
        add(kind, one.kinds[kind], end_section=kind is counted[-1])
    add(None, sum(one.kinds[kind] for kind in counted), style="bold", end_section=True)
    for kind in left_out:
        add(kind, one.kinds[kind], style="dim")
    return table


def _summary_table(measured: Sequence[Measurement], ours: Sequence[str], references: Sequence[str]) -> Table:
    from recorder.trace import EventKind

    headings = _ratio_headings(ours, references)
    table = _new_table(
        "median (least - greatest) of the rounds",
        "trace",
        [*headings, *(f"flush: {heading}" for heading in headings)],
    )

    def cells(one: Measurement, kind: EventKind | None) -> list[str]:
        if kind is not None and kind not in one.kinds:
            return ["no such call" for _ in headings]
        ratios = _ratios(one, kind, ours, references)
        return [
            f"{ratio.median:.3f} ({ratio.low:.3f} - {ratio.high:.3f})" if ratio else "not measured"
            for ratio in ratios
        ]

    for one in measured:
        table.add_row(one.trace, *cells(one, None), *cells(one, EventKind.FLUSH))
    return table


def _ratio_headings(ours: Sequence[str], references: Sequence[str]) -> list[str]:
    return [f"{name} / {other}" for other in references or ("sglang",) for name in ours]


def _ratios(
    one: Measurement, kind: EventKind | None, ours: Sequence[str], references: Sequence[str]
) -> list[Spread | None]:
    """In the order of `_ratio_headings`; None where there was nothing to measure against."""
    if not references:
        return [None for _ in ours]
    return [one.ratio(name, other, kind) for other in references for name in ours]


def _kernel_kinds() -> tuple[EventKind, ...]:
    from replayer.bench_calls import KERNEL_KINDS

    return KERNEL_KINDS


def positive(text: str) -> int:
    """A count from the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a count of at least 1")
    return number
