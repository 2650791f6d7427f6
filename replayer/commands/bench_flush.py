"""`kvtape bench flush`: what one flush costs, strategy by strategy, against SGLang's own class where it is installed."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replayer.commands.bench import NOT_INSTALLED, positive
from replayer.console import print_rich

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from replayer.bench_flush import Findings, Plan

NAME = "bench flush"
HELP = "measure one flush: moves, pool sizes, page sizes and strategies, as ratios within one run"

MOVES = (0, 1, 2, 3, 4, 8, 13, 16, 32, 64, 128, 177, 256, 512, 1024, 2048, 2737, 4096, 8192, 16384)
QUICK_MOVES = (0, 2, 4, 13)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategy",
        default="per-row,hybrid,batched,device",
        metavar="S,...",
        help="strategies (default: all, per-row,hybrid,batched,device)",
    )
    parser.add_argument(
        "--moves",
        metavar="N,...",
        help=f"numbers of moves (default {','.join(str(moves) for moves in MOVES)})",
    )
    parser.add_argument(
        "--rounds",
        type=positive,
        metavar="N",
        help="rounds that count, after one to warm up (default 5; 2 with --quick)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small pools and few flushes: whether it runs, not what it costs"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the figures (needs kvtape[plot])")
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit with 1 if a figure that is wanted was measured and not held",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    import torch

    from replayer.bench_flush import candidates, measure
    from replayer.flush_figures import BATCHED, as_json, figures
    from replayer.flush_plot import draw, require_plotting
    from replayer.targets_sglang import sglang_version

    plan = _plan(args)
    if args.plot is not None:
        require_plotting(args.plot)
    version = sglang_version()
    named = candidates(_strategies(args.strategy), version)
    names = [candidate.name for candidate in named]
    reference = names[-1] if version is not None or BATCHED not in names else BATCHED
    load = os.getloadavg()[0]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        findings = _measure(measure, named, plan)
    finally:
        torch.set_num_threads(threads)
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sglang": version,
        "threads": 1,
        "processor": _processor(),
        "processors": os.cpu_count(),
        "load_before_and_after": [round(load, 2), round(os.getloadavg()[0], 2)],
    }
    # Figures first: a picture that cannot be written must not cost them.
    if args.json:
        print(json.dumps(as_json(machine, plan.rounds, findings, names, reference, plan.repeats), indent=1))
    else:
        _print(machine, plan, findings, names, reference)
    if args.plot is not None:
        sys.stdout.flush()
        draw(args.plot, findings, names, reference, _caption(machine, plan.rounds, reference))
    return 1 if args.check and any(figure.held is False for figure in figures(findings, names)) else 0


def _measure(measure: Any, named: Sequence[Any], plan: Plan) -> Findings:
    from tqdm import tqdm

    total = len(plan.groups) * (plan.rounds + 1)
    with tqdm(total=total, unit="group", disable=not sys.stderr.isatty(), leave=False) as bar:
        findings: Findings = measure(named, plan, bar.update)
    return findings


def _plan(args: argparse.Namespace) -> Plan:
    from replayer.bench_flush import full_plan, quick_plan

    moves = _moves(args.moves) if args.moves else QUICK_MOVES if args.quick else MOVES
    if args.quick:
        return quick_plan(moves=moves, rounds=args.rounds or 2)
    return full_plan(moves=moves, rounds=args.rounds or 5)


def _moves(text: str) -> tuple[int, ...]:
    from replayer.errors import UsageError

    parts = text.split(",")
    if not all(part.isdecimal() for part in parts) or len({int(part) for part in parts}) != len(parts):
        raise UsageError(f"--moves {text}: numbers of pages, each once, with commas between them")
    return tuple(sorted(int(part) for part in parts))


def _strategies(text: str) -> list[str]:
    from replayer.bench_flush import STRATEGIES
    from replayer.errors import UsageError

    named = text.split(",")
    unknown = [name for name in named if name not in STRATEGIES]
    if unknown:
        raise UsageError(f"--strategy {text}: no strategy {unknown[0]!r}; known: {', '.join(STRATEGIES)}")
    if len(set(named)) != len(named):
        raise UsageError(f"--strategy {text}: a strategy is named twice")
    return named


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _caption(machine: dict[str, Any], rounds: int, reference: str) -> str:
    return (
        f"kvtape bench flush: medians of {rounds} rounds, bands from least to greatest; ratios within a round, to {reference}; "
        f"processor time of one thread, no bytes moved; torch {machine['torch']}"
    )


# -- for people


def _print(
    machine: dict[str, Any], plan: Plan, findings: Findings, names: Sequence[str], reference: str
) -> None:
    print_rich(lambda console: _draw_tables(console, machine, plan, findings, names, reference))


def _draw_tables(
    console: Console,
    machine: dict[str, Any],
    plan: Plan,
    findings: Findings,
    names: Sequence[str],
    reference: str,
) -> None:
    from rich import box
    from rich.table import Table

    from replayer.flush_figures import figures, not_installed

    others = [name for name in names if name != reference]
    title = f"flush time over that of {reference}: median (least - greatest) of the rounds"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("kind", "moves", "pages", "page size", *others, f"{reference}, us"):
        table.add_column(heading, justify="left" if heading == "kind" else "right", no_wrap=heading == "kind")
    for point in findings.nanoseconds:
        ratios = [findings.ratio(point, name, reference) for name in others]
        table.add_row(
            point.kind,
            f"{point.moves:,}",
            f"{point.pages:,}",
            str(point.page_size),
            *(f"{one.median:.2f} ({one.low:.2f} - {one.high:.2f})" for one in ratios),
            f"{findings.time(point, reference).median / 1e3:.1f}",
        )
    console.print(table)
    sglang = f"SGLang {machine['sglang']}" if machine["sglang"] else "no SGLang"
    console.print(
        f"Medians over {plan.rounds} rounds, after one to warm up; candidates take turns flush by flush, ratios are within a round. "
        f"Processor time of one thread of {machine['processor']}, no bytes moved; Python {machine['python']}, torch {machine['torch']}, "
        f"{sglang}; load {machine['load_before_and_after'][0]} before, {machine['load_before_and_after'][1]} after.",
        highlight=False,
    )
    for version in not_installed(machine["sglang"]):
        console.print(f"SGLang {version}: not installed in this environment, not measured.", highlight=False)
    if machine["sglang"] is None:
        console.print(NOT_INSTALLED + ".", highlight=False)
    for figure in figures(findings, names):
        console.print(figure.line(), highlight=False, soft_wrap=True)
