"""The pools of a random program, and the trace header that describes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from recorder.trace import COMPOSITE, SUB_POOL, Header, PoolHeader, Provenance

#: Bytes of one token of the smallest pool: one head of 8 float32, K and V.
TOKEN_BYTES: Final = 64


@dataclass(frozen=True)
class Shape:
    """A pool: one head of 8 float32 in ``layers`` layers, or with ``states`` one state of 256 bytes a layer and slot.

    ``owner`` names the pool whose virtual ids it is indexed by; None if it hands out its own.
    """

    name: str
    grow_direction: str
    layers: int = 1
    states: bool = False
    owner: str | None = None

    @property
    def entry_bytes(self) -> int:
        return self.layers * (4 * TOKEN_BYTES if self.states else TOKEN_BYTES)


@dataclass(frozen=True)
class Chain:
    """Pools that share one buffer. ``known_to_sglang``: whether SGLang 0.5.23's classes take this chain (one float at most).
    ``composite``: the calls are made on a composite of the pools."""

    name: str
    shapes: tuple[Shape, ...]
    known_to_sglang: bool = True
    composite: bool = False


CHAINS: Final = (
    Chain("two ends", (Shape("full", "down"), Shape("swa", "up", 3))),
    Chain("two ends, turned", (Shape("full", "up", 2), Shape("swa", "down"))),
    Chain("shared ids", (Shape("full", "down"), Shape("swa", "up", 3, owner="full"))),
    Chain("shared ids, dear owner", (Shape("full", "down", 3), Shape("swa", "up", 1, owner="full"))),
    Chain("states", (Shape("full", "down"), Shape("mamba", "up", 2, states=True))),
    Chain(
        "float",
        (Shape("full", "down"), Shape("swa", "float", 2), Shape("mamba", "up", 1, states=True)),
    ),
    Chain(
        "float, shared ids",
        (
            Shape("full", "down", 2),
            Shape("swa", "float", 1, owner="full"),
            Shape("mamba", "up", 1, states=True),
        ),
    ),
    Chain(
        "two floats",
        (
            Shape("full", "down"),
            Shape("swa", "float", 1),
            Shape("local", "float", 2, owner="full"),
            Shape("mamba", "up", 1, states=True),
        ),
        known_to_sglang=False,
    ),
)

COMPOSITES: Final = (
    Chain(
        "composite: full, swa",
        (Shape("full", "down"), Shape("swa", "up", 3, owner="full")),
        composite=True,
    ),
    Chain(
        "composite: full, swa, dear owner",
        (Shape("full", "down", 3), Shape("swa", "up", 1, owner="full")),
        composite=True,
    ),
    Chain(
        "composite: full, mamba",
        (Shape("full", "down"), Shape("mamba", "up", 2, states=True)),
        composite=True,
    ),
    Chain(
        "composite: full, swa, mamba",
        (
            Shape("full", "down", 2),
            Shape("swa", "float", 1, owner="full"),
            Shape("mamba", "up", 1, states=True),
        ),
        composite=True,
    ),
)


@dataclass(frozen=True)
class Setting:
    """Everything a program starts from. ``pages``: of the smallest pool, about; ``move_cap``: pages an opportunistic flush may move."""

    chain: Chain
    page_size: int
    lazy: bool
    move_cap: int
    pages: int

    def page_size_of(self, shape: Shape) -> int:
        """State pools hand out single slots."""
        return 1 if shape.states else self.page_size

    def header(self, how: str) -> Header:
        """The header of the program's trace; ``how`` goes into its provenance."""
        shapes: Sequence[Shape] = self.chain.shapes
        reserved = max(shape.entry_bytes * self.page_size_of(shape) for shape in shapes)
        total_bytes = reserved + self.pages * TOKEN_BYTES * self.page_size * len(shapes)
        pages = {s.name: total_bytes // s.entry_bytes // self.page_size_of(s) for s in shapes}

        def pool(shape: Shape) -> PoolHeader:
            size = self.page_size_of(shape)
            return PoolHeader(
                name=shape.name,
                kind="mamba" if shape.states else "mha",
                grow_direction=shape.grow_direction,
                page_size=size,
                entry_bytes=shape.entry_bytes,
                layer_num=shape.layers,
                num_pages=pages[shape.name],
                min_page_index=math.ceil(math.ceil(reserved / shape.entry_bytes) / size),
                num_virtual_ids=pages[shape.owner or shape.name],
                is_id_owner=shape.owner is None,
                lazy_compaction=self.lazy and shape.grow_direction != "float",
                layout=_layout(shape),
            )

        return Header(
            engine="kvtape",
            engine_version="fuzz",
            pools=[pool(shape) for shape in shapes],
            provenance=Provenance(kind="synthetic", how=how, hardware="a CPU"),
            settings={"placement": "engine", "move_cap": self.move_cap},
            total_bytes=total_bytes,
            device="cpu",
            level=COMPOSITE if self.chain.composite else SUB_POOL,
        )


def _layout(shape: Shape) -> dict[str, Any]:
    if shape.states:
        return {
            "conv_state_shapes": [[4, 8]], "conv_dtype": "float32",
            "temporal_state_shape": [4, 8], "temporal_dtype": "float32",
        }  # fmt: skip
    return {"head_num": 1, "head_dim": 8, "dtype": "float32"}
