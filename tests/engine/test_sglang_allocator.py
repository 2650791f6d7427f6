"""kvtape's allocator in the place of SGLang's: its composites, over our sub-pools, answer and place as over their own."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from allocator import sglang_plugin
from allocator.sglang_classes import (
    SglangDeviceFloatMultiEndedAllocator,
    SglangDeviceMultiEndedAllocator,
    SglangMultiEndedAllocator,
)
from replayer.targets_sglang import sglang_version
from tests.allocator.delayed import NeverReadBack, SlowReadBack
from tests.engine.composites import LAYOUTS, Scheduler, composite, pools

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        sglang_version() != "0.5.23", reason="SGLang 0.5.23 is not installed (tools/build_sglang_env.sh)"
    ),
    pytest.mark.usefixtures("sglang_on_a_cpu"),
]

STEPS = 300


def their_answers(layout: str, page_size: int, *, lazy: bool, look_every: int) -> list[Any]:
    """What SGLang's own classes answer, step by step. Its composites know floats by the class that their module names, so both cannot be
    run at the same time."""
    theirs = Scheduler(composite(layout, page_size, lazy=lazy), page_size)
    assert not any(isinstance(pool, SglangMultiEndedAllocator) for pool in pools(theirs.made).values())
    answers = []
    for number in range(STEPS):
        answers.append(theirs.step())
        if number % look_every == 0:
            answers[-1] = (answers[-1], theirs.sizes(), theirs.places())
    assert theirs.refused and (theirs.moved or not lazy)
    return answers


def compare(
    answers: list[Any], strategy: str, layout: str, page_size: int, *, lazy: bool, look_every: int
) -> None:
    sglang_plugin.put_in_place(strategy)
    ours = Scheduler(composite(layout, page_size, lazy=lazy), page_size)
    for pool in pools(ours.made).values():
        assert isinstance(pool, SglangMultiEndedAllocator) and pool.strategy == strategy
        on_device = isinstance(pool, SglangDeviceMultiEndedAllocator | SglangDeviceFloatMultiEndedAllocator)
        assert on_device == (strategy == "device")
    for number, expected in enumerate(answers):
        found = ours.step()
        if number % look_every == 0:
            assert found == expected[0], f"step {number}"
            assert ours.sizes() == expected[1], f"step {number}"
            assert ours.places() == expected[2], f"step {number}"
        else:
            assert found == expected, f"step {number}"


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", ["device", "batched"])
def test_the_composites_answer_the_same(strategy: str, layout: str, page_size: int, lazy: bool) -> None:
    answers = their_answers(layout, page_size, lazy=lazy, look_every=2)
    compare(answers, strategy, layout, page_size, lazy=lazy, look_every=2)


@pytest.mark.parametrize("read_back", [NeverReadBack, SlowReadBack], ids=["never", "slow"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_and_so_they_do_when_numbers_come_late(
    layout: str, page_size: int, read_back: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: what a flush moved is on its way while the composites go on asking."""
    for cls in (SglangDeviceMultiEndedAllocator, SglangDeviceFloatMultiEndedAllocator):
        monkeypatch.setattr(cls, "read_back_class", read_back)
    answers = their_answers(layout, page_size, lazy=True, look_every=7)
    compare(answers, "device", layout, page_size, lazy=True, look_every=7)


def test_every_name_that_sglang_asks_of_a_sub_pool_is_there() -> None:
    """Read off the source of whoever is given one."""
    folder = Path(importlib.import_module("sglang.srt.mem_cache").__path__[0])
    asked: dict[str, set[str]] = {}
    for path in (
        *folder.glob("allocator/unified_*.py"), folder / "unified_memory_pool.py", *folder.glob("unified_cache/components/*.py"),
        folder / "hybrid_cache" / "hybrid_pool_assembler.py", folder / "mamba_radix_cache.py",
    ):  # fmt: skip
        if path.exists():
            tree = ast.parse(path.read_text(encoding="utf-8"))
            # Inside the classes themselves anything may be asked.
            tree.body = [
                node
                for node in tree.body
                if getattr(node, "name", "") not in (sglang_plugin.END, sglang_plugin.FLOAT)
            ]
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and _names_a_pool(node.value):
                    asked.setdefault(node.attr, set()).add(f"{path.name}:{node.lineno}")
    assert {"virtual_to_physical", "free_virtual_ids", "_page_reps", "flush_for_allocation", "bind"} <= set(
        asked
    )
    sglang_plugin.put_in_place("device")
    made = pools(composite("full, swa and mamba", 4, lazy=True))
    # Requests' states are handed out by a slot allocator, which goes by the same name as the sub-pool under it.
    slots = importlib.import_module("sglang.srt.mem_cache.unified_memory_pool").UnifiedMambaSlotAllocator
    only_floats = {"low_wm_page", "high_wm_page", "_live_pages", "_hole_pages", "make_room", "pages_in_band"}
    missing = {
        name: sorted(where)
        for name, where in asked.items()
        if not hasattr(made["swa" if name in only_floats else "full"], name) and not hasattr(slots, name)
    }
    assert missing == {}


POOLS = {
    "fa", "sa", "ma", "full_attn_allocator", "swa_attn_allocator", "mamba_allocator", "_multi_ended_allocator", "_full_allocator",
    "_swa_allocator", "short_pool", "flt", "band_alloc", "blocker", "neighbor", "member", "mea", "swa",
}  # fmt: skip


def _names_a_pool(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in POOLS
    return isinstance(node, ast.Name) and node.id in POOLS


def test_sglang_gets_its_classes_back() -> None:
    modules = [importlib.import_module(name) for name in (sglang_plugin.MODULE, *sglang_plugin.USERS)]
    before = [dict(vars(module)) for module in modules]
    sglang_plugin.put_in_place("device")
    assert all(vars(module)[sglang_plugin.END] is SglangMultiEndedAllocator for module in modules)
    assert torch.equal(
        SglangMultiEndedAllocator.translate_token_ids(
            loc=torch.tensor([3, 9]), v2p=torch.tensor([0, 4, -1]), page_size=2
        ),
        torch.tensor([9, 0]),
    )
    sglang_plugin.remove()
    assert [dict(vars(module)) for module in modules] == before
