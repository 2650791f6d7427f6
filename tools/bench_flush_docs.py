"""Measures flushes again and writes docs/bench-flush.{md,json,png}: one command, some minutes, on a machine that does nothing else.

    python tools/bench_flush_docs.py ENV [OLDER_ENV]

ENV has SGLang 0.5.23 and matplotlib (tools/build_sglang_env.sh ENV; ENV/bin/python -m pip install 'matplotlib>=3.8'); OLDER_ENV, if given,
has SGLang 0.5.17 (SGLANG_VERSION=0.5.17 tools/build_sglang_env.sh OLDER_ENV). One environment holds one version, so there are two runs,
one after the other; what can be compared between them is each one's ratios. ``--from-json`` only writes the page again.
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
DOCS = REPOSITORY / "docs"
PAGE = DOCS / "bench-flush.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
MAIN = "import sys; from replayer.main import main; sys.exit(main())"
SHOWN_MOVES = (0, 1, 2, 3, 13, 64, 177, 1024, 2737, 16384)


def measure(environment: Path, picture: Path | None, *more: str) -> dict[str, Any]:
    """One run of `kvtape bench flush` of this checkout in an environment."""
    plot = [] if picture is None else ["--plot", str(picture)]
    done = subprocess.run(
        [str(environment / "bin" / "python"), "-W", "ignore", "-c", MAIN, "bench", "flush", "--json", *plot, *more],
        cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(done.returncode)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def ratio(spread: dict[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['low']:.2f} - {spread['high']:.2f})"


def table(found: dict[str, Any], panel: str, kind: str) -> list[str]:
    """Ratios to the reference, one row a number of moves."""
    reference = found["reference"]
    others = [name for name in found["candidates"] if name != reference]
    headings = ["moves", *others, f"{reference}, us"]
    lines = [f"| {' | '.join(headings)} |", "|---:" * len(headings) + "|"]
    for point in found["points"]:
        if point["panel"] != panel or point["kind"] != kind or point["moves"] not in SHOWN_MOVES:
            continue
        cells = [f"{point['moves']:,}", *(ratio(point["ratios"][name]) for name in others)]
        lines.append(f"| {' | '.join(cells)} | {point['nanoseconds'][reference]['median'] / 1e3:.1f} |")
    return lines


def wanted(found: dict[str, Any]) -> list[str]:
    """The figures that are wanted, held or not."""
    lines = ["| wanted | at most | found, at its worst point | |", "|---|---:|---|---|"]
    for figure in found["figures"]:
        verdict = {True: "held", False: "**not held**", None: "not measured"}[figure["held"]]
        spread = figure["found"]
        worst = "" if spread is None else f"{ratio(spread)} at {figure['at']}"
        lines.append(f"| {figure['what']} | {figure['limit']:g} | {worst} | {verdict} |")
    return lines


def page(found: dict[str, Any], older: dict[str, Any] | None) -> str:
    """What stands between the marks."""
    machine = found["machine"]
    before, after = machine["load_before_and_after"]
    lines = [
        f"{machine['processor']}, {machine['processors']} processors, load {before} before and {after} after; Python "
        f"{machine['python']}, torch {machine['torch']}, SGLang {machine['sglang']}; {found['rounds']} rounds.",
        "",
        *wanted(found),
    ]
    kinds = dict.fromkeys(point["kind"] for point in found["points"])
    for kind in kinds:
        lines += [
            "",
            f"Pages of one token, {kind}: time over that of {found['reference']}.",
            "",
            *table(found, "moves", kind),
        ]
    for kind in kinds:
        lines += ["", f"Pages of 64 tokens, {kind}.", "", *table(found, "pages", kind)]
    if older is None:
        lines += ["", "SGLang 0.5.17: not measured."]
    else:
        before, after = older["machine"]["load_before_and_after"]
        lines += [
            "",
            f"The same in an environment with SGLang {older['machine']['sglang']}, {older['rounds']} rounds, load {before} before and "
            f"{after} after (`docs/bench-flush-{older['machine']['sglang']}.json`), pages of one token, urgent:",
            "",
            *table(older, "moves", "urgent"),
        ]
    return "\n".join(lines)


def main() -> None:
    """Measure, then write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environment", type=Path, nargs="?", metavar="ENV")
    parser.add_argument("older_environment", type=Path, nargs="?", metavar="OLDER_ENV")
    parser.add_argument("--from-json", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    newest, oldest = DOCS / "bench-flush.json", DOCS / "bench-flush-0.5.17.json"
    if not arguments.from_json:
        if arguments.environment is None:
            parser.error("ENV is missing")
        newest.write_text(
            json.dumps(measure(arguments.environment, DOCS / "bench-flush.png"), indent=1) + "\n"
        )
        oldest.unlink(missing_ok=True)
        if arguments.older_environment is not None:
            oldest.write_text(
                json.dumps(measure(arguments.older_environment, None, "--rounds", "3"), indent=1) + "\n"
            )
    older = json.loads(oldest.read_text()) if oldest.exists() else None
    text = PAGE.read_text()
    head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(f"{head}\n{page(json.loads(newest.read_text()), older)}\n{tail}")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
