"""What recordings of a real engine are checked with: the engine's own idea of which blocks live, step by step, and a replay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from recorder.trace import EventKind, Header, MarkCode, TraceReader

REPOSITORY = Path(__file__).parents[2]
REPLAY = "import sys; from replayer.main import main; sys.exit(main())"


@dataclass
class Recording:
    """A finished trace: `lives[pool]` has the blocks that live at each step, as the events up to its mark say."""

    header: Header
    lives: dict[str, list[list[int]]] = field(default_factory=dict)
    marks: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    without_request: int = 0
    named: int = 0


def read_recording(path: Path) -> Recording:
    """Follow the events of a trace. AssertionError where a block is handed out that lives or dies that does not."""
    with TraceReader(path) as reader:
        header = reader.header
        found = Recording(header, {pool.name: [] for pool in header.pools})
        live: list[set[int]] = [set() for _ in header.pools]
        for chunk in reader.chunks():
            found.named += len(chunk.request_ids)
            for index in range(len(chunk)):
                kind, pool = EventKind(int(chunk.kind[index])), int(chunk.pool[index])
                found.kinds[kind.name] += 1
                if kind is EventKind.MARK:
                    code = MarkCode(int(chunk.value[index]))
                    found.marks[code.name] += 1
                    if code is MarkCode.STEP:
                        for number, one in enumerate(header.pools):
                            found.lives[one.name].append(sorted(live[number]))
                    continue
                found.without_request += int(chunk.request[index]) < 0
                size = header.pools[pool].page_size
                if kind is EventKind.ALLOC:
                    tokens = chunk.result.get(index)
                    assert tokens is not None
                    blocks = set((tokens[::size] // size).tolist())
                    assert not blocks & live[pool]
                    live[pool] |= blocks
                else:
                    pages = chunk.list1.get(index)
                    assert kind is EventKind.FREE and pages is not None
                    blocks = set(pages.tolist())
                    assert blocks <= live[pool]
                    live[pool] -= blocks
        assert reader.ended == "clean"
    return found


def record(
    module: str, folder: Path, *arguments: str, **variables: str
) -> tuple[Path, dict[str, list[list[int]]]]:
    """Run `python -m MODULE FOLDER/steps.json ARGUMENTS` recorded: (the trace, what lived at each step by the engine's own books)."""
    steps, traces = folder / "steps.json", folder / "traces"
    environment = {
        **os.environ,
        **variables,
        "PYTHONPATH": str(REPOSITORY),
        "HF_HUB_OFFLINE": "1",
        "KVTAPE_RECORD": f"{traces}/",
    }
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, str(steps), *arguments],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    (trace,) = traces.iterdir()
    return trace, json.loads(steps.read_text(encoding="utf-8"))


def replay_holds(trace: Path) -> None:
    """AssertionError with the report unless every check of a replay with flushes holds."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REPLAY, "replay", "--flush-every", "20", str(trace)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0 and ran.stdout.startswith("HELD"), ran.stdout + ran.stderr[-4000:]
