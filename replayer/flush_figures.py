"""What `kvtape bench flush` says about its findings: the figures that are wanted, held or not, and everything as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from replayer.bench import SGLANG, Spread
from replayer.bench_flush import KINDS, Findings, Point

DEVICE: Final = "kvtape device"
BATCHED: Final = "kvtape batched"
#: The version that the limits of time are about.
SGLANG_WANTED: Final = f"{SGLANG} 0.5.23"
#: Versions that are worth measuring against; an environment holds one.
SGLANG_VERSIONS: Final = ("0.5.17", "0.5.23")

#: The greatest ratio of ``device`` to SGLang 0.5.23, by moves from first to last.
LIMITS: Final = ((0, 2, 2.0), (3, 64, 0.5), (177, 177, 0.25), (2737, None, 0.10))
#: Twice the moved pages, at most so many times the time.
DOUBLING_LIMIT: Final = 2.0
#: The largest pool over the smallest, at the same moves.
POOL_LIMIT: Final = 1.1


@dataclass(frozen=True)
class Figure:
    """One figure that is wanted: at most ``limit``. ``found`` is the worst of the points it is about (``at``); None: not measured."""

    what: str
    limit: float
    found: Spread | None
    at: str = ""

    @property
    def held(self) -> bool | None:
        """Whether the median holds; None where nothing was measured."""
        return None if self.found is None else self.found.median <= self.limit

    def line(self) -> str:
        """For people."""
        if self.found is None:
            return f"not measured: {self.what}: at most {self.limit:g}"
        verdict = "held    " if self.held else "NOT HELD"
        low, high = self.found.low, self.found.high
        return (
            f"{verdict}: {self.what}: at most {self.limit:g}, found {self.found.median:.3f} "
            f"({low:.3f} to {high:.3f}) at {self.at}"
        )


def limit_for(moves: int) -> float | None:
    """What is wanted of ``device`` at so many moves, as a ratio to SGLang 0.5.23; None where nothing is."""
    for first, last, limit in LIMITS:
        if moves >= first and (last is None or moves <= last):
            return limit
    return None


def figures(findings: Findings, names: Sequence[str]) -> list[Figure]:
    """Everything that is wanted, kind by kind."""
    kinds = [kind for kind in KINDS if any(point.kind == kind for point in findings.nanoseconds)]
    made = [_to_sglang(findings, names, kind, *limit) for kind in kinds for limit in LIMITS]
    made += [_doubling(findings, names, kind) for kind in kinds]
    return made + [
        _pool(findings, names, kind)
        for kind in kinds
        if any(point.panel == "pool" and point.kind == kind for point in findings.nanoseconds)
    ]


def _worst(what: str, limit: float, ratios: Sequence[tuple[Spread, str]]) -> Figure:
    if not ratios:
        return Figure(what, limit, None)
    found, at = max(ratios, key=lambda ratio: ratio[0].median)
    return Figure(what, limit, found, at)


def _points(findings: Findings, panels: Sequence[str], kind: str) -> list[Point]:
    return [point for point in findings.nanoseconds if point.panel in panels and point.kind == kind]


def _to_sglang(
    findings: Findings, names: Sequence[str], kind: str, first: int, last: int | None, limit: float
) -> Figure:
    upto = "and more" if last is None else "" if last == first else f"to {last}"
    what = (
        f"device over SGLang 0.5.23, {kind}, {' '.join(part for part in (str(first), upto, 'moves') if part)}"
    )
    if DEVICE not in names or SGLANG_WANTED not in names:
        return Figure(what, limit, None)
    ratios = [
        (findings.ratio(point, DEVICE, SGLANG_WANTED), describe(point))
        for point in _points(findings, ("moves", "pages"), kind)
        if point.moves >= first and (last is None or point.moves <= last)
    ]
    return _worst(what, limit, ratios)


def _doubling(findings: Findings, names: Sequence[str], kind: str) -> Figure:
    what = f"device with twice the moved pages, {kind}"
    if DEVICE not in names:
        return Figure(what, DOUBLING_LIMIT, None)
    by_moves = {point.moves: point for point in _points(findings, ("moves",), kind)}
    ratios = [
        (findings.growth(by_moves[2 * moves], point, DEVICE), f"{moves} to {2 * moves} moves")
        for moves, point in by_moves.items()
        if moves and 2 * moves in by_moves
    ]
    return _worst(what, DOUBLING_LIMIT, ratios)


def _pool(findings: Findings, names: Sequence[str], kind: str) -> Figure:
    points = sorted(_points(findings, ("pool",), kind), key=lambda point: point.pages)
    factor = points[-1].pages // points[0].pages
    what = f"device in a pool of {factor} times the pages, {kind}, {points[0].moves} moves"
    if DEVICE not in names or len(points) < 2:
        return Figure(what, POOL_LIMIT, None)
    base = points[0]
    ratios = [
        (findings.growth(point, base, DEVICE), f"{point.pages:,} pages over {base.pages:,}")
        for point in points[1:]
    ]
    return _worst(what, POOL_LIMIT, ratios)


def describe(point: Point) -> str:
    """A point in a few words."""
    paged = f", pages of {point.page_size}" if point.page_size > 1 else ""
    return f"{point.moves} moves{paged}"


def not_installed(version: str | None) -> list[str]:
    """Of `SGLANG_VERSIONS`, those that this environment does not hold."""
    return [wanted for wanted in SGLANG_VERSIONS if wanted != version]


# -- for programs


def as_json(
    machine: dict[str, Any],
    rounds: int,
    findings: Findings,
    names: Sequence[str],
    reference: str,
    repeats: Callable[[int], int],
) -> dict[str, Any]:
    """Everything that was found. Spreads are the least and the greatest of the rounds, each of which is a median."""
    return {
        "machine": machine,
        "rounds": rounds,
        "candidates": list(names),
        "reference": reference,
        "sglang_not_installed": not_installed(machine["sglang"]),
        "points": [
            _point_as_json(point, findings, names, reference, repeats) for point in findings.nanoseconds
        ],
        "figures": [
            {
                "what": figure.what,
                "limit": figure.limit,
                "found": None if figure.found is None else figure.found._asdict(),
                "at": figure.at,
                "held": figure.held,
            }
            for figure in figures(findings, names)
        ],
    }


def _point_as_json(
    point: Point, findings: Findings, names: Sequence[str], reference: str, repeats: Callable[[int], int]
) -> dict[str, Any]:
    return {
        "panel": point.panel,
        "kind": point.kind,
        "moves": point.moves,
        "pages": point.pages,
        "page_size": point.page_size,
        "flushes_a_round": repeats(point.moves),
        "moved": findings.moved[point],
        "nanoseconds": {name: findings.time(point, name)._asdict() for name in names},
        "ratios": {
            name: findings.ratio(point, name, reference)._asdict() for name in names if name != reference
        },
    }
