"""What a mutant is: a class with one fault, the scene that shows it, and the check that must name it, at which event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allocator import FloatMultiEndedAllocator
from recorder.trace import EventKind, StateRow
from recorder.trace.digests import mix64
from replayer.checks import CheckOptions
from replayer.failure import CHECKS
from replayer.replay import Outcome, ReplayOptions, replay
from replayer.targets import TargetOptions
from tests.allocator.delayed import NeverEnd, NeverFloat
from tests.composite_scenario import CompositeScenario
from tests.scenario import TWO_ENDS, PoolShape, Scenario


class Tape(Scenario):
    """A `Scenario` that can also write down where the pages are, as a recorder of an engine does."""

    def clear(self) -> None:
        """All pools, as an engine does between two runs."""
        for pool in self.pools.values():
            pool.clear()
        self.write(EventKind.CLEAR, None)

    def state(self) -> None:
        """The tables after the last event, for C15."""
        self.writer.state(
            StateRow(
                self.seq,
                {
                    name: {"virtual_to_physical_mix64": mix64(pool.virtual_to_physical[:-1].numpy())}
                    for name, pool in self.pools.items()
                },
            )
        )


@dataclass(frozen=True)
class Scene:
    """A small trace: ``play`` makes the calls, on pools of these ``shapes`` in ``total_bytes``.

    ``results``: whether the trace carries the answers (and is compared with them, C15); without them a faulty allocator is judged on its
    own.
    """

    play: Callable[[Tape], None]
    shapes: tuple[PoolShape, ...] = TWO_ENDS
    total_bytes: int = 64 * 64
    move_cap: int = 4
    results: bool = False

    @property
    def name(self) -> str:
        return self.play.__name__

    def write(self, folder: Path) -> Path:
        path = folder / f"{self.name}.msgpack.zst"
        tape = Tape(path, self.shapes, self.total_bytes, self.move_cap, self.results, force=True)
        self.play(tape)
        return tape.close()


@dataclass(frozen=True)
class CompositeScene:
    """A `Scene` whose calls are a composite's (`tests.composite_scenario`), on pages of 4 tokens."""

    play: Callable[[CompositeScenario], None]
    layout: tuple[PoolShape, ...]
    total_bytes: int
    leases_shut_gates: bool = False

    @property
    def name(self) -> str:
        return self.play.__name__

    def write(self, folder: Path) -> Path:
        tape = CompositeScenario(
            folder / f"{self.name}.msgpack.zst", self.layout, self.total_bytes, results=False, force=True,
            leases_shut_gates=self.leases_shut_gates,
        )  # fmt: skip
        self.play(tape)
        return tape.close()


def scene(
    shapes: tuple[PoolShape, ...] = TWO_ENDS,
    total_bytes: int = 64 * 64,
    move_cap: int = 4,
    results: bool = False,
) -> Callable[[Callable[[Tape], None]], Scene]:
    """Decorator that makes a function a `Scene`."""
    return lambda play: Scene(play, shapes, total_bytes, move_cap, results)


@dataclass(frozen=True)
class Mutant:
    """``fault`` is a class derived from one of ours; its docstring says what is wrong.

    Attributes:
        check, event: what must be named, and where: the first event after which the state is wrong.
        row: the public report (`FAULTS`, by its number there), or "" where none is known.
        strategy: lookup strategy of the class.
        options: arguments of `CheckOptions`.
        variant: tells entries of one class apart.
        named, reason: where another check than the expected one sees it first, that one, and why that is right.
    """

    fault: type[Any]
    check: str
    event: int
    scene: Scene | CompositeScene
    row: str = ""
    strategy: str = "batched"
    options: dict[str, Any] = field(default_factory=dict)
    variant: str = ""
    named: str = ""
    reason: str = ""

    @property
    def name(self) -> str:
        return self.fault.__name__ + (f" ({self.variant})" if self.variant else "")

    @property
    def what(self) -> str:
        """The first paragraph of the class's docstring, in one line."""
        assert self.fault.__doc__, self.fault
        return " ".join(self.fault.__doc__.split("\n\n", 1)[0].split())

    @property
    def allocator(self) -> str:
        """The ``--allocator`` that names it."""
        spec = f"{self.fault.__module__}:{self.fault.__name__}"
        if issubclass(self.fault, NeverFloat):
            return f"tests.allocator.delayed:NeverEnd,{spec}"
        if issubclass(self.fault, FloatMultiEndedAllocator):
            return f"allocator:MultiEndedAllocator,{spec}"
        return spec

    @property
    def healthy(self) -> str:
        """The ``--allocator`` without the fault: where numbers come late with this one, they do so there too."""
        is_late = issubclass(self.fault, (NeverEnd, NeverFloat))
        return "tests.allocator.delayed:NeverEnd,tests.allocator.delayed:NeverFloat" if is_late else "kvtape"


def run(path: Path, allocator: str, strategy: str, options: dict[str, Any]) -> Outcome:
    """Replay with real rows. Synchronisations are counted only where a budget is set."""
    target = TargetOptions(allocator=allocator, strategy=strategy, kv="full")
    return replay(ReplayOptions(path, target, CheckOptions(**options), ledger="max_syncs" in options))


def found_without(mutant: Mutant, path: Path, disabled: frozenset[str]) -> Outcome:
    """The same replay with some checks off."""
    enabled = frozenset(mutant.options.get("enabled", CHECKS)) - disabled
    return run(path, mutant.allocator, mutant.strategy, {**mutant.options, "enabled": enabled})


def all_mutants() -> list[Mutant]:
    """Every mutant, by the part of the contract it breaks."""
    from tests.mutants import (
        alloc,
        capacity,
        composites,
        contents,
        device,
        floats,
        flush,
        forwards,
        free,
        late,
        syncs,
        tables,
        transfers,
    )

    modules = (
        flush,
        forwards,
        alloc,
        free,
        capacity,
        floats,
        tables,
        contents,
        transfers,
        composites,
        syncs,
        device,
        late,
    )
    mutants = [mutant for module in modules for mutant in module.MUTANTS]
    names = [mutant.name for mutant in mutants]
    assert len(set(names)) == len(names), "two mutants of one name"
    return mutants


def all_scenes() -> list[Scene | CompositeScene]:
    """The scenes of all mutants, each once."""
    return list({mutant.scene.name: mutant.scene for mutant in all_mutants()}.values())
