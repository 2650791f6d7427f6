"""The engine as kvtape's recorder sees it: hooks on the allocator's classes, and marks for what happens to requests.

It is entered as `docs/recording.md` has it for a fork whose allocator has SGLang's class and method names.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import allocator
from recorder import process
from recorder.engines.blocks import put_mark
from recorder.engines.sglang import SglangHooks
from recorder.engines.sglang_header import Engine as EngineName
from recorder.engines.sglang_tape import NO_RESULT, write_call
from recorder.settings import Settings, absolute
from recorder.trace import NONE, EventKind, MarkCode
from replayer import __version__
from replayer.errors import ReplayError, UsageError

NAME = "kvtape parity"
NUMBER = "_kvtape_number"
"""Attribute of an event that the hooks have numbered (`recorder.engines.sglang`)."""


class NotRecorded(ReplayError):
    """The run went through and its recording did not."""


class _Hook:
    """What `recorder.process.Recorder.attach` takes; see `recorder.engines.registry.Engine`."""

    NAME: str = NAME
    HOST: str = "kvtape"
    VERSIONS: Sequence[str] = (__version__,)

    def installed_version(self) -> str | None:
        return __version__

    def attach(self, recorder: process.Recorder) -> None:
        """Allocators that are made from now on are recorded; they place pages where SGLang 0.5.23 does."""
        SglangHooks(recorder, EngineName(NAME, __version__, same_placement=True)).attach(allocator)


class Recording:
    """A context manager around one run; also the engine's `Observer`. ``path`` is the file, once there is one."""

    def __init__(self, target: Path, model: str, how: str) -> None:
        self.path: Path | None = None
        self._settings = Settings(
            target=absolute(str(target)),
            run=secrets.token_hex(8),
            salt=secrets.token_bytes(16),
            on_overflow="block",
            provenance="recorded",
            how=how,
            model=model,
        )
        self._recorder: process.Recorder | None = None

    def __enter__(self) -> Recording:
        if (running := process.current()) is not None and running.active:
            raise UsageError(
                "--record: this process is being recorded already (kvtape record, KVTAPE_RECORD)"
            )
        self._recorder = process.begin(self._settings)
        self._recorder.attach(_Hook())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        recorder = self._recorder
        assert recorder is not None
        process.end("" if error is None else f"the run ended early: {type(error).__name__}")
        if recorder.sessions:
            self.path = recorder.sessions[0].path
        if error is None and (recorder.failure or self.path is None):
            raise NotRecorded(
                f"nothing usable was recorded to {self._settings.target}: "
                f"{recorder.failure or 'no allocator was called'}"
            )

    # -- the engine's observer

    @contextmanager
    def for_request(self, name: str) -> Iterator[None]:
        """Calls made inside are this request's."""
        assert self._recorder is not None
        here = self._recorder.calls.here
        here.request = name
        try:
            yield
        finally:
            here.request = None

    def arrived(self, name: str, tokens: int) -> None:
        self._mark(MarkCode.REQUEST_ARRIVE, name, tokens)

    def preempted(self, name: str, tokens: int) -> None:
        self._mark(MarkCode.PREEMPT, name, tokens)

    def finished(self, name: str, tokens: int) -> None:
        self._mark(MarkCode.REQUEST_FINISH, name, tokens)

    def forward_done(self, event: Any) -> None:
        """The engine has waited for a forward: what it reads and writes is free again, from here on and not from the next query on."""
        assert self._recorder is not None
        number = getattr(event, NUMBER, None)
        for session in self._recorder.sessions:
            if number is not None and session.has_room():
                arguments = (number, NONE, None, None, None)
                session.queue.append(
                    (
                        write_call,
                        session.clock_ns(),
                        int(EventKind.FORWARD_DONE),
                        NONE,
                        0,
                        None,
                        arguments,
                        NO_RESULT,
                        None,
                        None,
                    )
                )

    def _mark(self, code: MarkCode, name: str, tokens: int) -> None:
        assert self._recorder is not None
        for session in self._recorder.sessions:
            put_mark(session, code, tokens, name)
