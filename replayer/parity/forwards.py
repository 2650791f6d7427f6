"""When a forward is done."""

from __future__ import annotations

from typing import Any

import torch


class ForwardDone:
    """A forward's done event where forwards are over when they return, as on a CPU.

    It says "not yet" until the engine reads the forward's results, as an event on a GPU would: what is flushed meanwhile has to mind the
    forward, and pages it moves away stay in pending reuse.
    """

    def __init__(self) -> None:
        self._done = False

    def query(self) -> bool:
        return self._done

    def wait(self) -> None:
        """Orders a stream after the forward; there is one stream, and it is."""

    def synchronize(self) -> None:
        """The results are read."""
        self._done = True


def forward_done(device: str) -> Any:
    """The event of the forward that was just launched: torch's on CUDA, else a `ForwardDone`."""
    if not device.startswith("cuda"):
        return ForwardDone()
    event = torch.cuda.Event()
    event.record()
    return event
