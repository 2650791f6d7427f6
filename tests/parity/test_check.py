"""The whole check on the tiny decoder: every variant is exact, planted faults are found, and the recording replays."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recorder import process
from recorder.engines import parity, registry
from recorder.trace import EventKind, MarkCode, TraceReader
from replayer import __version__
from replayer.console import print_rich
from replayer.errors import UsageError
from replayer.main import COMMANDS
from replayer.parity.compare import OUTPUT_ID, TOP_LOGPROBS, compare
from replayer.parity.errors import ReferenceMoved
from replayer.parity.plants import PLANTS
from replayer.parity.pools import Layout
from replayer.parity.recording import NotRecorded, Recording
from replayer.parity.report import About, Took, draw, figures, held
from replayer.parity.requests import Generation
from replayer.parity.run import VARIANTS, Result, check
from replayer.replay import ReplayOptions, replay
from replayer.targets import TargetOptions
from tests.parity.toy import SETUP, ToyModel, toy_requests

pytestmark = pytest.mark.cpu

CROWDED = replace(SETUP, small_tokens=150)
COUNT = 16
PLUGINS = COMMANDS["parity"].plugins
TOOK = Took(2.0, 1.0)


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return list(check(ToyModel(), toy_requests(COUNT), CROWDED, VARIANTS))


def test_every_variant_is_exact(results: list[Result]) -> None:
    assert [result.run.name for result in results] == list(VARIANTS)
    for result in results:
        assert (result.comparison.exact, result.comparison.largest, result.comparison.first) == (
            COUNT,
            0.0,
            None,
        )
        assert result.comparison.tokens == sum(request.max_new_tokens for request in toy_requests(COUNT))
        assert result.run.flushes["pages_moved"] >= 100
        assert result.reference.flushes["pages_moved"] == 0
        done = result.run.operations()
        assert done["evictions"] >= 10 and done["preemptions"] >= 2 and done["reused_tokens"] >= 50


def test_one_reference_serves_all(results: list[Result]) -> None:
    """Strategies place alike, and the eager pool follows."""
    assert len({id(result.reference) for result in results}) == 1


def test_strategies_cost_what_they_cost(results: list[Result]) -> None:
    by_name = {result.run.name: result.run.flushes for result in results}
    lookups = {name: found["syncs"]["device_to_host"]["total"] for name, found in by_name.items()}
    assert by_name["device"]["syncs"]["device_to_host"]["total"] == 0
    assert by_name["device"]["syncs"]["host_to_device"]["total"] == 0
    assert 0 < lookups["batched"] < lookups["per-row"]
    assert len({by_name[name]["pages_moved"] for name in ("per-row", "hybrid", "batched", "device")}) == 1
    assert by_name["per-row"]["syncs"]["device_to_host"]["max"] > by_name["per-row"]["pages_moved_most"]


@pytest.mark.parametrize("variant", ["batched", "device", "eager"])
@pytest.mark.parametrize("plant", sorted(PLANTS))
def test_a_planted_fault_is_found_and_named(plant: str, variant: str) -> None:
    (result,) = check(ToyModel(), toy_requests(COUNT), CROWDED, [variant], store_class=PLANTS[plant])
    found = result.comparison
    assert found.exact < COUNT and found.largest > 1e-3
    assert found.first is not None and found.first.what == TOP_LOGPROBS
    # The first difference in time: nothing before that forward differs in any request.
    for name, expected in result.reference.generations.items():
        made = result.run.generations[name]
        for token, forward in enumerate(made.forwards):
            if forward < found.first.forward:
                assert made.top_logprobs[token] == expected.top_logprobs[token]
    made = result.run.generations[found.first.request]
    assert made.forwards[found.first.token] == found.first.forward


def test_without_moves_a_planted_fault_does_nothing() -> None:
    """It is the move that is wrong, not the store."""
    setup = replace(SETUP, layout=Layout(page_size=4, window=None), small_tokens=2000)
    for store in PLANTS.values():
        (result,) = check(ToyModel(), toy_requests(1), setup, ["batched"], store_class=store)
        assert result.run.flushes["pages_moved"] == 0 and held([result])


def test_bfloat16_is_exact_too() -> None:
    """As on CUDA."""
    for result in check(ToyModel(0, torch.bfloat16), toy_requests(16), CROWDED, ["batched", "device"]):
        assert held([result]) and result.run.flushes["pages_moved"] > 50


def test_a_reference_in_which_pages_move_is_none() -> None:
    with pytest.raises(ReferenceMoved, match="pages moved in the reference"):
        list(check(ToyModel(), toy_requests(COUNT), replace(CROWDED, large_tokens=150), ["batched"]))


@pytest.mark.parametrize(
    ("variant", "strategies"),
    [("batched", ("per-row", "hybrid", "batched", "device")), ("device", ("batched", "device"))],
)
def test_a_recorded_run_replays_on_every_strategy(
    variant: str, strategies: tuple[str, ...], tmp_path: Path
) -> None:
    recording = Recording(tmp_path / "toy.msgpack.zst", "toy", "a test", PLUGINS)
    requests = toy_requests(COUNT)
    (result,) = check(ToyModel(), requests, CROWDED, [variant], recordings={variant: recording})
    assert held([result]) and recording.path is not None
    assert process.current() is None
    marks, flushed, done = dict.fromkeys(MarkCode, 0), 0, 0
    with TraceReader(recording.path) as reader:
        header = reader.header
        for chunk in reader.chunks():
            for code in chunk.value[chunk.kind == EventKind.MARK]:
                marks[MarkCode(int(code))] += 1
            flushed += int(chunk.result_value[chunk.kind == EventKind.FLUSH].sum())
            done += int((chunk.kind == EventKind.FORWARD_DONE).sum())
    assert (header.engine, header.provenance.kind, header.model) == (parity.NAME, "recorded", "toy")
    assert [(pool.name, pool.grow_direction) for pool in header.pools] == [("window", "up"), ("full", "down")]
    operations = result.run.operations()
    assert marks[MarkCode.REQUEST_ARRIVE] == marks[MarkCode.REQUEST_FINISH] == COUNT
    assert marks[MarkCode.PREEMPT] == operations["preemptions"]
    assert done == operations["forwards"]
    assert flushed == result.run.flushes["pages_moved"]
    for strategy in strategies:
        outcome = replay(ReplayOptions(recording.path, target=TargetOptions(strategy=strategy)))
        assert outcome.verdict == "held", outcome.failure
        assert sum(flush.moves for flush in outcome.flushes) == flushed
        assert outcome.held["C15"] > 100 and outcome.held["C7"] > 50


def test_a_recording_that_fails_is_said(tmp_path: Path) -> None:
    with (
        pytest.raises(NotRecorded, match="no allocator was called"),
        Recording(tmp_path / "x", "toy", "", PLUGINS),
    ):
        pass
    assert process.current() is None


def test_without_a_recorder_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotRecorded, match="no recorder was there"), Recording(tmp_path / "x", "toy", "", ()):
        pass


def test_a_recorder_that_fails_is_said_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a mark")

    monkeypatch.setattr(parity, "put_mark", fail)
    recording = Recording(tmp_path / "x", "toy", "", PLUGINS)
    with pytest.raises(NotRecorded, match="ZeroDivisionError: a mark"):
        list(check(ToyModel(), toy_requests(4), CROWDED, ["batched"], recordings={"batched": recording}))
    assert process.current() is None


def test_a_recording_leaves_the_environment_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTAPE_MEMORY", "32M")
    before = dict(os.environ)
    recording = Recording(tmp_path / "x", "toy", "", PLUGINS)
    (result,) = check(ToyModel(), toy_requests(2), CROWDED, ["batched"], recordings={"batched": recording})
    assert held([result]) and recording.path is not None and dict(os.environ) == before


def test_the_engine_that_is_recorded_is_one_the_recorder_knows() -> None:
    (engine,) = registry.engines(parity.HOST)
    assert engine is parity
    assert registry.require_known_version(engine) == __version__


def test_one_recording_at_a_time(tmp_path: Path) -> None:
    with pytest.raises(NotRecorded), Recording(tmp_path / "x", "toy", "", PLUGINS):
        other = Recording(tmp_path / "y", "toy", "", PLUGINS)
        with pytest.raises(UsageError, match="recorded already"):
            other.__enter__()


def test_figures_and_text_say_the_same(results: list[Result], capsys: pytest.CaptureFixture[str]) -> None:
    about = About("toy", "float32", "cpu", "a CPU", COUNT, CROWDED, None, {"torch": torch.__version__})
    found = json.loads(json.dumps(figures(about, results, TOOK, interrupted=False)))
    assert found["verdict"] == "held" and list(found["variants"]) == list(VARIANTS)
    print_rich(lambda console: draw(console, about, results, TOOK, interrupted=False))
    text = capsys.readouterr().out
    assert text.startswith("HELD  toy, float32, on a CPU: 16 prompts")
    for name, variant in found["variants"].items():
        (row,) = [line for line in text.splitlines() if line.strip().startswith(f"{name} ")]
        assert (
            f"{variant['exact']}/{variant['requests']}" in row
            and f" {variant['largest_difference']!r} " in row
        )
        assert f" {variant['flushes']['pages_moved']:,} " in row


def test_a_run_without_moves_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    setup = replace(SETUP, layout=Layout(page_size=4, window=None), small_tokens=2000)
    about = About("toy", "float32", "cpu", "a CPU", 1, setup, None, {})
    still = list(check(ToyModel(), toy_requests(1), setup, ["hybrid"]))
    print_rich(lambda console: draw(console, about, still, TOOK, interrupted=False))
    assert "note: no page moved in hybrid, which proves nothing" in capsys.readouterr().out


def test_a_difference_is_printed_with_request_and_token(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = list(
        check(ToyModel(), toy_requests(COUNT), CROWDED, ["batched"], store_class=PLANTS["last-layer"])
    )
    about = About("toy", "float32", "cpu", "a CPU", COUNT, CROWDED, "last-layer", {})
    first = wrong[0].comparison.first
    assert first is not None
    assert (
        figures(about, wrong, TOOK, interrupted=False)["variants"]["batched"]["first_difference"]["request"]
        == first.request
    )
    print_rich(lambda console: draw(console, about, wrong, TOOK, interrupted=False))
    text = capsys.readouterr().out
    assert text.startswith("FAILED") and "planted fault: last-layer" in text
    assert (
        f"first differs at request {first.request}, token {first.token}, forward {first.forward}: top-20"
        in text
    )
    assert figures(about, wrong, TOOK, interrupted=True)["verdict"] == "interrupted"


def generation(ids: list[int], logprobs: list[list[float]]) -> Generation:
    return Generation(ids, list(range(1, len(ids) + 1)), [[1, 2]] * len(ids), logprobs)


@pytest.mark.parametrize(
    ("found", "exact", "tokens", "largest", "where"),
    [
        (generation([5, 6, 7], [[-1.0, -2.0]] * 3), 1, 3, 0.0, None),
        (generation([5, 6, 7], [[-1.0, -2.0], [-1.0, -2.5], [-1.0, -2.0]]), 0, 3, 0.5, (1, TOP_LOGPROBS)),
        # What follows another token answers another text.
        (generation([5, 9, 7], [[-1.0, -2.0], [-1.0, -2.0], [-9.0, -9.5]]), 0, 2, 0.0, (1, OUTPUT_ID)),
        (generation([5, 6], [[-1.0, -2.0]] * 2), 0, 2, 0.0, (2, OUTPUT_ID)),
        (generation([5, 6, 7], [[-1.0, float("nan")]] * 3), 0, 3, float("inf"), (0, TOP_LOGPROBS)),
    ],
)
def test_comparing(found: Generation, exact: int, tokens: int, largest: float, where) -> None:
    expected = generation([5, 6, 7], [[-1.0, -2.0]] * 3)
    got = compare({"r": expected}, {"r": found})
    assert (got.exact, got.tokens, got.largest) == (exact, tokens, largest)
    assert (None if got.first is None else (got.first.token, got.first.what)) == where
