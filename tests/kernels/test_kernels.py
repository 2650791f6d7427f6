"""Triton kernels beside torch operations: the same plans, tables and bytes, whatever the band looks like."""

from __future__ import annotations

from tests.kernels.interpreter import require_interpreter

require_interpreter()

import json  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from types import ModuleType  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from allocator.errors import ConfigurationError  # noqa: E402
from allocator.flush_ops import FLUSH_OPS_ENV, TorchFlush, flush_ops_class  # noqa: E402
from allocator.kernels import flush, move, part_plan, plan  # noqa: E402
from allocator.kernels.flush import TritonFlush  # noqa: E402
from allocator.tables import PageTables  # noqa: E402
from allocator.unsettled import FAR  # noqa: E402
from tests.kernels.bands import Band, Pool, expect_same, named_bands  # noqa: E402
from tests.kernels.compiled import PART_KERNELS  # noqa: E402
from tests.kernels.mutants import MUTANTS, attribute_of, planted  # noqa: E402
from tests.kernels.part_bands import PartBand, expect_same_in_part  # noqa: E402

pytestmark = pytest.mark.cpu

BANDS = named_bands()
#: Blocks smaller than windows, equal to them, and larger; one program and several.
TUNINGS = ({}, {"block": 4, "_most_programs": 3}, {"block": 8, "_chunk": 2, "_most_programs": 1})


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
@pytest.mark.parametrize("name", BANDS)
def test_named_bands(name: str, tuning: dict[str, int]) -> None:
    expect_same(BANDS[name], TritonFlush, **tuning)


@st.composite
def bands(draw: st.DrawFn) -> Band:
    size = draw(st.integers(1, 90))
    density = draw(st.sampled_from([0, 1, 5, 9, 10]))
    holds = draw(st.lists(st.integers(0, 9).map(lambda n: n < density), min_size=size, max_size=size))
    if all(holds):
        holds[draw(st.integers(0, size - 1))] = False
    return Band(
        holds=tuple(holds),
        grows_up=draw(st.booleans()),
        page_size=draw(st.sampled_from([1, 4])),
        entry_bytes=draw(st.sampled_from([7, 12, 32, 40])),
        seed=draw(st.integers(0, 1000)),
        lead=draw(st.integers(1, 3)),
        spare=draw(st.integers(0, 3)) + 2,
        on_device=draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None)
@given(bands(), st.sampled_from([4, 16, 1024]), st.sampled_from([1, 2, 2048]), st.integers(1, 5))
def test_any_band(band: Band, block: int, chunk: int, programs: int) -> None:
    expect_same(band, TritonFlush, block=block, _chunk=chunk, _most_programs=programs)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush, attribute_of(name), planted(name, tmp_path))
    # What a faulty kernel leaves unwritten reads as the padding page, and not as a page outside the buffer.
    monkeypatch.setattr(torch, "empty", torch.zeros)
    # The odd ones first, and those with padded lists of holes last: a fault that takes padding for a page would write outside the buffer.
    odd_first = list(reversed(BANDS.values()))
    for band in sorted(odd_first, key=lambda band: band.on_device):
        for tuning in TUNINGS:
            try:
                expect_same(band, TritonFlush, **tuning)
            except AssertionError:
                return
    pytest.fail("no band shows the fault")


def far_pages(mover: ModuleType) -> bool:
    """Whether a page beyond 2**32 bytes moves, in a buffer of which only the pages that are touched take memory."""
    page_bytes = 1001
    src, dst, wrapped = (2**32 // page_bytes + more for more in (10, 30, 0))
    words = torch.from_numpy(np.zeros((wrapped + 50) * page_bytes, dtype=np.uint8)).view(-1, page_bytes)
    value = torch.randint(1, 256, (page_bytes,), dtype=torch.uint8)
    words[src] = value
    tables = PageTables(8, words.shape[0], "cpu")
    tables.bind(torch.tensor([5]), torch.tensor([src]))
    pages = torch.tensor([src, 0]), torch.tensor([dst, 0])
    mover.move_pages[(2,)](
        words=words, virtual_to_physical=tables.virtual_to_physical, physical_to_virtual=tables.physical_to_virtual,
        src_pages=pages[0], dst_pages=pages[1], moved=torch.empty(2, dtype=torch.int64), num_moves=torch.tensor(1),
        ok=torch.tensor(1, dtype=torch.uint8), rows=2, PAGE_WORDS=page_bytes, CHUNK=256, ROWS=128,
    )  # fmt: skip
    assert tables.virtual_to_physical[5] == dst and tables.physical_to_virtual[dst] == 5
    return torch.equal(words[dst], value)


def test_offsets_do_not_wrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert far_pages(move)
    monkeypatch.setitem(MUTANTS, "int32", (move, "dst * PAGE_WORDS", "dst.to(tl.int32) * PAGE_WORDS"))
    assert not far_pages(planted("int32", tmp_path))


class Recorder:
    """Stands for a kernel: keeps what it is launched with and, like a capture, does not run it."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, Any, dict[str, Any]]]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(**arguments: Any) -> None:
            self._launches.append((self._kernel, grid, arguments))

        return launch


def test_what_moves_its_own_bytes_is_not_captured() -> None:
    made = Pool(Band((True, False), moves_itself=True), TritonFlush)
    with pytest.raises(ConfigurationError, match="its own bytes"):
        made.ops.pack(*made.window())


@pytest.mark.parametrize(
    ("asked", "device", "expected"),
    [
        ("", "cpu", TorchFlush),
        ("", "cuda", TritonFlush),
        ("torch", "cuda", TorchFlush),
        ("triton", "cpu", TritonFlush),
    ],
)
def test_who_does_the_work(
    asked: str, device: str, expected: type[TorchFlush], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FLUSH_OPS_ENV, asked)
    assert flush_ops_class(device) is expected


class OnlyMemory(TorchDispatchMode):
    """Refuses whatever a graph made of kernel launches alone would not do again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        views = ("slice", "select", "view", "detach", "split_with_sizes", "unbind")
        assert name in ("empty", "empty_like", *views), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("block", [8, 1024])
@pytest.mark.parametrize("grows_up", [True, False])
def test_pack_is_launches_that_can_be_replayed_on_another_band(
    grows_up: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a CUDA graph would: the same kernels, grids and arguments, twice, the tensors they name having got other contents."""
    launches: list[tuple[Any, Any, dict[str, Any]]] = []
    made = Pool(
        Band((True, False, False) * 10, grows_up=grows_up, on_device=True, seed=1), TritonFlush, block=block
    )
    window, ascending, rows = made.window()
    with monkeypatch.context() as patch:
        for module, names in (
            (plan, ("plan_one_block", "count_blocks", "match_blocks")),
            (move, ("move_pages",)),
        ):
            for name in names:
                patch.setattr(module, name, Recorder(getattr(module, name), launches))
        with OnlyMemory():
            outcome = made.ops.pack(window, ascending, rows)
    assert len(launches) == (2 if block == 1024 else 3)

    first = Pool(made.band)
    other = Pool(Band((False, True, True, False, False, True) * 5, grows_up, seed=2, on_device=True))
    for band in (first, other):
        size = band.ascending.shape[0]
        assert size <= ascending.shape[0], "a graph is made for the most there can be"
        ascending.fill_(FAR if grows_up else -1)
        (ascending[:size] if grows_up else ascending[ascending.shape[0] - size :]).copy_(band.ascending)
        assert isinstance(window.mark, torch.Tensor) and window.extent is not None
        window.mark.fill_(band.mark)
        window.extent.fill_(size)
        made.bytes.copy_(band.bytes)
        made.tables.virtual_to_physical.copy_(band.tables.virtual_to_physical)
        made.tables.physical_to_virtual.copy_(band.tables.physical_to_virtual)
        for kernel, grid, arguments in launches:
            kernel[grid](**arguments)
        expected = band.flush()
        assert made.state() == band.state()
        assert int(outcome.moves) == expected["moves"] > 0 and bool(outcome.ok)


@pytest.mark.parametrize("grows_up", [True, False])
def test_prewarming_launches_all_that_a_flush_does_and_changes_nothing(
    grows_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[tuple[Any, Any, dict[str, Any]]] = []

    def variants() -> set[tuple[str, tuple[tuple[str, Any], ...]]]:
        """What Triton compiles anew for: the kernel, and its arguments in capitals."""
        found = {
            (
                kernel.__name__,
                tuple((name, value) for name, value in sorted(arguments.items()) if name.isupper()),
            )
            for kernel, _, arguments in launches
        }
        launches.clear()
        return found

    for module, names in (
        (plan, ("plan_one_block", "count_blocks", "match_blocks")),
        (part_plan, PART_KERNELS),
        (move, ("move_pages",)),
    ):
        for name in names:
            kernel = getattr(module, name)
            monkeypatch.setattr(module, name, Running(kernel, launches))
    band = Band((True, False, False) * 10, grows_up=grows_up, seed=1)
    made = Pool(band, TritonFlush, block=8)
    window, _, _ = made.window()
    before, log = made.state(), made.errors.log.tolist()
    made.ops.prewarm(grows_up=grows_up, low=window.low, high=window.high)
    assert (made.state(), made.errors.log.tolist(), bool(made.errors.ok)) == (before, log, True)
    warm = variants()
    launched = set()
    for holds in (band.holds, band.holds[:6]):
        for on_device in (False, True):
            other = Pool(Band(holds, grows_up=grows_up, seed=1, on_device=on_device), TritonFlush, block=8)
            assert other.flush()["moves"]
            launched |= variants()
    assert len(launched) == 7 and launched <= warm
    for places in ("L..L-", "L.." * 5):
        for more in ({}, {"written": (0,), "is_void": True}):
            expect_same_in_part(PartBand(places, grows_up, padding=9, **more), TritonFlush, block=8)
            launched |= variants()
    assert len(launched) == 11 and launched == warm


class Running(Recorder):
    """The same, and runs it."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(**arguments: Any) -> None:
            self._launches.append((self._kernel, grid, arguments))
            self._kernel[grid](**arguments)

        return launch


def test_kernels_compile_for_a_gpu_and_move_16_bytes_at_once(tmp_path: Path) -> None:
    """Triton needs no GPU to compile for one. That they run there is another matter (`test_on_gpu`)."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {kernel: len(variants) for kernel, variants in found.items()} == {
        "plan_one_block": 8, "count_blocks": 8, "match_blocks": 8, "move_pages": 12,
        "plan_part_one_block": 4, "count_part_blocks": 4, "match_part_blocks": 4, "list_part_blocks": 4,
    }  # fmt: skip
    for variant, accesses in found["move_pages"].items():
        wide = {"ld.global.v2.b64", "st.global.v2.b64"}
        assert wide <= set(accesses) if "16-byte" in variant else not wide & set(accesses), variant
