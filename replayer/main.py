"""The commands ``kvtape`` and ``replay``: find the subcommand, run it, turn failures into exit codes.

This is the only module that prints errors and decides how the process ends. It imports nothing heavy, and a
command's module only when that command is the one called, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, NoReturn, Protocol, cast

EXIT_USAGE: Final = 2
EXIT_INTERNAL: Final = 70
EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT, what a shell reports for a process that Ctrl-C ended
EXIT_BROKEN_PIPE: Final = 141  # 128 + SIGPIPE: not 1, which would read as "a check failed"

DEBUG_VARIABLE: Final = "KVTAPE_DEBUG"

EXIT_CODES: Final = """\
exit codes:
  0    all checks held
  1    a check failed: mapping, content, log-probability, hazard or budget
  2    usage
  65   the trace is damaged, is no trace, or holds impossible events
  66   no such file
  70   a fault of kvtape (KVTAPE_DEBUG=1 shows the traceback)
  130  interrupted by Ctrl-C
  141  the reader of the output went away
"""


class CommandModule(Protocol):
    """What every module under ``replayer/commands`` and ``recorder/commands`` offers."""

    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


class Command(NamedTuple):
    """One row of the command table: where the command lives, its line in ``kvtape --help``, and ``module:function`` of what the command
    calls before a run that others may listen to. The table is the one place that names both packages' modules."""

    module: str
    help: str
    plugins: tuple[str, ...] = ()


# The help lines are repeated here so that `kvtape --help` imports no command; a test keeps the two equal.
COMMANDS: dict[str, Command] = {
    "replay": Command("replayer.commands.replay", "replay traces against an allocator and check every flush"),
    "record": Command(
        "recorder.commands.record", "run a serving engine and record what its KV-cache allocators do"
    ),
    "info": Command(
        "recorder.commands.info", "say what a trace file is, where it comes from and what is in it"
    ),
    "convert": Command("recorder.commands.convert", "turn a JSON call log of an engine into a trace file"),
    "anonymize": Command(
        "recorder.commands.anonymize", "take out of a trace what could tell users or machines apart"
    ),
    "bench": Command("replayer.commands.bench", "measure allocators on traces, as ratios within one run"),
    "parity": Command(
        "replayer.commands.parity",
        "have a language model generate while its KV pages move, and compare every token with a run in which none do",
        ("recorder.plugin:parity",),
    ),
    # Found before "bench" is: a trace of that name is ./flush.
    "bench flush": Command(
        "replayer.commands.bench_flush",
        "measure one flush: moves, pool sizes, page sizes and strategies, as ratios within one run",
    ),
    "fuzz": Command(
        "replayer.commands.fuzz",
        "drive allocators with random programs of calls and keep what differs or fails as a trace",
    ),
}


class _ShowVersion(argparse.Action):
    """``--version``; unlike argparse's own action it looks the version up only when asked."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help="show the version and exit")

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> NoReturn:
        import replayer

        print(f"kvtape {replayer.__version__}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kvtape COMMAND ...``.

    Args:
        argv: the arguments after the program's name; those of the process when ``None``.

    Returns:
        The exit code. No exception leaves this function but those that end the interpreter.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    return _guarded(lambda: _run_umbrella(arguments))


def replay_main(argv: Sequence[str] | None = None) -> int:
    """Run ``replay ...``, which is ``kvtape replay ...``; see :func:`main`."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    return _guarded(lambda: _run_command("replay", "replay", arguments))


def _run_umbrella(arguments: list[str]) -> int:
    for words in (2, 1):
        name = " ".join(arguments[:words])
        if name in COMMANDS:
            return _run_command(name, f"kvtape {name}", arguments[words:])
    parser = argparse.ArgumentParser(
        prog="kvtape",
        description="Record and replay what KV-cache allocators of LLM serving engines do.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_ShowVersion)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, command in COMMANDS.items():
        subparsers.add_parser(name, help=command.help, add_help=False)
    # Help, version or a usage error: the first argument is no command, and nothing else may stand before one.
    parser.parse_args(arguments)
    return parser.error("options belong after the command: kvtape COMMAND [options]")


def _run_command(name: str, program: str, arguments: list[str]) -> int:
    command = cast(CommandModule, importlib.import_module(COMMANDS[name].module))
    parser = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,  # an option added later must not change what an abbreviation in a script means
        description=f"{command.HELP[:1].upper()}{command.HELP[1:]}.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_ShowVersion)
    command.add_arguments(parser)
    parser.set_defaults(plugins=COMMANDS[name].plugins)
    return command.run(parser.parse_args(arguments))


def _guarded(body: Callable[[], int]) -> int:
    """Run ``body`` and turn whatever leaves it into an exit code and at most one line on stderr."""
    _never_fail_on_encoding()
    try:
        code = _checked(body)
    except BrokenPipeError:
        code = EXIT_BROKEN_PIPE
    # What the command printed may still be in the buffer: flush it here, where a closed pipe can be handled,
    # rather than at interpreter exit, where Python prints a complaint and ends with 120.
    try:
        print(end="", flush=True)  # flushes, and does nothing when there is no stdout at all
    except BrokenPipeError:
        _discard_stdout()
        code = code or EXIT_BROKEN_PIPE  # a verdict that failed stays the verdict
    except OSError as error:
        _discard_stdout()
        if code != EXIT_INTERNAL:  # else the same refusal has met the command already, which said so
            _say(f"error: the output could not be written: {error}", error)
        code = code or EXIT_INTERNAL
    return code


def _checked(body: Callable[[], int]) -> int:
    try:
        return body()
    except SystemExit as stop:  # argparse: --help, --version and usage errors, which it has printed itself
        return stop.code if isinstance(stop.code, int) else EXIT_INTERNAL if stop.code else 0
    except KeyboardInterrupt as error:
        _say("interrupted", error)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:
        exit_code = getattr(type(error), "exit_code", None)
        if isinstance(exit_code, int):
            _say(f"error: {error}", error)
            return exit_code
        summary = " ".join(str(error).split())
        if not isinstance(
            error, OSError
        ):  # the system's refusals speak for themselves and are seldom our fault
            summary = f"internal fault: {type(error).__name__}{': ' if summary else ''}{summary}"
        _say(f"error: {summary} (set {DEBUG_VARIABLE}=1 and run again for the traceback)", error)
        return EXIT_INTERNAL


def _say(message: str, error: BaseException) -> None:
    """Print ``kvtape: MESSAGE`` to stderr, after the traceback of ``error`` if the user asked for that."""
    try:
        if os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
            import traceback

            traceback.print_exception(error, file=sys.stderr)
        print(f"kvtape: {message}", file=sys.stderr, flush=True)
    except OSError:
        pass  # stderr is closed: the exit code is all that is left to say it with


def _never_fail_on_encoding() -> None:
    """Make stdout escape what its encoding lacks: a table's border or an odd file name is no fault."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_stdout() -> None:
    """Point stdout at the null device, so that the interpreter's own flush at exit does not fail on it."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # replaced by an object that is no file, as under a test runner
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


if __name__ == "__main__":
    sys.exit(main())
