"""What stands for `python` in workers: asks the server of warm.py to run a command line, and ends as that ends.

python -IS warm_python.py SOCKET [-u] SCRIPT ... | -m MODULE ... | -c CODE ...
"""

import array
import json
import os
import signal
import socket
import sys


def main() -> None:
    where, arguments = sys.argv[1], sys.argv[2:]
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(where)
    request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    files = array.array("i", [0, 1, 2])
    server.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(one, lambda number, _: server.send(str(number).encode()))
    answer = json.loads(server.recv(1 << 16) or b'{"error": "the server of interpreters is gone"}')
    if "real" in answer:
        os.execv(sys.executable, [sys.executable, *arguments])
    if "error" in answer:
        sys.exit(answer["error"])
    status = answer["status"]
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


main()
