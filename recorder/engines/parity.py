"""The engine of `kvtape parity`: SGLang's hooks on kvtape's own allocator classes, and marks for what happens to requests.

It is entered as `docs/recording.md` has it for a fork whose allocator has SGLang's class and method names. What it serves is a check of
several runs, of which it calls its plugins for one; with that one recording ends.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from recorder import process
from recorder.engines.blocks import put_mark
from recorder.engines.sglang import SglangHooks
from recorder.engines.sglang_header import Engine
from recorder.engines.sglang_tape import NO_RESULT, write_call
from recorder.trace import NONE, EventKind, MarkCode

if TYPE_CHECKING:
    from recorder.process import Recorder

NAME: Final = "kvtape parity"
HOST: Final = "kvtape"
#: All so far: engine and recorder come in one distribution.
VERSIONS: Final = ("0",)

#: Modules of the engine, imported when it is hooked and not before, as those of other engines are.
PACKAGE: Final = "replayer"
ALLOCATORS: Final = "allocator"
NOTICES: Final = "replayer.parity.notices"
NUMBER: Final = "_kvtape_number"
"""Attribute of an event that the hooks have numbered (`recorder.engines.sglang`)."""


def installed_version() -> str | None:
    """Version of the kvtape whose engine runs here."""
    return str(importlib.import_module(PACKAGE).__version__)


def attach(recorder: Recorder) -> None:
    """Wrap the allocators, which place pages where SGLang 0.5.23 does, and the engine's notices."""
    engine = Engine(NAME, installed_version() or "", same_placement=True)
    SglangHooks(recorder, engine).attach(importlib.import_module(ALLOCATORS))
    NoticeHooks(recorder).attach(importlib.import_module(NOTICES).Notices)


class NoticeHooks:
    """Makes the wrappers. One instance a recording."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def attach(self, notices: type) -> None:
        """
        Raises:
            MissingFunction: the engine does not tell something without which a trace of it would be wrong.
        """
        require = self._recorder.hooks.require
        require(notices, "run_begins", self._run_begins)
        require(notices, "for_request", self._for_request)
        require(notices, "arrived", self._marks(MarkCode.REQUEST_ARRIVE))
        require(notices, "preempted", self._marks(MarkCode.PREEMPT))
        require(notices, "finished", self._marks(MarkCode.REQUEST_FINISH))
        require(notices, "forward_done", self._forward_done)

    def _run_begins(self, original: Any) -> Any:
        recorder = self._recorder

        def ends(reason: str) -> tuple[list[Path], str]:
            process.end(reason)
            files = [session.path for session in recorder.sessions]
            return files, recorder.failure or ("" if files else "no allocator was called")

        def run_begins(notices: Any, model: str, how: str) -> Any:
            original(notices, model, how)
            settings = recorder.settings
            recorder.settings = replace(
                settings, model=settings.model or model, how=settings.how or how,
                provenance=settings.provenance or "recorded",
            )  # fmt: skip
            # Not a wrapper: hooks are taken away when recording fails, and that has to be told all the same.
            return ends

        return run_begins

    def _for_request(self, original: Any) -> Any:
        calls = self._recorder.calls

        @contextmanager
        def for_request(notices: Any, name: str) -> Iterator[None]:
            here = calls.here
            before, here.request = here.request, name
            try:
                with original(notices, name):
                    yield
            finally:
                here.request = before

        return for_request

    def _marks(self, code: MarkCode) -> Callable[[Any], Any]:
        recorder = self._recorder

        def make(original: Any) -> Any:
            def marked(notices: Any, name: str, tokens: int) -> None:
                original(notices, name, tokens)
                try:
                    for session in recorder.sessions:
                        put_mark(session, code, tokens, name)
                except Exception as problem:
                    recorder.fail(problem)

            return marked

        return make

    def _forward_done(self, original: Any) -> Any:
        recorder = self._recorder

        def forward_done(notices: Any, event: Any) -> None:
            original(notices, event)
            number = getattr(event, NUMBER, None)
            if number is None or not recorder.active:
                return
            arguments = (number, NONE, None, None, None)
            kind = int(EventKind.FORWARD_DONE)
            try:
                for session in recorder.sessions:
                    if session.has_room():
                        session.queue.append(
                            (write_call, session.clock_ns(), kind, NONE, 0, None, arguments, NO_RESULT, None, None)
                        )  # fmt: skip
            except Exception as problem:
                recorder.fail(problem)

        return forward_done
