"""Which source line asked for a synchronisation."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Final

import torch

UNKNOWN_LINE: Final = "unknown:0"

# Frames of torch and of the ledger itself are the messengers, never the ones who asked.
_MESSENGERS: Final = (str(Path(torch.__file__).parent) + "/", str(Path(__file__).parent) + "/")

_names: dict[str, str] = {}  # by the path of a code object; code objects themselves are equal across files


def asking_line() -> str:
    """``file:line`` of the innermost frame outside torch and the ledger; the file from its top package on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        name = _names.get(path)
        if name is None:
            name = _names[path] = _file_name(path, str(frame.f_globals.get("__name__", "")))
        if name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return UNKNOWN_LINE


def _file_name(path: str, module: str) -> str:
    """The short name of a file, ``allocator/end.py`` for module ``allocator.end``; empty for a messenger."""
    if path.startswith(_MESSENGERS):
        return ""
    parts = Path(path).parts
    depth = module.count(".") + 1
    if parts and parts[-1] == "__init__.py":
        depth += 1
    return "/".join(parts[-depth:])
