"""Run all mutants and write their score into docs/checks.md.

Usage: python -m tests.mutants [--update | --check]
"""

from __future__ import annotations

import argparse
import difflib
import sys
import tempfile
from pathlib import Path

from tests.mutants.registry import all_mutants
from tests.mutants.score import BEGIN, END, Traces, find_with_others, score_table

DOCUMENT = Path(__file__).parents[2] / "docs" / "checks.md"


def main() -> int:
    """1 where a mutant survives, is named otherwise than its entry says, or the committed table is another one (``--check``)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--update", action="store_true", help=f"write the tables into {DOCUMENT.name}")
    what.add_argument("--check", action="store_true", help="fail if the committed tables differ")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        traces = Traces(Path(folder))
        findings = [find_with_others(mutant, traces) for mutant in all_mutants()]
    wrong = [finding for finding in findings if not finding.is_expected]
    for finding in wrong:
        mutant = finding.mutant
        print(
            f"{mutant.name}: {mutant.named or mutant.check} at event {mutant.event} was expected; found: "
            f"{finding.failure or 'nothing, it survives'}",
            file=sys.stderr,
        )
    before = DOCUMENT.read_text(encoding="utf-8")
    head, _, rest = before.partition(BEGIN)
    _, _, tail = rest.partition(END)
    after = f"{head}{BEGIN}\n\n{score_table(findings)}\n{END}{tail}"
    if not arguments.update:
        sys.stdout.writelines(
            difflib.unified_diff(
                before.splitlines(True), after.splitlines(True), "committed", "measured", n=0
            )
        )
    else:
        DOCUMENT.write_text(after, encoding="utf-8")
    print(score_table(findings).split("\n", 1)[0], file=sys.stderr)
    return 1 if wrong or (arguments.check and before != after) else 0


if __name__ == "__main__":
    sys.exit(main())
