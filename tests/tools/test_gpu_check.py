"""`tools/gpu_check.py` as far as a CPU goes: it runs, says what it did not measure, and its verdicts can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.cpu

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = REPOSITORY / "tools" / "gpu_check.py"
#: Modules that a machine with a GPU need not have.
ABSENT = ("pytest", "rich", "tqdm", "hypothesis", "matplotlib")


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of a short run in which the modules of `ABSENT` cannot be imported."""
    folder = tmp_path_factory.mktemp("gpu_check")
    report = folder / "report.json"
    blocked = f"import sys, runpy; sys.modules.update(dict.fromkeys({ABSENT!r})); sys.argv = sys.argv[1:]; "
    code = (
        blocked
        + "sys.path.insert(0, sys.argv[0].rsplit('/', 1)[0]); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [
        sys.executable,
        "-c",
        code,
        str(TOOL),
        "--device",
        "cpu",
        "--json",
        str(report),
        "--events",
        "40",
        "--rounds",
        "1",
    ]
    small = ["--most-moves", "4", "--strategies", "device", "batched", "--seconds", "20"]
    done = subprocess.run(
        [*command, *small], cwd=folder, capture_output=True, text=True, timeout=250, check=False
    )
    # 3: a slow machine gets through less of it.
    assert done.returncode in (0, 3), done.stdout[-2000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(report.read_text())
    found["printed"], found["code"] = done.stdout, done.returncode
    return found


def verdicts(check: dict[str, Any]) -> dict[str, bool | None]:
    return {each["check"]: each["held"] for each in check["verdicts"]}


def test_nothing_failed_and_the_exit_status_says_so(check: dict[str, Any]) -> None:
    assert False not in verdicts(check).values()
    assert check["code"] == check["exit_status"] == (3 if check["skipped"] else 0)


def test_what_needs_cuda_is_not_measured(check: dict[str, Any]) -> None:
    found = verdicts(check)
    assert found["three counts of known operations"] is None
    assert found["bandwidth of moves over that of a copy"] is None
    assert found["host held by device over batched, busy stream, 256 moves"] is None
    agreeing = [held for what, held in found.items() if what.startswith("three counts agree")]
    assert agreeing
    assert set(agreeing) == {None}


def test_what_a_cpu_can_tell_is_told(check: dict[str, Any]) -> None:
    found = verdicts(check)
    assert found["no synchronisation, sglang_tiny_swa_p16, device"] is True
    rows = check["parts"]["synchronisations"]
    by_strategy = {
        strategy: sum(row["ledger"] for row in rows if row["strategy"] == strategy)
        for strategy in ("device", "batched")
    }
    assert by_strategy["device"] == 0
    assert by_strategy["batched"] > 0
    assert {row["moves"] for row in check["parts"]["host held, ms"]} == {1, 4}
    # Every part ran or is named.
    for strategy in ("device", "batched"):
        for part in ("golden transcripts", "composites"):
            ran = f"{part}, {strategy}" in found
            assert ran or any(part in skipped and strategy in skipped for skipped in check["skipped"])


def test_the_table_comes_last(check: dict[str, Any]) -> None:
    lines = check["printed"].splitlines()
    assert "failed" in lines[-1]
    assert "not measured" in lines[-1]
    heading = next(number for number, line in enumerate(lines) if line.lstrip().startswith("check "))
    assert len(lines) - heading - 2 == len(check["verdicts"])


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Code beside the tool, in a process of its own: its parts are no package of this one."""
    begin = "import sys; sys.path[:0] = ['tools', '.']; from gpu.verdicts import Results; "
    return subprocess.run(
        [sys.executable, "-c", begin + code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip


def test_exit_statuses() -> None:
    done = run_python(
        "r = Results(10.0); a = r.exit_status; r.add('x', None, ''); b = r.exit_status; r.begin_part(0.0); "
        "assert not r.has_time('y', 1.0); c = r.exit_status; r.add('z', False, ''); print(a, b, c, r.exit_status, r.skipped)"
    )
    assert done.stdout.strip() == "0 0 3 1 ['y']", done.stderr


def test_time_left_over_goes_to_the_next_part() -> None:
    done = run_python(
        "r = Results(100.0); r.begin_part(0.3); a = r.deadline - r.began; r.begin_part(0.5); b = r.deadline - r.began; "
        "r.begin_part(0.9); print(round(a), round(b), round(r.deadline - r.began))"
    )
    assert done.stdout.strip() == "30 80 100", done.stderr


def test_a_wrong_answer_is_found() -> None:
    done = run_python(
        "import gpu.correctness as c; from tests.golden.transcripts import Player; r = Results(60.0); r.begin_part(1.0); "
        "original = Player.call; "
        "Player.call = lambda p, line: [1, 2] if line['op'] == 'alloc' else original(p, line); "
        "c.check_golden(r, 'cpu', ['device']); print(r.exit_status, r.verdicts[0].found)"
    )
    assert done.stdout.startswith("1 "), done.stderr
    assert "alloc answered [1, 2]" in done.stdout


COMPOSITES = (
    "import gpu.composites as c; r = Results(90.0); r.begin_part(1.0); c.STEPS = 60; c.PAGE_SIZES = (4,); "
    "c._program = lambda layout, size, strategy, device: c.Writing(c.OnDevice(c.our_composite(layout, size, lazy=True, "
    "strategy=strategy, store=c.kv_store_for), 'cpu'), 'cpu', 40 + size); "
)


def test_a_composite_is_driven_as_on_another_device() -> None:
    done = run_python(
        COMPOSITES + "c.check_composites(r, 'cpu', ['device', 'batched']); "
        "print(r.exit_status, [v.found for v in r.verdicts], sum(row['moved'] for row in r.rows['composites']) > 0)"
    )
    assert done.stdout.strip() == "0 ['3 of 3 programs equal', '3 of 3 programs equal'] True", done.stderr


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("from allocator.kv_store import UnifiedPagePool as P; P.move_physical_pages = lambda *given: None", "bytes of virtual page"),
        ("o = c.OnDevice.__getattr__; c.OnDevice.__getattr__ = lambda w, n: (lambda k: None) if n == 'alloc_decode' else o(w, n)", "Error"),
        ("from allocator.device_end import DeviceMultiEndedAllocator as D; D._pack_in_part = lambda pool: 0", "differ"),
    ],
    ids=["bytes stay", "a call fails", "nothing is packed"],
)  # fmt: skip
def test_a_wrong_composite_is_found(fault: str, found: str) -> None:
    done = run_python(
        f"{COMPOSITES}\n{fault}\nc.check_composites(r, 'cpu', ['device']); print(r.exit_status, r.verdicts[0].found)"
    )
    assert done.stdout.startswith("1 "), done.stderr
    assert found in done.stdout


def test_what_runs_on_cuda_alone_runs_with_a_stand_in() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("cuda_stand_in.py"))], capture_output=True, text=True, timeout=200, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ran ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_cuda_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "no CUDA device" in done.stderr
    assert "--device cpu" in done.stderr
