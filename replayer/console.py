"""Text for people, through rich, but written by us: rich ends the process with 1 when the reader of a pipe goes away, and 1 means that a
check failed. What is written here raises BrokenPipeError, which `replayer.main` knows."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

#: Columns where the output is no terminal.
WIDTH = 160


def print_rich(draw: Callable[[Console], None]) -> None:
    """Let ``draw`` print on a console, then write what it printed to standard output; nothing where that is closed."""
    from rich.console import Console

    out = sys.stdout
    if out is None:
        return
    terminal = out.isatty()
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=None if terminal else WIDTH, highlight=False)
    draw(console)
    print(text.getvalue(), end="", file=out)
