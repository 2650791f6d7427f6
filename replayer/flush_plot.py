"""The picture of `kvtape bench flush`, through matplotlib, which only this needs."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from replayer.bench import Spread
from replayer.bench_flush import Findings, Point
from replayer.errors import UsageError
from replayer.flush_figures import DEVICE, LIMITS, POOL_LIMIT, SGLANG_WANTED

#: Distinguishable without colour vision too (Okabe and Ito), each with a marker of its own.
_STYLES: Final = (
    ("#999999", "o"),
    ("#E69F00", "s"),
    ("#56B4E9", "^"),
    ("#D55E00", "D"),
    ("#000000", "v"),
    ("#009E73", "P"),
)
_WIDTH, _HEIGHT, _DPI = 16, 5.2, 110


def require_plotting(path: Path) -> None:
    """Before anything is measured: whether a picture can be written to ``path``.

    Raises:
        UsageError: matplotlib is missing, or ``path`` is no place for a PNG.
    """
    if path.suffix.lower() != ".png":
        raise UsageError(f"--plot {path}: the picture is a PNG, so the name has to end in .png")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.absolute().parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed here: pip install 'kvtape[plot]'")


def draw(path: Path, findings: Findings, names: Sequence[str], reference: str, caption: str) -> None:
    """Times, ratios to ``reference`` and pool sizes, side by side; bands reach from the least to the greatest round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, ratios, pools) = pyplot.subplots(1, 3, figsize=(_WIDTH, _HEIGHT), layout="constrained")
    kinds = list(dict.fromkeys(point.kind for point in findings.nanoseconds))
    _draw_times(times, findings, names, kinds[0])
    _draw_ratios(ratios, findings, names, kinds, reference)
    _draw_pools(pools, findings, names)
    figure.suptitle(caption, fontsize=9)
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise UsageError(f"--plot {path}: cannot be written: {error}") from None
    finally:
        pyplot.close(figure)


def _line(
    axes: Any, xs: Sequence[float], spreads: Sequence[Spread], label: str, style: int, **more: Any
) -> None:
    colour, marker = _STYLES[style % len(_STYLES)]
    axes.plot(
        xs, [one.median for one in spreads], color=colour, marker=marker, markersize=4, linewidth=1.4, label=label, **more
    )  # fmt: skip
    axes.fill_between(
        xs, [one.low for one in spreads], [one.high for one in spreads], color=colour, alpha=0.18, linewidth=0
    )


def _moves(findings: Findings, kind: str) -> list[Point]:
    points = [point for point in findings.nanoseconds if point.panel == "moves" and point.kind == kind]
    return sorted(points, key=lambda point: point.moves)


def _by_moves(axes: Any) -> None:
    # No move is a point too, which a logarithm has no place for.
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(left=-0.2)
    ticks = (0, 1, 3, 13, 64, 177, 1024, 2737, 16384)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=45, fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("pages moved by the flush")
    axes.grid(True, which="major", alpha=0.3)


def _draw_times(axes: Any, findings: Findings, names: Sequence[str], kind: str) -> None:
    points = _moves(findings, kind)
    for number, name in enumerate(names):
        spreads = [findings.time(point, name) for point in points]
        micro = [Spread(*(value / 1e3 for value in one)) for one in spreads]
        _line(axes, [point.moves for point in points], micro, name, number)
    axes.set_yscale("log")
    _by_moves(axes)
    axes.set_ylabel("microseconds a flush, this machine")
    axes.set_title(f"time ({kind})", fontsize=10)
    axes.legend(fontsize=8)


def _draw_ratios(
    axes: Any, findings: Findings, names: Sequence[str], kinds: Sequence[str], reference: str
) -> None:
    shown = DEVICE if DEVICE in names and reference != DEVICE else names[0]
    for number, kind in enumerate(kinds):
        points = _moves(findings, kind)
        spreads = [findings.ratio(point, shown, reference) for point in points]
        _line(axes, [point.moves for point in points], spreads, kind, number)
    axes.axhline(1.0, color="black", linewidth=0.8)
    if reference == SGLANG_WANTED:
        greatest = max(point.moves for kind in kinds for point in _moves(findings, kind))
        for number, (first, last, limit) in enumerate(LIMITS):
            end = max(first, greatest) if last is None else last
            axes.plot(
                [first * 0.93, end * 1.07 + 0.05], [limit, limit], color="red", linewidth=2.2, alpha=0.55,
                label="wanted at most" if number == 0 else None,
            )  # fmt: skip
    axes.set_yscale("log")
    _by_moves(axes)
    axes.set_ylabel(f"time over that of {reference}")
    axes.set_title(f"{shown} / {reference}, by kind of flush", fontsize=10)
    axes.legend(fontsize=8)


def _draw_pools(axes: Any, findings: Findings, names: Sequence[str]) -> None:
    points = [point for point in findings.nanoseconds if point.panel == "pool"]
    if not points:
        axes.set_title("pool sizes: not measured", fontsize=10)
        return
    kind = points[0].kind
    points = sorted((point for point in points if point.kind == kind), key=lambda point: point.pages)
    base = points[0]
    for number, name in enumerate(names):
        spreads = [findings.growth(point, base, name) for point in points]
        _line(axes, [point.pages for point in points], spreads, name, number)
    axes.axhline(POOL_LIMIT, color="red", linewidth=2.2, alpha=0.55, label="wanted at most")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_ylim(0.5, 4)
    axes.set_yticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
    axes.set_xticks(
        [point.pages for point in points],
        [f"x{point.pages // base.pages}\n{point.pages:,}" for point in points],
    )
    axes.set_xlabel("pages of the pool, half of them live")
    axes.set_ylabel(f"time over that in {base.pages:,} pages")
    axes.set_title(f"{base.moves} moves in larger pools ({kind})", fontsize=10)
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=8)
