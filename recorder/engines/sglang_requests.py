"""For which request SGLang frees memory, and marks for requests that finish or are retracted."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from recorder.engines.blocks import put_mark
from recorder.engines.sglang_tape import Tape
from recorder.trace import MarkCode

if TYPE_CHECKING:
    from recorder.process import Recorder

CACHE_MODULE: Final = "sglang.srt.mem_cache.unified_radix_cache"
REQUEST_MODULE: Final = "sglang.srt.managers.schedule_batch"


class RequestHooks:
    """Hooks on the radix cache and on requests. A version without these names is recorded without them."""

    def __init__(self, recorder: Recorder, tapes: Iterable[Tape]) -> None:
        self._recorder = recorder
        self._calls = recorder.calls
        self._tapes = tapes

    def attach(self) -> None:
        """Wrap what is there."""
        hooks = self._recorder.hooks
        cache = find(CACHE_MODULE, "UnifiedRadixCache")
        if cache is not None:
            for name, make in (
                ("claim_kv_row", self._release_begins),
                ("on_release", self._release_ends),
                ("checkpoint", self._for_request),
            ):
                owner = definer(cache, name)
                if owner is not None:
                    hooks.wrap(owner, name, make)
        request = find(REQUEST_MODULE, "Req")
        if request is not None:
            hooks.wrap(request, "reset_for_retract", self._retracted)

    def _release_begins(self, original: Any) -> Any:
        calls = self._calls

        def claim_kv_row(cache: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
            here = calls.here
            here.request = getattr(req, "rid", None)
            kept = True
            try:
                kept = original(cache, req, *args, **kwargs)
            finally:
                if kept:  # somebody else keeps the row, or it failed: `on_release` does not come
                    here.request = None
            return kept

        return claim_kv_row

    def _release_ends(self, original: Any) -> Any:
        calls = self._calls

        def on_release(cache: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
            calls.here.request = None
            self._mark(MarkCode.REQUEST_FINISH, req, only_if_finished=True)
            return original(cache, req, *args, **kwargs)

        return on_release

    def _for_request(self, original: Any) -> Any:
        calls = self._calls

        def checkpoint(cache: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
            here = calls.here
            before, here.request = here.request, getattr(req, "rid", None)
            try:
                return original(cache, req, *args, **kwargs)
            finally:
                here.request = before

        return checkpoint

    def _retracted(self, original: Any) -> Any:
        def reset_for_retract(req: Any, *args: Any, **kwargs: Any) -> Any:
            self._mark(MarkCode.PREEMPT, req)
            return original(req, *args, **kwargs)

        return reset_for_retract

    def _mark(self, code: MarkCode, req: Any, *, only_if_finished: bool = False) -> None:
        """A mark in every file of this process (one, but for draft models with a buffer of their own)."""
        if not self._recorder.active:
            return
        try:
            if only_if_finished and not req.finished():
                return
            tokens = len(req.origin_input_ids) + len(req.output_ids)
            for tape in self._tapes:
                if tape.session is not None:
                    put_mark(tape.session, code, tokens, req.rid)
        except Exception as problem:
            self._recorder.fail(problem)


def definer(cls: Any, name: str) -> Any:
    """The class of `cls`'s bases that defines `name`, None if none does."""
    for base in cls.__mro__:
        if name in vars(base):
            return base
    return None


def find(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
