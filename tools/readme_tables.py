"""Prints the README's table of synchronisations per flush: every trace, our strategies, and SGLang's own classes on the same calls.

python tools/readme_tables.py --sglang-env ENV        (ENV from tools/build_sglang_env.sh)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
MAIN = "import sys; from replayer.main import replay_main; sys.exit(replay_main())"
STRATEGIES = ("per-row", "hybrid", "batched", "device")


def replay(python: str, trace: Path, *arguments: str) -> dict[str, Any]:
    """The JSON report of one replay; ends with the failure if there is one."""
    done = subprocess.run(
        [python, "-W", "ignore", "-c", MAIN, str(trace), "--json", *arguments],
        cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{trace.name} {' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def row(name: str, label: str, report: dict[str, Any], first: bool) -> str:
    """A row of the table."""

    def counts(kind: str) -> str:
        figures = report["syncs"]["per_flush"][kind]
        return f"{figures['min']} / {figures['median']:g} / {figures['max']} ({figures['total']:,})"

    flushes = report["flushes"]
    cells = (f"`{name}`", f"{flushes['count']:,}", f"{flushes['pages_moved']:,}") if first else ("", "", "")
    return f"| {' | '.join((*cells, label, counts('device_to_host'), counts('host_to_device')))} |"


def main() -> None:
    """Replay and print, row by row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sglang-env", type=Path, help="without it SGLang's own rows are left out")
    arguments = parser.parse_args()
    for trace in sorted((REPOSITORY / "traces").glob("*.msgpack.zst")):
        name = trace.name.removesuffix(".msgpack.zst")
        of_sglang = name.startswith(("sglang", "kimi", "parity"))
        flushing = () if of_sglang or name.startswith("synthetic") else ("--flush-every", "20")
        first = True
        if of_sglang and arguments.sglang_env is not None:
            python = str(arguments.sglang_env / "bin" / "python")
            print(
                row(name, "SGLang 0.5.23", replay(python, trace, "--allocator", "sglang"), first), flush=True
            )
            first = False
        for strategy in STRATEGIES:
            report = replay(sys.executable, trace, "--strategy", strategy, *flushing)
            print(row(name, strategy, report, first), flush=True)
            first = False


if __name__ == "__main__":
    main()
