"""Starts a real server, drives it with the real OpenAI client, and stops it: ``python -m tests.engines.serve sglang --out run.json``.

Several people chat at the same time, with streaming, over shared system prompts, some of them hang up in mid-answer. The server runs in a
process group of its own; whatever happens, nothing of it is left when this ends. Run with the interpreter of an engine's environment.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engines import run_sglang, run_vllm
from tests.engines.prompts import Chat, chats
from tests.engines.results import Stopwatch, model_folder, runner_parser

HOST = "127.0.0.1"
START_SECONDS = 240.0
STOP_SECONDS = 30.0
GROUP_SECONDS = 10.0
ANSWER_SECONDS = 150.0


class ServerFailed(Exception):
    """The server did not become healthy, or did not answer; the message says what was waited for."""


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def flags(options: Mapping[str, Any]) -> list[str]:
    """Keyword arguments as command line flags."""
    made = []
    for name, value in options.items():
        if value is True:
            made.append(f"--{name.replace('_', '-')}")
        elif value is not False:
            made += [f"--{name.replace('_', '-')}", str(value)]
    return made


def command(engine: str, arguments: argparse.Namespace, port: int) -> tuple[list[str], dict[str, str]]:
    """The command that serves, and what its environment needs."""
    folder = model_folder(arguments)
    where = ["--host", HOST, "--port", str(port), "--served-model-name", arguments.model]
    if engine == "sglang":
        options = run_sglang.options(folder, arguments) | {"log_level": "warning"}
        variables = run_sglang.environment(arguments.lag)
        return [sys.executable, "-m", "sglang.launch_server", *where, *flags(options)], variables
    # Without it the process that owns the block pool is killed, not asked to end.
    options = run_vllm.options(folder, arguments) | {"shutdown_timeout": 10}
    variables = run_vllm.environment()
    if run_vllm.FAST_OPENMP.exists():
        variables["LD_PRELOAD"] = str(run_vllm.FAST_OPENMP)
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *where, *flags(options)], variables


@contextlib.contextmanager
def serving(
    argv: Sequence[str], variables: Mapping[str, str], url: str, log: Path, *, prefix: Sequence[str] = ()
) -> Iterator[Server]:
    """A healthy server while the block runs.

    Args:
        prefix: put before the command, ``kvtape record -o PATH --`` for one.

    Raises:
        ServerFailed: it ended, or was not healthy in time.
    """
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*prefix, *argv],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(process, url, log)
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        stop(process)


def _wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise ServerFailed(
                f"the server ended with status {server.process.returncode}:\n{server.log_tail()}"
            )
        if server.is_healthy():
            return
        time.sleep(0.5)
    raise ServerFailed(f"the server was not healthy within {START_SECONDS:.0f} s:\n{server.log_tail()}")


def stop(process: subprocess.Popen[bytes], patience: float = STOP_SECONDS) -> int:
    """Ask the server to end, then make sure that it and all that it started has. Returns its exit status."""
    if process.poll() is None:
        # To the server alone: it tells its own children.
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    # What it started may still be closing its files. The group is there as long as one process of it is, and so is its id.
    deadline = time.monotonic() + GROUP_SECONDS
    while _group_exists(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait(patience)


def _group_exists(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


@dataclass
class Turn:
    """What came back for one turn of a chat."""

    name: str
    text: str
    aborted: bool
    #: Pieces of the stream that carried text.
    pieces: int


@dataclass
class ServedResult:
    engine: str
    model: str
    turns: list[Turn] = field(default_factory=list)
    startup_seconds: float = 0.0
    seconds: float = 0.0
    exit_status: int | None = None

    def write(self, path: Path | None) -> None:
        import json
        from dataclasses import asdict

        pieces = sum(turn.pieces for turn in self.turns)
        figures = {
            "answered": sum(not turn.aborted for turn in self.turns),
            "aborted": sum(turn.aborted for turn in self.turns),
            "pieces_per_second": round(pieces / self.seconds, 2) if self.seconds else 0.0,
        }
        if path is not None:
            path.write_text(json.dumps(asdict(self) | figures), encoding="utf-8")
        brief = {key: value for key, value in asdict(self).items() if key != "turns"}
        print(json.dumps(brief | figures), flush=True)


async def converse(
    url: str, model: str, conversations: Sequence[Chat], *, at_once: int, aborts: float, seed: int
) -> list[Turn]:
    """Hold the conversations, ``at_once`` of them at a time; a share ``aborts`` of the turns is hung up on in mid-stream."""
    import openai

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120.0, max_retries=0)
    gate = asyncio.Semaphore(at_once)
    draw = random.Random(seed)
    # Drawn beforehand: the order in which answers come back must not change who hangs up, and when.
    hang_ups = {
        (chat.name, number): draw.randint(2, 8) if draw.random() < aborts else None
        for chat in conversations
        for number in range(len(chat.turns))
    }

    async def hold(chat: Chat) -> list[Turn]:
        messages: list[Any] = [{"role": "system", "content": chat.system}]
        turns = []
        async with gate:
            for number, said in enumerate(chat.turns):
                messages.append({"role": "user", "content": said})
                turn = await _answered_in_time(
                    client,
                    f"{chat.name}-turn-{number}",
                    {
                        "model": model,
                        "messages": messages,
                        "max_tokens": chat.max_tokens[number],
                        "temperature": 0.0,
                    },
                    hang_ups[chat.name, number],
                )
                turns.append(turn)
                messages.append({"role": "assistant", "content": turn.text})
        return turns

    try:
        held = await asyncio.gather(*(hold(chat) for chat in conversations))
    finally:
        await client.close()
    return [turn for turns in held for turn in turns]


async def _answered_in_time(
    client: Any, name: str, request: dict[str, Any], hang_up_after: int | None
) -> Turn:
    try:
        return await asyncio.wait_for(_ask(client, name, request, hang_up_after), ANSWER_SECONDS)
    except asyncio.TimeoutError:
        raise ServerFailed(f"{name} was not answered within {ANSWER_SECONDS:.0f} s") from None


async def _ask(client: Any, name: str, request: dict[str, Any], hang_up_after: int | None) -> Turn:
    text = ""
    pieces = 0
    stream = await client.chat.completions.create(stream=True, **request)
    try:
        async for part in stream:
            piece = part.choices[0].delta.content if part.choices else None
            if piece:
                text += piece
                pieces += 1
                if pieces == hang_up_after:
                    return Turn(name, text, True, pieces)
    finally:
        # Closing the connection is how a client aborts.
        await stream.close()
    return Turn(name, text, False, pieces)


def run(engine: str, arguments: argparse.Namespace, *, prefix: Sequence[str] = ()) -> ServedResult:
    port = free_port()
    url = f"http://{HOST}:{port}"
    argv, variables = command(engine, arguments, port)
    result = ServedResult(engine, arguments.model)
    watch = Stopwatch()
    conversations = chats(
        arguments.requests,
        arguments.rounds,
        arguments.seed,
        shortest=arguments.shortest,
        longest=arguments.longest,
    )
    with serving(argv, variables, url, arguments.log, prefix=prefix) as server:
        result.startup_seconds = watch.lap()
        result.turns = asyncio.run(
            converse(
                url,
                arguments.model,
                conversations,
                at_once=arguments.at_once,
                aborts=arguments.aborts,
                seed=arguments.seed,
            )
        )
        result.seconds = watch.lap()
        time.sleep(arguments.linger)
        result.exit_status = stop(server.process)
    return result


def main() -> None:
    parser = runner_parser("Serve and chat.", model="smollm2", requests=20)
    parser.add_argument("engine", choices=["sglang", "vllm"])
    parser.add_argument("--at-once", type=int, default=8, help="conversations held at the same time")
    parser.add_argument("--aborts", type=float, default=0.15, help="share of the turns that are hung up on")
    parser.add_argument("--shortest", type=int, default=12, help="tokens of an answer, at least")
    parser.add_argument("--longest", type=int, default=48, help="tokens of an answer, at most")
    parser.add_argument(
        "--linger", type=float, default=0.0, help="seconds between the last answer and SIGTERM"
    )
    parser.add_argument("--log", type=Path, default=Path("server.log"))
    engines = {"sglang": run_sglang.pool_options, "vllm": run_vllm.pool_options}
    # Without a handler nothing would stop the server when somebody ends this.
    signal.signal(signal.SIGTERM, _exit)
    known, _ = parser.parse_known_args()
    engines[known.engine](parser)
    arguments, prefix = _split(sys.argv[1:])
    parsed = parser.parse_args(arguments)
    run(parsed.engine, parsed, prefix=prefix).write(parsed.out)


def _exit(number: int, frame: Any) -> None:
    sys.exit(128 + number)


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What follows ``--`` is put before the server's command."""
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


if __name__ == "__main__":
    main()
