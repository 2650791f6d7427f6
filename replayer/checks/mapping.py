"""C1: the two tables, against each other and against the placement that calls and moves have led to."""

from __future__ import annotations

import numpy as np
import torch

from replayer.content import IntArray, same_ids
from replayer.failure import CheckFailure
from replayer.oracle import shown
from replayer.pool_state import PoolState


def check_rows(state: PoolState, virtual_pages: IntArray) -> None:
    """Both tables' rows of some live pages.

    Raises:
        CheckFailure: C1.
    """
    expected = state.placed_physical[virtual_pages]
    found = state.rows("virtual_to_physical", virtual_pages)
    _require_same(state, virtual_pages, expected, found, "virtual_to_physical")
    back = state.rows("physical_to_virtual", expected)
    _require_same(state, virtual_pages, virtual_pages, back, "physical_to_virtual at their places")


def check_places(state: PoolState, physical_pages: IntArray) -> None:
    """The inverse table's rows of some places, taken or vacated.

    Raises:
        CheckFailure: C1.
    """
    found = state.rows("physical_to_virtual", physical_pages)
    expected = state.placed_virtual[physical_pages]
    if not same_ids(found, expected):
        wrong = physical_pages[found != expected]
        raise CheckFailure(
            "C1",
            f"physical_to_virtual of physical page(s) {shown(wrong)}",
            state.name,
            [int(page) for page in expected[found != expected] if page > 0],
            expected=shown(expected[found != expected]),
            found=shown(found[found != expected]),
        )


def check_translation(state: PoolState, virtual_pages: IntArray) -> None:
    """``translate_kv_loc``, which is what readers see of the tables, for the last token of live pages.

    Raises:
        CheckFailure: C1.
    """
    size = state.page_size
    tokens = virtual_pages * size + (size - 1)
    found = translated(state, tokens)
    expected = state.placed_physical[virtual_pages] * size + (size - 1)
    if not same_ids(found, expected):
        wrong = found != expected
        raise CheckFailure("C1", f"translate_kv_loc of tokens of virtual page(s) {shown(virtual_pages[wrong])}", state.name,
                           virtual_pages[wrong][:16].tolist(), shown(expected[wrong]), shown(found[wrong]))  # fmt: skip


def check_sink(state: PoolState) -> None:
    """Ids that name nothing translate to 0, the place of padding writes, and ``out=`` is written where it was asked for.

    Raises:
        CheckFailure: C1.
    """
    end = state.oracle.num_virtual_ids * state.page_size
    dead = np.flatnonzero(~state.oracle.live[1:])[:1] + 1
    tokens = np.concatenate([np.array([-1, 0, end, 2 * end + 1], dtype=np.int64), dead * state.page_size])
    out = torch.full(tokens.shape, -7, dtype=torch.int64, device=state.allocator.device)
    found = translated(state, tokens, out=out)
    if found.any() or out.cpu().numpy().any():
        raise CheckFailure("C1", f"translate_kv_loc of tokens {shown(tokens)}, none of which is live", state.name, [],
                           "0 each, in out= too", f"{shown(found)}; out= {shown(out.cpu().numpy())}")  # fmt: skip


def translated(state: PoolState, tokens: IntArray, **out: torch.Tensor) -> IntArray:
    """What the allocator translates virtual tokens to, on the host."""
    answer: IntArray = (
        state.allocator.translate_kv_loc(torch.from_numpy(tokens).to(state.allocator.device), **out)
        .cpu()
        .numpy()
    )
    return answer


def sweep_tables(state: PoolState) -> int:
    """Both tables, every row, sentinels and padding pair included; the number of rows.

    Raises:
        CheckFailure: C1.
    """
    forward, inverse = state.table("virtual_to_physical"), state.table("physical_to_virtual")
    for name, found, expected in (
        ("virtual_to_physical", forward, state.placed_physical),
        ("physical_to_virtual", inverse, state.placed_virtual),
    ):
        used = found[: len(expected) - 1]
        if not np.array_equal(used, expected[:-1]):
            rows = np.flatnonzero(used != expected[:-1])
            pages = rows if name == "virtual_to_physical" else expected[rows]
            raise CheckFailure(
                "C1",
                f"{name} rows {shown(rows)} are not what calls and moves have led to",
                state.name,
                [int(page) for page in pages[:16] if page > 0],
                expected=shown(expected[rows]),
                found=shown(used[rows]),
            )
        if found[-1] != -1:
            raise CheckFailure(
                "C1",
                f"the sentinel row of {name}",
                state.name,
                [],
                "-1",
                str(int(found[-1])),
            )
    return len(forward) + len(inverse)


def _require_same(state: PoolState, pages: IntArray, expected: IntArray, found: IntArray, what: str) -> None:
    if same_ids(expected, found):
        return
    wrong = expected != found
    raise CheckFailure(
        "C1",
        f"{what} of virtual page(s) {shown(pages[wrong])}",
        state.name,
        pages[wrong].tolist(),
        expected=shown(expected[wrong]),
        found=shown(found[wrong]),
    )
