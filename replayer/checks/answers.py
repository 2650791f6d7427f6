"""C13 for answers given earlier: ids that an alloc answered are the caller's, and no later call may overwrite them.

Megatron-LM#6584 answered a view of its free list, which the next free rewrote.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from replayer.content import IntArray
from replayer.failure import CheckFailure
from replayer.oracle import shown
from replayer.pool_state import PoolState

#: Answers looked at in a sweep.
KEPT = 64


@dataclass
class _Answer:
    seq: int
    state: PoolState
    tensor: torch.Tensor
    tokens: IntArray

    def require_unchanged(self) -> None:
        host = self.tensor if self.tensor.device.type == "cpu" else self.tensor.cpu()
        found = host.numpy()
        if not np.array_equal(found, self.tokens):
            changed = self.tokens[found != self.tokens]
            raise CheckFailure(
                "C13",
                f"the answer of event {self.seq} was overwritten by a later call: it was a view of the allocator's own memory",
                self.state.name,
                [int(page) for page in np.unique(changed // self.state.page_size)[:16]],
                expected=shown(changed),
                found=shown(found[found != self.tokens]),
            )


class Answers:
    """The last answers, as they were."""

    def __init__(self) -> None:
        self._kept: deque[_Answer] = deque(maxlen=KEPT)

    def note(self, seq: int, state: PoolState, tensor: torch.Tensor, tokens: IntArray) -> None:
        """Keep an answer; ``tokens`` is the same on the host."""
        self._kept.append(_Answer(seq, state, tensor, tokens.copy()))

    def sweep(self) -> None:
        """Look at all of them.

        Raises:
            CheckFailure: C13.
        """
        for answer in self._kept:
            answer.require_unchanged()
