"""What the environment tells a recording process."""

from __future__ import annotations

from pathlib import Path

import pytest

from recorder.settings import BadSetting, Settings, parse_bytes, read_settings, wanted

pytestmark = pytest.mark.cpu


def test_nothing_is_recorded_without_the_variable() -> None:
    assert not wanted({})
    assert not wanted({"KVTAPE_RECORD": ""})
    assert wanted({"KVTAPE_RECORD": "x"})


def test_defaults() -> None:
    settings = read_settings({"KVTAPE_RECORD": "run.msgpack.zst"})
    assert (settings.memory, settings.on_overflow, settings.keep_request_ids) == (64 << 20, "drop", False)
    assert (settings.chunk_events, settings.chunk_ms, settings.state_every) == (4096, 1000, 1024)
    assert len(settings.run) == 16
    assert len(settings.salt) == 16


def test_every_process_draws_its_own_salt_unless_one_is_given() -> None:
    environment = {"KVTAPE_RECORD": "x"}
    assert read_settings(environment).salt != read_settings(environment).salt
    assert read_settings({**environment, "KVTAPE_SALT": "00ff"}).salt == b"\x00\xff"


@pytest.mark.parametrize(
    ("text", "size"), [("67108864", 64 << 20), ("64M", 64 << 20), ("1g", 1 << 30), ("8192KiB", 8 << 20)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text, "KVTAPE_MEMORY") == size


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("KVTAPE_MEMORY", "1M", "at least 4M"),
        ("KVTAPE_MEMORY", "much", "a number of bytes"),
        ("KVTAPE_MEMORY", "-64M", "a number of bytes"),
        ("KVTAPE_ON_OVERFLOW", "explode", "drop or block"),
        ("KVTAPE_CHUNK_EVENTS", "0", "1 to 65536"),
        ("KVTAPE_CHUNK_MS", "now", "10 to"),
        ("KVTAPE_STATE_EVERY", "-1", "0 to"),
        ("KVTAPE_PROVENANCE", "synthetic", "'recorded' or 'driven'"),
        ("KVTAPE_SALT", "salt", "hexadecimal"),
    ],
)
def test_what_cannot_be_is_named(name: str, value: str, message: str) -> None:
    with pytest.raises(BadSetting, match=message) as caught:
        read_settings({"KVTAPE_RECORD": "x", name: value})
    assert name in str(caught.value)


def test_a_relative_path_stays_where_the_process_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_settings({"KVTAPE_RECORD": "run"}).target == str(tmp_path / "run")
    assert read_settings({"KVTAPE_RECORD": "new/"}).target == str(tmp_path / "new") + "/"


def test_one_file_a_process(tmp_path: Path) -> None:
    named = Settings(target=str(tmp_path / "run.msgpack.zst"), run="r", salt=b"")
    assert named.path_for("sglang", "tp1-pp0", 77) == tmp_path / "run.tp1-pp0.77.msgpack.zst"
    assert Settings(target=str(tmp_path / "run"), run="r", salt=b"").path_for("sglang", "tp0", 7).name == (
        "run.tp0.7.msgpack.zst"
    )
    folder = Settings(target=str(tmp_path), run="r", salt=b"")
    assert folder.path_for("vllm", "tp0", 77) == tmp_path / "vllm.tp0.77.msgpack.zst"
    missing = Settings(target=str(tmp_path / "new") + "/", run="r", salt=b"")
    assert missing.path_for("vllm", "tp0", 77) == tmp_path / "new" / "vllm.tp0.77.msgpack.zst"
