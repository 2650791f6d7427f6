"""`kvtape parity`: a language model generates while its KV pages move, and is held against a run in which none do."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

from replayer.console import print_rich

if TYPE_CHECKING:
    from replayer.parity.recording import Recording
    from replayer.parity.report import About, Took
    from replayer.parity.run import Result, Setup

NAME = "parity"
HELP = "have a language model generate while its KV pages move, and compare every token with a run in which none do"

PROMPTS = 80
WINDOW = 96
VARIANTS = ("per-row", "hybrid", "batched", "device", "eager")
PLANTS = ("last-layer", "table-first")
EXIT_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts",
        type=int,
        default=PROMPTS,
        metavar="N",
        help=f"only the first N of the {PROMPTS} committed prompts",
    )
    parser.add_argument(
        "--strategy",
        default=",".join(VARIANTS),
        metavar="S,...",
        help=f"how the small pools compact (default: all, {','.join(VARIANTS)}; eager compacts at every free)",
    )
    parser.add_argument(
        "--window",
        type=int,
        default=WINDOW,
        metavar="TOKENS",
        help=f"what two layers of three see (default {WINDOW}; 0: everything, as the model was trained)",
    )
    parser.add_argument("--device", help="cpu (float32) or cuda (bfloat16); default: cuda where there is one")
    parser.add_argument(
        "--plant",
        choices=PLANTS,
        help="move pages wrongly: without their last layer, or bytes after the tables. Has to end with 1, and say where",
    )
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="record one run, batched if it is among them, as a trace"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    from replayer.parity import model as language_model
    from replayer.parity.plants import PLANTS as STORES
    from replayer.parity.prompts import load_prompts
    from replayer.parity.report import Took, held
    from replayer.parity.run import Setup, check

    begun = perf_counter(), process_time()
    variants = _variants(args.strategy)
    _check_numbers(args)
    device = args.device or _default_device()
    language_model.check_device(device)
    results: list[Result] = []
    interrupted = False
    model, tokenizer = language_model.load(device)
    requests = load_prompts(tokenizer, args.prompts)
    setup = Setup.for_prompts(len(requests), args.window or None)
    recording = _recording(args, setup, model.shape.name)
    recorded = "batched" if "batched" in variants else variants[0]
    about = _about(args, device, model.shape.dtype, setup, model.shape.name)
    planted: dict[str, Any] = {"store_class": STORES[args.plant]} if args.plant else {}
    with _progress(len(requests) * (len(variants) + 1)) as progress:
        try:
            for result in check(
                model,
                requests,
                setup,
                variants,
                recordings={recorded: recording},
                progress=progress,
                **planted,
            ):
                results.append(result)
        except KeyboardInterrupt:
            interrupted = True
    took = Took(perf_counter() - begun[0], process_time() - begun[1])
    _print(args.json, about, results, took, interrupted, recording)
    if interrupted:
        return EXIT_INTERRUPTED
    return 0 if held(results) else 1


def _variants(text: str) -> list[str]:
    from replayer.errors import UsageError

    named = text.split(",")
    unknown = [name for name in named if name not in VARIANTS]
    if unknown:
        raise UsageError(f"--strategy {text}: no strategy {unknown[0]!r}; known: {', '.join(VARIANTS)}")
    if len(set(named)) != len(named):
        raise UsageError(f"--strategy {text}: a strategy is named twice")
    return named


def _check_numbers(args: argparse.Namespace) -> None:
    from replayer.errors import UsageError

    if not 1 <= args.prompts <= PROMPTS:
        raise UsageError(f"--prompts {args.prompts}: 1 to {PROMPTS} are there")
    if args.window < 0:
        raise UsageError(f"--window {args.window}: a number of tokens, or 0 for no window")
    if args.record is not None and not args.record.absolute().parent.is_dir():
        raise UsageError(f"--record {args.record}: there is no folder {args.record.absolute().parent}")


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _recording(args: argparse.Namespace, setup: Setup, model: str) -> Recording:
    """Around the run that is recorded, where it is wanted here or by who called the command (`kvtape record`)."""
    from replayer.parity.recording import Recording

    layout = setup.layout
    window = "see everything too" if layout.window is None else f"a window of {layout.window} tokens"
    how = (
        f"kvtape parity, {model}: continuous batching, prefix reuse and preemption on pools of {setup.small_tokens} tokens, pages of "
        f"{layout.page_size}; one layer in three in pool full, the others ({window}) in pool window"
    )
    recording = Recording(args.record, model, how, args.plugins)
    recording.require_nobody_records()  # said before the first run
    return recording


def _about(args: argparse.Namespace, device: str, dtype: Any, setup: Setup, model: str) -> About:
    from replayer.parity.model import device_name, versions
    from replayer.parity.report import About

    name = str(dtype).removeprefix("torch.")
    return About(model, name, device, device_name(device), args.prompts, setup, args.plant, versions())


def _progress(total: int) -> Any:
    """A context manager that gives the function to be told of finished requests; shows a bar on a terminal."""
    if not sys.stderr.isatty():
        ignore: Callable[[int], None] = lambda finished: None  # noqa: E731
        return nullcontext(ignore)
    from contextlib import contextmanager

    from tqdm import tqdm

    @contextmanager
    def bar() -> Any:
        with tqdm(total=total, unit="request", leave=False) as shown:
            yield shown.update

    return bar()


def _print(
    as_json: bool,
    about: About,
    results: list[Result],
    took: Took,
    interrupted: bool,
    recording: Recording,
) -> None:
    from replayer.parity.report import draw, figures

    path = recording.path
    if as_json:
        found = figures(about, results, took, interrupted=interrupted)
        print(json.dumps({**found, "recorded": None if path is None else str(path)}, indent=1))
        return
    print_rich(lambda console: draw(console, about, results, took, interrupted=interrupted))
    if path is not None:
        print(f"  recorded: {path}")
