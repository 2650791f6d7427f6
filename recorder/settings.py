"""What a recording process is told, through environment variables: they reach a server's child processes on their own."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

RECORD: Final = "KVTAPE_RECORD"
RUN: Final = "KVTAPE_RUN"
SALT: Final = "KVTAPE_SALT"
KEEP_REQUEST_IDS: Final = "KVTAPE_KEEP_REQUEST_IDS"
ON_OVERFLOW: Final = "KVTAPE_ON_OVERFLOW"
MEMORY: Final = "KVTAPE_MEMORY"
CHUNK_EVENTS: Final = "KVTAPE_CHUNK_EVENTS"
CHUNK_MS: Final = "KVTAPE_CHUNK_MS"
STATE_EVERY: Final = "KVTAPE_STATE_EVERY"
PROVENANCE: Final = "KVTAPE_PROVENANCE"
HOW: Final = "KVTAPE_HOW"
SOURCE: Final = "KVTAPE_SOURCE"
HARDWARE: Final = "KVTAPE_HARDWARE"
MODEL: Final = "KVTAPE_MODEL"

SUFFIX: Final = ".msgpack.zst"
OVERFLOW_POLICIES: Final = ("drop", "block")
MIN_MEMORY: Final = 4 << 20
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class BadSetting(Exception):
    """A variable or option that recording cannot work with: names it, what it holds, and what it may hold."""

    exit_code = 2


@dataclass(frozen=True)
class Settings:
    """Settings of one recording process. `memory` in bytes, `chunk_ms` in milliseconds, `state_every` in calls (0: no states);
    `provenance` "" is what the engine's hook says it is."""

    target: str
    run: str
    salt: bytes
    keep_request_ids: bool = False
    on_overflow: str = "drop"
    memory: int = 64 << 20
    chunk_events: int = 4096
    chunk_ms: int = 1000
    state_every: int = 1024
    provenance: str = ""
    how: str = ""
    source: str = ""
    hardware: str = ""
    model: str = ""

    def path_for(self, engine: str, rank: str, pid: int) -> Path:
        """The file of one recording process: `run.<rank>.<pid>.msgpack.zst` beside the name given, or
        `<engine>.<rank>.<pid>.msgpack.zst` in a folder."""
        target = Path(self.target)
        if self.target.endswith(os.sep) or target.is_dir():
            return target / f"{engine}.{rank}.{pid}{SUFFIX}"
        stem = target.name.removesuffix(SUFFIX)
        return target.with_name(f"{stem}.{rank}.{pid}{SUFFIX}")


def wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is to record at all."""
    return bool(environment.get(RECORD))


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings in `environment`, in which `KVTAPE_RECORD` is set.

    Raises:
        BadSetting: a variable holds what it may not.
    """
    provenance = environment.get(PROVENANCE, "")
    if provenance not in ("", "recorded", "driven"):
        raise BadSetting(f"{PROVENANCE} is {provenance!r}; a recording is 'recorded' or 'driven'")
    policy = environment.get(ON_OVERFLOW) or "drop"
    if policy not in OVERFLOW_POLICIES:
        raise BadSetting(f"{ON_OVERFLOW} is {policy!r}; it may be {' or '.join(OVERFLOW_POLICIES)}")
    return Settings(
        target=absolute(environment[RECORD]),
        run=_run(environment.get(RUN)),
        salt=_salt(environment.get(SALT)),
        keep_request_ids=environment.get(KEEP_REQUEST_IDS, "") not in ("", "0"),
        on_overflow=policy,
        memory=parse_bytes(environment.get(MEMORY) or "64M", MEMORY),
        chunk_events=_count(environment, CHUNK_EVENTS, 4096, 1, 65536),
        chunk_ms=_count(environment, CHUNK_MS, 1000, 10, 3_600_000),
        state_every=_count(environment, STATE_EVERY, 1024, 0, 1 << 40),
        provenance=provenance,
        how=environment.get(HOW, ""),
        source=environment.get(SOURCE, ""),
        hardware=environment.get(HARDWARE, ""),
        model=environment.get(MODEL, ""),
    )


def absolute(target: str) -> str:
    """`target` from the root, so that a process that changes its folder writes where it was told to; a folder's last `/` is kept."""
    return os.path.abspath(target) + (os.sep if target.endswith(os.sep) else "")


def parse_bytes(text: str, name: str) -> int:
    """`64M` as bytes. Raises BadSetting, also below the least that works."""
    match = re.fullmatch(r"([0-9]{1,15})([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise BadSetting(f"{name} is {text!r}; a size is a number of bytes, or one with K, M or G")
    size = int(match[1]) * _UNITS[match[2].upper()]
    if size < MIN_MEMORY:
        raise BadSetting(f"{name} is {text!r}; the recorder needs at least {MIN_MEMORY >> 20}M")
    return size


def _count(environment: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = environment.get(name)
    if not text:
        return default
    if not re.fullmatch(r"[0-9]{1,15}", text.strip()) or not low <= int(text) <= high:
        raise BadSetting(f"{name} is {text!r}; it may be {low} to {high}")
    return int(text)


def _run(text: str | None) -> str:
    if text and not re.fullmatch(r"[0-9a-fA-F]{1,64}", text):
        raise BadSetting(f"{RUN} is not a hexadecimal number of at most 64 digits")
    return text or secrets.token_hex(8)


def _salt(text: str | None) -> bytes:
    if not text:
        return secrets.token_bytes(16)
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise BadSetting(f"{SALT} is not hexadecimal") from None
