"""Tokens per second that a real engine serves with recording on, over off: alternating runs, ratios of neighbours.

    python tools/bench_throughput.py --env VLLM_ENV --engine vllm --pairs 5

Each run is a process of its own; its start is not counted. The outputs of all runs have to be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
OPTIONS = {
    "vllm": ("--model", "smollm2", "--requests", "24", "--rounds", "3"),
    "sglang": ("--model", "tiny_hybrid_swa", "--page-size", "16", "--lag", "3", "--requests", "16", "--rounds", "2"),
}  # fmt: skip


def serve(
    python: Path, engine: str, folder: Path, name: str, recorded: bool
) -> tuple[float, dict[str, list[int]]]:
    """(tokens per second, outputs) of one run."""
    environment = {key: value for key, value in os.environ.items() if key != "KVTAPE_RECORD"}
    environment["PYTHONPATH"] = str(REPOSITORY)
    if recorded:
        environment["KVTAPE_RECORD"] = f"{folder}/{name}.msgpack.zst"
    out = folder / f"{name}.json"
    command = [python, "-W", "ignore", "-m", f"tests.engines.run_{engine}", "--out", out, *OPTIONS[engine]]
    done = subprocess.run(
        [str(part) for part in command], env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{engine} failed:\n{done.stderr[-3000:]}")
    result = json.loads(out.read_text(encoding="utf-8"))
    if recorded and not list(folder.glob(f"{name}.*.msgpack.zst*")):
        raise SystemExit("nothing was recorded: is kvtape installed in that environment?")
    return float(result["tokens_per_second"]), result["outputs"]


def main() -> int:
    """Run the pairs and print ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", type=Path, required=True, help="the engine's environment")
    parser.add_argument("--engine", choices=sorted(OPTIONS), default="vllm")
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    python = arguments.env / "bin" / "python"
    ratios = []
    first: dict[str, list[int]] | None = None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for pair in range(arguments.pairs):
            speeds = {}
            # Who goes first changes from pair to pair, so that a drift of the machine favours neither.
            for recorded in (False, True) if pair % 2 == 0 else (True, False):
                speed, outputs = serve(python, arguments.engine, folder, f"{pair}-{recorded}", recorded)
                speeds[recorded] = speed
                first = first or outputs
                if outputs != first:
                    raise SystemExit("two runs answered differently")
            ratios.append(speeds[True] / speeds[False])
            print(
                f"pair {pair}: off {speeds[False]:.1f} tokens/s, on {speeds[True]:.1f}, on/off {ratios[-1]:.3f}",
                flush=True,
            )
    print(
        f"{arguments.engine}: on/off {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}, {arguments.pairs} pairs), same outputs in all runs"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
