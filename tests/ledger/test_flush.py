"""Two mapping look-ups as the ledger sees them: one read per moved page, and one per flush."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from replayer.ledger import CudaCrossCheck, SyncCounts, SyncLedger, SyncRecord

HERE = f"{Path(__file__).name}"


class Tables:
    """The two tables of a small pool with ``pages`` live pages, virtual page ``i`` at physical page ``i``."""

    def __init__(self, pages: int, device: str) -> None:
        self.device = device
        self.virtual_to_physical = torch.arange(pages + 1, device=device)
        self.physical_to_virtual = torch.arange(pages + 1, device=device)
        self.holes = torch.empty(0, dtype=torch.int64, device=device)

    def free(self, virtual_pages: torch.Tensor) -> None:
        physical = self.virtual_to_physical[virtual_pages]
        self.virtual_to_physical.index_fill_(0, virtual_pages, -1)
        self.physical_to_virtual.index_fill_(0, physical, -1)
        self.holes = torch.cat([self.holes, physical])


def plan(holes: list[int], watermark: int) -> tuple[list[int], list[int]]:
    """Which page moves where: live pages from the top into the lowest holes."""
    sources: list[int] = []
    targets: list[int] = []
    taken = set(holes)
    source = watermark
    for hole in holes:
        while source in taken:
            source -= 1
        if source <= hole:
            break
        sources.append(source)
        targets.append(hole)
        source -= 1
    return sources, targets


def flush_per_row(tables: Tables) -> int:
    """In the manner of SGLang 0.5.17: the moved pages' owners are looked up one at a time."""
    holes = torch.sort(tables.holes)[0].tolist()
    sources, targets = plan(holes, tables.physical_to_virtual.numel() - 1)
    owners = [int(tables.physical_to_virtual[source].item()) for source in sources]  # the line that costs N
    for owner, source, target in zip(owners, sources, targets, strict=True):
        tables.virtual_to_physical[owner : owner + 1] = target
        tables.physical_to_virtual[target : target + 1] = owner
        tables.physical_to_virtual[source : source + 1] = -1
    return len(sources)


def flush_batched(tables: Tables) -> int:
    """In the manner of SGLang 0.5.23: one gather for all of them, checked without waiting for the answer."""
    holes = torch.sort(tables.holes)[0].tolist()
    sources, targets = plan(holes, tables.physical_to_virtual.numel() - 1)
    if not sources:
        return 0
    source_pages = torch.tensor(sources, dtype=torch.int64, device=tables.device)
    target_pages = torch.tensor(targets, dtype=torch.int64, device=tables.device)
    owners = tables.physical_to_virtual[source_pages]
    torch._assert_async((owners >= 0).all(), "a page without an owner would move")
    tables.virtual_to_physical[owners] = target_pages
    tables.physical_to_virtual[target_pages] = owners
    tables.physical_to_virtual.index_fill_(0, source_pages, -1)
    return len(sources)


def flushed(
    function: object, moves: int, device: str, *, audit: bool = False
) -> tuple[SyncRecord, SyncLedger, Tables]:
    tables = Tables(4 * moves, device)
    with SyncLedger(device) as ledger:
        with ledger.call("free", 0, audit=audit) as free:
            tables.free(torch.arange(1, 2 * moves, 2, device=device))
        assert free.total == 0
        with ledger.call("flush", 1, audit=audit) as record:
            assert function(tables) == moves  # type: ignore[operator]
    assert ledger.disagreements == []
    return record, ledger, tables


@pytest.mark.cpu
@pytest.mark.parametrize("audit", [False, True])
@pytest.mark.parametrize("moves", [1, 2, 15, 16, 64])
def test_per_row_reads_once_per_moved_page(moves: int, audit: bool) -> None:
    record, _, _ = flushed(flush_per_row, moves, "cpu", audit=audit)
    assert (record.device_to_host, record.host_to_device, record.waits) == (1 + moves, 0, 0)


@pytest.mark.cpu
@pytest.mark.parametrize("audit", [False, True])
@pytest.mark.parametrize("moves", [1, 2, 15, 16, 64])
def test_batched_reads_once_per_flush(moves: int, audit: bool) -> None:
    record, _, _ = flushed(flush_batched, moves, "cpu", audit=audit)
    assert (record.device_to_host, record.host_to_device, record.waits) == (1, 2, 0)


@pytest.mark.cpu
def test_both_make_the_same_tables() -> None:
    _, _, one = flushed(flush_per_row, 20, "cpu")
    _, _, other = flushed(flush_batched, 20, "cpu")
    assert torch.equal(one.virtual_to_physical, other.virtual_to_physical)
    assert torch.equal(one.physical_to_virtual, other.physical_to_virtual)
    assert not torch.equal(one.physical_to_virtual, torch.arange(81))


@pytest.mark.cpu
def test_the_costly_line_is_named() -> None:
    record, ledger, _ = flushed(flush_per_row, 20, "cpu")
    source, first = inspect.getsourcelines(flush_per_row)
    costly = next(first + number for number, line in enumerate(source) if "the line that costs N" in line)
    reading = next(first + number for number, line in enumerate(source) if "torch.sort" in line)
    assert record.lines == {f"{HERE}:{costly}": 20, f"{HERE}:{reading}": 1}
    assert list(ledger.by_line().items()) == [
        (f"{HERE}:{costly}", SyncCounts(device_to_host=20)),
        (f"{HERE}:{reading}", SyncCounts(device_to_host=1)),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("moves", [1, 20])
def test_torch_warns_as_often_as_the_ledger_counts_on_a_gpu(moves: int) -> None:
    for function in (flush_per_row, flush_batched):
        tables = Tables(4 * moves, "cuda")
        tables.free(torch.arange(1, 2 * moves, 2, device="cuda"))
        cross_check = CudaCrossCheck()
        with SyncLedger("cuda") as ledger, cross_check, ledger.call("flush") as record:
            function(tables)
        assert cross_check.synchronisations == record.total
