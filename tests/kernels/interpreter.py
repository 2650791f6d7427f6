"""Triton kernels on a CPU: they run in Triton's interpreter, which must be chosen before triton is imported."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest


def require_interpreter() -> None:
    """To be called by a test module before it imports kernels: chooses the interpreter, or skips the module, saying why."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed here", allow_module_level=True)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    if "triton" in sys.modules:
        pytest.skip(
            "triton was imported without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True
        )
    import torch

    if torch.cuda.is_available():
        pytest.skip(
            "kernels are compiled where there is a GPU; TRITON_INTERPRET=1 runs these",
            allow_module_level=True,
        )
    os.environ["TRITON_INTERPRET"] = "1"


def require_compiler() -> None:
    """The other way round, for tests on a GPU."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed here", allow_module_level=True)
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels run in Triton's interpreter here", allow_module_level=True)
