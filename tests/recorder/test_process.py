"""One recorder a process: how it begins, fails and ends, and what it leaves: nothing."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recorder import plugin, process
from recorder.engines import registry
from recorder.hooks import MissingFunction
from recorder.process import Recorder
from recorder.session import Session
from recorder.trace import Header, PoolHeader, Provenance, TraceReader
from tests.recorder.recordings import settings

pytestmark = pytest.mark.cpu


class FakeEngine:
    """An engine with one function."""

    def allocate(self) -> str:
        return "pages"


class FakeEngineHooks:
    """What an entry point of `kvtape.engines` names."""

    NAME = "fake"
    HOST = "fakehost"
    VERSIONS = ("1.2", "2.0.1")

    def __init__(self, version: str | None = "1.2.3", problem: Exception | None = None) -> None:
        self._version, self._problem = version, problem

    def installed_version(self) -> str | None:
        return self._version

    def attach(self, recorder: Recorder) -> None:
        recorder.hooks.wrap(FakeEngine, "allocate", lambda original: lambda engine: original(engine))
        if self._problem is not None:
            raise self._problem


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Makes `plugin._start("fakehost")` meet a given engine; everything is off again afterwards."""

    def install(engine: Any) -> None:
        monkeypatch.setattr(registry, "engines", lambda name: [engine] if name == "fakehost" else [])

    monkeypatch.setenv("KVTAPE_RECORD", str(tmp_path / "run.msgpack.zst"))
    monkeypatch.setenv("KVTAPE_RUN", "ab")
    monkeypatch.setenv("KVTAPE_SALT", "cd")
    monkeypatch.setattr(plugin, "_started", set())
    before = dict(vars(FakeEngine))
    yield install
    process.end()
    assert dict(vars(FakeEngine)) == before


def test_off_means_that_nothing_is_imported_or_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTAPE_RECORD", raising=False)
    monkeypatch.setattr(plugin, "_start", lambda host: pytest.fail("recording began"))
    plugin.sglang()
    plugin.vllm()
    plugin.transformers()
    assert process.current() is None


def test_on_off_on_off(host: Any) -> None:
    host(FakeEngineHooks())
    original = FakeEngine.allocate
    for _ in range(2):
        plugin._start("fakehost")
        assert FakeEngine.allocate is not original
        plugin._start("fakehost")
        recorder = process.current()
        assert recorder is not None and len(recorder.hooks) == 1
        process.end()
        assert FakeEngine.allocate is original
        assert process.current() is None


@pytest.mark.parametrize("version", ["1.20", "2.0", "2.0.10", "0.9", None])
def test_an_unknown_version_is_refused_with_those_that_are_known(
    host: Any, caplog: pytest.LogCaptureFixture, version: str | None
) -> None:
    host(FakeEngineHooks(version))
    plugin._start("fakehost")
    assert process.current() is None
    (record,) = caplog.records
    assert "knows 1.2, 2.0.1" in record.message
    assert "nothing is recorded" in record.message


@pytest.mark.parametrize("version", ["1.2", "1.2.0", "1.2+cpu", "1.2.0+cpu", "2.0.1"])
def test_known_versions(host: Any, version: str) -> None:
    host(FakeEngineHooks(version))
    plugin._start("fakehost")
    recorder = process.current()
    assert recorder is not None and recorder.active


def test_hooks_that_cannot_be_put_in_place_are_taken_away(
    host: Any, caplog: pytest.LogCaptureFixture
) -> None:
    host(FakeEngineHooks(problem=RuntimeError("no such method")))
    plugin._start("fakehost")
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "fake cannot be recorded: RuntimeError: no such method" in caplog.records[0].message
    assert process.current() is None


@pytest.mark.parametrize("problem", [RuntimeError("a fault"), SystemExit(9)])
def test_an_engine_that_cannot_be_hooked_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch, host: Any, problem: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = FakeEngineHooks(), FakeEngineHooks(problem=problem)
    host(good)
    monkeypatch.setattr(registry, "engines", lambda name: [good, bad])
    plugin._start("fakehost")
    plugin._start("fakehost")
    recorder = process.current()
    assert recorder is not None and recorder.active
    assert recorder.engines == [good]
    assert len(recorder.hooks) == 1
    assert caplog.text.count("fake cannot be recorded") == 1


def test_what_a_trace_would_be_wrong_without_is_required(tmp_path: Path) -> None:
    recorder = Recorder(settings(tmp_path))
    with pytest.raises(MissingFunction, match="FakeEngine has no release"):
        recorder.hooks.require(FakeEngine, "release", lambda original: original)
    recorder.stop()
    assert not recorder.hooks.wrap(FakeEngine, "allocate", lambda original: lambda engine: "ours")
    assert FakeEngine().allocate() == "pages"


def test_a_process_number_that_comes_again_gets_another_name(tmp_path: Path) -> None:
    recorder = Recorder(settings(tmp_path))
    name = f"run.tp0.{os.getpid()}"
    (tmp_path / f"{name}.msgpack.zst.partial").write_bytes(b"left behind")
    (tmp_path / f"{name}-2.msgpack.zst").write_bytes(b"an older run")
    session = recorder.open("test", "tp0", header())
    assert session.path.name == f"{name}-3.msgpack.zst"
    recorder.stop()


def test_children_belong_to_the_run(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTAPE_RUN")
    monkeypatch.delenv("KVTAPE_SALT")
    host(FakeEngineHooks())
    plugin._start("fakehost")
    recorder = process.current()
    assert recorder is not None
    assert os.environ.pop("KVTAPE_RUN") == recorder.settings.run
    assert bytes.fromhex(os.environ.pop("KVTAPE_SALT")) == recorder.settings.salt


def test_settings_that_are_wrong_are_said_and_nothing_is_recorded(
    host: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host(FakeEngineHooks())
    monkeypatch.setenv("KVTAPE_MEMORY", "lots")
    plugin._start("fakehost")
    assert process.current() is None
    assert "KVTAPE_MEMORY is 'lots'" in caplog.text


def test_a_failure_is_logged_once_and_ends_everything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(settings(tmp_path))
    marks = []
    recorder.on_stop(lambda: marks.append("off"))
    recorder.hooks.wrap(FakeEngine, "allocate", lambda original: lambda engine: original(engine))
    for number in range(3):
        recorder.fail(ValueError(f"fault {number}"))
    assert [record.message for record in caplog.records] == [
        "kvtape: recording has ended, the engine goes on: ValueError: fault 0"
    ]
    assert len(recorder.hooks) == 0
    assert not recorder.active
    assert marks == ["off"]
    recorder.stop()


def header() -> Header:
    pool = PoolHeader("full", "tokens", "down", 16, 64, 1, 64, 1, 64)
    return Header("test", [pool], Provenance("synthetic"))


def test_a_second_buffer_has_a_file_of_its_own(tmp_path: Path) -> None:
    recorder = Recorder(settings(tmp_path))
    first = recorder.open("test", "tp0", header())
    second = recorder.open("test", "tp0", header())
    pid = os.getpid()
    assert first.path.name == f"run.tp0.{pid}.msgpack.zst"
    assert second.path.name == f"run.tp0-1.{pid}.msgpack.zst"
    recorder.stop()


def test_header_says_which_run_and_under_which_settings(tmp_path: Path) -> None:
    recorder = Recorder(settings(tmp_path, how="by hand", model="m", hardware="a test"))
    session = recorder.open("test", "tp0", header())
    session.put((lambda sink, item: sink.writer.append(26, time_us=1, value=1), 0))
    recorder.stop()
    with TraceReader(session.path) as reader:
        found = reader.header
    assert found.extra["run"] == "0123456789abcdef"
    assert found.extra["pid"] == os.getpid()
    assert (found.provenance.kind, found.provenance.how, found.provenance.hardware) == (
        "driven",
        "by hand",
        "a test",
    )
    assert (found.model, found.drop_policy) == ("m", "drop")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_a_recording_of_its_own(host: Any, tmp_path: Path) -> None:
    host(FakeEngineHooks())
    plugin._start("fakehost")
    recorder = process.current()
    assert recorder is not None
    session = recorder.open("test", "tp0", header())
    session.put((lambda sink, item: sink.writer.append(26, time_us=1, value=1), 0))
    child = os.fork()
    if child == 0:
        os._exit(_in_child(recorder, session))
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert recorder.active and len(recorder.hooks) == 1
    end = time.monotonic() + 10
    while session.queue and time.monotonic() < end:
        time.sleep(0.01)
    process.end()
    with TraceReader(session.path) as reader:
        assert sum(len(chunk) for chunk in reader.chunks()) == 1


def _in_child(parent: Recorder, inherited: Session) -> int:
    """0 where a forked child is hooked anew, has nothing open, and writes to a file with its own number."""
    own = process.current()
    if own is None or own is parent or len(own.hooks) != 1 or own.sessions:
        return 1
    if inherited.active or parent.active or len(parent.hooks):
        return 2
    session = own.open("test", "tp0", header())
    session.put((lambda sink, item: sink.writer.append(26, time_us=1, value=1), 0))
    process.end()
    return 0 if str(os.getpid()) in session.path.name and session.path.exists() else 3


def test_our_own_engines_are_in_the_registry() -> None:
    for name in registry.OWN:
        (engine, *_) = registry.engines(name)
        assert engine.NAME in (name, f"{name} parity")
        assert name == engine.HOST
        assert engine.VERSIONS


def test_our_own_engines_are_declared_as_other_packages_declare_theirs() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split(f'[project.entry-points."{registry.GROUP}"]\n')[1].split("\n\n")[0]
    declared = [line.split(" = ")[1].strip('"') for line in section.splitlines()]
    assert sorted(declared) == sorted(registry.OWN.values())


def test_an_engine_that_many_import_and_few_use_is_refused_when_it_is_used(
    host: Any, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[Callable[[], None]] = []

    class Library(FakeEngineHooks):
        def refuse_when_used(self, say: Callable[[], None]) -> bool:
            said.append(say)
            return True

    host(Library("0.1"))
    plugin._start("fakehost")
    assert caplog.records == []
    said[0]()
    assert "fake 0.1 has not been tested" in caplog.text
