"""The client of tests/children.py: `child.py SOCKET ARGUMENTS` does what `python ARGUMENTS` does.

It starts within milliseconds, because it imports next to nothing.
"""

import marshal
import os
import signal
import socket
import sys

ITSELF = b"itself"
"""The server's answer if variables make Python start in another way than it did."""


def python(path: str, arguments: list[str]) -> None:
    """Have the server's fork do it, pass signals on, and end as that process ends."""
    answer, said = ITSELF, marshal.dumps((arguments, os.getcwd(), dict(os.environ)))
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: server.send(bytes([number])))
        try:
            socket.send_fds(server, [len(said).to_bytes(4, "big")], [0, 1, 2])
        except OSError:  # one of the streams is closed
            pass
        else:
            server.sendall(said)
            answer = server.recv(16)
    if answer == ITSELF:
        os.execv(sys.executable, [sys.executable, *arguments])
    status = int.from_bytes(answer, "big") if answer else signal.SIGKILL
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    python(sys.argv[1], sys.argv[2:])
