"""Everything about the allocators that only a GPU can tell, in one run of less than 8 minutes.

    python tools/gpu_check.py --json gpu-check.json

Needs torch, numpy, msgpack, zstandard and, for the kernels, triton; nothing has to be installed, it runs from a checkout. See
docs/gpu-check.md. The exit status is 0 only if every check held; 1 if one failed, 3 if none failed and there was no time for some.
With ``--device cpu`` it goes as far as a CPU can, and says of the rest that it was not measured.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY)]

import torch  # noqa: E402
from gpu.bandwidth import check_bandwidth, kernel_names  # noqa: E402
from gpu.busy import MOVES, ROUNDS, check_busy  # noqa: E402
from gpu.composites import check_composites  # noqa: E402
from gpu.correctness import check_golden, check_traces  # noqa: E402
from gpu.counting import check_counts  # noqa: E402
from gpu.verdicts import Results, rows_table, table  # noqa: E402

STRATEGIES = ("device", "batched", "hybrid", "per-row")
#: In this order; the share is of the whole time, and what a part leaves over goes to those after it.
PARTS = {"counts": 0.28, "busy": 0.20, "bandwidth": 0.14, "traces": 0.18, "composites": 0.08, "golden": 0.12}


def machine(device: str) -> dict[str, Any]:
    """What this ran on."""
    found: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "device": device,
    }
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found.update(
            gpu=properties.name, memory_gib=round(properties.total_memory / 2**30, 1), cuda=torch.version.cuda,
            capability=f"{properties.major}.{properties.minor}",
        )  # fmt: skip
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def parts(results: Results, args: argparse.Namespace, found: dict[str, Any]) -> dict[str, Callable[[], None]]:
    """What each part does."""
    device, strategies = args.device, args.strategies
    moves = tuple(count for count in MOVES if count <= args.most_moves)

    def bandwidth() -> None:
        found["path"] = check_bandwidth(results, device, "device")

    return {
        "counts": lambda: check_counts(results, device, strategies, args.events),
        "busy": lambda: check_busy(results, device, strategies, moves, args.rounds),
        "bandwidth": bandwidth,
        "traces": lambda: check_traces(results, device, strategies, args.events),
        "composites": lambda: check_composites(results, device, strategies),
        "golden": lambda: check_golden(results, device, strategies),
    }


def run(results: Results, args: argparse.Namespace, found: dict[str, Any]) -> None:
    """All parts, one after the other. A part that breaks is a failure and does not keep the others from running."""
    for name, work in parts(results, args, found).items():
        if name not in args.parts:
            results.skipped.append(f"{name}: not asked for")
            continue
        results.begin_part(PARTS[name])
        print(f"{results.elapsed:6.1f} s  {name}", flush=True)
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            results.add(
                f"part {name}",
                False,
                f"broke off: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
            )


def show(results: Results, found: dict[str, Any]) -> None:
    """Parts first, verdicts last."""
    for part, rows in results.rows.items():
        print(f"\n{part}")
        print("\n".join(f"  {line}" for line in rows_table(rows)))
    for what in results.skipped:
        print(f"skipped: {what}")
    print()
    print("  ".join(f"{key} {value}" for key, value in found.items() if value is not None))
    cells = [[each.word, each.what, each.found, each.wanted] for each in results.verdicts]
    print("\n".join(table(["", "check", "found", "wanted"], cells)))
    held = sum(each.held is True for each in results.verdicts)
    failed = sum(each.held is False for each in results.verdicts)
    unmeasured = len(results.verdicts) - held - failed
    print(
        f"{held} held, {failed} failed, {unmeasured} not measured, {len(results.skipped)} skipped; {results.elapsed:.0f} s"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (default cuda)")
    parser.add_argument(
        "--seconds", type=float, default=450.0, help="after so long what is left is skipped (default 450)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here as well")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--events", type=int, metavar="N", help="of each trace (default 1,200 to 2,500)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of timed flushes (default {ROUNDS})")
    parser.add_argument(
        "--most-moves", type=int, default=max(MOVES), help=f"of timed flushes (default {max(MOVES)})"
    )
    args = parser.parse_args()
    if args.rounds < 1 or args.most_moves < 1 or (args.events is not None and args.events < 1):
        parser.error("--rounds, --most-moves and --events are 1 or more")
    try:
        kind = torch.device(args.device).type
    except RuntimeError:
        kind = ""
    if kind not in ("cuda", "cpu"):
        parser.error(f"--device {args.device}: cuda, cuda:N or cpu")
    if args.json is not None:
        try:
            # Now, and not after minutes of device time.
            args.json.write_text("", encoding="utf-8")
        except OSError as problem:
            parser.error(f"--json {args.json}: {problem.strerror}")
    return args


def main() -> int:
    args = arguments()
    if torch.device(args.device).type == "cuda":
        if not torch.cuda.is_available():
            print(
                "gpu_check: no CUDA device that torch can use; --device cpu goes as far as a CPU can",
                file=sys.stderr,
            )
            return 2
        # Events and streams without a device's name are those of the current one.
        torch.cuda.set_device(torch.device(args.device).index or 0)
    warnings.simplefilter("default")
    found = machine(args.device)
    found["triton_kernels"] = ", ".join(sorted(kernel_names())) or None
    results = Results(args.seconds)
    try:
        run(results, args, found)
    except KeyboardInterrupt:
        results.add("the check itself", False, "interrupted")
    if args.json is not None:
        written = {
            "machine": found,
            "seconds": round(results.elapsed, 1),
            "exit_status": results.exit_status,
            "verdicts": [
                {"check": each.what, "held": each.held, "found": each.found, "wanted": each.wanted}
                for each in results.verdicts
            ],
            "skipped": results.skipped,
            "parts": results.rows,
        }
        args.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    show(results, found)
    return results.exit_status


if __name__ == "__main__":
    sys.exit(main())
