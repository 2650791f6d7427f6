"""The count of torch's own CUDA synchronisation warnings, to be held against the ledger's."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Final

import torch

_MESSAGE: Final = "called a synchronizing CUDA operation"


class CudaCrossCheck:
    """Counts what ``torch.cuda.set_sync_debug_mode("warn")`` warns about inside its ``with`` blocks.

    It is another measure than the ledger's and is kept apart from it: the mode is that of the whole process,
    so other threads are in it, and non-blocking copies from pageable memory are not. May be entered again and
    again; the counts add up.

    Without a CUDA device nothing is run and ``synchronisations`` stays ``None``, which is not zero.

    Attributes:
        synchronisations: warnings so far, or ``None`` if the check never ran.
        lines: the same by ``file:line``.
    """

    def __init__(self) -> None:
        self.synchronisations: int | None = None
        self.lines: Counter[str] = Counter()
        self._previous_mode = 0
        self._catcher: warnings.catch_warnings[list[warnings.WarningMessage]] | None = None
        self._caught: list[warnings.WarningMessage] = []

    @property
    def so_far(self) -> int | None:
        """`synchronisations`, those of a block that is still open included."""
        if self._catcher is None:
            return self.synchronisations
        return (self.synchronisations or 0) + sum(_MESSAGE in str(each.message) for each in self._caught)

    def __enter__(self) -> CudaCrossCheck:
        if self._catcher is not None:
            raise RuntimeError("the cross-check is running already: its mode is that of the whole process")
        if not torch.cuda.is_available():
            return self
        self._catcher = warnings.catch_warnings(record=True)
        self._caught = self._catcher.__enter__()
        try:
            warnings.simplefilter("always")
            self._previous_mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn")
        except BaseException:
            self._catcher.__exit__(None, None, None)
            self._catcher = None
            raise
        self.synchronisations = self.synchronisations or 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._catcher is None:
            return
        try:
            torch.cuda.set_sync_debug_mode(self._previous_mode)
        finally:
            self._catcher.__exit__(kind, error, traceback)
            self._catcher = None
        caught, self._caught = self._caught, []
        others = []
        for warning in caught:
            if _MESSAGE in str(warning.message):
                self.synchronisations = (self.synchronisations or 0) + 1
                self.lines[f"{'/'.join(Path(warning.filename).parts[-2:])}:{warning.lineno}"] += 1
            else:
                others.append(warning)
        for warning in others:  # not ours: warn again, under the filters of the outside
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
