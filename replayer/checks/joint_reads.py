"""What readers and schedulers are told by a composite itself: its translations of ids, and what each side has left.

The pools' own answers are compared with the bands elsewhere; here those of the composite are compared with them. A composite need not have
all of these names.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from replayer.content import IntArray
from replayer.failure import CheckFailure
from replayer.oracle import shown
from replayer.pool_state import PoolState


def check_joint_translation(
    composite: Any, full: PoolState, swa: PoolState | None, virtual_pages: IntArray
) -> None:
    """``translate_kv_loc`` and ``translate_loc_from_full_to_swa`` for the last token of live full pages; a page without a window page
    translates to 0 there.

    Raises:
        CheckFailure: C1.
    """
    last = full.page_size - 1
    tokens = torch.from_numpy(virtual_pages * full.page_size + last).to(full.allocator.device)
    for name, state in (("translate_kv_loc", full), ("translate_loc_from_full_to_swa", swa)):
        translate = getattr(composite, name, None)
        if state is None or translate is None:
            continue
        places = state.placed_physical[virtual_pages]
        expected = np.where(places > 0, places * state.page_size + last, 0)
        found = translate(tokens).cpu().numpy()
        if not np.array_equal(found, expected):
            wrong = found != expected
            raise CheckFailure("C1", f"{name} of the composite, of tokens of virtual page(s) {shown(virtual_pages[wrong])}", state.name,
                               virtual_pages[wrong][:16].tolist(), shown(expected[wrong]), shown(found[wrong]))  # fmt: skip


def check_sides(composite: Any, sides: dict[str, PoolState]) -> None:
    """C10: what the composite says of each side alone is what the side says, or its maximum less what lives, or the smaller of the two.

    Raises:
        CheckFailure: C10.
    """
    for side, state in sides.items():
        schedulable = int(state.allocator.schedulable_available_size())
        expected = {f"schedulable_{side}_available_size": schedulable}
        most = getattr(composite, f"size_{side}", None)
        if most is not None:
            left = int(most) - int(state.allocator.allocated_count())
            expected[f"conserve_{side}_available_size"] = left
            expected[f"{side}_available_size"] = min(left, schedulable)
        for name, tokens in expected.items():
            tell = getattr(composite, name, None)
            found = tokens if tell is None else int(tell())
            if found != tokens:
                raise CheckFailure("C10", f"{name}() of the composite is not what is left of pool {state.name!r}", state.name, [],
                                   f"{tokens} tokens", f"{found} tokens")  # fmt: skip
