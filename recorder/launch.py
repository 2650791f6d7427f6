"""Runs a command so that the engine in it is recorded: environment, signals, exit status, and the files it leaves."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from . import settings as names
from .errors import CommandNotExecutable, CommandNotStarted
from .trace import EmptyTrace, TraceError, TraceReader, finish_partial

AUTOSTART: Final = Path(__file__).with_name("autostart")
PARTIAL: Final = ".partial"
LEFT_OPEN: Final = (
    "the recorded process ended without closing the file, because it was killed or could not write any more; what came after the last "
    "chunk is missing"
)
FROM_TERMINAL: Final = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
FORWARDED: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def environment_for(target: str, options: dict[str, str]) -> dict[str, str]:
    """The environment of a recorded command: ours, the settings, and the folder whose `sitecustomize` hooks engines without plugins."""
    environment = {**os.environ, **options}
    environment[names.RECORD] = names.absolute(target)
    environment.setdefault(names.RUN, secrets.token_hex(8))
    environment.setdefault(names.SALT, secrets.token_hex(16))
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{AUTOSTART}{os.pathsep}{path}" if path else str(AUTOSTART)
    return environment


def run(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run `command` on this terminal and return its exit status, 128 + n where signal n ended it.

    Ctrl-C reaches the command from the terminal and is left to it; signals that are sent to us are passed on.

    Raises:
        CommandNotStarted: there is no such program, or it cannot be run.
        CommandNotExecutable: it is there and may not be run.
    """
    on_terminal = _in_foreground()
    try:
        process = subprocess.Popen(command, env=environment)
    except PermissionError:
        raise CommandNotExecutable(f"{command[0]} may not be executed") from None
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
        raise CommandNotStarted(f"{command[0]} cannot be started: {reason}") from None
    with _signals_go_to(process, on_terminal):
        status = process.wait()
    return status if status >= 0 else 128 - status


def _in_foreground() -> bool:
    """Whether a terminal sends its signals (Ctrl-C, a hang-up) to this process and its children at once."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


@contextlib.contextmanager
def _signals_go_to(process: subprocess.Popen[bytes], on_terminal: bool) -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)

    handlers: dict[signal.Signals, object] = {}
    for number in FORWARDED:
        handlers[number] = signal.signal(number, forward)
    for number in FROM_TERMINAL:
        # The terminal sends these to the command as well; which of us dies of them is the command's decision.
        handlers[number] = signal.signal(number, signal.SIG_IGN if on_terminal else forward)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


def files_of(target: str, before: set[Path], run: str) -> list[Path]:
    """Trace files of a run that were not there before, in the order of their names. Another run may write beside this one."""
    return sorted(path for path in existing(target) - before if _is_of(path, run))


def _is_of(path: Path, run: str) -> bool:
    try:
        with TraceReader(path) as reader:
            return bool(reader.header.extra.get("run") == run)
    except TraceError:
        return True  # it will be said what is wrong with it


def existing(target: str) -> set[Path]:
    """Every trace file, finished or not, that a recording to `target` could have written."""
    path = Path(target)
    if target.endswith(os.sep) or path.is_dir():
        folder, stem = path, ""
    else:
        folder, stem = path.parent, path.name.removesuffix(names.SUFFIX) + "."
    endings = (names.SUFFIX, names.SUFFIX + PARTIAL)
    try:
        entries = list(folder.iterdir())
    except OSError:
        return set()
    return {entry for entry in entries if entry.name.startswith(stem) and entry.name.endswith(endings)}


def close_what_was_left(files: list[Path]) -> tuple[list[Path], list[str]]:
    """Close the `.partial` files of processes that were killed.

    Returns:
        (the files as they are named now, a sentence for each that could not be closed or held nothing).
    """
    closed: list[Path] = []
    notes: list[str] = []
    for path in files:
        if not path.name.endswith(PARTIAL):
            closed.append(path)
            continue
        try:
            closed.append(finish_partial(path, LEFT_OPEN))
        except EmptyTrace:
            path.unlink(missing_ok=True)
            notes.append(f"{path.name}: the process ended before its first events were written")
        except TraceError as problem:
            notes.append(str(problem))
    return closed, notes
