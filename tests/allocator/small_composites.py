"""Small composites for tests of one rule each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allocator import STRATEGIES
from tests.allocator.composite_program import our_composite
from tests.engine.composites import LAYOUTS

ENDS, STATES, THREE = LAYOUTS
WINDOWS = (ENDS, THREE)
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
every_window = pytest.mark.parametrize("layout", WINDOWS)


def make(
    layout: str, page_size: int = 4, *, lazy: bool = True, strategy: str = "batched", **settings: Any
) -> Any:
    return our_composite(layout, page_size, lazy=lazy, strategy=strategy, **settings)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def pages_of(made: Any, tokens: torch.Tensor) -> list[int]:
    return torch.unique(tokens // made.page_size).tolist()


def window_places(made: Any, tokens: torch.Tensor) -> list[int]:
    return made.swa_attn_allocator.virtual_to_physical[tokens[:: made.page_size] // made.page_size].tolist()


def lay(made: Any, tokens: int) -> torch.Tensor:
    found = made.alloc(tokens)
    assert found is not None
    return found
