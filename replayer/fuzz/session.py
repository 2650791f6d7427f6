"""Programs, one after another, until the time is over; what they find is kept as traces."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from types import TracebackType

from allocator import STRATEGIES
from replayer.errors import UsageError
from replayer.fuzz.composite_program import CompositeProgram
from replayer.fuzz.program import Program
from replayer.fuzz.shapes import CHAINS, COMPOSITES, Setting
from replayer.fuzz.sides import Disagreement, Side
from replayer.targets import TargetOptions
from replayer.targets_sglang import sglang_version

#: Programs in a round, which is what one seed of Hypothesis makes; calls in a program.
ROUND = 40
CALLS = 60


@dataclass(frozen=True)
class Find:
    """A disagreement, shrunk, the trace that shows it, and the ``replay`` command that does so."""

    message: str
    trace: Path
    command: str


def require_hypothesis() -> None:
    """Raise UsageError where Hypothesis, which chooses the calls, is not installed."""
    if importlib.util.find_spec("hypothesis") is None:
        raise UsageError("fuzz needs Hypothesis, which is not installed here: pip install 'kvtape[fuzz]'")


@dataclass(frozen=True)
class FuzzOptions:
    """``against``: ``sglang`` or ``oracle``. ``rounds``: how many at most, None for as many as the time allows."""

    minutes: float
    seed: int = 0
    against: str = "oracle"
    allocator: str = "kvtape"
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    out: Path = Path()
    rounds: int | None = None
    programs: int = ROUND
    calls: int = CALLS


@dataclass
class Session:
    """One ``kvtape fuzz``. Use as a context manager: traces under way lie in a folder that goes with it.

    Raises:
        UsageError: SGLang is to be fuzzed and is not installed, or an allocator cannot be made. Which version of SGLang is installed is not
            asked: placement is that of 0.5.23, and any other shows as differences.
    """

    options: FuzzOptions
    progress: Callable[[Session], None] = lambda _: None
    counts: Counter[str] = field(default_factory=Counter)
    finds: list[Find] = field(default_factory=list)

    def __post_init__(self) -> None:
        options = self.options
        self.with_sglang = options.against == "sglang"
        self._targets = [
            (f"{options.allocator} {strategy}", TargetOptions(options.allocator, strategy, kv="stamp"))
            for strategy in options.strategies
        ]
        self.how = f"kvtape fuzz --seed {options.seed}, answers of {self._targets[0][0]}"
        if self.with_sglang:
            version = sglang_version()
            if version is None:
                raise UsageError(
                    "--against sglang needs SGLang 0.5.23's classes beside kvtape: tools/build_sglang_env.sh DIR builds such an environment"
                )
            name = f"SGLang {version}"
            self._targets.insert(0, (name, TargetOptions("sglang", kv="stamp")))
            self.how = f"kvtape fuzz --seed {options.seed}, answers of {name}'s allocator classes"
        self.own_names = [name for name, target in self._targets if target.allocator != "sglang"]
        self.reference_name = self._targets[0][0] if self.with_sglang else "the oracle"
        self._begin, self._round = monotonic(), 0
        # Before the first program: whether there are such allocators, and such composites, at all.
        for chain in (CHAINS[0], COMPOSITES[0]):
            header = Setting(chain, 1, True, 1, 20).header(self.how)
            for name, target in self._targets:
                Side(name, header, target)
        self._folder = tempfile.TemporaryDirectory(prefix="kvtape-fuzz-")
        self._found: tuple[Disagreement, Path] | None = None

    @property
    def seconds(self) -> float:
        """Since the session began."""
        return monotonic() - self._begin

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()

    # -- one program, called by the machine

    def begin(self, setting: Setting) -> Program:
        self.counts[f"chain {setting.chain.name}"] += 1
        return Program(Path(self._folder.name) / "program.msgpack.zst", setting, self._targets, self.how)

    def begin_composite(self, setting: Setting) -> CompositeProgram:
        self.counts[f"chain {setting.chain.name}"] += 1
        path = Path(self._folder.name) / "program.msgpack.zst"
        return CompositeProgram(path, setting, self._targets, self.how)

    def finish(self, program: Program) -> None:
        """Close the program's trace, and judge it if the sides have agreed.

        Raises:
            Disagreement: a check failed.
        """
        if program.seq < 0:
            program.writer.abort()
            return
        program.close()
        try:
            if program.failed is None:
                self.counts["programs"] += 1
                own = [target for _, target in self._targets if target.allocator != "sglang"]
                program.judge(own[self.counts["programs"] % len(own)])
        except Disagreement as error:
            program.failed = error
            raise
        finally:
            if program.failed is not None:
                kept = Path(self._folder.name) / "found.msgpack.zst"
                shutil.copyfile(program.path, kept)
                self._found = (program.failed, kept)
            self.counts.update(program.counts)
            self.counts["pages moved"] += program.reference.moves.pages
            self.counts["batches moved"] += program.reference.moves.batches
            self.progress(self)

    # -- all of them

    def run(self) -> None:
        """Rounds until the time is over or one has found something; a find ends the session once it is shrunk."""
        from hypothesis import HealthCheck, Phase, Verbosity, configuration, seed, settings
        from hypothesis.errors import Flaky
        from hypothesis.stateful import run_state_machine_as_test

        from replayer.fuzz.composite_machine import composite_machine_for
        from replayer.fuzz.machine import machine_for

        options = self.options
        configuration.set_hypothesis_home_dir(
            self._folder.name
        )  # it keeps notes, and not in the folder somebody happens to be in
        chosen = settings(
            max_examples=options.programs,
            stateful_step_count=options.calls,
            database=None,
            deadline=None,
            derandomize=False,
            phases=[Phase.generate, Phase.shrink],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
            print_blob=False,
        )
        while options.rounds is None or self._round < options.rounds:
            if self.seconds >= options.minutes * 60:
                return
            chosen_machine = (machine_for, composite_machine_for)[_joins(self._round)]
            machine = seed(options.seed * 1_000_003 + self._round)(chosen_machine(self))
            try:
                run_state_machine_as_test(machine, settings=chosen)
            except (Disagreement, Flaky) as error:
                self._keep(error)
                return
            except KeyboardInterrupt:
                if self._found is not None:  # found already, and not shrunk to the end
                    self._keep(self._found[0])
                raise
            finally:
                self._round += 1
                self.counts["rounds"] = self._round

    def _keep(self, error: BaseException) -> None:
        if self._found is None:
            raise error
        disagreement, trace = self._found
        elsewhere = ""
        try:
            kept = _kept(trace, self.options.out, self.options.seed)
        except OSError as refused:
            kept = _kept(trace, Path(tempfile.mkdtemp(prefix="kvtape-find-")), self.options.seed)
            elsewhere = f" (not in {self.options.out}: {refused.strerror})"
        flaky = (
            "" if isinstance(error, Disagreement) else " (not every time: the allocator is not deterministic)"
        )
        target = disagreement.target or self._targets[-1][1]
        command = (
            f"replay --check-every event --allocator {target.allocator} --strategy {target.strategy} {kept}"
        )
        self.finds.append(Find(f"{disagreement}{flaky}{elsewhere}", kept, command))


def _joins(number: int) -> bool:
    """Whether round ``number`` is one of programs on composites."""
    return number % 3 == 2


def _kept(trace: Path, folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = _free_name(folder, seed)
    try:
        shutil.copyfile(trace, path)
    except OSError:
        path.unlink(missing_ok=True)  # half a file on a full disk
        raise
    return path


def _free_name(folder: Path, seed: int) -> Path:
    """A name that is not taken: a find is never overwritten."""
    for number in range(1, 10_000):
        path = folder / f"find-{seed}-{number}.msgpack.zst"
        if not path.exists():
            return path
    raise UsageError(f"{folder} holds 10,000 finds of seed {seed}; give another --out")
