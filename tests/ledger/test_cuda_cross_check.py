"""The count of torch's own warnings. They are imitated here, but for the tests marked gpu."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from replayer.ledger import CudaCrossCheck

HERE = f"ledger/{Path(__file__).name}"

Synchronise = Callable[[], None]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Synchronise:
    """An imitation of the process-wide mode, set to "error" by somebody else; gives what synchronises."""
    mode = {"value": 2}
    numbers = {"default": 0, "warn": 1, "error": 2}

    def set_mode(value: int | str) -> None:
        mode["value"] = numbers[value] if isinstance(value, str) else value

    def synchronise() -> None:
        if mode["value"] == 1:
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=2)
        if mode["value"] == 2:
            raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode["value"])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    return synchronise


@pytest.mark.cpu
def test_counts_warnings_and_restores_the_mode(device: Synchronise) -> None:
    check = CudaCrossCheck()
    for _ in range(2):
        with check:
            for _ in range(3):
                device()
    assert check.synchronisations == 6
    ((line, count),) = check.lines.items()
    assert line.startswith(f"{HERE}:")
    assert count == 6
    assert torch.cuda.get_sync_debug_mode() == 2
    with pytest.raises(RuntimeError, match="synchronizing"):
        device()


@pytest.mark.cpu
def test_restores_after_an_exception(device: Synchronise) -> None:
    check = CudaCrossCheck()
    before = warnings.filters[:]
    with pytest.raises(ZeroDivisionError), check:
        device()
        raise ZeroDivisionError
    assert torch.cuda.get_sync_debug_mode() == 2
    assert warnings.filters[:] == before
    assert check.synchronisations == 1


@pytest.mark.cpu
def test_zero_is_not_none(device: Synchronise) -> None:
    check = CudaCrossCheck()
    assert check.synchronisations is None
    with check:
        pass
    assert check.synchronisations == 0


@pytest.mark.cpu
def test_other_warnings_are_passed_on(device: Synchronise) -> None:
    check = CudaCrossCheck()
    with pytest.warns(UserWarning, match="something else"), check:
        warnings.warn("something else", stacklevel=1)
    assert check.synchronisations == 0


@pytest.mark.cpu
def test_it_does_not_run_inside_itself(device: Synchronise) -> None:
    check = CudaCrossCheck()
    with check, pytest.raises(RuntimeError, match="running already"):
        check.__enter__()
    assert torch.cuda.get_sync_debug_mode() == 2


@pytest.mark.cpu
def test_a_mode_that_cannot_be_set_leaves_nothing(
    device: Synchronise, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(value: int | str) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", refuse)
    before = warnings.filters[:]
    check = CudaCrossCheck()
    with pytest.raises(RuntimeError, match="no"), check:
        pass
    assert warnings.filters[:] == before
    assert check.synchronisations is None


@pytest.mark.cpu
def test_without_a_gpu_it_says_that_it_did_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check = CudaCrossCheck()
    with check:
        torch.arange(3).tolist()
    assert check.synchronisations is None
    assert not check.lines


@pytest.mark.gpu
def test_a_real_synchronisation() -> None:
    tensor = torch.arange(3, device="cuda")
    before = torch.cuda.get_sync_debug_mode()
    check = CudaCrossCheck()
    with check:
        tensor.add_(1)
    assert check.synchronisations == 0
    with check:
        tensor[0].item()
    assert check.synchronisations == 1
    assert torch.cuda.get_sync_debug_mode() == before
