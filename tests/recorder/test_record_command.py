"""`kvtape record`: somebody else's command, run as if we were not there."""

from __future__ import annotations

import os
import pty
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recorder.trace import TraceReader
from replayer.replay import ReplayOptions, replay

pytestmark = pytest.mark.cpu

REPOSITORY = Path(__file__).parents[2]
KVTAPE = [sys.executable, "-c", "import sys; from replayer.main import main; sys.exit(main())"]
ENGINE = [sys.executable, "-m", "tests.recorder.small_engine"]
SECONDS = 120


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVTAPE_")}
    return {**kept, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **changes}


def record(
    output: Path | str, *command: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KVTAPE, "record", "-o", str(output), *options, "--", *command],
        env=environment(), cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip


def traces(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.msgpack.zst*"))


def test_a_command_is_recorded_and_its_output_is_its_own(tmp_path: Path) -> None:
    plain = subprocess.run(
        [*ENGINE, "40"], env=environment(), cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS, check=True,
    )  # fmt: skip
    done = record(tmp_path / "run.msgpack.zst", *ENGINE, "40")
    assert done.returncode == 0
    assert done.stdout == plain.stdout
    (path,) = traces(tmp_path)
    assert path.name.startswith("run.tp0-pp0-dp0.") and path.name.endswith(".msgpack.zst")
    assert "full, swa" in done.stderr
    outcome = replay(ReplayOptions(path, ledger=False))
    assert outcome.failure is None
    assert outcome.events > 100
    with TraceReader(path) as reader:
        list(reader.items())
        assert reader.footer is not None and reader.footer.reason == ""


def test_its_exit_status_is_passed_on(tmp_path: Path) -> None:
    assert record(tmp_path / "a", *ENGINE, "5", "--status", "7").returncode == 7
    assert record(tmp_path / "b", "/bin/sh", "-c", "kill -TERM $$").returncode == 128 + signal.SIGTERM


def test_a_killed_process_leaves_a_closed_file_that_says_so(tmp_path: Path) -> None:
    done = record(tmp_path / "run.msgpack.zst", *ENGINE, "40", "--end", "kill", options=("--chunk-ms", "50"))
    assert done.returncode == 128 + signal.SIGKILL
    (path,) = traces(tmp_path)
    assert path.suffix == ".zst"
    with TraceReader(path) as reader:
        assert sum(len(chunk) for chunk in reader.chunks()) > 100
        assert reader.footer is not None and "without closing the file" in reader.footer.reason
    assert "without closing" in done.stderr
    assert replay(ReplayOptions(path, ledger=False)).failure is None


def test_what_is_sent_to_us_goes_to_the_command(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*KVTAPE, "record", "-o", str(tmp_path / "run"), "--chunk-ms", "50", "--", *ENGINE, "20", "--end", "hang"],
        env=environment(), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        while "waiting" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGTERM
    assert len(traces(tmp_path)) == 1
    assert "recorded" in errors


def test_ctrl_c_on_a_terminal_is_the_commands_business(tmp_path: Path) -> None:
    """The command catches it and ends with a status of its own; we print what was recorded all the same."""
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(3))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(REPOSITORY)
        command = [*KVTAPE, "record", "-o", str(tmp_path / "run"), "--", sys.executable, "-c", script]
        os.execve(command[0], command, environment())
    seen = b""
    while b"ready" not in seen:
        seen += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    try:
        while True:
            seen += os.read(terminal, 4096)
    except OSError:  # the other end is closed
        pass
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 3
    assert b"nothing was recorded" in seen


def test_nothing_recorded_is_said(tmp_path: Path) -> None:
    done = record(tmp_path / "run", sys.executable, "-c", "print('hello')")
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert "nothing was recorded" in done.stderr
    assert traces(tmp_path) == []


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    done = record(tmp_path / "run", "no-such-program")
    assert done.returncode == 127
    assert done.stderr == "kvtape: error: no-such-program cannot be started: No such file or directory\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--memory", "1M"), "at least 4M"),
        (("--chunk-events", "none"), "1 to 65536"),
        (("--on-overflow", "explode"), "invalid choice"),
    ],
)
def test_wrong_options(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    done = record(tmp_path / "run", "true", options=options)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_variables_that_are_set_stay(tmp_path: Path) -> None:
    script = "import os; print(sorted(item for item in os.environ.items() if item[0].startswith('KVTAPE_')))"
    done = subprocess.run(
        [*KVTAPE, "record", "-o", str(tmp_path / "run"), "--memory", "32M", "--", sys.executable, "-c", script],
        env=environment(KVTAPE_MEMORY="128M", KVTAPE_STATE_EVERY="7"), cwd=REPOSITORY, capture_output=True, text=True,
        timeout=SECONDS, check=False,
    )  # fmt: skip
    assert "('KVTAPE_MEMORY', '32M')" in done.stdout
    assert "('KVTAPE_STATE_EVERY', '7')" in done.stdout
    assert "KVTAPE_CHUNK_MS" not in done.stdout


def test_the_status_is_the_commands_even_where_nothing_can_be_printed(tmp_path: Path) -> None:
    for redirected in ("2>/dev/full", "2>&-", "<&-"):
        command = f"exec {shlex.join([*KVTAPE, 'record', '-o', str(tmp_path / 'run'), '--', *ENGINE, '3', '--status', '7'])} {redirected}"
        done = subprocess.run(
            ["/bin/sh", "-c", command], env=environment(), cwd=REPOSITORY, capture_output=True, timeout=SECONDS, check=False
        )  # fmt: skip
        assert done.returncode == 7, redirected


def test_a_command_that_may_not_be_run(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("#!/bin/sh\n")
    assert record(tmp_path / "run", str(tmp_path / "script")).returncode == 126


def test_no_command(tmp_path: Path) -> None:
    done = record(tmp_path / "run")
    assert done.returncode == 2
    assert "kvtape record -o FILE -- COMMAND" in done.stderr


def test_a_folder_that_cannot_be_written_leaves_the_command_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    plain = subprocess.run(
        [*ENGINE, "20"], env=environment(), cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS, check=True,
    )  # fmt: skip
    done = record(tmp_path / "file" / "run", *ENGINE, "20")
    assert done.returncode == 0
    assert done.stdout == plain.stdout
    assert done.stderr.count("recording has ended, the engine goes on") == 1
    assert "nothing was recorded" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs')")
    done = subprocess.run(
        [*KVTAPE, "record", "-o", str(tmp_path / "run"), "--", sys.executable, "-c", "pass"],
        env=environment(PYTHONPATH=f"{REPOSITORY}{os.pathsep}{tmp_path}"),
        cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.stdout.count("theirs") == 2  # ours and the command's
