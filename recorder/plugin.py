"""Entry points that serving engines call in each of their processes. They return at once unless recording is asked for, and never raise."""

from __future__ import annotations

from .settings import wanted


def sglang() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    if wanted():
        _start("sglang")


def vllm() -> None:
    """Entry point of the group `vllm.general_plugins`."""
    if wanted():
        _start("vllm")


def transformers() -> None:
    """Hook transformers' continuous batching, which has no plugin system: `kvtape record` arranges for this call, or a script makes it."""
    if wanted():
        _start("transformers")


def parity() -> None:
    """Called by `kvtape parity` before the one of its runs that can be recorded."""
    if wanted():
        _start("kvtape")


_started: set[str] = set()


def _start(host: str) -> None:
    """Hook every engine of `host` that has not been hooked in this process. Engines may call their plugins more than once."""
    import logging
    import os
    from functools import partial

    log = logging.getLogger("kvtape")
    try:
        from .engines.registry import UnknownVersion, engines, require_known_version
        from .process import begin, current, end
        from .settings import RUN, SALT, BadSetting, read_settings

        recorder = current()
        if recorder is not None and recorder.active and host in _started:
            return
        try:
            settings = read_settings()
        except BadSetting as problem:
            log.error("kvtape: nothing is recorded: %s", problem)
            return
        # Children that are started from here belong to the same run, and hash request ids the same way.
        os.environ.setdefault(RUN, settings.run)
        os.environ.setdefault(SALT, settings.salt.hex())
        _started.add(host)
        for engine in engines(host):
            try:
                require_known_version(engine)
            except UnknownVersion as problem:
                say = partial(log.error, "kvtape: %s", problem)
                refuse = getattr(engine, "refuse_when_used", None)
                if refuse is None or not refuse(say):
                    say()
                continue
            recorder = begin(settings)
            try:
                recorder.attach(engine)
            except (Exception, SystemExit) as problem:
                log.error(
                    "kvtape: %s cannot be recorded: %s: %s", engine.NAME, type(problem).__name__, problem
                )
        recorder = current()
        if recorder is not None and not recorder.engines:
            end()
    except (Exception, SystemExit) as problem:
        log.error("kvtape: recording could not begin, the engine goes on: %s", problem)
