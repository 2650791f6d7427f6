"""SGLang's classes as `replayer.targets_sglang` builds them answer as SGLang did when the golden transcripts were made.

This is what shows that the stand-ins (a buffer of sizes only, specs that know only an entry's size, a CPU's stream, the paged kernels)
change nothing of what is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recorder.trace import Header, PoolHeader, Provenance
from replayer.targets_sglang import build_sglang_pools, remove_cpu_stand_ins, sglang_version
from tests.golden.transcripts import DATA, Player, lines

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        sglang_version() is None, reason="SGLang is not installed (tools/build_sglang_env.sh)"
    ),
]

TRANSCRIPTS = sorted(DATA.glob("*.jsonl.zst"))
POOL_FIELDS = (
    "name",
    "kind",
    "grow_direction",
    "page_size",
    "entry_bytes",
    "layer_num",
    "num_pages",
    "min_page_index",
)


class NoBytes:
    """Moves nothing, and checks that it is asked for whole, distinct pages."""

    def move_physical_pages(self, dst_pages: torch.Tensor, src_pages: torch.Tensor, page_size: int) -> None:
        pages = torch.cat([dst_pages, src_pages]).tolist()
        assert len(set(pages)) == 2 * len(src_pages)


class NoBytesZeroed(NoBytes):
    def zero_physical_pages(self, phys_pages: torch.Tensor) -> None:
        assert (phys_pages > 0).all()


class SGLangPlayer(Player):
    """Plays a transcript on SGLang's classes instead of ours."""

    def __init__(self, header: dict[str, Any]) -> None:
        pools = header["pools"]
        trace_header = Header(
            engine="sglang",
            total_bytes=header["total_bytes"],
            settings={"move_cap": header["move_cap"]},
            provenance=Provenance("recorded"),
            pools=[
                PoolHeader(
                    **{name: pool[name] for name in POOL_FIELDS},
                    num_virtual_ids=pool.get("num_virtual_ids", pool["num_pages"]),
                    is_id_owner=pool.get("is_id_owner", True),
                    lazy_compaction=header["lazy_compaction"],
                )
                for pool in pools
            ],
        )
        state_pools = {pool["name"] for pool in pools if pool["kind"] == "mamba"}
        self.allocators = build_sglang_pools(
            trace_header, kvcache_for=lambda name: NoBytes() if name in state_pools else NoBytesZeroed()
        )
        self.gate_of_floats = "is_id_owner" in pools[0]
        self.gate_open = True
        self.events = {}

    def call(self, line: dict[str, Any]) -> Any:
        if line["op"] == "flush":
            target = self.allocators[line["pool"]]
            if target.grow_direction == "float":
                return target.flush_opportunistic()
        return super().call(line)


@pytest.fixture(autouse=True)
def stand_ins_do_not_outlive_a_test() -> Iterator[None]:
    before = torch.cuda.current_stream
    yield
    remove_cpu_stand_ins()
    assert torch.cuda.current_stream is before


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.name.removesuffix(".jsonl.zst"))
def test_every_line_equals_the_transcript(path: Path) -> None:
    transcript = lines(path)
    header = next(transcript)["header"]
    player = SGLangPlayer(header)
    for pool in header["pools"]:
        made = player.allocators[pool["name"]]
        assert type(made).__module__.startswith("sglang.")
        assert (made.entry_bytes, made.num_pages, made.min_page_index) == tuple(
            pool[key] for key in ("entry_bytes", "num_pages", "min_page_index")
        )
    for number, line in enumerate(transcript, start=2):
        result = player.call(line)
        assert result == line.get("result"), f"{path.name} line {number}: {line['op']}"
        for name, expected in line["state"].items():
            assert player.state(name, expected) == expected, (
                f"{path.name} line {number}: {line['op']}, state of {name}"
            )
