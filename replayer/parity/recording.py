"""The run of a check that a recorder may have, if there is one: plugins are called before it, and it is asked for its file afterwards.

A recorder is told what to do by its environment (``KVTAPE_RECORD``, docs/recording.md), whoever has set it. Nothing of it is imported
here: plugins are named by the command line, which knows both packages.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from replayer.errors import ReplayError, UsageError
from replayer.parity.notices import Notices

RECORD: Final = "KVTAPE_RECORD"
ON_OVERFLOW: Final = "KVTAPE_ON_OVERFLOW"
PREFIX: Final = "KVTAPE_"


class NotRecorded(ReplayError):
    """The run went through and its recording did not."""


class Recording:
    """A context manager around one run.

    Args:
        target: record to this name, and fail if that does not work; None: what the environment says, if it says anything.
        model, how: for the file's header.
        plugins: ``module:function`` of what listens, called without arguments before the run.

    Attributes:
        path: the file, once there is one.
    """

    def __init__(self, target: Path | None, model: str, how: str, plugins: Sequence[str]) -> None:
        self.path: Path | None = None
        self._target, self._model, self._how, self._plugins = target, model, how, plugins
        self._before: dict[str, str] = {}

    def __enter__(self) -> Recording:
        self.require_nobody_records()
        self._before = _settings()
        if self._target is not None:
            os.environ[RECORD] = str(self._target.absolute())
            # Nobody waits for this engine, and a whole file is what is wanted.
            os.environ.setdefault(ON_OVERFLOW, "block")
        try:
            for plugin in self._plugins:
                module, _, function = plugin.partition(":")
                getattr(importlib.import_module(module), function)()
        except BaseException:
            self._restore()
            raise
        self._ends = Notices().run_begins(self._model, self._how)
        return self

    def require_nobody_records(self) -> None:
        """
        Raises:
            UsageError: ``target`` is given, and this process is being recorded as it is.
        """
        if self._target is not None and os.environ.get(RECORD):
            raise UsageError(
                "--record: this process is being recorded already (kvtape record, KVTAPE_RECORD)"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        reason = "" if error is None else f"the run ended early: {type(error).__name__}"
        try:
            files, failure = self._ends(reason)
        finally:
            self._restore()
        self.path = files[0] if files else None
        if self._target is not None and error is None and (failure or not files):
            raise NotRecorded(
                f"nothing usable was recorded to {self._target}: {failure or 'no recorder was there'}"
            )

    def _restore(self) -> None:
        """What a recorder leaves in the environment for an engine's children is not for the next run."""
        for name in _settings():
            del os.environ[name]
        os.environ.update(self._before)


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
