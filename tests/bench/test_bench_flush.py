"""`kvtape bench flush`: that candidates do the same work, what is said about it, and how it fails. Nothing here depends on a time."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import replayer.targets_sglang
from recorder.trace import Header
from replayer.bench import Candidate, Spread, kvtape_candidate
from replayer.bench_calls import ResultsDiffer
from replayer.bench_flush import (
    KINDS,
    STRATEGIES,
    Findings,
    Plan,
    Point,
    full_plan,
    header_for,
    measure,
    quick_plan,
)
from replayer.flush_figures import DEVICE, SGLANG_WANTED, Figure, figures, limit_for
from replayer.main import main
from replayer.targets_sglang import build_sglang_pools

pytestmark = pytest.mark.cpu

TINY = ("bench", "flush", "--quick", "--moves", "0,3", "--rounds", "1")


@pytest.fixture(autouse=True)
def without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayer.targets_sglang, "sglang_version", lambda: None)


def tiny(kind: str, moves: int, page_size: int = 1) -> Plan:
    return Plan([[Point("moves", kind, moves, 1024, page_size)]], rounds=1, repeats=lambda count: 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("moves", [0, 1, 2, 17])
def test_every_candidate_moves_the_same_pages(kind: str, page_size: int, moves: int) -> None:
    named = [kvtape_candidate("kvtape", strategy) for strategy in STRATEGIES]
    plan = tiny(kind, moves, page_size)
    findings = measure(named, plan)
    ((point, moved),) = findings.moved.items()
    assert point.moves == moves
    assert moved == {f"kvtape {strategy}": moves for strategy in STRATEGIES}
    assert {len(times) for times in findings.nanoseconds[point].values()} == {1}


def test_a_candidate_that_moves_less_is_refused() -> None:
    def build(header: Header) -> Mapping[str, Any]:
        pools = kvtape_candidate("kvtape", "batched").build(header)
        pools["full"].disagg_move_gate = lambda: False
        return pools

    with pytest.raises(ResultsDiffer, match="moved 0 pages where 5 were to move"):
        measure([Candidate("shut", build)], tiny("urgent", 5))


def test_a_candidate_that_places_otherwise_is_refused() -> None:
    ours = kvtape_candidate("kvtape", "batched")

    def build(header: Header) -> Mapping[str, Any]:
        pools = ours.build(header)
        original = pools["full"]._flush
        swapped: list[bool] = []

        def flush(*, urgent: bool) -> int:
            moved: int = original(urgent=urgent)
            if not swapped:
                swapped.append(True)
                table = pools["full"].virtual_to_physical
                table[[200, 201]] = table[[201, 200]]
            return moved

        pools["full"]._flush = flush
        return pools

    with pytest.raises(ResultsDiffer, match="other pages"):
        measure([ours, Candidate("swaps", build)], tiny("urgent", 5))


def test_the_first_round_does_not_count() -> None:
    plan = Plan([[Point("moves", "urgent", 2, 512)]], rounds=3, repeats=lambda count: 1)
    findings = measure([kvtape_candidate("kvtape", "device")], plan)
    assert [len(times) for times in findings.nanoseconds[plan.groups[0][0]].values()] == [3]


def test_what_the_clock_costs_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**9, 1000))
    monkeypatch.setattr("replayer.bench_flush.thread_time_ns", lambda: next(clock))
    plan = Plan([[Point("moves", "urgent", 2, 512)]], rounds=1, repeats=lambda count: 1)
    findings = measure([kvtape_candidate("kvtape", "device")], plan)
    # By this clock a reading takes 1000 ns and a flush nothing.
    assert findings.time(plan.groups[0][0], "kvtape device").median == 1.0


def test_plans_ask_all_questions() -> None:
    for plan in (full_plan(moves=(0, 16384)), quick_plan(moves=(0, 2))):
        points = [point for group in plan.groups for point in group]
        assert {point.panel for point in points} == {"moves", "pages", "pool"}
        assert {point.kind for point in points} == set(KINDS)
        assert {point.page_size for point in points} == {1, 64}
    sizes = [
        point.pages for group in full_plan(moves=(0,)).groups for point in group if point.panel == "pool"
    ]
    assert max(sizes) == 64 * min(sizes)


# -- what is wanted


@pytest.mark.parametrize(
    ("moves", "limit"),
    [
        (0, 2.0),
        (2, 2.0),
        (3, 0.5),
        (64, 0.5),
        (65, None),
        (177, 0.25),
        (2736, None),
        (2737, 0.1),
        (16384, 0.1),
    ],
)
def test_limits(moves: int, limit: float | None) -> None:
    assert limit_for(moves) == limit


def found(times: dict[tuple[str, int, int], tuple[float, float]]) -> Findings:
    """Findings with one round: (panel, moves, pages) to the times of device and SGLang."""
    made = Findings()
    for (panel, moves, pages), (device, sglang) in times.items():
        made.nanoseconds[Point(panel, "urgent", moves, pages)] = {DEVICE: [device], SGLANG_WANTED: [sglang]}
    return made


def by_name(findings: Findings, names: tuple[str, ...] = (DEVICE, SGLANG_WANTED)) -> dict[str, Figure]:
    return {figure.what: figure for figure in figures(findings, names)}


def test_the_worst_point_decides() -> None:
    made = by_name(found({("moves", 3, 64): (4.0, 10.0), ("moves", 64, 64): (6.0, 10.0)}))
    figure = made["device over SGLang 0.5.23, urgent, 3 to 64 moves"]
    assert (figure.held, figure.at) == (False, "64 moves")
    assert figure.found == Spread(0.6, 0.6, 0.6)
    assert figure.line().startswith("NOT HELD")
    assert made["device over SGLang 0.5.23, urgent, 177 moves"].held is None
    assert made["device over SGLang 0.5.23, urgent, 177 moves"].line().startswith("not measured")


def test_doubling_and_pool_size() -> None:
    made = by_name(
        found(
            {
                ("moves", 8, 64): (1.0, 1.0),
                ("moves", 16, 64): (2.5, 1.0),
                ("pool", 13, 100): (10.0, 1.0),
                ("pool", 13, 6400): (10.5, 1.0),
            }
        )
    )
    doubling = made["device with twice the moved pages, urgent"]
    assert (doubling.held, doubling.at) == (False, "8 to 16 moves")
    pool = made["device in a pool of 64 times the pages, urgent, 13 moves"]
    assert pool.held is True
    assert "held" in pool.line()


def test_another_version_is_not_the_one_that_is_wanted() -> None:
    made = Findings({Point("moves", "urgent", 3, 64): {DEVICE: [1.0], "sglang 0.5.17": [9.0]}})
    assert (
        by_name(made, (DEVICE, "sglang 0.5.17"))["device over SGLang 0.5.23, urgent, 3 to 64 moves"].held
        is None
    )


# -- the command


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["candidates"] == [f"kvtape {strategy}" for strategy in STRATEGIES]
    assert figures["reference"] == "kvtape batched"
    assert figures["rounds"] == 1
    assert figures["machine"]["threads"] == 1
    assert figures["machine"]["sglang"] is None
    assert figures["sglang_not_installed"] == ["0.5.17", "0.5.23"]
    assert {(point["panel"], point["page_size"]) for point in figures["points"]} == {
        ("moves", 1),
        ("pages", 64),
        ("pool", 1),
    }
    for point in figures["points"]:
        assert set(point["moved"].values()) == {point["moves"]}
        assert set(point["moved"]) == set(point["nanoseconds"]) == set(figures["candidates"])
        assert set(point["ratios"]) == set(figures["candidates"]) - {"kvtape batched"}
        for times in (*point["nanoseconds"].values(), *point["ratios"].values()):
            assert 0 < times["low"] <= times["median"] <= times["high"]
    held = {figure["what"]: figure["held"] for figure in figures["figures"]}
    assert all(verdict is None for what, verdict in held.items() if "SGLang" in what)
    assert any(verdict is not None for what, verdict in held.items() if "pool" in what)


def test_tables_say_what_was_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--strategy", "batched,device"]) == 0
    printed = capsys.readouterr().out
    assert "flush time over that of kvtape batched" in printed
    assert "one thread" in printed
    assert "SGLang 0.5.17: not installed" in printed
    assert "tools/build_sglang_env.sh" in printed
    assert "not measured: device over SGLang 0.5.23, urgent, 3 to 64 moves" in printed
    assert "times the pages" in printed


def test_check_is_about_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for limit, code in ((1e9, 0), (1e-9, 1)):
        monkeypatch.setattr("replayer.flush_figures.POOL_LIMIT", limit)
        assert main([*TINY, "--check", "--strategy", "device"]) == code
    assert "NOT HELD" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--strategy", "clever"], "no strategy 'clever'"),
        (["--strategy", "device,device"], "named twice"),
        (["--moves", "3,x"], "numbers of pages"),
        (["--moves", "3,3"], "each once"),
        (["--rounds", "0"], "at least 1"),
        (["--plot", "figures.svg"], "PNG"),
        (["--plot", "no/such/folder/a.png"], "no folder"),
        (["trace.msgpack.zst"], "unrecognized arguments"),
    ],
)
def test_bad_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "flush", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([*TINY, "--plot", str(tmp_path / "a.png")]) == 2
    assert "kvtape[plot]" in capsys.readouterr().err


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed (kvtape[plot])"
)
def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "flush.png"
    assert main([*TINY, "--plot", str(picture)]) == 0
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 10_000


def test_a_trace_of_that_name_is_still_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("flush").write_bytes(b"no trace")
    assert main(["bench", "./flush"]) == 65
    assert "flush" in capsys.readouterr().err


def test_older_versions_are_only_for_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(module: str) -> Any:
        asked.append(module)
        raise replayer.targets_sglang.UsageError("not here")

    monkeypatch.setattr(replayer.targets_sglang, "sglang_version", lambda: "0.5.17")
    monkeypatch.setattr(replayer.targets_sglang, "import_sglang", refuse)
    header = header_for(Point("moves", "urgent", 2, 512), live=64)
    for older in (False, True):
        with pytest.raises(replayer.targets_sglang.UsageError):
            build_sglang_pools(header, kvcache_for=lambda name: None, older=older)
    assert asked == [
        "sglang.srt.mem_cache.allocator.unified_sub_pool",
        "sglang.srt.mem_cache.allocator.unified_sub_pool",
        "sglang.srt.mem_cache.multi_ended_allocator",
    ]
