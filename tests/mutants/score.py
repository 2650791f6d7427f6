"""Runs every mutant: which check names it, at which event, and which checks would have seen it too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from recorder.trace import ImpossibleEvent
from replayer.failure import CHECKS, CheckFailure
from tests.mutants.registry import CompositeScene, Mutant, Scene, found_without, run

BEGIN = "<!-- mutants: python -m tests.mutants --update -->"
END = "<!-- end of mutants -->"


@dataclass(frozen=True)
class Finding:
    """``others``: checks that see the mutant, with their events, once those named before it are disabled, in that order. ``ends``: after
    those a call fails, or answers what cannot be followed, whatever is disabled."""

    mutant: Mutant
    failure: CheckFailure | None
    others: tuple[tuple[str, int], ...] = ()
    ends: bool = False

    @property
    def is_seen_by_one(self) -> bool:
        """Whether it would pass unseen without the check that names it."""
        return self.failure is not None and not self.others and not self.ends

    @property
    def is_expected(self) -> bool:
        """Whether the check that the entry asks for was named, at its event."""
        named = self.mutant.named or self.mutant.check
        found = self.failure
        return found is not None and (found.check, found.seq) == (named, self.mutant.event)


class Traces:
    """The scenes' traces, each written once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._paths = folder, dict[str, Path]()

    def of(self, scene: Scene | CompositeScene) -> Path:
        if scene.name not in self._paths:
            self._paths[scene.name] = scene.write(self._folder)
        return self._paths[scene.name]


def find(mutant: Mutant, traces: Traces) -> Finding:
    """What the checks say."""
    path = traces.of(mutant.scene)
    return Finding(mutant, run(path, mutant.allocator, mutant.strategy, mutant.options).failure)


def find_with_others(mutant: Mutant, traces: Traces) -> Finding:
    """`find`, and then again without the check named, and so on until nothing sees the mutant."""
    found = find(mutant, traces)
    others: list[tuple[str, int]] = []
    failure = found.failure
    disabled: set[str] = set()
    while failure is not None and failure.check not in disabled | {"CALL"}:
        disabled.add(failure.check)
        try:
            failure = found_without(mutant, traces.of(mutant.scene), frozenset(disabled)).failure
        except ImpossibleEvent:
            break  # what a disabled check let pass has led the replay astray: the trace does not fit any more
        if failure is not None and failure.check not in disabled | {"CALL"}:
            others.append((failure.check, failure.seq))
    return Finding(mutant, found.failure, tuple(others), ends=failure is not None)


def score_table(findings: Iterable[Finding]) -> str:
    """The tables of ``docs/checks.md``."""
    findings = list(findings)
    lines = [*_summary(findings), "", *_by_check(findings), "", *_by_mutant(findings)]
    return "\n".join(lines) + "\n"


def _summary(findings: list[Finding]) -> list[str]:
    caught = [finding for finding in findings if finding.failure is not None]
    at_event = [f for f in caught if f.failure is not None and f.failure.seq == f.mutant.event]
    expected = [f for f in caught if f.failure is not None and f.failure.check == f.mutant.check]
    total = len(findings)
    rows = sorted(
        {finding.mutant.row for finding in findings if finding.mutant.row}, key=lambda row: int(row[1:])
    )
    lines = [
        f"{len(caught)} of {total} mutants are caught; {len(at_event)} of {total} at the first event after which the state is wrong; "
        f"{len(expected)} of {total} ({len(expected) / total:.1%}) by the check the entry expects. "
        f"Public reports among them: {', '.join(rows)}.",
    ]
    others = [finding for finding in findings if finding.mutant.named]
    if others:
        lines += ["", "Named by another check than the expected one:", ""]
        lines += [
            f"- `{f.mutant.name}`: {f.mutant.named} and not {f.mutant.check}, because {f.mutant.reason}"
            for f in others
        ]
    return lines


def _by_check(findings: list[Finding]) -> list[str]:
    first = Counter(finding.failure.check for finding in findings if finding.failure is not None)
    alone = Counter(f.failure.check for f in findings if f.failure is not None and f.is_seen_by_one)
    second = Counter(check for finding in findings for check, _ in finding.others)
    lines = [
        "| check | mutants it names | of these, only it sees | further mutants it sees once others are disabled |",
        "|---|---|---|---|",
    ]
    for check, about in CHECKS.items():
        if first[check] or second[check]:
            lines.append(
                f"| {check} {about.split(':')[0]} | {first[check]} | {alone[check]} | {second[check]} |"
            )
    return lines


def _by_mutant(findings: list[Finding]) -> list[str]:
    lines = [
        "| mutant | what is wrong | report | named by | at event | seen too by |",
        "|---|---|---|---|---|---|",
    ]
    for finding in findings:
        mutant, failure = finding.mutant, finding.failure
        others = ", ".join(
            check if failure is not None and seq == failure.seq else f"{check} at {seq}"
            for check, seq in finding.others
        )
        if finding.ends:
            others = f"{others}, and a call fails" if others else "a call fails in any case"
        where = "" if failure is None else f"{failure.seq}: {failure.call}"
        named = "survives" if failure is None else failure.check
        lines.append(
            f"| `{mutant.name}` | {mutant.what} | {mutant.row} | {named} | {where} | {others or 'nothing else'} |"
        )
    return lines
