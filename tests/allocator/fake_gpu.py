"""Calls of the ``device`` strategy on a device that is not there. Run as a program: the device is registered with torch for good.

torch's fake tensors know on which device each would be, and hold no data. An operation that mixes devices is refused as CUDA would refuse
it, and whatever reads the device on the host finds nothing to read.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from allocator import MHASubPoolSpec, MultiEndedAllocator, UnifiedKVPool, kv_store_for
from allocator.device_end import DeviceMultiEndedAllocator
from allocator.device_middle import DeviceFloatMultiEndedAllocator
from allocator.read_back import ReadBack, Ticket
from allocator.unsettled import Flushed, PackedPerhaps
from tests.allocator.pools import two_ends

GPU = "kvgpu"
PAGES = 64


def register() -> None:
    """Make `GPU` a device's name."""

    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> object:
            return torch._C._autograd.DeviceType.PrivateUse1

    class Hooks(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return True

        def has_primary_context(self, device: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    torch._C._acc.register_python_privateuseone_device_guard(Guard())
    torch._C._acc.register_python_privateuseone_hook(Hooks())
    module = types.ModuleType(f"torch.{GPU}")
    answers: dict[str, object] = {
        "device_count": 1,
        "current_device": 0,
        "is_available": True,
        "is_initialized": True,
    }
    for name, answer in answers.items():
        setattr(module, name, lambda answer=answer: answer)
    torch.utils.rename_privateuse1_backend(GPU)
    torch._register_device_module(GPU, module)


class _Pending(Ticket):
    """Numbers that are still on their way, and must not be waited for."""

    def ready(self) -> bool:
        return False

    def wait(self) -> None:
        raise AssertionError("waited for the device")


class OnGpu(ReadBack):
    """What is posted has to be on the device; it never comes back."""

    def __init__(self, device: str | torch.device) -> None:
        self.immediate, self.blocking_reads = False, 0
        self.pinned_host_tensors: list[torch.Tensor] = []

    def post(self, *numbers: torch.Tensor) -> Ticket:
        for number in numbers:
            assert (number.device.type, number.numel(), number.dtype) == (GPU, 1, torch.int64)
        return _Pending(self, None)


class GpuEnd(DeviceMultiEndedAllocator):
    read_back_class = OnGpu


class GpuFloat(DeviceFloatMultiEndedAllocator):
    read_back_class = OnGpu


class Event:
    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def wait(self) -> None: ...


def pools(page_size: int, *, lazy: bool = True) -> tuple[MultiEndedAllocator, MultiEndedAllocator]:
    full, swa = two_ends(
        page_size=page_size, total_bytes=128 * page_size * PAGES, lazy=lazy, strategy="device", end_class=GpuEnd, device=GPU,
    )  # fmt: skip
    return full, swa


def on_gpu(count: int) -> torch.Tensor:
    """So many numbers; which ones nobody knows."""
    return torch.zeros(count, dtype=torch.int64, device=GPU)


def given(ids: torch.Tensor | None) -> torch.Tensor:
    assert ids is not None
    assert ids.device.type == GPU
    return ids


def fakes_refuse_what_cuda_would() -> None:
    """Else nothing else here could fail."""
    for refused, error in (
        (lambda: on_gpu(2).index_select(0, torch.arange(2)), RuntimeError),
        (lambda: on_gpu(1)[0].item(), DataDependentOutputException),
        (lambda: on_gpu(2).tolist(), DataDependentOutputException),
    ):
        try:
            refused()
        except error:
            continue
        raise AssertionError("went through")


def flushes(page_size: int, pool: int) -> None:
    """Frees, flushes of both kinds with and without a forward, hand-outs of holes."""
    made = pools(page_size)[pool]
    first = given(made.alloc(8 * page_size))
    made.translate_kv_loc(first)
    made.free(first[: 3 * page_size])
    made._flush(urgent=True)
    second = given(made.alloc(2 * page_size))
    made.free(second[:page_size])
    event = Event()
    made.set_latest_forward_done_event(event)
    made.set_inflight_forward(event, first[-page_size:])
    made._flush(urgent=False)
    made._flush(urgent=False)
    made.free_segment(first[4 * page_size : 5 * page_size], start_pos=0)
    made._flush(urgent=True)
    event.done = True
    made._flush(urgent=False)
    made.free_group_begin()
    made.free(first[5 * page_size : 6 * page_size])
    made.free(second[page_size:])
    made.free_group_end()
    made._flush(urgent=True)
    given(made.alloc(page_size))


def growth(page_size: int) -> None:
    made = pools(page_size)[0]
    host = torch.ones(2, dtype=torch.int64)
    num_pages = 3 if page_size == 4 else 8
    ids = given(made.alloc_extend(on_gpu(2), host, on_gpu(2), host, on_gpu(2), 8, num_pages))
    made.free(ids[:1] if page_size == 1 else ids[:3])


def binding() -> None:
    full, swa = pools(1)
    ids = given(full.alloc(4))
    places = given(swa.alloc_physical(2))
    swa.bind(ids[2:] + 16, places)
    swa.unbind(ids[2:] + 16)
    swa.cancel_physical_reservation(given(swa.alloc_physical(2)))


def eager() -> None:
    made = pools(1, lazy=False)[0]
    ids = given(made.alloc(6))
    # Of tokens alone an eager pool asks the device how many pages they are; of pages it does not have to.
    made.free(ids[1:3], _pages=ids[1:3])
    given(made.alloc(2))


def lacking(page_size: int) -> None:
    """A request that fits once the neighbour is packed, and perhaps before; pages backed because the caller was promised them."""
    full, swa = pools(page_size)
    taken = given(swa.alloc(12 * page_size))
    event = Event()
    for pool in (full, swa):
        pool.set_latest_forward_done_event(event)
        pool.set_inflight_forward(event, taken[-page_size:])
    swa.free_segment(taken[: 4 * page_size], start_pos=0)
    swa._flush(urgent=False)
    room = full.available_size()
    given(full.alloc(room + page_size))
    assert [type(entry) for entry in swa._journal._entries] == [Flushed, PackedPerhaps]
    full.free_segment(given(full.alloc(page_size)), start_pos=0)
    swa._flush(urgent=False)
    room = swa.available_size() // page_size
    swa.alloc_with_virtual(on_gpu(room + 1))


def naming(page_size: int) -> None:
    """Frees of those tokens that a mask names."""
    full, swa = pools(page_size)
    for pool in (full, swa):
        tokens = given(pool.alloc(6 * page_size))
        pool.free_named(tokens, tokens > 3)
        pool.free_named(tokens[::page_size], tokens[::page_size] > 3, in_order=True)
        given(pool.alloc(page_size))


def float_between(page_size: int) -> None:
    """Two ends and a float whose numbers never come."""
    specs = [
        MHASubPoolSpec(
            name=name, layer_num=1, grow_direction=direction, head_num=1, head_dim=16, store_dtype=torch.float16
        )
        for name, direction in (("low", "up"), ("middle", "float"), ("high", "down"))
    ]  # fmt: skip
    buffer = UnifiedKVPool(
        total_bytes=64 * page_size * PAGES, sub_pool_specs=specs, device=GPU, page_size=page_size
    )
    made = [
        (GpuFloat if name == "middle" else GpuEnd)(
            kvcache=kv_store_for(buffer, name), unified_buffer=buffer, sub_pool_name=name, device=GPU, is_id_owner=True,
            page_size=page_size, lazy_compaction=name != "middle", strategy="device",
        )
        for name in ("low", "middle", "high")
    ]  # fmt: skip
    for below, above in itertools.pairwise(made):
        below.bind_high_peer(above)
        above.bind_low_peer(below)
    low, middle, high = made
    tokens = given(middle.alloc(12 * page_size))
    for pool in (low, high):
        ids = given(pool.alloc(3 * page_size))
        pool.free_segment(ids[page_size : 2 * page_size], start_pos=0)
        pool._flush(urgent=False)
    if page_size == 1:
        middle.free_named(tokens[:3], tokens[:3] > 3)
    else:
        middle.free(tokens[: 2 * page_size + 1])
    middle.flush_opportunistic()
    places = given(middle.alloc_physical(page_size))
    middle.bind(given(middle.alloc(page_size))[:1] + 9, places[:1])
    middle.free_segment(tokens[-page_size:], start_pos=0)
    middle.flush_opportunistic()
    given(middle.alloc(2 * page_size))
    given(low.alloc(page_size))
    high.alloc_with_virtual(on_gpu(1))
    middle.alloc_with_virtual(on_gpu(middle.available_size() // page_size + 1))


def main() -> None:
    register()
    scenarios: dict[str, Callable[[], None]] = {
        "fakes": fakes_refuse_what_cuda_would,
        "binding": binding,
        "eager": eager,
    }
    for page_size in (1, 4):
        for scenario in (growth, lacking, naming, float_between):
            name = scenario.__name__.replace("_", " ")
            scenarios[f"{name}, pages of {page_size}"] = functools.partial(scenario, page_size)
        for pool in (0, 1):
            scenarios[f"flushes, pages of {page_size}, pool {pool}"] = lambda size=page_size, at=pool: (
                flushes(size, at)
            )
    for name, scenario in scenarios.items():
        with FakeTensorMode():
            scenario()
        print(f"held: {name}")
    sys.exit(0)


if __name__ == "__main__":
    main()
