"""Placement, mapping, bytes and log-probabilities on the device."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from allocator.device_end import DeviceMultiEndedAllocator
from allocator.lookup import DEVICE_STRATEGY
from gpu.verdicts import Results
from replayer.checks import CheckOptions
from replayer.replay import ReplayOptions, replay
from replayer.targets import TargetOptions
from tests.golden.transcripts import DATA, Player, lines

REPOSITORY = Path(__file__).resolve().parents[2]
#: Name of the trace, events driven of it, and options: sliding window pages of 16, a server's traffic, and an engine that never flushes.
TRACES: tuple[tuple[str, int | None, dict[str, Any]], ...] = (
    ("sglang_tiny_swa_p16", 2500, {}),
    ("sglang_server_smollm2", 2500, {}),
    ("vllm_gemma3_swa", 2500, {"flush_every": 20}),
)
#: Between two looks at all the state, which wait for the device, an allocator works on what it knows.
LOOK_EVERY = 5


def check_golden(results: Results, device: str, strategies: list[str]) -> None:
    """Every line of the golden transcripts: what calls answer, and at every `LOOK_EVERY`th line the whole state."""
    transcripts = sorted(DATA.glob("*.jsonl.zst"))
    # What only runs so on a GPU first, in case the time runs out.
    for strategy in sorted(strategies, key=lambda each: each != DEVICE_STRATEGY):
        done, slowest, failure = 0, 0.0, ""
        for path in transcripts:
            name = path.name.removesuffix(".jsonl.zst")
            if not results.has_time(f"golden transcripts from {name} on, {strategy}", slowest):
                break
            begin = time.monotonic()
            failure = _play(path, strategy, device)
            slowest = max(slowest, time.monotonic() - begin)
            if failure:
                break
            done += 1
        results.row(
            "golden transcripts",
            strategy=strategy,
            equal=done,
            of=len(transcripts),
            difference=failure or "none",
        )
        if done or failure:
            found = failure or f"{done} of {len(transcripts)} equal"
            results.add(
                f"golden transcripts, {strategy}", not failure, found, "every line as SGLang 0.5.23 answered"
            )


def _play(path: Path, strategy: str, device: str) -> str:
    """The first difference; empty if there is none."""
    transcript = lines(path)
    player = Player(next(transcript)["header"], strategy, device=device)
    number, line = 1, None
    for number, line in enumerate(transcript, start=2):
        try:
            result = player.call(line)
        except Exception as error:
            return f"{path.name} line {number}: {line['op']} raised {type(error).__name__}: {error}"
        if result != line.get("result"):
            return f"{path.name} line {number}: {line['op']} answered {str(result)[:80]}"
        if number % LOOK_EVERY == 0 and (different := _different_state(player, line)):
            return f"{path.name} line {number}: {line['op']}: {different}"
    different = "" if line is None else _different_state(player, line)
    return f"{path.name}, the end: {different}" if different else ""


def _different_state(player: Player, line: dict[str, Any]) -> str:
    for made in player.allocators.values():
        if isinstance(made, DeviceMultiEndedAllocator):
            # Asking settles it; what a pool says of its room is exact once its neighbours are settled too.
            assert made.watermark_physical >= -1
    for name, expected in line["state"].items():
        if player.state(name, expected) != expected:
            return f"state of {name}"
    return ""


def check_traces(results: Results, device: str, strategies: list[str], until: int | None) -> None:
    """Replays with all checks, the pools' real bytes included."""
    slowest = 0.0
    for name, events, options in TRACES:
        for strategy in strategies:
            if not results.has_time(f"replay of {name}, {strategy}", slowest):
                continue
            begin = time.monotonic()
            outcome = replay(
                ReplayOptions(
                    path=REPOSITORY / "traces" / f"{name}.msgpack.zst",
                    target=TargetOptions(strategy=strategy, device=device, kv="full"),
                    checks=CheckOptions(),
                    ids="auto",
                    until=until or events,
                    **options,
                )
            )
            slowest = max(slowest, time.monotonic() - begin)
            failure = outcome.failure
            text = "none" if failure is None else f"{failure.check}: {failure}"
            results.row(
                "traces", trace=name, strategy=strategy, events=outcome.events, flushes=len(outcome.flushes),
                moved=sum(flush.moves for flush in outcome.flushes), logprobs=outcome.logprob_compared, failure=text,
            )  # fmt: skip
            checks = sum(outcome.held.values())
            found = text if failure is not None else f"{outcome.events:,} events, {checks:,} checks held"
            results.add(f"replay of {name}, {strategy}", outcome.verdict == "held", found, "all checks held")
