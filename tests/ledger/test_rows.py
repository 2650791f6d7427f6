"""One row per way to make the host and the device wait for each other, or not: what it costs on a GPU.

Each row is run with the CPU standing in for the GPU, where the ledger says what a GPU would do, and, if there
is one, on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from replayer.ledger import SyncLedger, SyncRecord


class Given:
    """Fresh tensors on a device, one on the host, and the functions that rows need as statements."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.ids = torch.arange(10, device=device)
        self.mask = self.ids > 3
        self.index = torch.tensor([1, 2], device=device)
        self.number: Any = torch.tensor(3, device=device)  # Any: also given where torch asks for a number
        self.floats = torch.linspace(0.0, 1.0, 10, device=device)
        self.matrix = torch.arange(12, device=device).reshape(3, 4)
        self.host = torch.tensor([4, 5, 6])
        self.array = np.array([1, 2])

    def put(self, key: Any, value: Any) -> torch.Tensor:
        self.ids[key] = value
        return self.ids

    def put_host(self, key: Any, value: Any) -> torch.Tensor:
        self.host[key] = value
        return self.host


@dataclass(frozen=True)
class Row:
    """``device_to_host`` and ``host_to_device`` are the counts expected of ``run``.

    ``observed`` is what an audit sees below, where that differs; ``why`` then says why.
    """

    name: str
    run: Callable[[Given], object]
    device_to_host: int = 0
    host_to_device: int = 0
    observed: int | None = None
    why: str = ""
    on_cuda: bool = True  # whether a GPU accepts it at all


READS = [
    Row("item", lambda g: g.number.item(), 1),
    Row("int", lambda g: int(g.number), 1),
    Row("float", lambda g: float(g.number), 1),
    Row("complex", lambda g: complex(g.number), 1),
    Row("bool", lambda g: bool(g.number), 1),
    Row("if", lambda g: 1 if g.mask.any() else 2, 1),
    Row("not", lambda g: not g.number, 1),
    Row("assert a tensor", lambda g: torch._assert((g.ids >= 0).all(), "ids"), 1),
    Row("index of a list", lambda g: [1, 2, 3, 4][g.number], 1),
    Row("range", lambda g: list(range(g.number)), 1),
    Row("tolist", lambda g: g.ids.tolist(), 1),
    Row("cpu", lambda g: g.ids.cpu(), 1),
    Row("cpu then reads", lambda g: [int(x) for x in g.ids.cpu()[2:5]], 1),
    Row("cpu and numpy", lambda g: g.ids.cpu().numpy(), 1),
    Row("numpy", lambda g: g.ids.numpy(), 1, on_cuda=False),
    Row("numpy.asarray", lambda g: np.asarray(g.ids), 1, on_cuda=False),
    Row("in", lambda g: 3 in g.ids, 1),
    Row("max of Python", lambda g: max(g.index), 1),
    Row("repr", lambda g: repr(g.ids), 1),
    Row("format", lambda g: f"{g.number:3d}", 1),
    Row("each element", lambda g: [int(x) for x in g.index], 2),
    Row("iterate", lambda g: list(g.index), 0),
    Row("is_nonzero", lambda g: torch.is_nonzero(g.number), 1),
    Row("equal", lambda g: torch.equal(g.ids, g.ids + 0), 1),
    Row("equal of other shapes", lambda g: torch.equal(g.ids, g.index), 0, observed=None),
    Row("Tensor.equal", lambda g: g.ids.equal(g.ids + 1), 1),
    Row("allclose", lambda g: torch.allclose(g.floats, g.floats), 1),
    Row("aten.item", lambda g: torch.ops.aten.item(g.number), 1),
    Row("aten.nonzero", lambda g: torch.ops.aten.nonzero(g.ids), 1),
    Row("aten.nonzero.default", lambda g: torch.ops.aten.nonzero.default(g.ids), 1),
]

DATA_DEPENDENT_SIZES = [
    Row("nonzero", lambda g: g.ids.nonzero(), 1),
    Row("torch.nonzero", lambda g: torch.nonzero(g.ids), 1),
    Row("nonzero as tuple", lambda g: torch.nonzero(g.ids, as_tuple=True), 1),
    Row("nonzero_static", lambda g: torch.nonzero_static(g.ids, size=9), 0),
    Row("argwhere", lambda g: torch.argwhere(g.ids), 1),
    Row("where of a condition", lambda g: torch.where(g.mask), 1),
    Row("where of three", lambda g: torch.where(g.mask, g.ids, 0), 0),
    Row("masked_select", lambda g: g.ids.masked_select(g.mask), 1),
    Row("unique", lambda g: torch.unique(g.ids), 1),
    Row("Tensor.unique", lambda g: g.ids.unique(), 1),
    Row("unique with inverse", lambda g: torch.unique(g.ids, return_inverse=True), 1),
    Row("unique of rows", lambda g: torch.unique(g.matrix, dim=0), 1),
    Row("isin, few of them", lambda g: torch.isin(g.ids, g.index), 0),
    Row("isin, many of them", lambda g: torch.isin(g.ids[:1], g.ids), 2),
    Row("isin, many and each once", lambda g: torch.isin(g.ids[:1], g.ids, assume_unique=True), 0),
    Row("isin of a number", lambda g: torch.isin(g.ids, 3), 0),
    Row("isin on the host", lambda g: torch.isin(g.host[:1], g.host.repeat(9)), 0),
    Row("unique_consecutive", lambda g: torch.unique_consecutive(g.ids), 1),
    Row("bincount", lambda g: torch.bincount(g.ids), 2),
    Row("repeat_interleave", lambda g: torch.repeat_interleave(g.index, g.index), 1),
    Row("repeat_interleave of repeats", lambda g: torch.repeat_interleave(g.index), 1),
    Row("repeat_interleave sized", lambda g: torch.repeat_interleave(g.index, g.index, output_size=3), 0),
    Row("repeat_interleave by a number", lambda g: g.index.repeat_interleave(2), 0),
]

GETITEM = [
    Row("[int]", lambda g: g.ids[3], 0),
    Row("[numpy int]", lambda g: g.ids[np.int64(3)], 0),
    Row("[slice]", lambda g: g.ids[2:5], 0),
    Row("[ids]", lambda g: g.ids[g.index], 0),
    Row("[..., ids]", lambda g: g.ids[..., g.index], 0),
    Row("[mask]", lambda g: g.ids[g.mask], 1),
    Row("[None, mask]", lambda g: g.ids[None, g.mask], 1),
    Row("[0-dimensional]", lambda g: g.ids[g.number], 1),
    Row("[:0-dimensional]", lambda g: g.ids[: g.number], 1),
    Row("[list]", lambda g: g.ids[[1, 2]], 0, 1),
    Row("[list of bool]", lambda g: g.ids[[True] * 10], 1, 1),
    Row("[numpy array]", lambda g: g.ids[g.array], 0, 1),
    Row("[host ids]", lambda g: g.ids[g.host], 0, 1),
    Row("index_select", lambda g: g.ids.index_select(0, g.index), 0),
    Row("narrow by a tensor", lambda g: g.ids.narrow(0, g.number, 2), 1),
]

SETITEM = [
    Row("[ids] = tensor", lambda g: g.put(g.index, g.index), 0),
    Row("[ids] = number", lambda g: g.put(g.index, -1), 0, 1),
    Row("[ids] = 0-dimensional", lambda g: g.put(g.index, g.number), 0),
    Row("[mask] = number", lambda g: g.put(g.mask, -1), 0),
    Row("[mask] = tensor", lambda g: g.put(g.mask, g.ids[:6] + 1), 1),
    Row("[mask] = 0-dimensional", lambda g: g.put(g.mask, g.number), 1),
    Row("[list] = number", lambda g: g.put([1, 2], -1), 0, 2),
    Row("[slice] = number", lambda g: g.put(slice(2, 5), -1), 0),
    Row("[slice of one] = number", lambda g: g.put(slice(2, 3), -1), 0),
    Row("[:] = number", lambda g: g.put(slice(None), -1), 0),
    Row("[...] = number", lambda g: g.put(..., -1), 0),
    Row("[slice] = tensor", lambda g: g.put(slice(2, 4), g.index), 0),
    Row("[slice] = host tensor", lambda g: g.put(slice(2, 5), g.host), 0, 1),
    Row("[int] = number", lambda g: g.put(3, -1), 0, 1),
    Row("[int] = 0-dimensional", lambda g: g.put(3, g.number), 0),
    Row("[0-dimensional] = number", lambda g: g.put(g.number, -1), 1, 1),
    Row("index_put_", lambda g: g.ids.index_put_((g.index,), g.index), 0),
    Row("index_put_ with a mask", lambda g: g.ids.index_put_((g.mask,), g.number), 1),
    Row("torch.index_put", lambda g: torch.index_put(g.ids, (g.index,), g.number), 0),
    Row("fill_", lambda g: g.ids.fill_(-1), 0),
    Row("zero_", lambda g: g.ids.zero_(), 0),
    Row("index_fill_", lambda g: g.ids.index_fill_(0, g.index, -1), 0),
    Row("index_fill_ by a tensor", lambda g: g.ids.index_fill_(0, g.index, g.number), 1),
    Row("masked_fill_", lambda g: g.ids.masked_fill_(g.mask, -1), 0),
    Row("masked_fill_ by a tensor", lambda g: g.ids.masked_fill_(g.mask, g.number), 1),
    Row("scatter_", lambda g: g.ids.scatter_(0, g.index, -1), 0),
    Row("index_copy_", lambda g: g.ids.index_copy_(0, g.index, g.index), 0),
]

TRANSFERS = [
    Row("tensor of a list", lambda g: torch.tensor([1, 2], device=g.device), 0, 1),
    Row("tensor of a number", lambda g: torch.tensor(1, device=g.device), 0, 1),
    Row("tensor of tensors", lambda g: torch.tensor([g.number, g.number], device=g.device), 2, 1),
    Row("tensor on the host", lambda g: torch.tensor([1, 2]), 0),
    Row("tensor on the host, read", lambda g: torch.tensor([1, 2]).tolist(), 0),
    Row("tensor on the host, moved", lambda g: torch.tensor([1, 2]).to(g.device), 0, 1),
    Row("moved and then read", lambda g: torch.tensor([1, 2]).to(g.device).tolist(), 1, 1),
    Row("from_numpy", lambda g: torch.from_numpy(g.array).sum().item(), 0),
    Row("from_numpy, moved", lambda g: torch.from_numpy(g.array).to(g.device), 0, 1),
    Row("as_tensor of a list", lambda g: torch.as_tensor([1, 2], device=g.device), 0, 1),
    Row("as_tensor of numpy", lambda g: torch.as_tensor(g.array), 0),
    Row("as_tensor of numpy, moved", lambda g: torch.as_tensor(g.array, device=g.device), 0, 1),
    Row("as_tensor of a tensor", lambda g: torch.as_tensor(g.ids, device=g.device), 0),
    Row("as_tensor of a host tensor", lambda g: torch.as_tensor(g.host, device=g.device), 0, 1),
    Row("new_tensor", lambda g: g.ids.new_tensor([1, 2]), 0, 1),
    Row("new_tensor of a host tensor", lambda g: g.host.new_tensor([1, 2]), 0),
    Row("to the device", lambda g: g.host.to(g.device), 0, 1),
    Row("to the device by keyword", lambda g: g.host.to(device=g.device), 0, 1),
    Row("to the side of a tensor", lambda g: g.host.to(g.ids), 0, 1),
    Row("to the device, not blocking", lambda g: g.host.to(g.device, non_blocking=True), 0, 1),
    Row("to where it is", lambda g: g.ids.to(g.device), 0),
    Row("to another type", lambda g: g.ids.to(torch.int32), 0),
    Row("host to another type", lambda g: g.host.to(torch.int32).tolist(), 0),
    Row("copy_ on the device", lambda g: g.ids.copy_(g.ids + 1), 0),
    Row("copy_ to the device", lambda g: g.ids[:3].copy_(g.host), 0, 1),
    Row("copy_ to the host", lambda g: g.host.copy_(g.ids[:3]), 1),
    Row("host[:] = device", lambda g: g.put_host(slice(None), g.ids[:3]), 1),
    Row("host[slice] = device", lambda g: g.put_host(slice(0, 2), g.ids[:2]), 1),
]

KERNELS = [
    Row("arange", lambda g: torch.arange(3, device=g.device), 0),
    Row("arange to a tensor", lambda g: torch.arange(g.number, device=g.device), 1),
    Row("full", lambda g: torch.full((3,), -1, device=g.device), 0),
    Row("full of a tensor", lambda g: torch.full((3,), g.number, device=g.device), 1),
    Row("full_like of a tensor", lambda g: torch.full_like(g.ids, g.number), 1),
    Row("linspace to a tensor", lambda g: torch.linspace(0, g.number, 3, device=g.device), 1),
    Row("empty", lambda g: torch.empty(3, device=g.device).shape, 0),
    Row("zeros", lambda g: torch.zeros(3, device=g.device), 0),
    Row("zeros_like", lambda g: torch.zeros_like(g.ids), 0),
    Row("scalar_tensor", lambda g: torch.scalar_tensor(3, device=g.device), 0),
    Row("host arange, read", lambda g: torch.arange(3).sum().item(), 0),
    Row("sort", lambda g: torch.sort(g.ids), 0),
    Row("cat", lambda g: torch.cat([g.ids, g.index]), 0),
    Row("clone", lambda g: g.ids.clone(), 0),
    Row("comparison", lambda g: (g.ids >= 0).all(), 0),
    Row("numel and shape", lambda g: (g.ids.numel(), g.ids.shape, len(g.ids)), 0),
    Row("isin", lambda g: torch.isin(g.ids, g.index), 0),
    Row("_assert_async", lambda g: torch._assert_async((g.ids >= 0).all(), "ids"), 0),
]

HOST = [
    Row("host tolist", lambda g: g.host.tolist(), 0),
    Row("host item", lambda g: g.host[1].item(), 0),
    Row("host sum", lambda g: int((g.host + 3 - 1).div(3, rounding_mode="floor").sum()), 0),
    Row("host mask", lambda g: g.host[g.host > 4], 0),
    Row("host unique", lambda g: torch.unique(g.host), 0),
    Row("host allclose", lambda g: torch.allclose(g.host, g.host), 0),
    Row("host [ids] = number", lambda g: g.put_host(torch.tensor([1]), -1), 0),
    Row("host and device", lambda g: (g.ids + g.host[0]).tolist(), 1),
    Row("host cat", lambda g: torch.cat([g.host, g.host]).tolist(), 0),
    Row("host max and index", lambda g: torch.max(g.host, dim=0)[1].item(), 0),
]

NOT_IN_THE_TABLE = [
    Row(
        "add with a tensor as alpha",
        lambda g: torch.add(g.ids, g.ids, alpha=g.number),
        observed=1,
        why="any number argument may be a tensor; the table has the functions where that is usual",
    ),
]

ROWS = [
    *READS,
    *DATA_DEPENDENT_SIZES,
    *GETITEM,
    *SETITEM,
    *TRANSFERS,
    *KERNELS,
    *HOST,
    *NOT_IN_THE_TABLE,
]


def count(row: Row, device: str, *, audit: bool) -> tuple[SyncRecord, SyncLedger, object]:
    given = Given(device)
    with SyncLedger(device) as ledger:
        ledger.host(given.host)
        with ledger.call("row", audit=audit) as record:
            result = row.run(given)
    return record, ledger, result


def same(one: object, other: object) -> bool:
    """Equal by value, tensors and arrays inside included."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)  # type: ignore[arg-type]
    if isinstance(one, (tuple, list)):
        return isinstance(other, (tuple, list)) and len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.cpu
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_counts_with_the_cpu_as_stand_in(row: Row) -> None:
    record, _, _ = count(row, "cpu", audit=False)
    assert (record.device_to_host, record.host_to_device, record.waits) == (
        row.device_to_host,
        row.host_to_device,
        0,
    )


@pytest.mark.cpu
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_an_audit_counts_the_same_and_agrees(row: Row) -> None:
    record, ledger, _ = count(row, "cpu", audit=True)
    assert (record.device_to_host, record.host_to_device) == (row.device_to_host, row.host_to_device)
    disagreements = [(found.counted, found.observed) for found in ledger.disagreements]
    if row.observed is None:
        assert disagreements == []
    else:
        assert row.why
        assert disagreements == [(row.device_to_host, row.observed)]


@pytest.mark.cpu
@pytest.mark.parametrize("audit", [False, True])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_results_are_those_of_a_run_without_the_ledger(row: Row, audit: bool) -> None:
    expected = row.run(Given("cpu"))
    _, _, result = count(row, "cpu", audit=audit)
    assert same(expected, result)


@pytest.mark.cpu
def test_the_comparison_of_results_can_fail() -> None:
    assert not same(torch.tensor([1]), torch.tensor([2]))
    assert not same([torch.tensor([1])], [torch.tensor([1]), 2])
    assert not same(np.array([1]), np.array([2]))
    assert not same(1, 2)


@pytest.mark.cpu
def test_rows_have_names_of_their_own() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.gpu
@pytest.mark.parametrize("row", [row for row in ROWS if row.on_cuda], ids=lambda row: row.name)
def test_counts_on_a_gpu(row: Row) -> None:
    record, _, _ = count(row, "cuda", audit=False)
    assert (record.device_to_host, record.host_to_device) == (row.device_to_host, row.host_to_device)
