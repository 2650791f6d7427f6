"""Digests of what SGLang 0.5.23's composites answer to seeded programs, for machines on which SGLang is not installed.

``python -m tests.allocator.composite_digests`` writes them anew, where it is.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from tests.allocator.composite_program import Program
from tests.engine.composites import LAYOUTS, composite

FILE = Path(__file__).parent / "data" / "composite_digests.json"
STEPS, EVERY = 200, 20
#: Layout, page size, lazy, seed. Most of them with three pools: what is moved for whom has most cases there.
CASES = [
    (layout, page_size, lazy, seed)
    for layout, seeds in zip(LAYOUTS, (1, 1, 4), strict=True)
    for page_size in (1, 4)
    for lazy in (True, False)
    for seed in range(seeds)
]


def digests(program: Program) -> list[str]:
    """One for every `EVERY` steps, over answers, sizes and places since the beginning."""
    running, found = hashlib.sha256(), []
    for number in range(1, STEPS + 1):
        answer: Any = (program.step(), program.sizes(), program.places())
        running.update(json.dumps(answer, sort_keys=True).encode())
        if number % EVERY == 0:
            found.append(running.hexdigest()[:16])
    return found


def of_sglang() -> dict[str, list[str]]:
    """By the case's text. SGLang must be installed, and set up as its tests here do."""
    return {
        repr(case): digests(Program(composite(case[0], case[1], lazy=case[2]), case[3])) for case in CASES
    }


def main() -> int:
    FILE.write_text(json.dumps(of_sglang(), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
