"""Who does the device work of a late flush, where there may be no triton."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from allocator.errors import ConfigurationError
from allocator.flush_ops import FLUSH_OPS_ENV, TorchFlush, flush_ops_class

pytestmark = pytest.mark.cpu


def test_torch_operations_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert flush_ops_class("cuda") is TorchFlush
    monkeypatch.setenv(FLUSH_OPS_ENV, "triton")
    with pytest.raises(ConfigurationError, match="not installed"):
        flush_ops_class("cuda")


def test_what_cannot_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FLUSH_OPS_ENV, "cuda")
    with pytest.raises(ConfigurationError, match="torch, triton"):
        flush_ops_class("cpu")


def test_allocators_do_without_triton_and_without_kernels() -> None:
    """Nothing imports either before it has been chosen."""
    code = (
        "import sys; sys.modules['triton'] = None; import allocator, allocator.device_end, allocator.flush_ops as ops;"
        "assert not any(name.startswith('allocator.kernels') for name in sys.modules);"
        "assert ops.flush_ops_class('cpu') is ops.TorchFlush"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
