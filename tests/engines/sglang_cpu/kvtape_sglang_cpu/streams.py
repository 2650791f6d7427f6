"""A stream for code that asks for CUDA's current one. On a CPU everything is done in the order it is called: nothing to wait for."""

from __future__ import annotations

from typing import Any


class ProgramOrder:
    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


_PROGRAM_ORDER = ProgramOrder()


def _current_stream(device: Any = None) -> ProgramOrder:
    return _PROGRAM_ORDER


def install() -> None:
    import torch

    torch.cuda.current_stream = _current_stream
