"""What is read from the profiler's trace. Events are written here as a CUDA machine's profiler exports them; one test profiles a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replayer.ledger.profiled import Profile, read_events

pytestmark = pytest.mark.cpu


def span(name: str, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": end - start}


def runtime(name: str, at: float, correlation: int = 0, category: str = "cuda_runtime") -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": at,
        "dur": 0.5,
        "args": {"correlation": correlation},
    }


def on_device(category: str, name: str, correlation: int, took: float = 2.0) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": 900.0,
        "dur": took,
        "args": {"correlation": correlation},
    }


def syncs(*events: dict[str, Any]) -> dict[str, int]:
    found, saw_runtime = read_events([span("kvtape:0", 0, 100), *events])
    assert saw_runtime
    return found[0].syncs


@pytest.mark.parametrize(
    "name",
    [
        "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaEventSynchronize_v3020", "cudaMemcpy",
        "cudaStreamSynchronize_ptsz",
    ],
)  # fmt: skip
def test_waits_are_counted(name: str) -> None:
    assert sum(syncs(runtime(name, 10)).values()) == 1


@pytest.mark.parametrize(
    "name",
    [
        "cudaLaunchKernel",
        "cudaMemcpyAsync",
        "cudaEventQuery",
        "cudaEventRecord",
        "cudaStreamWaitEvent",
        "cudaMalloc",
    ],
)
def test_other_calls_are_not(name: str) -> None:
    assert syncs(runtime(name, 10)) == {}


def test_the_drivers_names_count_too() -> None:
    assert syncs(runtime("cuStreamSynchronize", 10, category="cuda_driver")) == {"cuStreamSynchronize": 1}


def test_a_pageable_copy_with_its_wait_is_one() -> None:
    copy = on_device("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 7)
    assert syncs(runtime("cudaMemcpyAsync", 10, 7), runtime("cudaStreamSynchronize", 11), copy) == {
        "cudaStreamSynchronize": 1
    }


def test_a_pageable_copy_that_does_not_wait_is_one() -> None:
    copy = on_device("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 7)
    assert syncs(runtime("cudaMemcpyAsync", 10, 7), runtime("cudaLaunchKernel", 11), copy) == {
        "cudaMemcpyAsync (pageable)": 1
    }


def test_a_pinned_copy_is_none() -> None:
    assert (
        syncs(runtime("cudaMemcpyAsync", 10, 7), on_device("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 7))
        == {}
    )


def test_a_wait_belongs_to_all_ranges_around_it() -> None:
    found, _ = read_events(
        [
            runtime("cudaStreamSynchronize", 30),
            runtime("cudaStreamSynchronize", 60),
            runtime("cudaStreamSynchronize", 150),
            span("kvtape:1", 20, 40),
            span("kvtape:0", 0, 100),
            span("kvtape:2", 110, 120),
        ]
    )
    assert {number: each.total for number, each in found.items()} == {0: 2, 1: 1, 2: 0}


def test_a_pause_belongs_to_none() -> None:
    found, _ = read_events(
        [
            span("kvtape:0", 0, 100),
            span("kvtape:paused", 20, 40),
            runtime("cudaStreamSynchronize", 30),
            runtime("cudaMemcpy", 50),
        ]
    )
    assert found[0].syncs == {"cudaMemcpy": 1}


def test_the_next_call_of_another_range_does_not_make_a_copy_wait() -> None:
    copy = on_device("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 7)
    found, _ = read_events(
        [
            span("kvtape:0", 0, 20),
            span("kvtape:1", 21, 40),
            runtime("cudaMemcpyAsync", 10, 7),
            runtime("cudaStreamSynchronize", 30),
            copy,
        ]
    )
    assert found[0].total == found[1].total == 1


def test_kernels_go_with_their_launch() -> None:
    found, _ = read_events(
        [
            span("kvtape:0", 0, 20),
            runtime("cudaLaunchKernel", 10, 3),
            runtime("cudaLaunchKernel", 50, 4),
            on_device("kernel", "moves", 3, took=12.5),
            on_device("kernel", "elsewhere", 4),
        ]
    )
    assert [(each.name, each.microseconds) for each in found[0].on_device] == [("moves", 12.5)]


def test_other_peoples_events_are_passed_over() -> None:
    found, saw_runtime = read_events(
        [
            {"ph": "M", "name": "process_name"},
            span("ProfilerStep", 0, 5),
            {"ph": "X", "cat": "cpu_op", "name": "aten::add"},
        ]
    )
    assert (found, saw_runtime) == ({}, False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a runtime to see")
def test_on_a_cpu_there_are_ranges_and_nothing_in_them() -> None:
    profile = Profile()
    with profile:
        with profile.range(3):
            torch.arange(4).add(1)
        with profile.paused(), profile.range(4):
            pass
    assert set(profile.findings) == {3, 4}
    assert profile.findings[3].total == 0
    assert profile.saw_runtime is False
