"""Random programs hold on our allocators, and find what is planted: shrunk, kept as a trace, seen again by a replay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recorder.trace import TraceReader
from replayer.checks import CheckOptions
from replayer.errors import UsageError
from replayer.fuzz.session import FuzzOptions, Session
from replayer.main import main
from replayer.replay import Outcome, ReplayOptions, replay
from replayer.targets import TargetOptions
from tests.fuzz import faulty

pytestmark = pytest.mark.cpu


def fuzz(tmp_path: Path, allocator: str = "kvtape", **options: object) -> Session:
    if allocator != "kvtape":
        options.setdefault("strategies", ("batched",))
        allocator = f"tests.fuzz.faulty:{allocator}"
    chosen = {"rounds": 30, "minutes": 3.0, "seed": 1, "calls": 25, **options}
    with Session(FuzzOptions(allocator=allocator, out=tmp_path / "finds", **chosen)) as session:  # type: ignore[arg-type]
        session.run()
    return session


def again(trace: Path, allocator: str) -> Outcome:
    return replay(ReplayOptions(trace, TargetOptions(allocator), CheckOptions(every=1)))


def test_nothing_is_found_and_everything_is_visited(tmp_path: Path) -> None:
    session = fuzz(tmp_path, rounds=2, seed=7, calls=60)
    assert session.finds == [] and not (tmp_path / "finds").exists()
    counts = session.counts
    assert counts["programs"] > 30
    for visited in ("refused", "flushes that moved", "states with pages pending", "calls behind a shut gate"):
        assert counts[visited] > 0, visited
    assert counts["pages moved"] > counts["batches moved"] > 0
    assert sum(count for name, count in counts.items() if name.startswith("call ")) == counts["calls"]


@pytest.mark.parametrize(
    ("allocator", "checks", "most_events", "seed"),
    # Seeds that find it in their first round: shrinking takes longer than finding.
    [("LosesAHole", {"C2", "C4", "C12", "CALL"}, 6, 1), ("LosesBytes", {"C6"}, 8, 8)],
)
def test_a_planted_fault_is_found_and_seen_again(
    tmp_path: Path, allocator: str, checks: set[str], most_events: int, seed: int
) -> None:
    session = fuzz(tmp_path, allocator, seed=seed)
    (find,) = session.finds
    assert find.trace.parent == tmp_path / "finds"
    with TraceReader(find.trace) as reader:
        events = sum(len(chunk) for chunk in reader.chunks())
        assert reader.header.provenance.kind == "synthetic"
        assert f"--seed {seed}" in reader.header.provenance.how
    assert events <= most_events, "not shrunk"
    outcome = again(find.trace, f"tests.fuzz.faulty:{allocator}")
    assert outcome.failure is not None and outcome.failure.check in checks, outcome.failure
    assert again(find.trace, "kvtape").verdict == "held"


def test_a_refused_call_is_a_find(tmp_path: Path) -> None:
    (find,) = fuzz(tmp_path, "Raises").finds
    assert "ZeroDivisionError: the second flush" in find.message
    outcome = again(find.trace, "tests.fuzz.faulty:Raises")
    assert outcome.failure is not None and outcome.failure.check == "CALL"


@pytest.mark.parametrize(
    ("allocator", "said"),
    [
        ("AnswersFloats", "answered what names no ids: a tensor of float32"),
        ("FlushTellsNothing", "answered no number: None"),
        ("SizeRaises", "IndexError: three holes"),
        ("HandsOutIdsBeyondTheTable", "4611686018427387"),
    ],
)
def test_an_allocator_that_answers_nonsense_is_a_find_and_no_fault_of_ours(
    tmp_path: Path, allocator: str, said: str
) -> None:
    (find,) = fuzz(tmp_path, allocator).finds
    assert said in find.message
    outcome = again(find.trace, f"tests.fuzz.faulty:{allocator}")
    assert outcome.failure is not None and outcome.failure.check in {"CALL", "C3", "C13"}, outcome.failure
    assert outcome.failure.seq >= 0


def test_an_allocator_that_cannot_be_made_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = "traces/synthetic_two_batches_one_event.msgpack.zst"
    for command in (["fuzz", "--rounds", "1", "--out", str(tmp_path)], ["replay", trace]):
        assert main([*command, "--allocator", "tests.fuzz.faulty:CannotBeMade"]) == 2
        said = capsys.readouterr().err
        assert "CannotBeMade could not be made: RuntimeError: no buffer of that size" in said
        assert said.count("\n") == 1


def test_ctrl_c_while_a_find_is_shrunk_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finish, after = Session.finish, []

    def interrupted(self: Session, program: object) -> None:
        if self._found is not None:
            after.append(1)
            if len(after) > 2:
                raise KeyboardInterrupt
        finish(self, program)  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "finish", interrupted)
    arguments = ["--allocator", "tests.fuzz.faulty:LosesAHole", "--out", str(tmp_path), "--seed", "1"]
    assert main(["fuzz", *arguments]) == 130
    said = capsys.readouterr()
    assert "FOUND" in said.out and "found nothing" not in said.out and "interrupted" in said.err
    (trace,) = tmp_path.iterdir()
    assert again(trace, "tests.fuzz.faulty:LosesAHole").verdict == "failed"


def test_a_find_is_kept_elsewhere_where_its_folder_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    options = {"rounds": 30, "seed": 1, "calls": 25, "strategies": ("batched",)}
    out = Path("/proc/no such folder")
    with Session(FuzzOptions(3.0, allocator="tests.fuzz.faulty:Raises", out=out, **options)) as session:  # type: ignore[arg-type]
        session.run()
    (find,) = session.finds
    assert "not in /proc/no such folder" in find.message and tmp_path in find.trace.parents
    assert str(find.trace) in find.command
    assert again(find.trace, "tests.fuzz.faulty:Raises").verdict == "failed"


def test_a_fault_that_comes_and_goes_is_kept_all_the_same(tmp_path: Path) -> None:
    faulty.Unsteady.asked = 0
    (find,) = fuzz(tmp_path, "Unsteady").finds
    assert "unlucky" in find.message and "not every time" in find.message
    assert find.trace.exists()


def test_the_same_seed_makes_the_same_programs(tmp_path: Path) -> None:
    counts = [fuzz(tmp_path, rounds=1, programs=12, seed=seed).counts for seed in (3, 3, 4)]
    assert counts[0] == counts[1] != counts[2]


def test_a_find_is_never_overwritten(tmp_path: Path) -> None:
    first = fuzz(tmp_path, "LosesAHole").finds[0].trace
    before = first.read_bytes()
    second = fuzz(tmp_path, "LosesAHole").finds[0].trace
    assert first != second and first.read_bytes() == before


def test_what_cannot_be_fuzzed_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no class"):
        fuzz(tmp_path, "NoSuchClass")


# -- the command


def test_the_command_prints_what_it_covered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "--rounds", "1", "--seed", "2", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "found nothing" in said.out and "seed 2" in said.out and said.err == ""
    assert list(tmp_path.iterdir()) == []


def test_the_command_ends_with_1_and_the_way_to_see_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--allocator", "tests.fuzz.faulty:LosesAHole", "--out", str(tmp_path), "--json"]
    assert main(["fuzz", "--seed", "1", *arguments]) == 1
    (find,) = json.loads(capsys.readouterr().out)["finds"]
    words = find["replay"].split()
    assert words[0] == "replay"
    assert main(words) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--minutes", "0"], "no number of minutes"),
        (["--seed", "-1"], "no number from 0"),
        (["--strategy", "batched,nowhere"], "each once"),
        (["--out", __file__], "is no folder"),
        (["--out", f"{__file__}/finds"], "is no folder"),
        (["--rounds", "0"], "no number of rounds"),
    ],
)
def test_usage(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_without_hypothesis_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["fuzz"]) == 2
    assert "pip install 'kvtape[fuzz]'" in capsys.readouterr().err
