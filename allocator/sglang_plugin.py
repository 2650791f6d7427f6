"""Puts kvtape's allocator in the place of SGLang's: ``KVTAPE_ALLOCATOR=device`` in the environment of the server, and nothing else.

SGLang calls an entry point of its group ``sglang.srt.plugins`` in each of its processes, before any pool is made, and that calls `install`.
What cannot be done is said in one line, and SGLang goes on with its own class: that one is always a right answer, and servers whose
variable has a slip, or whose SGLang was brought up to date, must not be down for it. Which allocator is in use is in the log (a line for
each sub-pool) and in the header of a recording.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from allocator.errors import ConfigurationError
from allocator.flush_ops import flush_ops_class
from allocator.lookup import STRATEGIES
from allocator.sglang_classes import SglangFloatMultiEndedAllocator, SglangMultiEndedAllocator
from allocator.sglang_composites import composites_in_place

log = logging.getLogger("kvtape")

VARIABLE: Final = "KVTAPE_ALLOCATOR"
#: Releases whose every use of the two classes has been looked at. A local part ("+cu129") is the same release, a post-release is not.
VERSIONS: Final = ("0.5.23",)

MODULE: Final = "sglang.srt.mem_cache.allocator.unified_sub_pool"
#: Have the classes' names from `MODULE` as their own. They are imported first, so that none of them takes the old ones later.
USERS: Final = (
    "sglang.srt.mem_cache.allocator.unified_hybrid_swa",
    "sglang.srt.mem_cache.allocator.unified_mamba",
)
END: Final = "MultiEndedAllocator"
FLOAT: Final = "FloatMultiEndedAllocator"
#: Attribute of `MODULE`, if somebody left it there: a list of functions to be called with the module once its classes are others. A
#: recorder that began before wrapped the methods of classes that nobody uses any more.
LISTENERS: Final = "_kvtape_on_replaced"


def install(chosen: str) -> None:
    """Have SGLang's pools allocated with the strategy ``chosen``, or say why not. Does nothing the second time; never raises."""
    if _in_place:
        return
    try:
        reason = refusal(chosen)
        if reason:
            log.error("kvtape: SGLang goes on with its own allocator: %s", reason)
            return
        put_in_place(chosen)
    except Exception as problem:
        remove()
        log.error(
            "kvtape: SGLang goes on with its own allocator: kvtape's cannot stand in its place: %s: %s",
            type(problem).__name__,
            problem,
        )
        return
    log.info(
        "kvtape: %s=%s: SGLang's unified memory pool (--enable-unified-memory) is allocated by kvtape, sub-pools and composites",
        VARIABLE,
        chosen,
    )


def refusal(chosen: str) -> str:
    """Why ``chosen`` cannot be had here, "" if it can."""
    if chosen not in STRATEGIES:
        return f"{VARIABLE} is {chosen!r}; it may be {', '.join(sorted(STRATEGIES))}"
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        installed = "of unknown version"
    if installed.split("+")[0] not in VERSIONS:
        return f"{VARIABLE} is for SGLang {', '.join(VERSIONS)}, and this is SGLang {installed}"
    try:
        flush_ops_class("cpu")
    except ConfigurationError as problem:
        return str(problem)
    return ""


#: What was replaced, and by what: owner, name, the original, ours.
_in_place: list[tuple[Any, str, Any, Any]] = []


def put_in_place(strategy: str) -> None:
    """Replace the two classes wherever SGLang has bound them, whatever version it is.

    Raises:
        ImportError, AttributeError: the modules or the classes are not where they are looked for; see `remove`.
    """
    module = importlib.import_module(MODULE)
    for name in USERS:
        importlib.import_module(name)
    ours: dict[str, type[Any]] = {END: SglangMultiEndedAllocator, FLOAT: SglangFloatMultiEndedAllocator}
    theirs = {name: getattr(module, name) for name in ours}
    environment = importlib.import_module("sglang.srt.environ").envs
    kernels = importlib.import_module("sglang.kernels.ops.memory.virtual_slot")
    max_pages = int(environment.SGLANG_COMPACTION_MAX_PAGES_PER_MOVE.get())
    if max_pages < 1:
        raise ValueError(f"SGLANG_COMPACTION_MAX_PAGES_PER_MOVE is {max_pages}; it must be 1 or more")
    _replace(SglangMultiEndedAllocator, "chosen_strategy", strategy)
    _replace(SglangMultiEndedAllocator, "max_pages_per_move", max_pages)
    _replace(SglangMultiEndedAllocator, "translate_token_ids", staticmethod(kernels.translate_token_ids))
    in_place_of = {theirs[name]: ours[name] for name in ours} | dict(composites_in_place())
    for their_class, our_class in in_place_of.items():
        for owner, bound_as in _bound(their_class):
            _replace(owner, bound_as, our_class)
    for tell in list(getattr(module, LISTENERS, ())):
        tell(module)


def remove() -> None:
    """Give SGLang its classes back. Pools that were made meanwhile stay what they are."""
    while _in_place:
        owner, name, original, ours = _in_place.pop()
        if vars(owner).get(name) is ours:
            setattr(owner, name, original)


def _bound(their_class: type) -> Iterator[tuple[Any, str]]:
    """Every module of SGLang's, and every name in it, that stands for the class."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "sglang":
            for bound_as, value in list(getattr(module, "__dict__", {}).items()):
                if value is their_class:
                    yield module, bound_as


def _replace(owner: Any, name: str, ours: Any) -> None:
    _in_place.append((owner, name, vars(owner)[name], ours))
    setattr(owner, name, ours)
