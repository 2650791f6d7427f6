"""The plugin that puts kvtape's allocator in the place of SGLang's, here beside modules that stand in for SGLang's."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from allocator import (
    DEFAULT_STRATEGY,
    FloatMultiEndedAllocator,
    MultiEndedAllocator,
    UnifiedKVPool,
    sglang_plugin,
)
from allocator.device_end import DeviceMultiEndedAllocator
from allocator.errors import ConfigurationError, OutOfRoomError, PageAlignmentError
from allocator.flush_ops import TorchFlush
from allocator.read_back import LateCount
from allocator.sglang_classes import (
    SglangDeviceFloatMultiEndedAllocator,
    SglangDeviceMultiEndedAllocator,
    SglangFloatMultiEndedAllocator,
    SglangMultiEndedAllocator,
)
from allocator.sglang_composites import OURS
from allocator.specs import MHASubPoolSpec
from recorder.engines import sglang as engine
from recorder.engines.sglang import SglangHooks
from recorder.engines.sglang_header import Engine
from recorder.process import Recorder
from recorder.trace import TraceReader
from replayer import plugin
from replayer.replay import ReplayOptions, replay
from tests.allocator.delayed import NeverReadBack
from tests.allocator.pools import two_ends, whole_state
from tests.recorder.recordings import events_of, settings

pytestmark = pytest.mark.cpu


class TheirEnd(MultiEndedAllocator):
    """Stands for SGLang's class: the same names, and a class of its own."""


class TheirFloat(FloatMultiEndedAllocator, TheirEnd): ...


#: They stand for SGLang's composites, by module.
THEIR_COMPOSITES = {
    name: [type(ours.__name__, (), {"__module__": name}) for ours in classes]
    for name, classes in OURS.items()
}


def translate(**arguments: Any) -> torch.Tensor:
    raise NotImplementedError


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """SGLang's allocator module. Three others have its classes, one of them by another name, and two have composites; the version is a
    known one."""
    modules = {
        name: ModuleType(name)
        for name in (sglang_plugin.MODULE, *sglang_plugin.USERS, "sglang.somebody", "sglang.srt.environ",
                     "sglang.kernels.ops.memory.virtual_slot", "elsewhere")
    }  # fmt: skip
    for name in (sglang_plugin.MODULE, sglang_plugin.USERS[0], "elsewhere"):
        modules[name].MultiEndedAllocator, modules[name].FloatMultiEndedAllocator = TheirEnd, TheirFloat  # type: ignore[attr-defined]
    modules[sglang_plugin.USERS[1]].MultiEndedAllocator = TheirEnd  # type: ignore[attr-defined]
    modules["sglang.somebody"].Ends = TheirEnd  # type: ignore[attr-defined]
    for name, classes in THEIR_COMPOSITES.items():
        for cls in classes:
            setattr(modules[name], cls.__name__, cls)
    modules["sglang.somebody"].Pair = THEIR_COMPOSITES[sglang_plugin.USERS[0]][0]  # type: ignore[attr-defined]
    modules["sglang.srt.environ"].envs = SimpleNamespace(  # type: ignore[attr-defined]
        SGLANG_COMPACTION_MAX_PAGES_PER_MOVE=SimpleNamespace(get=lambda: 2)
    )
    modules["sglang.kernels.ops.memory.virtual_slot"].translate_token_ids = translate  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sglang_plugin, "version", lambda name: "0.5.23+cu129")
    monkeypatch.delenv(plugin.VARIABLE, raising=False)
    yield modules[sglang_plugin.MODULE]
    sglang_plugin.remove()


def bound() -> list[tuple[str, str, Any]]:
    """Every class that a stand-in module has."""
    names = (sglang_plugin.MODULE, *sglang_plugin.USERS, "sglang.somebody", "elsewhere")
    return [
        (name, key, value)
        for name in names
        for key, value in vars(sys.modules[name]).items()
        if isinstance(value, type)
    ]


def test_without_the_variable_nothing_is_imported() -> None:
    code = (
        "import sys; from replayer.plugin import sglang_allocator; sglang_allocator();"
        "assert not {'torch', 'allocator', 'logging', 'sglang'} & set(sys.modules), sys.modules"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], env={"PATH": "", "PYTHONPATH": ":".join(sys.path)}, capture_output=True
    )
    assert ran.returncode == 0, ran.stderr.decode()


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_variable_nothing_is_replaced(
    value: str | None, sglang: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = bound()
    if value is not None:
        monkeypatch.setenv(plugin.VARIABLE, value)
    with caplog.at_level(logging.DEBUG):
        plugin.sglang_allocator()
    assert bound() == before and not caplog.messages


@pytest.mark.parametrize("strategy", ["device", "batched", "hybrid", "per-row"])
def test_the_classes_are_replaced_and_given_back(
    strategy: str, sglang: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = bound()
    ours = {TheirEnd: SglangMultiEndedAllocator, TheirFloat: SglangFloatMultiEndedAllocator}
    monkeypatch.setenv(plugin.VARIABLE, strategy)
    with caplog.at_level(logging.INFO, "kvtape"):
        plugin.sglang_allocator()
        plugin.sglang_allocator()
    for (module, name, value), found in zip(before, bound(), strict=True):
        assert found[:2] == (module, name)
        if module == "elsewhere":
            assert found[2] is value
        elif value in ours:
            assert found[2] is ours[value]
        else:
            kvtapes = next(
                cls for classes in OURS.values() for cls in classes if cls.__name__ == value.__name__
            )
            assert issubclass(found[2], value) and issubclass(found[2], kvtapes)
    assert (
        sys.modules["sglang.somebody"].Pair
        is sys.modules[sglang_plugin.USERS[0]].UnifiedSWATokenToKVPoolAllocator
    )
    assert len(caplog.messages) == 1 and f"{plugin.VARIABLE}={strategy}" in caplog.messages[0]
    full, _ = two_ends(end_class=sglang.MultiEndedAllocator, strategy=strategy)
    assert full.strategy == strategy and full.implementation == f"kvtape {strategy}"
    assert isinstance(full, DeviceMultiEndedAllocator) == (strategy == "device")
    sglang_plugin.remove()
    assert bound() == before
    assert SglangMultiEndedAllocator.chosen_strategy == DEFAULT_STRATEGY
    assert (
        SglangMultiEndedAllocator.translate_token_ids is None
        and SglangMultiEndedAllocator.max_pages_per_move is None
    )


@pytest.mark.parametrize(
    ("value", "installed", "words"),
    [
        ("Device", "0.5.23", ["'Device'", "batched, device, hybrid, per-row"]),
        ("on", "0.5.23", ["'on'", "batched, device, hybrid, per-row"]),
        ("device", "0.5.24", ["0.5.24", "is for SGLang 0.5.23"]),
        ("device", "0.5.23.post1", ["0.5.23.post1", "is for SGLang 0.5.23"]),
        ("device", "0.5.18", ["0.5.18", "is for SGLang 0.5.23"]),
    ],
)
def test_what_cannot_be_had_is_said_in_one_line(
    value: str, installed: str, words: list[str], sglang: ModuleType, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    before = bound()
    monkeypatch.setattr(sglang_plugin, "version", lambda name: installed)
    monkeypatch.setenv(plugin.VARIABLE, value)
    plugin.sglang_allocator()
    assert bound() == before
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "SGLang goes on with its own allocator" in record.getMessage() and "\n" not in record.getMessage()
    assert all(word in record.getMessage() for word in [*words, plugin.VARIABLE])


def test_a_version_that_is_not_as_it_was_gets_its_classes_back(
    sglang: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = bound()

    def fails(module: ModuleType) -> None:
        raise RuntimeError("a fault of somebody who listens")

    setattr(sglang, sglang_plugin.LISTENERS, [fails])
    monkeypatch.setenv(plugin.VARIABLE, "device")
    plugin.sglang_allocator()
    assert bound() == before
    assert len(caplog.messages) == 1 and "a fault of somebody who listens" in caplog.messages[0]


def test_both_sides_know_the_names() -> None:
    assert plugin.VARIABLE == sglang_plugin.VARIABLE
    assert engine.LISTENERS == sglang_plugin.LISTENERS
    assert engine.ALLOCATOR_MODULES[0] == sglang_plugin.MODULE
    assert set(OURS) == set(sglang_plugin.USERS)
    assert set(sglang_plugin.VERSIONS) <= set(engine.VERSIONS)


# -- recording


@pytest.mark.parametrize("first", ["recorder", "allocator"])
def test_what_is_recorded_is_the_allocator_in_use(first: str, sglang: ModuleType, tmp_path: Any) -> None:
    recorder = Recorder(settings(tmp_path))
    before = {cls: dict(vars(cls)) for cls in SglangDeviceMultiEndedAllocator.__mro__[:-1]}
    steps = {
        "recorder": lambda: SglangHooks(recorder, Engine("sglang", "0.5.23", same_placement=True)).attach(
            sglang
        ),
        "allocator": lambda: sglang_plugin.put_in_place("device"),
    }
    for name in sorted(steps, key=lambda name: name != first):
        steps[name]()
    full, swa = two_ends(end_class=sglang.MultiEndedAllocator, strategy="device")
    assert type(full) is SglangDeviceMultiEndedAllocator
    tokens = full.alloc(24)
    full.free(tokens[-4:])
    assert full.flush_for_allocation() == 1
    swa.free(swa.alloc(8))
    recorder.stop()
    assert recorder.failure == ""
    assert not hasattr(sglang, sglang_plugin.LISTENERS)
    path = recorder.sessions[0].path
    assert [event[0] for event in events_of(path)] == ["ALLOC", "FREE", "FLUSH", "ALLOC", "FREE"]
    with TraceReader(path) as reader:
        header = reader.header
    assert (header.settings["allocator"], header.settings["placement"]) == ("kvtape device", "engine")
    assert header.allocator == "SglangDeviceMultiEndedAllocator"
    assert replay(ReplayOptions(path)).failure is None
    sglang_plugin.remove()
    assert {cls: dict(vars(cls)) for cls in before} == before


def test_a_recorder_that_cannot_follow_ends_and_the_engine_goes_on(sglang: ModuleType, tmp_path: Any) -> None:
    recorder = Recorder(settings(tmp_path))
    SglangHooks(recorder, Engine("sglang", "0.5.23", same_placement=True)).attach(sglang)
    (tell,) = getattr(sglang, sglang_plugin.LISTENERS)
    tell(SimpleNamespace(MultiEndedAllocator=type("Changed", (), {"__init__": lambda self: None})))
    assert "Changed has no alloc" in recorder.failure and len(recorder.hooks) == 0


def test_a_state_is_put_off_while_sizes_are_on_their_way(
    sglang: ModuleType, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SglangDeviceMultiEndedAllocator, "read_back_class", NeverReadBack)
    sglang_plugin.put_in_place("device")
    recorder = Recorder(settings(tmp_path, state_every=3))
    SglangHooks(recorder, Engine("sglang", "0.5.23", same_placement=True)).attach(sglang)
    full, _ = two_ends(end_class=sglang.MultiEndedAllocator, strategy="device", page_size=1)
    tokens = full.alloc(12)
    full.free(tokens[-3:])
    moved = full._flush(urgent=False)  # the third call, after which a state is due
    assert not full._is_settled
    full.free(tokens[5:6])
    full._settle()
    full.free(tokens[6:7])
    recorder.stop()
    assert recorder.failure == "" and int(moved) == 3
    path = recorder.sessions[0].path
    with TraceReader(path) as reader:
        rows = list(reader.states())
    # The thread that writes may have waited for the number before the next call.
    assert [row.after_seq for row in rows] in ([3], [4])
    outcome = replay(ReplayOptions(path))
    assert outcome.failure is None and outcome.held["C15"]


# -- what SGLang's other files ask for


class Memory:
    """Moves nothing, remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], list[int]]] = []

    def move_physical_pages(self, dst: torch.Tensor, src: torch.Tensor, page_size: int) -> None:
        self.asked.append((dst.tolist(), src.tolist()))


def pool(direction: str = "up", *, page_size: int = 4, **arguments: Any) -> Any:
    other = "down" if direction == "up" else "up"
    specs = [
        MHASubPoolSpec(
            name=name, layer_num=1, grow_direction=each, head_num=1, head_dim=16, store_dtype=torch.float16
        )
        for name, each in (("one", direction), ("other", other))
    ]
    buffer = UnifiedKVPool(
        total_bytes=64 * 64 * page_size, sub_pool_specs=specs, device="cpu", page_size=page_size
    )
    chosen = SglangFloatMultiEndedAllocator if direction == "float" else SglangMultiEndedAllocator
    given = {
        "kvcache": Memory(),
        "device": "cpu",
        "is_id_owner": True,
        "lazy_compaction": direction != "float",
        **arguments,
    }
    return chosen(unified_buffer=buffer, sub_pool_name="one", page_size=page_size, **given)


def test_moves_are_asked_for_in_parts(sglang: ModuleType) -> None:
    sglang_plugin.put_in_place("device")
    memory = Memory()
    made = pool(kvcache=memory)
    tokens = made.alloc(40)
    made.free(tokens[:20])
    assert made.flush_for_allocation() == 5
    assert [len(dst) for dst, _ in memory.asked] == [2, 2, 1]
    assert sorted(page for dst, _ in memory.asked for page in dst) == [1, 2, 3, 4, 5]
    assert made.get_kvcache() is memory


@pytest.mark.parametrize("direction", ["up", "down"])
def test_sglangs_warm_up_launches_what_flushes_launch(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With numbers that come late, as on CUDA; where they are there at once there is nothing to launch."""
    at_once = pool(direction, strategy="device")
    at_once.prewarm_compaction()
    assert "_flush_ops" not in vars(at_once)
    monkeypatch.setattr(SglangDeviceMultiEndedAllocator, "read_back_class", NeverReadBack)
    memory = Memory()
    made = pool(direction, strategy="device", kvcache=memory)
    tokens = made.alloc(40)
    made.free(tokens[8:20])
    before = whole_state(made)
    launched: list[Any] = []
    monkeypatch.setattr(made._flush_ops, "plan", lambda *given: launched.append(given) or _plan(*given))
    _plan = TorchFlush.plan.__get__(made._flush_ops)
    made.prewarm_compaction()
    marks = [(type(window.mark), window.extent is None) for window, _, _ in launched]
    assert marks == [(int, True), (torch.Tensor, False)]
    assert memory.asked and all(set(dst) == set(src) == {0} for dst, src in memory.asked)
    made._errors.look(wait=True)
    assert whole_state(made) == before


def test_a_buffer_that_shrank_is_seen_when_the_pool_is_resized() -> None:
    made = pool(page_size=1)
    made.unified_buffer.total_bytes //= 2
    made._set_capacity(made.max_slots // 2)
    assert made.available_size() == 31 and made._byte_accounting_violations() == []


@pytest.mark.parametrize("strategy", ["device", "batched"])
@pytest.mark.parametrize("direction", ["up", "down", "float"])
def test_accounts_that_do_not_add_up_are_found(direction: str, strategy: str) -> None:
    made = pool(direction, strategy=strategy)
    tokens = made.alloc(40)
    made.free(tokens[8:16])
    assert made._byte_accounting_violations() == []
    made.holes.clear()
    (said,) = made._byte_accounting_violations()
    assert "[one]" in said and "10 pages" in said
    if direction == "float":
        assert isinstance(made, SglangMultiEndedAllocator)  # SGLang asks so
        assert isinstance(made, SglangDeviceFloatMultiEndedAllocator) == (strategy == "device")


def test_translation_is_sglangs_kernel_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pool()
    tokens = made.alloc(8)
    out = torch.full((12,), 7)
    expected = [*made.translate_kv_loc(tokens).tolist(), 0, 0]
    assert made.translate_write_loc(tokens, out=out, out_width=10) is out
    assert out.tolist() == [*expected, 7, 7]
    asked = []
    kernel = staticmethod(lambda **given: asked.append(given) or given["loc"])
    monkeypatch.setattr(type(made), "translate_token_ids", kernel)
    made.translate_kv_loc(tokens, out=out)
    made.translate_write_loc(tokens)
    assert [given["out"] is out for given in asked] == [True, False]
    assert all(given["v2p"] is made.virtual_to_physical and given["page_size"] == 4 for given in asked)


def test_page_representatives() -> None:
    made = pool()
    assert made._page_reps(torch.arange(4, 14), 8).tolist() == [4, 8, 12]
    with pytest.raises(PageAlignmentError, match="position 6"):
        made._page_reps(torch.arange(4), 6)


def test_decode_context_parallelism_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    context = ModuleType("sglang.srt.runtime_context")
    parallel = SimpleNamespace(attn_dcp_size=1)
    context.get_parallel = lambda: parallel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, context.__name__, context)
    assert pool(shards_under_dcp=True).shards_under_dcp
    parallel.attn_dcp_size = 2
    assert not pool().shards_under_dcp
    with pytest.raises(ConfigurationError, match="without KVTAPE_ALLOCATOR"):
        pool(shards_under_dcp=True)


def test_strategy_device_knows_two_kinds_of_devices() -> None:
    with pytest.raises(ConfigurationError, match="cpu and cuda, not meta"):
        pool(device="meta", strategy="device")


@pytest.mark.parametrize("is_promised", [False, True])
def test_window_places_that_are_not_there_are_refused_at_once_where_nobody_promised_them(
    is_promised: bool, sglang: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's cache for LMCache takes full pages and then window places for them, of the sub-pools; that the places are not there it
    catches, and gives the full pages back (``lmcache_unified_radix_cache.py``, ``_allocate_external_slots``)."""
    monkeypatch.setattr(SglangDeviceMultiEndedAllocator, "read_back_class", NeverReadBack)
    sglang_plugin.put_in_place("device")
    full, swa = two_ends(end_class=sglang.MultiEndedAllocator, strategy="device", page_size=4)
    full.alloc(40)
    window = swa.alloc(swa.available_size())
    swa.free(window[:5])  # of two pages, which nobody has counted yet
    swa.alloc_with_virtual(torch.tensor([28]))
    assert swa.blocking_reads == 0 and not swa._is_settled
    too_many = torch.tensor([29, 30])
    if is_promised:
        with swa.promised():
            swa.alloc_with_virtual(too_many)
        assert swa.blocking_reads == 0
        with pytest.raises(OutOfRoomError):
            swa._errors.look(wait=True)
        return
    with pytest.raises(OutOfRoomError):
        swa.alloc_with_virtual(too_many)
    assert swa.blocking_reads > 0
    swa.alloc_with_virtual(too_many[:1])
    swa._errors.look(wait=True)


def test_a_late_count_is_taken_where_a_number_is() -> None:
    late = LateCount(lambda: 3)
    assert 0 + late + late == 6 and sum([late, 1]) == 4 and max(late, 2) == 3
    assert late <= 3 <= late and late >= 3 and not late > 3 and late < 4
    assert f"{late} {late:>4d} {late!r}" == "3    3 3" and "%d moves" % late == "3 moves"  # noqa: UP031
    assert [10, 20, 30, 40][late] == 40
