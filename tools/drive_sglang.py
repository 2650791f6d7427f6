"""Drives SGLang 0.5.23's own prefix cache and allocators on a CPU with a public request log, in Kimi-K3 TP8 page geometry.

    KVTAPE_RECORD=kimi.msgpack.zst python tools/drive_sglang.py --workload mooncake_conversation.jsonl.zst --requests 3000

No model runs and no GPU is involved: requests arrive, match the prefix cache, evict, allocate, decode, and are inserted and freed at
simulated times. Without KVTAPE_RECORD it only drives; ``--count`` prints how often each allocator was called. It needs an environment with
SGLang in it (tools/build_sglang_env.sh).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import sys
import time
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

TOOLS = Path(__file__).resolve().parent
sys.path[:0] = [str(TOOLS), str(TOOLS.parent)]

if TYPE_CHECKING:
    from drive.sglang_parts import ForwardDone, Parts

#: Tokens of one prefix block of the log.
BLOCK_TOKENS = 512
#: Token ids from here on are answers; below are prompts, ``block id * BLOCK_TOKENS + position``.
FIRST_ANSWER_TOKEN = 1 << 40

HOW = (
    "driven on a CPU, no GB200 was involved and no model ran: SGLang 0.5.23 UnifiedRadixCache (full component), "
    "UnifiedMambaTokenToKVPoolAllocator and sub-pool allocators in Kimi-K3 TP8 page geometry, layers folded by 24 (page counts are real, "
    "bytes are 1/24); arrivals, lengths and prefix blocks from the request log; one state slot per running request and one per cached "
    "conversation, kept least-recently-used; decode at {rate:g} tokens/s per request, simulated time; {nodes}"
)
NODES = {
    True: "the tree keeps prompt and answer of a request apart",
    False: "prompt and answer of a request are inserted into the tree as one",
}
SOURCE = "{workload} (Mooncake's log of requests to the Kimi service, kvcache-ai/Mooncake), first {requests} requests, arrival speed x1"
HARDWARE = "a CPU; no GB200 or any other GPU was involved"


@dataclass(frozen=True)
class LoggedRequest:
    """A line of the request log. ``arrival_ms`` from its start; lengths in tokens; ``blocks`` are ids of equal content."""

    number: int
    arrival_ms: float
    input_length: int
    output_length: int
    blocks: list[int]

    @property
    def conversation(self) -> int:
        """Requests with the same prompt are one conversation: they share the block in which it ends, and so all before."""
        return self.blocks[-1]

    def prompt(self) -> array[int]:
        """Token ids, equal where the blocks are."""
        tokens: array[int] = array("q")
        for block in self.blocks:
            start = block * BLOCK_TOKENS
            tokens.extend(range(start, start + BLOCK_TOKENS))
        return tokens[: self.input_length]


def read_workload(path: Path, requests: int) -> list[LoggedRequest]:
    """The first ``requests`` lines of a Mooncake request log (JSON lines, plain or zstd)."""
    read = []
    for number, line in enumerate(_lines(path)):
        if number == requests:
            break
        entry = json.loads(line)
        read.append(
            LoggedRequest(
                number, entry["timestamp"], entry["input_length"], entry["output_length"], entry["hash_ids"]
            )
        )
    return read


def _lines(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        if path.suffix != ".zst":
            yield from io.TextIOWrapper(file, "utf-8")
            return
        import zstandard

        with zstandard.ZstdDecompressor().stream_reader(file) as stream:
            yield from io.TextIOWrapper(stream, "utf-8")


@dataclass(frozen=True)
class Settings:
    """How a run is scheduled.

    Attributes:
        tokens_per_second: decode speed of every request; a step takes its inverse.
        prefill_tokens: once so many new tokens were admitted in a step, the next request waits for the next step.
        cached_states: state slots kept for finished requests.
        max_running: requests that run at the same time.
        split_prompts: the tree keeps prompt and answer of a request apart.
    """

    tokens_per_second: float = 40.0
    prefill_tokens: int = 16384
    cached_states: int = 200
    max_running: int = 256
    split_prompts: bool = False


class SimulatedClock:
    """Seconds since the first step."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def microseconds(self) -> int:
        return int(self.seconds * 1e6)


class Driver:
    """The scheduler: what happens in which step, and when by ``clock``."""

    def __init__(
        self, parts: Parts, workload: list[LoggedRequest], settings: Settings, clock: SimulatedClock
    ) -> None:
        self._parts = parts
        self._clock = clock
        self._settings = settings
        self._waiting = deque(workload)
        self._running: list[Any] = []
        # State slots of the running requests, each with its request's conversation.
        self._states: dict[Any, tuple[int, Any]] = {}
        # State slots by conversation, the one used longest ago first.
        self._cached_states: OrderedDict[int, Any] = OrderedDict()
        self._in_flight: ForwardDone | None = None
        self._next_token = FIRST_ANSWER_TOKEN
        self.steps = 0
        self.requests_done = 0

    def run(self) -> None:
        step_seconds = 1.0 / self._settings.tokens_per_second
        while self._waiting or self._running:
            if not self._running:
                self._idle_until(self._waiting[0].arrival_ms / 1e3)
            self._admit()
            self._step()
            self._clock.seconds += step_seconds

    def _idle_until(self, seconds: float) -> None:
        """Wait for the next arrival: what was launched gets done, and is compacted after."""
        if self._in_flight is not None and seconds > self._clock.seconds:
            self._in_flight.fire()
            self._parts.composite.flush_opportunistic()
        self._clock.seconds = max(self._clock.seconds, seconds)

    def _admit(self) -> None:
        admitted = 0
        while (
            self._waiting
            and self._waiting[0].arrival_ms <= self._clock.seconds * 1e3
            and admitted < self._settings.prefill_tokens
            and len(self._running) < self._settings.max_running
        ):
            logged = self._waiting.popleft()
            req = self._parts.request(logged.number, logged.prompt(), logged.output_length)
            self._parts.match(req)
            self._states[req] = logged.conversation, self._state_slot()
            self._parts.extend(req)
            admitted += logged.input_length - req.prefix_len
            self._running.append(req)

    def _state_slot(self) -> Any:
        """A state slot; while the buffer is full, cached ones make room, the one used longest ago first."""
        while (slot := self._parts.states.alloc(1)) is None:
            self._drop_state()
        return slot

    def _drop_state(self) -> None:
        if not self._cached_states:
            raise RuntimeError("no state slot is left for another request: too many run at the same time")
        _, slot = self._cached_states.popitem(last=False)
        self._parts.states.free(slot)

    def _keep_state(self, conversation: int, slot: Any) -> None:
        """Keep a finished request's slot in place of the one that its conversation had."""
        replaced = self._cached_states.pop(conversation, None)
        if replaced is not None:
            self._parts.states.free(replaced)
        self._cached_states[conversation] = slot
        if len(self._cached_states) > self._settings.cached_states:
            self._drop_state()

    def _step(self) -> None:
        from drive.sglang_parts import ForwardDone

        written = self._parts.decode(self._running)
        launched, before = ForwardDone(), self._in_flight
        self._in_flight = launched
        self._parts.composite.set_latest_forward_done_event(launched)
        self._parts.composite.set_inflight_forward(launched, written)
        # One forward runs at a time: this one could start because the one before was done.
        if before is not None:
            before.fire()
        finished = []
        for req in self._running:
            req.output_ids.append(self._next_token)
            self._next_token += 1
            if len(req.output_ids) >= req.sampling_params.max_new_tokens:
                finished.append(req)
        for req in finished:
            self._finish(req)
        if finished:
            self._running = [req for req in self._running if req not in finished]
        self._parts.composite.flush_opportunistic()
        self.steps += 1

    def _finish(self, req: Any) -> None:
        self._parts.finish(req, split_prompt=self._settings.split_prompts)
        self._keep_state(*self._states.pop(req))
        self.requests_done += 1


class CallCounter:
    """Counts the calls on the two sub-pool allocators that are not made inside another such call, by pool and method."""

    METHODS = (
        "alloc",
        "alloc_extend",
        "alloc_decode",
        "free",
        "free_segment",
        "flush_opportunistic",
        "flush_for_allocation",
        "set_latest_forward_done_event",
        "set_inflight_forward",
    )

    def __init__(self, allocators: dict[str, Any]) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self._allocators = allocators
        self._depth = 0
        for pool, allocator in allocators.items():
            for method in self.METHODS:
                setattr(allocator, method, self._counted(pool, method, allocator))

    def _counted(self, pool: str, method: str, allocator: Any) -> Any:
        original = getattr(allocator, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            idle = method == "flush_opportunistic" and not (
                allocator._free_phys_pages.numel() or allocator._pending_reuse
            )
            self._depth += 1
            try:
                result = original(*args, **kwargs)
            finally:
                self._depth -= 1
            if self._depth:
                if method == "flush_for_allocation":
                    self.calls[pool, "urgent flushes inside an alloc"] += 1
                    self.calls[pool, "pages moved inside an alloc"] += result
            elif not idle:
                self.calls[pool, method] += 1
                if method.startswith("alloc"):
                    self.calls[pool, f"{method} refused"] += result is None
                    self.calls[pool, "tokens allocated"] += 0 if result is None else len(result)
                elif method.startswith("flush"):
                    self.calls[pool, "pages moved"] += result
                elif method == "free":
                    self.calls[pool, "ids freed"] += args[0].numel()
            return result

        return call

    def total(self) -> int:
        return sum(count for (_, method), count in self.calls.items() if method in self.METHODS)

    def digests(self) -> dict[str, str]:
        """By pool, of both tables, the free ids and the holes as they are now."""
        return {
            pool: hashlib.blake2b(
                b"".join(
                    tensor.numpy().tobytes()
                    for tensor in (
                        allocator.virtual_to_physical,
                        allocator.physical_to_virtual,
                        allocator.free_virtual_ids,
                        allocator._free_phys_pages,
                    )
                ),
                digest_size=12,
            ).hexdigest()
            for pool, allocator in self._allocators.items()
        }

    def print(self) -> None:
        for (pool, method), count in sorted(self.calls.items()):
            print(f"{pool:6} {method:32} {count:12,}")
        print(f"calls  {self.total():,}")
        for pool, digest in self.digests().items():
            print(f"{pool:6} tables and free lists at the end: {digest}")


MODEL = "Kimi-K3 (page geometry of one rank of tensor parallelism 8; no model ran)"


def start_recording(workload: Path, requests: int, settings: Settings, clock: SimulatedClock) -> None:
    """Hook the allocators that are made from now on, if KVTAPE_RECORD asks for it. Variables that are set already keep their values."""
    if not os.environ.get("KVTAPE_RECORD"):
        return
    defaults = {
        "KVTAPE_PROVENANCE": "driven",
        "KVTAPE_HOW": HOW.format(rate=settings.tokens_per_second, nodes=NODES[settings.split_prompts]),
        "KVTAPE_SOURCE": SOURCE.format(workload=workload.name, requests=requests),
        "KVTAPE_HARDWARE": HARDWARE,
        # Nobody waits for an answer or kills this to restart it, and a request's id is its line in a public log.
        "KVTAPE_ON_OVERFLOW": "block",
        # Whole chunks, however many ids they have: prompts of 12,000 tokens would end one after a few hundred events.
        "KVTAPE_MEMORY": "1G",
        "KVTAPE_MODEL": MODEL,
        "KVTAPE_CHUNK_EVENTS": "16384",
        "KVTAPE_CHUNK_MS": "60000",
        "KVTAPE_KEEP_REQUEST_IDS": "1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # SGLang loads its plugins when an engine starts, and none does here.
    import recorder.plugin
    import recorder.session

    # Before the hook is in place: a session keeps the clock that it began with.
    recorder.session.set_clock(clock.microseconds)
    recorder.plugin.sglang()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workload", type=Path, required=True, help="Mooncake request log, JSON lines, plain or .zst"
    )
    parser.add_argument("--requests", type=int, default=3000, help="how many of its requests (3000)")
    parser.add_argument(
        "--split-prompts",
        action="store_true",
        help="let the tree keep prompt and answer apart, as SGLang does on its own; the trace in traces/ was driven without",
    )
    parser.add_argument(
        "--count", action="store_true", help="count allocator calls and print digests of the final tables"
    )
    options = parser.parse_args()

    started = time.monotonic()
    settings = Settings(split_prompts=options.split_prompts)
    workload = read_workload(options.workload, options.requests)
    clock = SimulatedClock()
    start_recording(options.workload, len(workload), settings, clock)

    import torch

    torch.set_num_threads(1)
    from drive.sglang_parts import Parts

    parts = Parts(
        max_running=settings.max_running,
        max_tokens=max(request.input_length + request.output_length for request in workload) + 1,
    )
    driver = Driver(parts, workload, settings, clock)
    counter = CallCounter({"full": parts.full, "mamba": parts.states}) if options.count else None
    built = time.monotonic()
    driver.run()
    ended = time.monotonic()
    print(
        f"{driver.requests_done:,} requests in {driver.steps:,} steps, {clock.seconds:,.1f} s simulated: "
        f"{built - started:.1f} s to start, {ended - built:.1f} s to drive"
    )
    if counter is not None:
        counter.print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
