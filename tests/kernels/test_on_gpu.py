"""The same on CUDA, compiled: kernels beside torch operations, and an urgent flush in a CUDA graph."""

from __future__ import annotations

from tests.kernels.interpreter import require_compiler

require_compiler()

import pytest  # noqa: E402
import torch  # noqa: E402

from allocator.flush_ops import flush_ops_class  # noqa: E402
from allocator.unsettled import FAR  # noqa: E402
from tests.kernels.bands import Band, Pool, expect_same, named_bands  # noqa: E402
from tests.kernels.part_bands import PartBand, expect_same_in_part, named_part_bands  # noqa: E402

pytestmark = pytest.mark.gpu


def test_kernels_are_what_is_used() -> None:
    from allocator.kernels.flush import TritonFlush

    assert flush_ops_class("cuda") is TritonFlush


@pytest.mark.parametrize("name", named_bands())
def test_named_bands(name: str) -> None:
    from allocator.kernels.flush import TritonFlush

    expect_same(named_bands()[name], TritonFlush, "cuda")


@pytest.mark.parametrize("grows_up", [True, False])
@pytest.mark.parametrize("entry_bytes", [4096 + 48, 8, 21])
def test_windows_of_many_blocks(grows_up: bool, entry_bytes: int) -> None:
    from allocator.kernels.flush import TritonFlush

    holds = torch.rand(9000, generator=torch.Generator().manual_seed(1)) < 0.4
    band = Band(tuple(holds.tolist()), grows_up, page_size=4, entry_bytes=entry_bytes)
    assert expect_same(band, TritonFlush, "cuda")["moves"] > 1024


@pytest.mark.parametrize("name", named_part_bands())
def test_named_bands_in_part(name: str) -> None:
    from allocator.kernels.flush import TritonFlush

    expect_same_in_part(named_part_bands()[name], TritonFlush, "cuda")
    expect_same_in_part(named_part_bands()[name], TritonFlush, "cuda", block=16)


@pytest.mark.parametrize("grows_up", [True, False])
@pytest.mark.parametrize("writes", [False, True])
def test_windows_of_many_blocks_in_part(grows_up: bool, writes: bool) -> None:
    from allocator.kernels.flush import TritonFlush

    draws = torch.rand(9000, generator=torch.Generator().manual_seed(2)).tolist()
    places = "....." + "".join("L.-"[(draw > 0.4) + (draw > 0.97)] for draw in draws)
    written = [x for x, place in enumerate(places) if place == "L" and x > 3000] if writes else None
    band = PartBand(places, grows_up, page_size=4, written=written and tuple(reversed(written)), padding=100)
    assert expect_same_in_part(band, TritonFlush, "cuda")["moves"] > 1024


@pytest.mark.parametrize("grows_up", [True, False])
def test_urgent_flush_in_a_cuda_graph(grows_up: bool) -> None:
    from allocator.kernels.flush import TritonFlush

    bands = [
        Band((True, False, False) * 2000, grows_up, entry_bytes=512, seed=1, on_device=True),
        Band(
            (False, True, True, False, False, True) * 1000, grows_up, entry_bytes=512, seed=2, on_device=True
        ),
    ]
    Pool(bands[0], TritonFlush, "cuda").flush()  # kernels are compiled and loaded before a capture
    made = Pool(bands[0], TritonFlush, "cuda")
    window, ascending, rows = made.window()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outcome = made.ops.pack(window, ascending, rows)
    for band in bands:
        reference = Pool(band, device="cuda")
        size = reference.ascending.shape[0]
        ascending.fill_(FAR if grows_up else -1)
        (ascending[:size] if grows_up else ascending[ascending.shape[0] - size :]).copy_(reference.ascending)
        assert isinstance(window.mark, torch.Tensor) and window.extent is not None
        window.mark.fill_(reference.mark)
        window.extent.fill_(size)
        made.bytes.copy_(reference.bytes)
        made.tables.virtual_to_physical.copy_(reference.tables.virtual_to_physical)
        made.tables.physical_to_virtual.copy_(reference.tables.physical_to_virtual)
        graph.replay()
        expected = reference.flush()
        assert made.state() == reference.state()
        assert int(outcome.moves) == expected["moves"] > 0
