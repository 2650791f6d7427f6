"""Rules for the whole suite: every test says what it needs, and what did not run is named at the end."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator

import pytest

# Before torch is imported anywhere: several workers with several threads each only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

NEEDS = ("cpu", "gpu", "engine", "browser")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail the collection of a module whose tests do not carry exactly one of the marks in ``NEEDS``.

    A failed collect report, and not an exception later on, because it is also shown properly with ``-n``.
    """
    report = yield
    wrong = []
    for item in report.result or ():
        marks = {mark.name for mark in item.iter_markers()}.intersection(NEEDS)
        if isinstance(item, pytest.Item) and len(marks) != 1:
            wrong.append(f"  {item.nodeid}: has {', '.join(sorted(marks)) or 'none'}")
    if wrong:
        report.outcome = "failed"
        report.longrepr = "\n".join([f"A test carries exactly one of the marks {', '.join(NEEDS)}:", *wrong])
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip ``gpu`` tests where there is no GPU; torch is imported for that only if there are such tests."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _cuda_is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was skipped and why, also in runs without ``-ra``: a test that did not run proves nothing."""
    skipped = Counter[str]()
    for report in terminalreporter.getreports("skipped"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        skipped[reason.removeprefix("Skipped: ")] += 1
    terminalreporter.section("not run", sep="-")
    for reason, count in sorted(skipped.items()):
        terminalreporter.line(f"{count} skipped: {reason}")
    if not skipped:
        terminalreporter.line("nothing was skipped")
