"""Finds what can be recorded: our own engines and those other packages declare in the entry point group `kvtape.engines`.

An entry point names an object (a module will do) with

    NAME       the engine, as it stands in file names and headers
    HOST       whose plugin system loads it: "sglang", "vllm", "transformers", "kvtape"
    VERSIONS   versions of the host it was tested with; "0.32" stands for every 0.32.x
    installed_version() -> str | None
    attach(recorder) -> None            wraps the engine's functions through `recorder.hooks`

so that a fork whose allocator is another one is recorded without a change here: see docs/recording.md.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final, Protocol, cast

if TYPE_CHECKING:
    from recorder.process import Recorder

log = logging.getLogger("kvtape")

GROUP: Final = "kvtape.engines"
OWN: Final = {
    "sglang": "recorder.engines.sglang",
    "vllm": "recorder.engines.vllm",
    "transformers": "recorder.engines.transformers",
    "kvtape": "recorder.engines.parity",
}


class Engine(Protocol):
    """What an entry point of the group names."""

    NAME: str
    HOST: str
    VERSIONS: Sequence[str]

    def installed_version(self) -> str | None: ...

    def attach(self, recorder: Recorder) -> None: ...


class UnknownVersion(Exception):
    """The engine's version is none this recorder was tested with: recording refuses, the engine runs on unrecorded."""

    exit_code = 2


def engines(host: str) -> list[Engine]:
    """Engines that the plugin system of `host` loads: ours first, then other packages', in the order of their names."""
    found = [cast(Engine, importlib.import_module(OWN[host]))] if host in OWN else []
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        if point.value in OWN.values():
            continue
        try:
            engine = cast(Engine, point.load())
            if host == engine.HOST:
                missing = [
                    name
                    for name in ("NAME", "VERSIONS", "installed_version", "attach")
                    if not hasattr(engine, name)
                ]
                if missing:
                    raise TypeError(f"it has no {', '.join(missing)}")
                found.append(engine)
        except (Exception, SystemExit) as problem:
            log.error("kvtape: the engine %s (%s) does not load: %s", point.name, point.value, problem)
    return found


def require_known_version(engine: Engine) -> str:
    """The installed version. Raises UnknownVersion with the versions that are known."""
    try:
        version = engine.installed_version()
    except Exception as problem:
        raise UnknownVersion(
            f"the version of {engine.NAME} cannot be told ({problem}): nothing is recorded"
        ) from None
    if version is not None and matches(version, engine.VERSIONS):
        return version
    raise UnknownVersion(
        f"{engine.NAME} {version or '(of unknown version)'} has not been tested with this kvtape, which knows "
        f"{', '.join(engine.VERSIONS)}: nothing is recorded"
    )


def matches(version: str, known: Sequence[str]) -> bool:
    """Whether `version`, without its local part, is one of `known` or a later release of one."""
    plain = version.split("+")[0]
    return any(plain == one or plain.startswith(one + ".") for one in known)
