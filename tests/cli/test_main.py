"""The command skeleton: exit codes, messages, and what is not imported before it is needed."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import replayer
from replayer import main as cli
from replayer.errors import ReplayError, UsageError

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "numpy", "rich", "zstandard", "msgpack"}

Run = Callable[[argparse.Namespace], int]


class DamageError(Exception):
    """An error of another package: reported by its exit_code, without being known to replayer.main."""

    exit_code = 65


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """Put a command that calls the given function into the table, as ``fake`` and instead of ``replay``."""

    def install(run: Run) -> None:
        module = types.ModuleType("fake_command")
        module.NAME = "fake"  # type: ignore[attr-defined]
        module.HELP = "does what the test says"  # type: ignore[attr-defined]
        module.run = run  # type: ignore[attr-defined]

        def add_arguments(parser: argparse.ArgumentParser) -> None:
            parser.add_argument("trace", nargs="*")
            parser.add_argument("--count", type=int, default=0)

        module.add_arguments = add_arguments  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fake_command", module)
        for name in ("fake", "replay"):
            monkeypatch.setitem(cli.COMMANDS, name, cli.Command("fake_command", "does what the test says"))

    return install


def raising(error: BaseException) -> Run:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize("code", [0, 1, 65, 130])
def test_the_commands_code_is_the_exit_code(command: Callable[[Run], None], code: int) -> None:
    command(lambda args: code)
    assert cli.main(["fake"]) == code
    assert cli.replay_main([]) == code


def test_arguments_reach_the_command(command: Callable[[Run], None]) -> None:
    seen: list[argparse.Namespace] = []

    def run(args: argparse.Namespace) -> int:
        seen.append(args)
        return 0

    command(run)
    assert cli.main(["fake", "a", "b", "--count", "3"]) == 0
    assert cli.replay_main(["c", "--count", "4"]) == 0
    assert [(args.trace, args.count) for args in seen] == [(["a", "b"], 3), (["c"], 4)]


def test_arguments_of_the_process_are_the_default(
    command: Callable[[Run], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    command(lambda args: int(args.count))
    monkeypatch.setattr(sys, "argv", ["kvtape", "fake", "--count", "65"])
    assert cli.main() == 65
    monkeypatch.setattr(sys, "argv", ["replay", "--count", "66"])
    assert cli.replay_main() == 66


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("--until 9 is past the end of a.msgpack.zst (8 events)"), 2),
        (ReplayError("the reference run stopped"), 70),
        (DamageError("a.msgpack.zst: frame 3: checksum differs; copy the file again"), 65),
    ],
)
def test_expected_errors_are_one_plain_line(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    command(raising(error))
    assert cli.main(["fake"]) == code
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"kvtape: error: {error}\n")


def test_unexpected_errors_are_one_line_and_70(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVTAPE_DEBUG", raising=False)
    command(raising(ValueError("first line\nsecond line")))
    assert cli.main(["fake"]) == 70
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("kvtape: error: internal fault: ValueError: first line second line")
    assert "KVTAPE_DEBUG=1" in err


def test_an_exit_code_on_the_instance_is_not_an_expected_error(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    error = ValueError("made up")
    error.exit_code = 0  # type: ignore[attr-defined]
    command(raising(error))
    assert cli.main(["fake"]) == 70
    assert "internal fault" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "shown"), [("1", True), ("0", False), ("", False)])
@pytest.mark.parametrize("error", [ValueError("unexpected"), UsageError("expected")])
def test_tracebacks_only_when_asked_for(
    command: Callable[[Run], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    shown: bool,
    error: Exception,
) -> None:
    monkeypatch.setenv("KVTAPE_DEBUG", value)
    command(raising(error))
    cli.main(["fake"])
    assert ("Traceback (most recent call last)" in capsys.readouterr().err) is shown


def test_interrupt_is_130(command: Callable[[Run], None], capsys: pytest.CaptureFixture[str]) -> None:
    command(raising(KeyboardInterrupt()))
    assert cli.main(["fake"]) == 130
    assert capsys.readouterr().err == "kvtape: interrupted\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["no-such-command"],
        ["--no-such-option"],
        ["fake", "--no-such-option"],
        ["fake", "--count", "x"],
        ["--", "fake"],
    ],
)
def test_usage_errors_are_2(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    command(lambda args: 0)
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: kvtape")


def test_options_are_not_abbreviated(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(lambda args: 0)
    assert cli.main(["fake", "--coun", "3"]) == 2
    assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--version"], ["fake", "--version"]])
def test_version(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    command(lambda args: 1)
    assert cli.main(arguments) == 0
    assert re.fullmatch(r"kvtape \d+(\.\d+)*(\+\S+)?\n", capsys.readouterr().out)


def test_version_is_that_of_the_installed_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", {"kvtape": "4.5.6"}.__getitem__)
    assert replayer.__version__ == "4.5.6"


def test_version_without_an_installed_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert replayer.__version__ == "0+unknown"


def test_the_package_has_no_other_lazy_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        replayer.nothing  # noqa: B018


def test_help_names_every_command_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, entry in cli.COMMANDS.items():
        assert re.search(rf"^ +{name}\s", out, re.MULTILINE), name
        assert entry.help.split()[-1] in out
    for code in (0, 1, 2, 65, 66, 70, 130, 141):
        assert re.search(rf"^  {code} ", out, re.MULTILINE), code


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_the_table_agrees_with_the_command(name: str) -> None:
    entry = cli.COMMANDS[name]
    module = importlib.import_module(entry.module)
    name_and_help = (module.NAME, module.HELP)
    assert name_and_help == (name, entry.help)


# `-X importtime` would not do: it leaves out what importlib.import_module imports, so the command itself.
LISTS_MODULES = """
import sys
from replayer import main
code = main.{function}({arguments})
print(*sys.modules, file=sys.stderr)
sys.exit(code)
"""


def imported_by(function: str, *arguments: str) -> set[str]:
    """The modules that a fresh interpreter has imported when ``main.FUNCTION(arguments)`` is done."""
    result = subprocess.run(
        [sys.executable, "-c", LISTS_MODULES.format(function=function, arguments=list(arguments))],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: ")
    return set(result.stderr.split())


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_help_of_a_command_imports_nothing_heavy(name: str) -> None:
    imported = imported_by("main", name, "--help")
    assert cli.COMMANDS[name].module in imported
    assert imported & HEAVY == set()


def test_help_of_the_umbrella_imports_no_command() -> None:
    imported = imported_by("main", "--help")
    assert "replayer.main" in imported
    assert imported & (HEAVY | {entry.module for entry in cli.COMMANDS.values()}) == set()


def test_help_of_replay_imports_nothing_heavy() -> None:
    imported = imported_by("replay_main", "--help")
    assert cli.COMMANDS["replay"].module in imported
    assert imported & HEAVY == set()


# A command that prints more than a pipe holds; run in a process of its own, since stdout is a file there.
PRINTS_A_LOT = """
import sys, types
from replayer import main
fake = types.ModuleType("fake")
fake.NAME = fake.HELP = "fake"
fake.add_arguments = lambda parser: parser.add_argument("--code", type=int)
def run(args):
    for _ in range({lines}):
        print("x" * 100)
    return args.code
fake.run = run
sys.modules["fake"] = fake
main.COMMANDS["fake"] = main.Command("fake", "fake")
sys.exit(main.main(["fake", "--code", "{code}"]))
"""


def run_printing(stdout: int, *, lines: int, code: int) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-c", PRINTS_A_LOT.format(lines=lines, code=code)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=ROOT,
        timeout=60,
        text=True,
    )


@pytest.mark.parametrize(
    ("lines", "code", "expected"),
    [
        (100_000, 0, 141),  # the pipe breaks while the command prints
        (10, 0, 141),  # and here when what is left in the buffer is flushed
        (10, 1, 1),  # a verdict that was reached stays
    ],
)
def test_a_reader_that_goes_away(lines: int, code: int, expected: int) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        process = run_printing(write_end, lines=lines, code=code)
    finally:
        os.close(write_end)
    assert (process.returncode, process.stderr) == (expected, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
@pytest.mark.parametrize(
    ("lines", "code", "expected"),
    [
        (100_000, 0, 70),
        (10, 0, 70),
        (10, 1, 1),
    ],
)
def test_output_to_a_full_device_is_reported(lines: int, code: int, expected: int) -> None:
    with Path("/dev/full").open("w") as full:
        process = run_printing(full.fileno(), lines=lines, code=code)
    assert process.returncode == expected
    assert re.fullmatch(r"kvtape: error: .*No space left on device.*\n", process.stderr)


def test_no_stdout_at_all() -> None:
    process = subprocess.run(
        ["/bin/sh", "-c", '"$0" -c "$1" >&-', sys.executable, PRINTS_A_LOT.format(lines=1, code=1)],
        stderr=subprocess.PIPE,
        cwd=ROOT,
        timeout=60,
        text=True,
    )
    assert (process.returncode, process.stderr) == (1, "")


def test_what_stdout_cannot_encode_is_escaped() -> None:
    program = PRINTS_A_LOT.format(lines=1, code=0).replace('"x" * 100', '"\\u2502 cell"')
    process = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        cwd=ROOT,
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (process.returncode, process.stdout.rstrip()) == (0, b"\\u2502 cell")
