"""The ledger around the table of functions: calls, lines, host tensors, waits, pauses, what it leaves."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from replayer.ledger import Disagreement, KindOfCallCounts, SyncCounts, SyncLedger, SyncSite

pytestmark = pytest.mark.cpu

HERE = Path(__file__).name
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def ledger() -> Iterator[SyncLedger]:
    with SyncLedger() as ledger:
        yield ledger
    assert _get_current_function_mode_stack() == []
    assert _get_current_dispatch_mode_stack() == []


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.arange(8)


def line_of(text: str) -> int:
    """The number of the only line of this file that ends with a comment of this text."""
    numbers = [
        number
        for number, line in enumerate(Path(__file__).read_text().splitlines(), start=1)
        if line.endswith(f"# {text}")
    ]
    assert len(numbers) == 1
    return numbers[0]


def test_a_call_without_synchronisations(ledger: SyncLedger, ids: torch.Tensor) -> None:
    with ledger.call("alloc", 7) as record:
        ids.add_(1)
    assert (record.kind, record.seq, record.audited) == ("alloc", 7, False)
    assert (record.total, record.sites, record.lines) == (0, None, {})
    assert ledger.totals() == SyncCounts()
    assert ledger.by_line() == {}
    assert ledger.by_kind_of_call() == {"alloc": KindOfCallCounts(calls=1)}


def test_outside_calls_nothing_is_counted(ledger: SyncLedger, ids: torch.Tensor) -> None:
    ids.tolist()
    with ledger.call("alloc"):
        ids.tolist()
    ids.tolist()
    assert ledger.totals() == SyncCounts(device_to_host=1)


def test_totals_and_kinds_of_call(ledger: SyncLedger, ids: torch.Tensor) -> None:
    for seq in range(3):
        with ledger.call("flush", seq) as record:
            ids.tolist()
            torch.tensor([1], device=ids.device)
            ledger.wait("event.synchronize")
        assert (record.device_to_host, record.host_to_device, record.waits, record.total) == (1, 1, 1, 3)
    with ledger.call("free"):
        ids.nonzero()
    assert ledger.totals() == SyncCounts(4, 3, 3)
    assert ledger.totals().total == 10
    assert ledger.by_kind_of_call() == {
        "flush": KindOfCallCounts(3, 3, 3, calls=3),
        "free": KindOfCallCounts(1, 0, 0, calls=1),
    }


def test_what_is_handed_out_is_a_copy(ledger: SyncLedger, ids: torch.Tensor) -> None:
    with ledger.call("flush"):
        ids.tolist()
    ledger.totals().device_to_host = 9
    ledger.by_kind_of_call()["flush"].device_to_host = 9
    ledger.by_site().clear()
    assert ledger.totals() == SyncCounts(1)
    assert ledger.by_kind_of_call() == {"flush": KindOfCallCounts(1, calls=1)}
    assert ledger.by_site().total() == 1


def test_lines_kinds_and_operations(ledger: SyncLedger, ids: torch.Tensor) -> None:
    with ledger.call("flush") as record:
        for _ in range(2):
            ids.tolist()  # reads
        ids[torch.tensor([1], device=ids.device)] = -1  # writes
    reads, writes = f"{HERE}:{line_of('reads')}", f"{HERE}:{line_of('writes')}"
    assert record.sites == {
        SyncSite(reads, "device_to_host", "Tensor.tolist"): 2,
        SyncSite(writes, "host_to_device", "torch.tensor"): 1,
        SyncSite(writes, "host_to_device", "Tensor.__setitem__"): 1,
    }
    assert ledger.by_site() == record.sites
    assert record.lines == {reads: 2, writes: 2}
    assert ledger.by_line() == {reads: SyncCounts(2, 0), writes: SyncCounts(0, 2)}


def test_lines_most_first(ledger: SyncLedger, ids: torch.Tensor) -> None:
    with ledger.call("flush"):
        ids.tolist()
        for _ in range(3):
            ids.tolist()
    assert [counts.total for counts in ledger.by_line().values()] == [3, 1]


def test_frames_of_torch_are_not_the_asking_line(ledger: SyncLedger, ids: torch.Tensor) -> None:
    with ledger.call("flush") as record:
        torch._assert((ids >= 0).all(), "ids")  # asserts
    assert list(record.lines) == [f"{HERE}:{line_of('asserts')}"]


def test_lines_in_packages_start_at_the_top_package(
    ledger: SyncLedger, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "outer_package" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "outer_package" / "__init__.py").write_text("def read(t):\n    return t.tolist()\n")
    (package / "__init__.py").write_text("")
    (package / "end.py").write_text("def read(t):\n    return t.tolist()\n")
    monkeypatch.syspath_prepend(tmp_path)
    import outer_package  # type: ignore[import-not-found]
    from outer_package.inner import end  # type: ignore[import-not-found]

    with ledger.call("flush") as record:
        outer_package.read(ids)
        end.read(ids)
    assert set(record.lines) == {"outer_package/__init__.py:2", "outer_package/inner/end.py:2"}


def test_nested_calls(ledger: SyncLedger, ids: torch.Tensor) -> None:
    with ledger.call("alloc", 1) as outer:
        ids.tolist()
        with ledger.call("flush", 2) as inner:
            ids.tolist()
            ids.tolist()
        assert (outer.device_to_host, inner.device_to_host) == (3, 2)
        ids.tolist()
    assert (outer.device_to_host, inner.device_to_host) == (4, 2)
    assert sum(outer.lines.values()) == 4
    assert ledger.totals() == SyncCounts(4)
    assert ledger.by_kind_of_call() == {
        "alloc": KindOfCallCounts(2, calls=1),
        "flush": KindOfCallCounts(2, calls=1),
    }


def test_a_record_is_good_for_one_call(ledger: SyncLedger) -> None:
    record = ledger.call("alloc")
    with record:
        pass
    with pytest.raises(RuntimeError, match="ask the ledger for another"), record:
        pass
    assert ledger.by_kind_of_call() == {"alloc": KindOfCallCounts(calls=1)}


@pytest.mark.parametrize("audit", [False, True])
def test_exceptions_pass_and_leave_no_mode(ledger: SyncLedger, ids: torch.Tensor, audit: bool) -> None:
    with pytest.raises(ZeroDivisionError), ledger.call("alloc", audit=audit) as outer:
        ids.tolist()
        with ledger.call("flush", audit=audit):
            ids.tolist()
            raise ZeroDivisionError
    assert _get_current_function_mode_stack() == []
    assert _get_current_dispatch_mode_stack() == []
    assert outer.device_to_host == 2
    ids.tolist()
    with ledger.call("alloc") as record:
        ids.tolist()
    assert record.device_to_host == 1
    assert ledger.totals() == SyncCounts(3)


@pytest.mark.parametrize("audit", [False, True])
def test_a_function_that_raises_did_not_read(ledger: SyncLedger, ids: torch.Tensor, audit: bool) -> None:
    with ledger.call("alloc", audit=audit) as record:
        with pytest.raises(RuntimeError):
            ids.item()
        with pytest.raises(IndexError):
            ids[99]
    assert record.total == 0
    assert ledger.disagreements == []


def test_other_modes_stay_as_they_were(ledger: SyncLedger, ids: torch.Tensor) -> None:
    class Other(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += 1
            return func(*args, **(kwargs or {}))

    other = Other()
    with other:
        with ledger.call("alloc") as record:
            ids.tolist()
        assert _get_current_function_mode_stack() == [other]
    assert (record.device_to_host, other.seen) == (1, 1)


class TestAudit:
    def test_the_function_level_alone_runs_otherwise(self, ledger: SyncLedger, ids: torch.Tensor) -> None:
        with ledger.call("alloc"):
            assert _get_current_dispatch_mode_stack() == []
            with ledger.call("flush", audit=True):
                assert len(_get_current_dispatch_mode_stack()) == 1
                with ledger.call("move", audit=True):
                    assert len(_get_current_dispatch_mode_stack()) == 1
                assert len(_get_current_dispatch_mode_stack()) == 1
            assert _get_current_dispatch_mode_stack() == []

    def test_a_function_the_table_lacks(self, ledger: SyncLedger, ids: torch.Tensor) -> None:
        number: Any = ids[0]
        with ledger.call("flush", 12, audit=True) as record:
            torch.add(ids, ids, alpha=number)  # lacking
        assert record.total == 0
        assert ledger.disagreements == [
            Disagreement(
                "flush",
                12,
                f"{HERE}:{line_of('lacking')}",
                "torch.add",
                0,
                1,
                ("aten._local_scalar_dense.default", "aten.add.Tensor"),
            )
        ]

    def test_a_function_no_mode_sees(self, ledger: SyncLedger, ids: torch.Tensor) -> None:
        def below(tensor: torch.Tensor) -> torch.Tensor:
            with torch._C.DisableTorchFunction():
                return tensor.nonzero()

        with ledger.call("flush", 3, audit=True) as record:
            below(ids)
        assert record.total == 0
        (found,) = ledger.disagreements
        assert (found.function, found.counted, found.observed) == ("", 0, 1)
        assert found.operators == ("aten.nonzero.default",)

    def test_it_does_not_import_the_compiler(self) -> None:
        program = """
import sys, torch
from replayer.ledger import SyncLedger
ids = torch.arange(4)
number = ids[1]
with SyncLedger() as ledger, ledger.call("flush", audit=True):
    torch.add(ids, ids, alpha=number).tolist()
assert len(ledger.disagreements) == 1
assert "torch.utils._python_dispatch" in sys.modules
assert "torch._dynamo" not in sys.modules, "seconds of imports"
"""
        run = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=120
        )
        assert (run.returncode, run.stderr) == (0, "")

    def test_an_exception_between_the_levels(self, ledger: SyncLedger, ids: torch.Tensor) -> None:
        with ledger.call("flush", audit=True) as record:
            with pytest.raises(RuntimeError):
                torch.add(ids, torch.arange(3, device="cpu"))
            ids.nonzero()
        assert record.total == 1
        assert ledger.disagreements == []


class TestHost:
    def test_declared_tensors_and_what_is_computed_from_them(
        self, ledger: SyncLedger, ids: torch.Tensor
    ) -> None:
        seq_lens_cpu = torch.tensor([5, 9])
        ledger.host(seq_lens_cpu)
        with ledger.call("alloc_extend") as record:
            pages = (seq_lens_cpu + 15) // 16 - torch.zeros_like(seq_lens_cpu)
            assert int(pages.sum().item()) == 2
            assert pages.max() > 0
            assert torch.unbind(pages)[0].item() == 1
        assert record.total == 0
        with ledger.call("alloc_extend") as record:
            int((ids[:2] + seq_lens_cpu).sum())
        assert record.device_to_host == 1

    def test_undeclared_it_would_count(self, ledger: SyncLedger) -> None:
        seq_lens = torch.tensor([5, 9])
        with ledger.call("alloc_extend") as record:
            int(seq_lens.sum())
        assert record.device_to_host == 1

    def test_pinned_memory(self, ledger: SyncLedger, ids: torch.Tensor) -> None:
        staging, plain = torch.arange(8), torch.arange(8)
        ledger.host(staging, pinned=True)
        ledger.host(plain)
        with ledger.call("alloc") as record:
            staging.to("cpu", non_blocking=True)
            ids.copy_(staging, non_blocking=True)
            staging.copy_(ids, non_blocking=True)
        assert record.total == 0
        with ledger.call("alloc") as record:
            plain.to("cpu", non_blocking=True)
            ids.copy_(plain, non_blocking=True)
            plain.copy_(ids, non_blocking=True)
            staging.to("cpu")
            ids.copy_(staging)
        assert (record.device_to_host, record.host_to_device) == (1, 4)

    def test_both_sides_of_a_transfer_that_is_none_on_a_cpu(
        self, ledger: SyncLedger, ids: torch.Tensor
    ) -> None:
        with ledger.call("flush") as record:
            host = ids.cpu()
            host.tolist()
            device = host.to("cpu")
            device.tolist()
            host.tolist()
            ids.tolist()
        assert (record.device_to_host, record.host_to_device) == (3, 1)
        assert host.data_ptr() == device.data_ptr() == ids.data_ptr()

    def test_host_tensors_are_forgotten_when_they_die(self, ledger: SyncLedger) -> None:
        tensors = [torch.arange(3) for _ in range(4)]
        for tensor in tensors:
            ledger.host(tensor, pinned=True)
            ledger.host(tensor)
        assert len(ledger._places.hosts) == len(ledger._places._pinned) == 4
        del tensors, tensor
        gc.collect()
        assert ledger._places.hosts == {}
        assert ledger._places._pinned == set()


class TestPause:
    @pytest.mark.parametrize("audit", [False, True])
    def test_nothing_counts_inside(self, ledger: SyncLedger, ids: torch.Tensor, audit: bool) -> None:
        with ledger.call("flush", audit=audit) as record:
            with ledger.paused():
                ids.tolist()
                with ledger.paused():
                    ids.nonzero()
                ids.nonzero()
                ledger.wait()
            ids.tolist()
            ids.nonzero()
        assert record.total == 2
        assert ledger.disagreements == []

    def test_it_ends_with_an_exception(self, ledger: SyncLedger, ids: torch.Tensor) -> None:
        with ledger.call("flush") as record:
            with pytest.raises(ZeroDivisionError), ledger.paused():
                raise ZeroDivisionError
            ids.tolist()
        assert record.total == 1


class TestWaits:
    @pytest.fixture(autouse=True)
    def no_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stands in for the wait itself, which needs a GPU; the ledger wraps this."""
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)

    def test_synchronize_counts(self, ids: torch.Tensor) -> None:
        with SyncLedger() as ledger, ledger.call("flush") as record:
            torch.cuda.synchronize()
            torch.cpu.synchronize()  # waits
        assert (record.waits, record.total) == (2, 2)
        assert SyncSite(f"{HERE}:{line_of('waits')}", "wait", "torch.cpu.synchronize") in (record.sites or {})

    def test_waits_outside_calls_and_in_other_threads_do_not_count(self) -> None:
        with SyncLedger() as ledger:
            torch.cuda.synchronize()
            with ledger.call("flush") as record:
                thread = threading.Thread(target=torch.cuda.synchronize)
                thread.start()
                thread.join()
            torch.cuda.synchronize()
        assert record.total == 0
        assert ledger.totals() == SyncCounts()

    def test_only_the_ledger_with_an_open_call_counts(self) -> None:
        with SyncLedger() as one, SyncLedger() as other, one.call("flush"):
            torch.cuda.synchronize()
        assert (one.totals(), other.totals()) == (SyncCounts(waits=1), SyncCounts())

    def test_the_wrappers_go_with_the_last_ledger(self) -> None:
        originals = (torch.cuda.synchronize, torch.cuda.Event.synchronize, torch.from_numpy)
        one, other = SyncLedger(), SyncLedger()
        assert torch.cuda.synchronize is not originals[0]
        one.close()
        one.close()
        assert torch.cuda.synchronize is not originals[0]
        other.close()
        assert (torch.cuda.synchronize, torch.cuda.Event.synchronize, torch.from_numpy) == originals

    def test_the_wrappers_go_with_a_ledger_that_nobody_closed(self) -> None:
        original = torch.cuda.synchronize
        ledger = SyncLedger()
        with ledger.call("flush"):
            pass
        assert torch.cuda.synchronize is not original
        del ledger
        gc.collect()
        assert torch.cuda.synchronize is original

    def test_a_wrapper_of_somebody_else_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with SyncLedger():
            theirs = lambda: None  # noqa: E731
            monkeypatch.setattr(torch.cuda, "synchronize", theirs)
        assert torch.cuda.synchronize is theirs


def test_queries_and_stream_waits_are_no_synchronisations(ledger: SyncLedger) -> None:
    event = torch.cpu.current_stream()
    with ledger.call("flush") as record:
        event.wait_stream(event)
    assert record.total == 0


class TestRealDevice:
    """With another device than the CPU the tensors' own devices count; every machine has "meta"."""

    def test_copies_between_devices(self) -> None:
        host = torch.arange(3)
        with SyncLedger("meta") as ledger, ledger.call("alloc") as record:
            device = host.to("meta")
            device.copy_(host)
            torch.tensor([1, 2], device="meta")
            device.new_tensor([1, 2])
            device[device] = -1
        assert (record.device_to_host, record.host_to_device) == (0, 5)

    def test_work_on_the_host(self) -> None:
        host = torch.arange(3)
        with SyncLedger("meta") as ledger, ledger.call("alloc") as record:
            host.tolist()
            host.nonzero()
            int(host.sum())
            host[host > 1] = torch.tensor([7])
            host.to("cpu").cpu().numpy()
            torch.as_tensor([1, 2])
            torch.arange(3, device="meta").to("meta")
        assert record.total == 0

    def test_declarations_are_not_needed(self) -> None:
        with SyncLedger("meta") as ledger:
            ledger.host(torch.arange(3))
            assert ledger._places.hosts == {}
