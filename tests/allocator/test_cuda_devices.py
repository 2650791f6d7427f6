"""Nothing that a GPU run of the ``device`` strategy does is done on another device or read back: see `tests.allocator.fake_gpu`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

REPOSITORY = Path(__file__).resolve().parents[2]


def test_calls_mix_no_devices_and_read_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.allocator.fake_gpu"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    held = [line for line in done.stdout.splitlines() if line.startswith("held: ")]
    assert len(held) == 15, done.stdout
    assert held[0] == "held: fakes"
