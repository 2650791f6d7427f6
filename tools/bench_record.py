"""What recording costs the engine's thread: each kind of call bare and hooked, in one run, with a writer thread at work.

    PYTHONPATH=. python tools/bench_record.py

The calls are made on a stand-in whose methods do nothing, so what is added is the hook's own time. `--ids` is the length of every list
of a call: `alloc` returns one, `alloc_decode` has three with its result and `alloc_extend` four. Bare and hooked calls alternate, and
what a hook adds is told as lower quartile and median over the rounds: a busy neighbour on a shared machine makes some rounds half as fast.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from recorder.engines.sglang import SglangHooks
from recorder.engines.sglang_header import Engine
from recorder.process import Recorder
from recorder.settings import Settings


class Spec:
    """A spec that knows its size."""

    layer_num = 2


class Buffer:
    """A buffer of a size."""

    total_bytes = 1 << 30


class Event:
    """A forward's event that has fired."""

    def query(self) -> bool:
        return True


def stand_in() -> type[Any]:
    """An allocator whose methods return at once what they were told to."""

    class MultiEndedAllocator:
        def __init__(self) -> None:
            self.unified_buffer, self.sub_pool_name, self.spec = BUFFER, "full", Spec()
            self.grow_direction, self.page_size, self.entry_bytes = "up", 16, 256
            self.num_pages, self.min_page_index, self.num_virtual_ids = 4096, 1, 4096
            self.is_id_owner, self.lazy_compaction, self.device = True, True, "cpu"
            self._lazy_max_moves_per_call = 4096
            self.virtual_to_physical = torch.arange(4097)
            self.free_virtual_ids = torch.arange(4096)
            self._free_phys_pages, self._pending_reuse_pages_cpu, self.watermark_physical = [], set(), 1
            self.answer: Any = None

        def allocated_count(self) -> int:
            return 0

        def _available_tokens(self) -> int:
            return 0

        def alloc(self, need_size: int) -> Any:
            return self.answer

        def alloc_extend(
            self,
            prefix_lens: Any,
            prefix_lens_cpu: Any,
            seq_lens: Any,
            seq_lens_cpu: Any,
            last_loc: Any,
            extend_num_tokens: int,
            num_new_pages: int | None = None,
        ) -> Any:
            return self.answer

        def alloc_decode(self, seq_lens: Any, seq_lens_cpu: Any, last_loc: Any) -> Any:
            return self.answer

        def free(self, free_index: Any, _pages: Any = None) -> None:
            return None

        def _flush(self, *, urgent: bool) -> int:
            return 0

        def set_latest_forward_done_event(self, event: Any) -> None:
            return None

        def clear(self) -> None:
            return None

        def set_inflight_forward(self, forward_done: Any, out_cache_loc_virtual: Any) -> None:
            return None

    return MultiEndedAllocator


BUFFER = Buffer()


def calls_on(allocator: Any, ids: int) -> dict[str, Callable[[], Any]]:
    """One call of each kind, with `ids` ids where it takes or returns some."""
    tokens = torch.arange(1000, 1000 + ids)
    lens = torch.full((ids,), 300)
    event = Event()
    allocator.answer = tokens
    return {
        "alloc": lambda: allocator.alloc(ids),
        "alloc_decode": lambda: allocator.alloc_decode(lens, lens, tokens),
        "alloc_extend": lambda: allocator.alloc_extend(lens, lens, lens, lens, tokens, ids, 4),
        "free": lambda: allocator.free(tokens),
        "flush": lambda: allocator._flush(urgent=True),
        "set_inflight_forward": lambda: allocator.set_inflight_forward(event, tokens),
    }


def mean_us(call: Callable[[], Any], repeat: int) -> float:
    """Time of one of `repeat` calls in a row, in microseconds."""
    start = time.perf_counter_ns()
    for _ in range(repeat):
        call()
    return (time.perf_counter_ns() - start) / repeat / 1000


def measure(ids: int, rounds: int, repeat: int, folder: Path) -> dict[str, dict[str, float]]:
    """Per kind of call: medians of bare, hooked and added microseconds over alternating rounds, and the added ones' lower quartile."""
    bare_class, hooked_class = stand_in(), stand_in()
    settings = Settings(
        target=str(folder / "bench.msgpack.zst"), run="bench", salt=b"", memory=512 << 20, provenance="driven"
    )
    recorder = Recorder(settings)
    SglangHooks(recorder, Engine("stand-in", "", same_placement=False)).attach(
        SimpleNamespace(MultiEndedAllocator=hooked_class)
    )
    bare, hooked = calls_on(bare_class(), ids), calls_on(hooked_class(), ids)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in bare}
    for _ in range(rounds):
        for name, (without, with_hook) in times.items():
            without.append(mean_us(bare[name], repeat))
            with_hook.append(mean_us(hooked[name], repeat))
            time.sleep(0.002)  # the writer thread catches up, as it does between an engine's steps
    recorder.stop()
    dropped = sum(session.dropped for session in recorder.sessions)
    if recorder.failure or dropped:
        raise SystemExit(f"the recorder did not keep up: {recorder.failure or dropped}")
    results = {}
    for name, (without, with_hook) in times.items():
        added = [hooked - bare for bare, hooked in zip(without, with_hook, strict=True)]
        lower, median, _ = statistics.quantiles(added, n=4)
        results[name] = {
            "bare_us": statistics.median(without),
            "hooked_us": statistics.median(with_hook),
            "added_us_lower_quartile": lower,
            "added_us": median,
        }
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ids", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        results = {
            ids: measure(ids, arguments.rounds, arguments.repeat, Path(folder) / str(ids))
            for ids in arguments.ids
        }
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    print(
        f"{'call':<22}{'ids':>5}{'bare us':>10}{'hooked us':>11}{'added us, lower quartile':>26}{'median':>8}"
    )
    for ids, calls in results.items():
        for name, figures in calls.items():
            print(
                f"{name:<22}{ids:>5}{figures['bare_us']:>10.2f}{figures['hooked_us']:>11.2f}"
                f"{figures['added_us_lower_quartile']:>26.2f}{figures['added_us']:>8.2f}"
            )


if __name__ == "__main__":
    main()
