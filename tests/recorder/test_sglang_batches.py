"""The wrappers of `alloc_extend` and `alloc_decode`: what they record is what the general wrapper records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import allocator
from recorder.process import Recorder
from tests.allocator.pools import two_ends
from tests.recorder.recordings import events_of, hooked, settings

pytestmark = pytest.mark.cpu


class OtherParameters(allocator.MultiEndedAllocator):
    """Somebody's subclass that takes the same arguments under no names of their own, and so gets the general wrapper."""

    def alloc_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        return super().alloc_extend(*args, **kwargs)

    def alloc_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        return super().alloc_decode(*args, **kwargs)


def int64(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def strided(values: list[int]) -> torch.Tensor:
    """Every other row of a larger tensor."""
    table = torch.full((2 * len(values),), -99, dtype=torch.int64)
    table[::2] = torch.tensor(values)
    return table[::2]


def serve(make: Callable[[list[int]], torch.Tensor], requests: int) -> list[list[int]]:
    """Requests of 6 tokens, then a step, then one more that finds no room for all; what the allocator answered."""
    full, _ = two_ends(total_bytes=256 * 256)
    page = full.page_size
    lens, none = [6] * requests, [0] * requests
    extended = full.alloc_extend(
        make(none), int64(none), make(lens), int64(lens), make([-1] * requests), 6 * requests,
        requests * -(-6 // page),
    )  # fmt: skip
    assert extended is not None
    last = extended[5::6].tolist()
    longer = [7] * requests
    decoded = full.alloc_decode(seq_lens=make(longer), seq_lens_cpu=int64(longer), last_loc=make(last))
    assert decoded is not None
    many = [100_000]
    refused = full.alloc_extend(int64([0]), int64([0]), int64(many), int64(many), int64([-1]), 100_000)
    assert refused is None
    return [extended.tolist(), decoded.tolist()]


@pytest.mark.parametrize("make", [int64, int32, strided])
@pytest.mark.parametrize("requests", [1, 16, 65])
def test_both_wrappers_record_the_same(
    make: Callable[[list[int]], torch.Tensor],
    requests: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = []
    for number, cls in enumerate((allocator.MultiEndedAllocator, OtherParameters)):
        monkeypatch.setattr("tests.allocator.pools.MultiEndedAllocator", cls)
        recorder = Recorder(settings(tmp_path / str(number)))
        hooked(recorder)
        try:
            answers = serve(make, requests)
        finally:
            recorder.stop()
        assert not recorder.failure
        recorded.append([event for event in events_of(recorder.sessions[0].path) if event[0] != "FLUSH"])
    assert [event[0] for event in recorded[0]] == ["ALLOC_EXTEND", "ALLOC_DECODE", "ALLOC_EXTEND"]
    assert recorded[0] == recorded[1]
    for answer, event in zip(answers, recorded[0], strict=False):
        assert event[7] == answer


def test_a_batch_call_that_raises_is_recorded_and_raises(tmp_path: Path) -> None:
    class Refusing(allocator.MultiEndedAllocator):
        def alloc_decode(
            self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
        ) -> torch.Tensor | None:
            raise ValueError("the engine's own")

    recorder = Recorder(settings(tmp_path))
    hooked(recorder)
    try:
        full, _ = two_ends(end_class=Refusing)
        with pytest.raises(ValueError, match="the engine's own"):
            full.alloc_decode(int64([1]), int64([1]), int64([5]))
        full.alloc(4)
    finally:
        recorder.stop()
    assert [event[0] for event in events_of(recorder.sessions[0].path)] == ["ALLOC_DECODE", "ALLOC"]


def test_a_list_that_is_changed_after_the_call_is_recorded_as_it_was(tmp_path: Path) -> None:
    recorder = Recorder(settings(tmp_path))
    hooked(recorder)
    try:
        full, _ = two_ends()
        lens, last = int64([3]), int64([-1])
        tokens = full.alloc_extend(int64([0]), int64([0]), lens, lens, last, 3)
        assert tokens is not None
        expected = tokens.tolist()
        for tensor in (lens, last, tokens):
            tensor.fill_(-7)
    finally:
        recorder.stop()
    (event,) = [event for event in events_of(recorder.sessions[0].path) if event[0] == "ALLOC_EXTEND"]
    assert event[4:8] == ([0], [3], [-1], expected)


class OtherDefault(allocator.MultiEndedAllocator):
    """Somebody's subclass for which an argument that is left out means something else."""

    def alloc_extend(  # type: ignore[override]
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int = 7,
    ) -> torch.Tensor | None:
        return torch.tensor([num_new_pages])


def test_an_argument_that_is_left_out_keeps_the_methods_own_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.allocator.pools.MultiEndedAllocator", OtherDefault)
    recorder = Recorder(settings(tmp_path))
    hooked(recorder)
    try:
        full, _ = two_ends(end_class=OtherDefault)
        answer = full.alloc_extend(int64([0]), int64([0]), int64([3]), int64([3]), int64([-1]), 3)
    finally:
        recorder.stop()
    assert answer is not None and answer.tolist() == [7]
    assert not recorder.failure
