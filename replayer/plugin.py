"""Entry point that SGLang calls in each of its processes, by which kvtape's allocator comes in the place of its own.

Here and not beside the allocator, whose package brings torch: where nobody asks for it, nothing is imported.
"""

from __future__ import annotations

import os
from typing import Final

VARIABLE: Final = "KVTAPE_ALLOCATOR"


def sglang_allocator() -> None:
    """Entry point of the group `sglang.srt.plugins`. Returns at once unless the variable names a strategy; never raises."""
    chosen = os.environ.get(VARIABLE)
    if not chosen:
        return
    try:
        from allocator.sglang_plugin import install

        install(chosen)
    except Exception as problem:
        import logging

        logging.getLogger("kvtape").error(
            "kvtape: SGLang goes on with its own allocator: %s: %s", type(problem).__name__, problem
        )
