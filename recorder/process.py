"""Recording in this process: which engine is hooked, which files are open, and how it begins and ends.

There is one `Recorder` a process. Nothing it does raises into the engine: a failure of ours takes the hooks away, is logged once, and the
files say why they end.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .hooks import Hooks
from .session import QUEUE_SHARE, Session
from .settings import SUFFIX, Settings
from .staging import Staging
from .trace.writer import partial_path

if TYPE_CHECKING:
    from .engines.registry import Engine
    from .trace import Header

log = logging.getLogger("kvtape")

GRACE_WAITS: Final = 200
"""Waits of half a millisecond for a writer that has an event in its hands and nothing in its queue."""


class ThreadState:
    """Where a thread is: inside how many recorded calls, the answers events gave in the outermost one, and for which request."""

    __slots__ = ("asked", "depth", "pool", "request")

    def __init__(self) -> None:
        self.depth = 0
        self.asked: list[tuple[int, bool]] | None = None
        self.request: str | None = None
        self.pool: Any = None  # what a forward is being announced to


class Calls(threading.local):
    """The state of the thread that asks: `calls.here`. One look-up, then plain attributes."""

    def __init__(self) -> None:
        self.here = ThreadState()


class Recorder:
    """Hooks and open files of this process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.hooks = Hooks()
        self.calls = Calls()
        self.staging = Staging(settings.memory // QUEUE_SHARE, self._may_wait)
        self.sessions: list[Session] = []
        self.engines: list[Engine] = []
        self.active = True
        self.failure = ""
        self._on_stop: list[Any] = []
        self._lock = threading.Lock()

    def attach(self, engine: Engine) -> None:
        """Hook an engine. Of one that cannot be hooked nothing is left, and the others go on. Raises what it raised."""
        before = len(self.hooks)
        try:
            engine.attach(self)
        except BaseException:
            self.hooks.undo(before)
            raise
        self.engines.append(engine)

    def open(self, engine: str, rank: str, header: Header) -> Session:
        """Begin a file. The second one of a process (another buffer) has a number in its name."""
        header.extra.setdefault("run", self.settings.run)
        header.extra.setdefault("pid", os.getpid())
        header.settings.setdefault("state_every", self.settings.state_every)
        header.drop_policy = self.settings.on_overflow
        header.model = self.settings.model or header.model
        header.provenance.kind = self.settings.provenance or header.provenance.kind
        header.provenance.how = self.settings.how or header.provenance.how
        header.provenance.source = self.settings.source or header.provenance.source
        header.provenance.hardware = (
            self.settings.hardware or header.provenance.hardware or hardware(header.device)
        )
        with self._lock:
            number = len(self.sessions)
            rank = f"{rank}-{number}" if number else rank
            path = free_name(self.settings.path_for(engine, rank, os.getpid()))
            session = Session(path, header, self.settings, self.staging, self.fail)
            self.sessions.append(session)
        log.info("kvtape records to %s", path)
        return session

    def _may_wait(self, waits: int) -> bool:
        """Whether the engine's thread waits for memory: it has been told to, and there is a writer who will give some back.

        A writer whose queue is empty has at most the event in its hands; what then still holds memory is the event that is being
        captured itself, and waiting would never end.
        """
        if self.settings.on_overflow != "block":
            return False
        writing = [session for session in self.sessions if session.is_writing]
        return any(session.queue for session in writing) or (bool(writing) and waits < GRACE_WAITS)

    def on_stop(self, action: Any) -> None:
        """Call `action()` when recording ends: an engine module takes its marks off the engine's objects."""
        self._on_stop.append(action)

    def fail(self, problem: BaseException | str) -> None:
        """End recording because of a fault of ours. Never raises; says it once."""
        try:
            with self._lock:
                if self.failure:
                    return
                self.failure = _sentence(problem)
            log.error("kvtape: recording has ended, the engine goes on: %s", self.failure)
            self._end(f"recording ended early: {self.failure}", wait=False)
        except Exception:  # a logger that raises, a hook that cannot be given back: the wrappers pass calls through all the same
            self.active = False

    def stop(self, reason: str = "") -> None:
        """End recording: no hook is left, every file is closed. Can be called twice."""
        self._end(reason, wait=True)

    def _end(self, reason: str, wait: bool) -> None:
        self.active = False
        self.hooks.restore()
        for session in list(self.sessions):
            session.close(reason, seconds=10.0 if wait else 0.0)
        self.forget()

    def forget(self) -> None:
        """Take the marks off the engine's objects."""
        while self._on_stop:
            self._on_stop.pop()()


def free_name(path: Path) -> Path:
    """`path`, or with a number behind the pid where a file is there: process numbers come again, in containers at every start."""
    stem = path.name.removesuffix(SUFFIX)
    number = 1
    while path.exists() or partial_path(path).exists():
        number += 1
        path = path.with_name(f"{stem}-{number}{SUFFIX}")
    return path


def hardware(device: str) -> str:
    """The card's name for a CUDA device, else "a CPU"."""
    if not device.startswith("cuda"):
        return "a CPU" if device == "cpu" else device
    import torch

    return torch.cuda.get_device_name(torch.device(device))


def _sentence(problem: BaseException | str) -> str:
    if isinstance(problem, str):
        return problem
    where = ""
    if problem.__traceback__ is not None:
        last = problem.__traceback__
        while last.tb_next is not None:
            last = last.tb_next
        where = f" ({os.path.basename(last.tb_frame.f_code.co_filename)}:{last.tb_lineno})"
    return f"{type(problem).__name__}: {problem}{where}"


_recorder: Recorder | None = None
_exit_is_watched = False


def current() -> Recorder | None:
    """The recorder of this process, None when nothing is recorded."""
    return _recorder


def begin(settings: Settings) -> Recorder:
    """The recorder of this process, made at the first call; one that has ended is replaced by a new one."""
    global _recorder, _exit_is_watched
    if _recorder is None or not _recorder.active:
        _recorder = Recorder(settings)
        if not _exit_is_watched:
            _exit_is_watched = True
            atexit.register(_at_exit)
            _watch_multiprocessing(None)
            # A forked child of `multiprocessing` forgets its parent's exit functions, then runs these.
            util.register_after_fork(Hooks, _watch_multiprocessing)
            os.register_at_fork(after_in_child=_in_forked_child)
    return _recorder


def end(reason: str = "") -> None:
    """Stop recording in this process, if it does."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.stop(reason)


def _at_exit() -> None:
    try:
        end()
    except Exception as problem:  # an interpreter that is going away must not end with our traceback
        log.debug("closing the recording failed: %s", problem)


def _watch_multiprocessing(_: object) -> None:
    """A child of `multiprocessing` that was forked leaves without `atexit`; its own exit functions are run."""
    util.Finalize(None, _at_exit, exitpriority=100)


def _in_forked_child() -> None:
    """The writer thread did not come along and the file is the parent's. The engine's plugins are not asked again in a forked child, so
    the engines are hooked anew here: what it makes from now on goes to a file of its own."""
    global _recorder
    parent, _recorder = _recorder, None
    if parent is None:
        return
    try:
        was_active, parent.active = parent.active, False
        for session in parent.sessions:
            session.active = False
        parent.hooks.after_fork()
        parent.hooks.restore()
        parent.forget()
        if was_active:
            _recorder = Recorder(parent.settings)
            for engine in parent.engines:
                _recorder.attach(engine)
    except Exception as problem:
        log.error("kvtape: a forked process is not recorded: %s", problem)
