"""Errors of recording that reach whoever typed the command."""

from __future__ import annotations


class RecordError(Exception):
    """Base of the errors below."""

    exit_code = 70


class CommandNotStarted(RecordError):
    """The command to record cannot be run; 127 is what a shell answers."""

    exit_code = 127


class CommandNotExecutable(RecordError):
    """The command is there and may not be run; 126 is what a shell answers."""

    exit_code = 126
