"""What the `record_*` tools share: one run of a real engine under `kvtape record`, and its trace put into place under a name."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SUFFIX = ".msgpack.zst"
SERVER = "tests.engines.serve"
#: An engine killed at its end loses the chunk that is open; while it idles for this long, every event is written.
LINGER_SECONDS = 3


@dataclass(frozen=True)
class Recording:
    """One file of the corpus.

    Attributes:
        name: of the file, without its ending.
        run: module that is run, with its arguments, as on a command line.
        how: one sentence for the header's provenance.
        fewest_events: a trace with fewer is not what was wanted.
    """

    name: str
    run: str
    how: str
    fewest_events: int = 500


class RecordingFailed(Exception):
    """The run failed, or left another number of traces than one, or a trace that is too short."""


def main(engine: str, builder: str, recordings: Sequence[Recording]) -> None:
    """Command line of a `record_*` tool."""
    parser = argparse.ArgumentParser(
        description=f"Make the {engine} traces of the corpus again.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of: {', '.join(recording.name for recording in recordings)}",
    )
    parser.add_argument("--env", type=Path, required=True, help=f"environment made by tools/{builder}")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "traces", help="folder of the traces")
    parser.add_argument("--models", type=Path, help="where model folders are kept")
    parser.add_argument("--logs", type=Path, help="keep the engines' output in this folder")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {recording.name for recording in recordings}
    if unknown:
        parser.error(f"no such recording: {', '.join(sorted(unknown))}")
    for recording in recordings:
        if not arguments.names or recording.name in arguments.names:
            try:
                record(recording, arguments)
            except RecordingFailed as problem:
                sys.exit(f"{recording.name}: {problem}")


def record(recording: Recording, arguments: argparse.Namespace) -> Path:
    """Run, pick up, check, and put into place.

    Raises:
        RecordingFailed: what was there under the name stays.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        log = folder / "engine.log"
        result = folder / "result.json"
        kvtape = (arguments.env / "bin" / "kvtape").absolute()
        python = (arguments.env / "bin" / "python").absolute()
        models = ["--models", str(arguments.models.absolute())] if arguments.models else []
        served = ["--log", str(folder / "server.log")] if recording.run.startswith(SERVER) else []
        command = [
            str(kvtape),
            "record",
            "-o",
            str(folder / recording.name) + SUFFIX,
            "--",
            str(python),
            "-m",
        ]
        command += [*shlex.split(recording.run), *models, *served, "--out", str(result)]
        environment = os.environ | {
            "KVTAPE_HOW": recording.how,
            "KVTAPE_SOURCE": "a workload written for kvtape (tests/engines/prompts.py)",
            "KVTAPE_HARDWARE": "a CPU",
        }
        with log.open("wb") as sink:
            status = subprocess.run(
                command, cwd=REPOSITORY, env=environment, stdout=sink, stderr=subprocess.STDOUT, check=False
            ).returncode
        if arguments.logs:
            arguments.logs.mkdir(parents=True, exist_ok=True)
            for kept in (log, result, folder / "server.log"):
                if kept.exists():
                    shutil.copy(kept, arguments.logs / f"{recording.name}.{kept.name}")
        if status != 0:
            raise RecordingFailed(f"the run ended with status {status}:\n{_tail(log)}")
        traces = sorted(folder.glob(f"{recording.name}.*{SUFFIX}"))
        if len(traces) != 1:
            raise RecordingFailed(f"{len(traces)} traces instead of one:\n{_tail(log)}")
        events = _events(kvtape, traces[0])
        if events < recording.fewest_events:
            raise RecordingFailed(f"{events} events, at least {recording.fewest_events} were wanted")
        arguments.out.mkdir(parents=True, exist_ok=True)
        target = arguments.out / f"{recording.name}{SUFFIX}"
        shutil.copy(traces[0], target)
    seconds = time.monotonic() - started
    print(f"{target}: {events:,} events, {target.stat().st_size:,} bytes, {seconds:.0f} s", flush=True)
    return target


def _events(kvtape: Path, trace: Path) -> int:
    told = subprocess.run(
        [str(kvtape), "info", "--json", str(trace)], capture_output=True, text=True, check=False
    )
    if told.returncode != 0:
        raise RecordingFailed(f"kvtape info: {told.stderr.strip()}")
    (figures,) = json.loads(told.stdout)["traces"]
    return int(figures["events"])


def _tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
