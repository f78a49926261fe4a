"""Child processes that tests start often, forked from one in which their imports are done.

`python(...)` returns a command that does what `[sys.executable, ...]` does. It is a client: it
hands its streams, folder, arguments and variables to a server, which forks the process that does
the work, and it ends as that process ends. The server has imported torch, and the suite, once.
Tests of what is imported, of groups of processes and of isolation start Python themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.util
import marshal
import multiprocessing.forkserver
import multiprocessing.util
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import cache, partial
from pathlib import Path
from typing import NoReturn

from _pytest.assertion import rewrite
from child import ITSELF

CLIENT = Path(__file__).with_name("child.py")
SUITE = ("conformance.running.run", "hypothesis", "numpy", "pytest", "rich.console")
"""What children need, except for frameworks; pytest imports hypothesis at its end."""

SERVERS: list[subprocess.Popen[bytes]] = []
"""They end when this process closes their input, as it does at its end."""


def python(*arguments: str, imports: tuple[str, ...] = (*SUITE, "torch")) -> list[str]:
    """The command for `python ARGUMENTS`, the first of which is `-m` or `-c`."""
    if not hasattr(os, "pidfd_open"):
        return anew(*arguments)
    return [sys.executable, "-I", "-S", str(CLIENT), _server(imports), *arguments]


python_alone = partial(python, imports=SUITE)
"""The same, without any framework."""


def anew(*arguments: str) -> list[str]:
    """The command for a Python that has imported nothing."""
    return [sys.executable, *arguments]


@cache
def _server(imports: tuple[str, ...]) -> str:
    """Start a server that ends with this process, and return the path of its socket."""
    path = f"{tempfile.mkdtemp(prefix='children')}/socket"
    server = subprocess.Popen(
        [sys.executable, __file__, path, *imports],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    SERVERS.append(server)
    assert server.stdout is not None
    assert server.stdout.readline() == b"listening\n"
    return path


def serve(path: str, imports: list[str]) -> list[str]:
    """Fork a process for each client; return its arguments, in that process."""
    own = _variables()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        print("listening", flush=True)
        for name in imports:
            if importlib.util.find_spec(name.partition(".")[0]):
                importlib.import_module(name)
        # Otherwise it says that it cannot rewrite the asserts of hypothesis.
        rewrite.AssertionRewritingHook._warn_already_imported = lambda *_: None
        gc.freeze()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True:
            if 0 in select.select([listening, 0], [], [])[0]:  # the tests have ended
                shutil.rmtree(Path(path).parent)
                os._exit(0)
            client, _ = listening.accept()
            if os.fork() == 0:
                break
            client.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    length, streams, _, _ = socket.recv_fds(client, 4, 3)
    with client.makefile("rb") as sent:
        arguments, folder, variables = marshal.loads(sent.read(int.from_bytes(length, "big")))
    os.environ.clear()
    os.environ.update(variables)
    if _variables() != own:
        client.sendall(ITSELF)
        os._exit(0)
    if process := os.fork():
        _keep(process, client)
    client.close()
    os.setsid()  # a signal to its group reaches no other process
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    return arguments


def _variables() -> dict[str, str]:
    """The variables on which it depends how Python starts."""
    return {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}


def _keep(process: int, client: socket.socket) -> NoReturn:
    """Pass signals on to a process until it ends, and tell the client how it ended."""
    ended = os.pidfd_open(process)
    while True:
        ready = select.select([ended, client], [], [])[0]
        if ended in ready:
            client.sendall(os.waitpid(process, 0)[1].to_bytes(4, "big"))
            os._exit(0)
        numbers = client.recv(1)
        os.kill(process, numbers[0] if numbers else signal.SIGKILL)


def _open_streams() -> None:
    """Open them as Python does when it starts."""
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(  # noqa: SIM115
        2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False
    )


def _server_of_isolated(path: bytes, arguments: list[str], kept: list[int]) -> int:
    """Fork the server of isolated processes, or of locks, which Python would start anew."""
    if process := os.fork():
        return process
    try:
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in kept:
                with contextlib.suppress(OSError):
                    os.close(number)
        _open_streams()
        multiprocessing.forkserver._forkserver.__init__()
        exec(arguments[-1], {"__name__": "__main__"})
    finally:
        os._exit(1)


def run(option: str, what: str, *arguments: str) -> NoReturn:
    """Do what `python OPTION WHAT ARGUMENTS` does after its start, and end as it does."""
    _open_streams()
    multiprocessing.util.spawnv_passfds = _server_of_isolated
    sys.argv[:] = [option, *arguments]
    sys.path[0] = os.getcwd() if option == "-m" else ""
    code: object = 0
    try:
        if option == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    # What Python does at its end, except that all modules are emptied, which takes half a second.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(int(code or 0))


if __name__ == "__main__":
    run(*serve(sys.argv[1], sys.argv[2:]))
