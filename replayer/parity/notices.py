"""What the engine tells whoever listens, beside its calls on the allocators: runs, requests and the ends of forwards.

Nothing is done here. A recorder wraps these methods while it records, as it wraps functions of other engines
(`recorder.engines.parity`), so that neither package imports the other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

#: Called with why the run ended early, empty if it did not; answers the files it was recorded to, and why they are not what they should be.
RunEnd = Callable[[str], tuple[list[Path], str]]


class Notices:
    """All instances are alike: the class is what is listened to."""

    def run_begins(self, model: str, how: str) -> RunEnd:
        """Pools that are made from now on serve a run of ``model``; ``how`` is a sentence on the engine and its settings.

        Returns:
            What is to be called when the run is over. Here nobody listens: no file was written, and nothing went wrong.
        """
        return lambda reason: ([], "")

    def for_request(self, name: str) -> AbstractContextManager[None]:
        """Calls made inside are this request's."""
        return nullcontext()

    def arrived(self, name: str, tokens: int) -> None:
        """A request joins for the first time, with so many tokens of prompt."""

    def preempted(self, name: str, tokens: int) -> None:
        """A running request is thrown out, with so many tokens computed."""

    def finished(self, name: str, tokens: int) -> None:
        """A request ends, with so many tokens computed."""

    def forward_done(self, event: Any) -> None:
        """The engine has waited for a forward: what it reads and writes is free again, from here on and not from the next query on."""
