"""Long possible traces of level ``composite``: what an engine does, in random order, on every layout, strategy and mode. All hold."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from replayer.checks import CheckOptions
from replayer.replay import ReplayOptions, replay
from replayer.targets import TargetOptions
from tests.composite_scenario import MAMBA, MAMBA_SWA, SWA, CompositeScenario

pytestmark = pytest.mark.cpu

LAYOUTS = {"swa": SWA, "mamba": MAMBA, "mamba_swa": MAMBA_SWA}


class Engine:
    """Requests that grow, leave their window, end, and are copied to the host and back."""

    def __init__(self, s: CompositeScenario, seed: int) -> None:
        self.s, self.chance = s, random.Random(seed)
        self.requests: list[list[int]] = []
        self.left: list[int] = []
        self.states: list[int] = []
        self.on_host: list[tuple[int, list[int]]] = []
        self.number = self.host_slot = 0
        self.running: int | None = None
        self.has_window = "swa" in s.pools
        self.has_states = "mamba" in s.pools

    def step(self) -> None:
        names = [
            "prefill",
            "prefill",
            "decode",
            "decode",
            "finish",
            "finish_several",
            "forward",
            "flush",
            "gate",
        ]
        names += ["leave_window", "tail", "ensure"] if self.has_window else []
        names += ["state", "state", "prepare"] if self.has_states else []
        if self.s.composite.lazy_compaction:
            names += ["transfer", "offload", "load"]
            names += ["state_there_and_back"] if self.has_states else []
            names += ["window_there_and_back"] if self.has_window else []
        getattr(self, self.chance.choice(names))()

    def prefill(self) -> None:
        count = self.chance.randint(1, 3)
        lens = [self.chance.randint(1, 5 * self.s.page_size) for _ in range(count)]
        tokens = self.s.extend([0] * count, lens, [-1] * count)
        if tokens is not None:
            for length in lens:
                self.requests.append(tokens[:length])
                self.left.append(0)
                tokens = tokens[length:]

    def decode(self) -> None:
        if not self.requests:
            return
        tokens = self.s.decode([len(r) + 1 for r in self.requests], [r[-1] for r in self.requests])
        if tokens is not None:
            for request, token in zip(self.requests, tokens, strict=True):
                request.append(token)
            self.end_forward()
            self.number += 1
            self.running = self.number
            self.s.launch(self.number, writes=tokens)

    def forward(self) -> None:
        self.end_forward()

    def end_forward(self) -> None:
        if self.running is not None:
            self.s.forward_done(self.running)
            self.running = None

    def finish(self) -> None:
        if not self.requests:
            return
        self.end_forward()
        at = self.chance.randrange(len(self.requests))
        tokens, left = self.requests.pop(at), self.left.pop(at)
        if left and self.chance.random() < 0.5:
            self.s.free_full_segment(tokens[:left], 0)
            self.s.give_segment(tokens[left:], left)
        elif not left and self.chance.random() < 0.5:
            self.s.give_segment(tokens, 0)
        else:
            self.s.give(tokens)

    def finish_several(self) -> None:
        self.s.group_begin()
        for _ in range(self.chance.randint(0, 3)):
            self.finish()
            if self.has_window and self.chance.random() < 0.3:
                self.leave_window()
        if self.chance.random() < 0.3:
            self.s.flush_deferred_full_frees()
            self.finish()
        self.s.group_end()

    def leave_window(self) -> None:
        if not self.requests:
            return
        at = self.chance.randrange(len(self.requests))
        tokens, left, size = self.requests[at], self.left[at], self.s.page_size
        end = (left + len(tokens)) // 2 // size * size
        if end > left:
            self.end_forward()
            if self.chance.random() < 0.5:
                self.s.free_swa(tokens[:end])
            else:
                self.s.free_swa_segment(tokens[left:end], left)
            self.left[at] = end

    def tail(self) -> None:
        size = self.s.page_size
        length = self.chance.randint(1, 6 * size)
        tail = self.chance.randint(0, length)
        tokens = self.s.extend_swa_tail(0, length, -1, tail)
        if tokens is not None:
            self.requests.append(tokens)
            self.left.append((length - tail) // size * size if tail else -(-length // size) * size)

    def ensure(self) -> None:
        self.s.ensure_capacity(self.chance.randint(0, 120), self.chance.randint(0, 60))

    def state(self) -> None:
        if self.states and self.chance.random() < 0.5:
            self.s.slot_free([self.states.pop(self.chance.randrange(len(self.states)))])
            return
        slots = self.s.slot_alloc(self.chance.randint(1, 3))
        self.states += slots or []

    def prepare(self) -> None:
        self.s.prepare_mamba_allocation(self.chance.randint(0, 20))

    def flush(self) -> None:
        self.s.flush_all()

    def gate(self) -> None:
        if self.s.composite.lazy_compaction:
            self.s.move_gate(is_open=self.chance.random() < 0.7)

    def transfer(self) -> None:
        if not self.requests:
            return
        self.number += 1
        request = self.chance.choice(self.requests)
        self.s.move_gate(is_open=False)
        self.s.export(self.number, "full", request)
        if self.states:
            self.s.export(self.number, "mamba", self.states[:2])
            self.s.flush("mamba", urgent=True)
        self.flush()
        self.s.lease_end(self.number, "full")
        if self.states:
            self.s.lease_end(self.number, "mamba")
        self.s.move_gate(is_open=True)

    def offload(self) -> None:
        if not self.requests:
            return
        self.end_forward()
        at = self.chance.randrange(len(self.requests))
        tokens = self.requests[at]
        pages = -(-len(tokens) // self.s.page_size)
        slots = list(range(self.host_slot, self.host_slot + pages))
        self.host_slot += pages
        self.number += 1
        self.s.backup(self.number, "full", tokens, slots)
        if self.chance.random() < 0.5:
            self.flush()
            self.s.flush("full", urgent=True)
        self.s.copy_done(self.number)
        self.on_host.append((len(tokens), slots))
        self.requests.pop(at)
        self.left.pop(at)
        self.s.give(tokens)

    def load(self) -> None:
        if not self.on_host:
            return
        self.end_forward()
        length, slots = self.on_host.pop(self.chance.randrange(len(self.on_host)))
        size = self.s.page_size
        # A load brings whole pages, whatever was written of the last one.
        tokens = self.s.take(-(-length // size) * size)
        if tokens is None:
            return
        self.number += 1
        order = sorted(range(0, len(tokens), size), key=lambda at: tokens[at])
        self.s.load_back(self.number, "full", tokens, [slots[at // size] for at in order])
        if self.chance.random() < 0.5:
            self.s.flush("full", urgent=True)
        self.s.copy_done(self.number)
        self.s.host_free("full", slots)
        self.requests.append(tokens)
        self.left.append(0)

    def state_there_and_back(self) -> None:
        """States go to the host and come back under other ids, with whatever moves meanwhile."""
        if len(self.states) < 2:
            return
        self.end_forward()
        gone = sorted(self.states[:2])
        del self.states[:2]
        self.number += 2
        slots = [self.host_slot, self.host_slot + 1]
        self.host_slot += 2
        self.s.backup(self.number - 1, "mamba", gone, slots)
        self.s.flush("mamba", urgent=True)
        self.s.copy_done(self.number - 1, "mamba")
        self.s.slot_free(gone)
        self.flush()
        back = self.s.slot_alloc(2)
        if back is not None:
            self.s.load_back(self.number, "mamba", back, slots)
            self.flush()
            self.s.copy_done(self.number)
            self.states += back
        self.s.host_free("mamba", slots)

    def window_there_and_back(self) -> None:
        """Window pages are given up and loaded into reserved places, which are paired before or after the bytes are there."""
        if not self.requests or self.left[0] or len(self.requests[0]) < self.s.page_size:
            return
        self.end_forward()
        size, slot = self.s.page_size, self.host_slot
        tokens = self.requests[0][:size]
        self.host_slot += 1
        self.number += 2
        self.s.backup(self.number - 1, "swa", tokens, [slot])
        self.s.copy_done(self.number - 1)
        self.s.free_swa(tokens)
        self.left[0] = size
        places = self.s.alloc_physical("swa", size)
        if places is None:
            return
        early = self.chance.random() < 0.5
        if early:
            self.s.set_full_to_swa_mapping(tokens, places)
        self.s.load_back_places(self.number, "swa", [places[0] // size], [slot])
        self.flush()
        if not early:
            self.s.set_full_to_swa_mapping(tokens, places)
        self.s.copy_done(self.number, "swa")
        self.left[0] = 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_an_engine_does_holds(tmp_path: Path, layout: str, lazy: bool, seed: int) -> None:
    s = CompositeScenario(
        tmp_path / "walk.msgpack.zst",
        LAYOUTS[layout],
        page_size=(1, 4, 2)[seed],
        lazy=lazy,
        move_cap=(4096, 2, 4096)[seed],
    )
    engine = Engine(s, seed)
    for _ in range(90):
        engine.step()
    path = s.close()
    for strategy in ("batched", ("per-row", "hybrid", "device")[seed]):
        kv = "full" if strategy == "batched" else "stamp"
        checks = CheckOptions(every=1, logprob_every=16) if strategy == "batched" else CheckOptions()
        outcome = replay(ReplayOptions(path, TargetOptions(strategy=strategy, kv=kv), checks, ledger=False))
        assert outcome.failure is None, (strategy, vars(outcome.failure))
        assert outcome.events == s.seq + 1


def test_where_ids_are_mapped_the_sides_share_them(tmp_path: Path) -> None:
    s = CompositeScenario(tmp_path / "walk.msgpack.zst", MAMBA_SWA)
    engine = Engine(s, 7)
    engine.window_there_and_back = lambda: None  # type: ignore[method-assign]  # places of the engine's mean nothing then
    for _ in range(150):
        engine.step()
    outcome = replay(
        ReplayOptions(s.close(), TargetOptions(kv="stamp"), CheckOptions(every=1), ids="mapped", ledger=False)
    )
    assert outcome.failure is None and outcome.ids == "mapped"
