"""`kvtape anonymize`: the same events and states, and nothing of the users and machines they came from."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zstandard

from recorder.anonymize import anonymize_trace, anonymous_header
from recorder.private_text import without_paths, without_people
from recorder.trace import (
    Chunk,
    EventKind,
    Header,
    PoolHeader,
    Provenance,
    StateRow,
    TraceReader,
    TraceWriter,
)
from replayer.main import main, replay_main

pytestmark = pytest.mark.cpu

TRACES = Path(__file__).parents[2] / "traces"
GOLDEN = Path(__file__).parents[1] / "trace" / "data"
SECRETS = ("joe", "acme", "10.1.2.3", "node17", "4711", "runid", "chatcmpl", "s3cret", "/home", "prompts.txt")


def columns(path: Path) -> list[Any]:
    """Everything that is in a file but the header, ready to compare."""
    found: list[Any] = []
    with TraceReader(path) as reader:
        for item in reader.items():
            if not isinstance(item, Chunk):
                found.append(list(item))
                continue
            names = (
                "kind",
                "pool",
                "depth",
                "time_us",
                "request",
                "value",
                "value2",
                "result_kind",
                "result_value",
            )
            lists = [item.lists(slot) for slot in range(5)]
            found.append(
                (
                    [getattr(item, name).tolist() for name in names],
                    [(one.values.tolist(), one.offsets.tolist(), one.present.tolist()) for one in lists],
                    item.queries[1].tolist(),
                    item.drops.tolist(),
                )
            )
        footer = reader.footer
        counts = footer and (footer.events, footer.states, footer.dropped, footer.dropped_at_end)
    return [*found, counts]


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A recording that says too much."""
    header = Header(
        engine="sglang",
        engine_version="0.5.23",
        model="/home/joe/models/llama-8b",
        settings={
            "placement": "engine",
            "page_size": 16,
            "load_format": "/home/joe/x/loader.py",
            "host": "10.1.2.3",
            "command": "python -m sglang.launch_server --api-key s3cret",
            "schedule_policy": {"user": "joe"},
        },
        rank={"tp": 1, "tp_size": 2, "hostname": "node17"},
        device="cuda:0",
        provenance=Provenance(
            "recorded",
            how="recorded by joe@acme.com from /home/joe/run with 10.1.2.3:30000 at 40 tokens/s",
            source="s3://acme/joe/prompts",
            hardware="one GPU of a server",
            extra={"log": "joe.jsonl", "user": "joe"},
        ),
        extra={"run": "runid", "pid": 4711, "cwd": "/home/joe", "hostname": "node17", "note": "acme only"},
        pools=[
            PoolHeader(
                "full", "mha", "up", 16, 256, 1, 64, 1, 64, layout={"head_num": 2, "path": "/home/joe"}
            )
        ],
    )
    path = tmp_path / "private.msgpack.zst"
    with TraceWriter(path, header, chunk_events=2) as writer:
        for number in range(5):
            writer.name_request(number, f"chatcmpl-{number % 4}")
            writer.append(
                EventKind.ALLOC, pool=0, time_us=1_000_000 + 10 * number, value=16, request=number,
                result=list(range(16 * number + 16, 16 * number + 32)),
            )  # fmt: skip
            writer.state(StateRow(number, {"full": {"holes": number}}))
            if number == 2:
                writer.dropped(2)
        writer.close("could not write /home/joe/disk/x: no space")
    return path


def texts(path: Path) -> str:
    """All frames of a file, decoded."""
    content = zstandard.ZstdDecompressor().stream_reader(path.read_bytes(), read_across_frames=True).read()
    return repr(list(msgpack.Unpacker(io.BytesIO(content), raw=False)))


def names_of(path: Path) -> list[str]:
    with TraceReader(path) as reader:
        return [name for chunk in reader.chunks() for name in chunk.request_ids.values()]


def test_nothing_private_is_left_and_the_events_are_the_same(
    private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.msgpack.zst"
    assert main(["anonymize", str(private), "-o", str(out)]) == 0
    said = capsys.readouterr().out
    assert "Wrote" in said and "settings.command" in said and "pools.full.layout.path" in said
    assert columns(out) == columns(private)
    found = texts(out)
    assert "s3cret" in texts(private)
    assert [secret for secret in SECRETS if secret in found] == []
    with TraceReader(private) as old, TraceReader(out) as new:
        header = new.header
        assert header.uuid != old.header.uuid and old.header.uuid not in found
        list(new.chunks())
        assert new.footer is not None and new.footer.reason == "could not write x: no space"
    assert header.model == "llama-8b" and header.engine_version == "0.5.23" and header.device == "cuda:0"
    assert header.settings == {"placement": "engine", "page_size": 16, "load_format": "loader.py"}
    assert header.rank == {"tp": 1, "tp_size": 2} and header.extra == {}
    assert header.pools[0].layout == {"head_num": 2} and header.pools[0].num_pages == 64
    assert header.provenance == Provenance(
        "recorded",
        how="recorded by [removed] from run with [removed] at 40 tokens/s",
        source="prompts",
        hardware="one GPU of a server",
        extra={"anonymized": True},
    )


def test_request_ids_are_hashed_with_a_salt_of_their_own(private: Path, tmp_path: Path) -> None:
    outs = [tmp_path / f"{number}.msgpack.zst" for number in range(2)]
    for out in outs:
        assert anonymize_trace(private, out).request_ids == 5
    first, second = (names_of(out) for out in outs)
    assert all(len(name) == 16 and int(name, 16) >= 0 for name in first)
    assert first[0] == first[4] and len(set(first)) == 4  # one id stays one id
    assert not set(first) & set(second)


def test_request_ids_can_be_left_out(private: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.msgpack.zst"
    assert anonymize_trace(private, out, drop_request_ids=True).request_ids == 0
    assert names_of(out) == [] and columns(out) == columns(private)


def test_times_can_begin_at_0(private: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.msgpack.zst"
    anonymize_trace(private, out, rebase_times=True)
    with TraceReader(out) as reader:
        assert [time for chunk in reader.chunks() for time in chunk.time_us.tolist()] == [0, 10, 20, 30, 40]


def test_keys_that_are_asked_for_stay(private: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.msgpack.zst"
    arguments = [
        "anonymize",
        str(private),
        "-o",
        str(out),
        "--keep",
        "note",
        "--keep",
        "cwd",
        "--keep",
        "run",
    ]
    assert main(arguments) == 0
    with TraceReader(out) as reader:
        assert reader.header.extra == {"run": "runid", "cwd": "joe", "note": "acme only"}


def test_json_says_what_was_done(private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.msgpack.zst"
    assert main(["anonymize", str(private), "-o", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["events"], found["states"], found["request_ids"], found["note"]) == (5, 5, 5, "")
    assert {"pid", "run", "provenance.user", "rank.hostname", "settings.schedule_policy"} <= set(
        found["removed"]
    )
    assert found["bytes"] == out.stat().st_size


@pytest.mark.parametrize(
    "name", ["sglang_tiny_swa_p16", "vllm_gemma3_swa", "synthetic_two_batches_one_event"]
)
def test_a_committed_trace_keeps_its_events_and_still_replays(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = TRACES / f"{name}.msgpack.zst", tmp_path / "out.msgpack.zst"
    anonymize_trace(path, out)
    assert columns(out) == columns(path)
    with TraceReader(path) as old, TraceReader(out) as new:
        assert (new.header.settings, new.header.total_bytes) == (old.header.settings, old.header.total_bytes)
        assert new.header.pools == old.header.pools and new.header.provenance.how == old.header.provenance.how
    assert replay_main([str(out), "--json", "--until", "1500"]) == 0
    assert json.loads(capsys.readouterr().out)["checks"]["C6"] > 0


def test_what_our_own_recorders_write_stays() -> None:
    from recorder.engines import sglang_header, transformers_header, vllm_header

    settings = {
        *sglang_header.SERVER_SETTINGS,
        *vllm_header.SCHEDULER_SETTINGS,
        *vllm_header.CACHE_SETTINGS,
        *vllm_header.MODEL_SETTINGS,
        *vllm_header.SPECULATIVE_SETTINGS,
        *transformers_header.BATCHING_SETTINGS,
        *transformers_header.CACHE_SETTINGS,
    }
    groups = [{"kind": "FullAttentionSpec", "layers": 4, "block_size": 16, "dtype": "float32"}]
    header = Header(
        engine="vllm",
        pools=[PoolHeader("blocks", "tokens", "down", 16, 1, 1, 64, 1, 64, extra={"groups": groups})],
        provenance=Provenance("recorded"),
        settings=dict.fromkeys(settings, 1),
    )
    made, removed = anonymous_header(header)
    assert removed == [] and made.settings == header.settings and made.pools == header.pools
    header.pools[0].extra["groups"][0]["layer_names"] = ["joe"]
    assert anonymous_header(header)[1] == ["pools.blocks.groups"]


@pytest.mark.parametrize("version", ["1_0", "1_1"])
def test_every_kind_of_event_of_every_format_stays(version: str, tmp_path: Path) -> None:
    path, out = GOLDEN / f"format_{version}.msgpack.zst", tmp_path / "out.msgpack.zst"
    anonymize_trace(path, out)
    assert columns(out) == columns(path)


def test_a_cut_trace_keeps_its_note(
    private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut, out = tmp_path / "cut.msgpack.zst", tmp_path / "out.msgpack.zst"
    data = private.read_bytes()
    cut.write_bytes(data[: len(data) * 3 // 4])
    assert main(["anonymize", str(cut), "-o", str(out)]) == 0
    assert "ends early" in capsys.readouterr().err
    with TraceReader(out) as reader:
        events = sum(len(chunk) for chunk in reader.chunks())
        assert 0 < events < 5 and reader.ended == "clean" and reader.footer is not None
        assert f"event {events - 1} is its last one" in reader.footer.reason


def test_damage_is_an_error_and_leaves_no_output(private: Path, tmp_path: Path) -> None:
    data = bytearray(private.read_bytes())
    data[len(data) // 2] ^= 0x20
    private.write_bytes(data)
    out = tmp_path / "out.msgpack.zst"
    assert main(["anonymize", str(private), "-o", str(out)]) == 65
    assert list(tmp_path.iterdir()) == [private]
    out.write_bytes(b"precious")
    assert main(["anonymize", str(private), "-o", str(out), "--force"]) == 65
    assert out.read_bytes() == b"precious" and len(list(tmp_path.iterdir())) == 2


def test_usage_and_missing_files(private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.msgpack.zst"
    out.write_bytes(b"precious")
    assert main(["anonymize", str(private), "-o", str(out)]) == 2
    assert out.read_bytes() == b"precious" and "--force" in capsys.readouterr().err
    assert main(["anonymize", str(private), "-o", str(out), "--force"]) == 0
    assert main(["anonymize", str(tmp_path / "no.msgpack.zst"), "-o", str(out), "--force"]) == 66
    assert main(["anonymize", str(private)]) == 2
    assert main(["anonymize", str(private), "-o", str(tmp_path / "no" / "out.msgpack.zst")]) == 2


def test_a_trace_can_be_rewritten_in_place(private: Path) -> None:
    before = columns(private)
    anonymize_trace(private, private, force=True)
    assert columns(private) == before and "joe" not in texts(private)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Kimi-K3 (page geometry; no model ran)", "Kimi-K3 (page geometry; no model ran)"),
        ("meta-llama/Llama-3-8B", "Llama-3-8B"),
        ("/data/models/x/", "x"),
        ("/home/joe doe/models/x", "x"),
        ("~/models/x.gguf", "x.gguf"),
        ("../x", "x"),
        ("C:\\Users\\joe\\x.gguf", "x.gguf"),
        ("\\\\server\\share\\x", "x"),
        ("file:///home/joe/x", "x"),
        ("https://host.acme.com", "[removed]"),
        ("https://host/a/b?token=s3cret", "b"),
        ("/", "[removed]"),
        ("at 40 tokens/s, 1/24 of it", "at 40 tokens/s, 1/24 of it"),
        ("read from /a/b/c.json, then (~/d/e)", "read from c.json, then (e)"),
        ("users/joe/x and y", "x and y"),
        ("fetched https://host/a/b.json twice", "fetched b.json twice"),
        ("in C:\\Users\\joe\\x now", "in x now"),
        ("", ""),
    ],
)
def test_paths_become_their_last_component(text: str, expected: str) -> None:
    assert without_paths(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SGLang 0.5.23 on 10.0.0.7:30000", "SGLang 0.5.23 on [removed]"),
        ("by joe@host.acme.com", "by [removed]"),
        ("SGLang 0.5.23.1rc2 ran", "SGLang 0.5.23.1rc2 ran"),
        ("an H200 in node17.corp.example.com, idle", "an H200 in [removed], idle"),
        ("peer 2001:db8::8a2e:370:7334 failed", "peer [removed] failed"),
        ("sglang.Engine at 12:30, page 16", "sglang.Engine at 12:30, page 16"),
    ],
)
def test_accounts_and_addresses_go(text: str, expected: str) -> None:
    assert without_people(text) == expected
