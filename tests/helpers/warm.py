"""A server that has imported what workers import, and forks Python interpreters that begin with all of it.

An interpreter that imports torch, transformers, peft and trl spends 6 s of CPU time before its first line runs, and
the suite starts some two hundred. `start()` gives the path of a program that takes the place of sys.executable:

    python [-u] SCRIPT ... | -m MODULE ... | -c CODE ...

The program (warm_python.py) hands its arguments, environment, folder and files to the server and waits. The server has
one thread, so a fork of it is sound; the fork takes all that over, runs what was asked as `__main__`, and sees the
program as its sys.executable: torchrun and accelerate, run so, start their ranks so too. It ends as the program is
ended: a program that was killed takes its fork with it, and the server's end that of all.

What is read from the environment at import cannot differ between forks, but for the few variables that a fork can read
again. The program runs a real interpreter instead where another variable of READ_AT_IMPORT is not the server's, where
the interpreter has other options, and where some import has started a thread, which the end of the suite's output says.

There are two servers. FULL has the whole stack, for workers. BARE has torch with its compiler and launcher, and nothing
of bitshard, of a bitsandbytes or of transformers: for tests of what an import of those does, with a PYTHONPATH of its
own. It saves 2 s of CPU time each, and 4 where the original bitsandbytes, which imports torch's compiler, is imported.
With a GPU there is no BARE: torch's compiler may have looked for GPUs before a fork.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from pathlib import Path

PROGRAM = "BITSHARD_TEST_PYTHON"  # the variable that names the program to all processes of a run of the suite
BARE = "BITSHARD_TEST_BARE_PYTHON"  # the same for the second server
WORKER = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
READ_AT_IMPORT = ("PYTHON", "LD_", "OMP_", "GOMP_", "MKL_", "OPENBLAS_", "CUDA_", "HF_", "TRANSFORMERS_", "TORCH_")
READ_AT_IMPORT += ("BITSHARD_ISA", "BITSHARD_LINEAR", "BITSHARD_GROUPED", "BITSHARD_WORKSPACE", "BITSHARD_PAGING")
GPU = os.path.exists("/dev/nvidia0")
READ_LATER = ("TORCH_NCCL_",) if GPU else ("TORCH_NCCL_", "CUDA_VISIBLE_DEVICES")  # torchrun sets the first
READ_AGAIN = ("OMP_NUM_THREADS", "PYTHONPATH", "PYTHONWARNINGS", "TRANSFORMERS_VERBOSITY")  # by a fork: `read_again`
READ_BY = {"BITSHARD_": "bitshard", "HF_": "huggingface_hub", "TRANSFORMERS_": "transformers"}  # by whose import
# Threads that numpy and pyarrow would start as they are imported. A fork has only the thread that forks.
NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
BARE_IMPORTS = """
torch torch.distributed.run torch.distributed.fsdp torch.distributed.device_mesh torch._dynamo
torch._inductor.compile_fx torch._inductor.lowering
""".split()
IMPORTS = """
torch torch.distributed.run torch.distributed.fsdp torch.distributed.checkpoint.state_dict torch._dynamo
transformers.trainer transformers.models.llama.modeling_llama transformers.models.auto.modeling_auto
transformers.integrations.bitsandbytes transformers.quantizers.auto accelerate.commands.launch peft datasets
trl.trainer.sft_trainer safetensors.torch tokenizers matplotlib.pyplot
bitshard bitshard.fsdp bitshard.lora bitshard.optim bitsandbytes bitsandbytes.optim
""".split()
LONGEST_REQUEST = 1 << 18  # bytes: an environment and a command line


# ---- for the suite ----


def start(variable: str = PROGRAM, imports: list[str] = IMPORTS) -> subprocess.Popen:
    """Start a server, which imports nothing before it is first asked, and name its program in os.environ.

    It ends with this process; `stop` ends it and waits.
    """
    folder = Path(tempfile.mkdtemp(prefix="bitshard-"))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    alive, held = os.pipe()  # the server sees the end of the pipe once nobody holds the other one
    program = folder / "python"
    stub = Path(__file__).with_name("warm_python.py")
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{stub}" "{folder / "socket"}" "$@"\n')
    program.chmod(0o700)
    environment = {**without_launcher(), **(WORKER if variable == PROGRAM else {})}
    (folder / "environment").write_text(json.dumps(environment))
    (folder / "imports").write_text(json.dumps(imports))
    with open(folder / "log", "wb") as log:
        command = [sys.executable, "-u", __file__, str(folder), str(listener.fileno()), str(alive)]
        server = subprocess.Popen(
            command,
            env={**environment, **NO_THREADS},
            pass_fds=(listener.fileno(), alive),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    listener.close()
    os.close(alive)
    server.held, server.folder, server.variable = held, folder, variable
    os.environ[variable] = str(program)
    return server


def stop(server: subprocess.Popen) -> None:
    """End the server and what it has forked."""
    os.environ.pop(server.variable, None)
    os.close(server.held)
    server.wait(timeout=60)


def python() -> str:
    """The interpreter for workers: the server's program, or without a server sys.executable."""
    return os.environ.get(PROGRAM, sys.executable)


def bare() -> str:
    """The interpreter for what imports bitshard, a bitsandbytes or transformers by itself."""
    return os.environ.get(BARE, sys.executable)


def without_launcher() -> dict[str, str]:
    """The environment without what accelerate tells a worker."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}


def ask(request: dict, variable: str = PROGRAM) -> dict:
    """The answer of a server to a request that is no command; {} without a server."""
    if variable not in os.environ:
        return {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(Path(os.environ[variable]).with_name("socket")))
        connection.send(json.dumps(request).encode())
        return json.loads(connection.recv(LONGEST_REQUEST) or b"{}")


# ---- the server ----


class Server:
    """Connections, one for each program that waits, and the forks that they wait for."""

    def __init__(self, folder: Path, listener: socket.socket, alive: int):
        self.program, self.listener, self.alive = str(folder / "python"), listener, alive
        self.environment = json.loads((folder / "environment").read_text())
        self.imports = json.loads((folder / "imports").read_text())
        self.forks: dict[socket.socket, int] = {}  # connection -> process
        self.spent: dict[str, float] = {}  # lane -> CPU seconds of the forks that have ended
        self.threads: list[str] = []  # that an import has started, and for which nothing can be forked
        self.watched = selectors.DefaultSelector()
        self.watched.register(listener, selectors.EVENT_READ, self.accept)
        self.watched.register(alive, selectors.EVENT_READ, self.leave)

    def loop(self) -> None:
        while True:
            for key, _ in self.watched.select():
                if key.fd in self.watched.get_map():  # nobody before it in this round has closed it
                    key.data(key.fileobj)

    def accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        self.watched.register(connection, selectors.EVENT_READ, self.read)

    def read(self, connection: socket.socket) -> None:
        """A request, or a signal for the fork that the connection waits for; at its end the fork's."""
        try:
            message, files, *_ = socket.recv_fds(connection, LONGEST_REQUEST, 3)
        except ConnectionResetError:  # the program was killed with an answer unread
            message, files = b"", []
        if not message:
            self.kill(self.forks.pop(connection, None))
            self.watched.unregister(connection)
            connection.close()
        elif message.isdigit():  # it may come when the fork has ended, and the program has not read so yet
            with contextlib.suppress(ProcessLookupError, KeyError):
                os.kill(self.forks[connection], int(message))
        else:
            request = json.loads(message)
            answer = self.tell(request) if "cpu" in request else self.fork(connection, request, files)
            if answer:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.send(json.dumps(answer).encode())
        for file in files:
            os.close(file)

    def tell(self, request: dict) -> dict:
        return {"cpu": self.spent.get(request["cpu"], 0.0), "threads": self.threads}

    def fork(self, connection: socket.socket, request: dict, files: list[int]) -> dict | None:
        """Begin what was asked; what to answer where that cannot be."""
        load(self.imports)
        if not understood(request["arguments"]) or not same_imports(request["environment"], self.environment):
            return {"real": True}
        threads = [Path(f"/proc/self/task/{one}/comm").read_text().strip() for one in os.listdir("/proc/self/task")]
        if len(threads) > 1:
            self.threads = threads[1:]
            return {"real": True}
        process = os.fork()
        if process == 0:
            self.become(request, files)
        self.forks[connection] = process
        ended = os.pidfd_open(process)
        lane = request["environment"].get("PYTEST_XDIST_WORKER", "")
        self.watched.register(ended, selectors.EVENT_READ, lambda _: self.end(connection, process, ended, lane))
        return None

    def end(self, connection: socket.socket, process: int, ended: int, lane: str) -> None:
        """A fork has ended: so do processes that it left; the program gets its status."""
        self.kill(process)
        _, status, usage = os.wait4(process, 0)
        self.spent[lane] = self.spent.get(lane, 0.0) + usage.ru_utime + usage.ru_stime
        self.watched.unregister(ended)
        os.close(ended)
        if self.forks.pop(connection, None) is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.send(json.dumps({"status": status}).encode())

    @staticmethod
    def kill(process: int | None) -> None:
        """End a fork that was not waited for yet, and all of its session that stayed in its group."""
        for end in (os.killpg, os.kill) if process else ():
            with contextlib.suppress(ProcessLookupError):
                end(process, signal.SIGKILL)

    def leave(self, _) -> None:
        """Nobody holds the pipe: the run of the suite is over, or was killed."""
        for process in self.forks.values():
            self.kill(process)
            os.waitpid(process, 0)
        shutil.rmtree(Path(self.program).parent, ignore_errors=True)
        os._exit(0)

    def become(self, request: dict, files: list[int]) -> None:
        """In the fork: take over what the program has, run what it was asked to, and leave."""
        os.setsid()
        for target, file in enumerate(files):
            os.dup2(file, target)
        for key in list(self.watched.get_map().values()):
            os.close(key.fd)
        self.watched.close()
        for file in files:
            os.close(file)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        sys.executable, sys.orig_argv = self.program, [self.program, *request["arguments"]]
        if "RANK" in os.environ:
            faulthandler.enable()  # a rank that is aborted says where each of its threads was
        read_again(self.environment)
        leave(interpret(request["arguments"]))


@contextlib.contextmanager
def quiet():
    """Nothing that a library says while it is imported is an error of the server."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def load(imports: list[str]) -> None:
    """Import what is there, at the first fork."""
    if not imports:
        return
    while imports:
        with contextlib.suppress(ImportError), quiet():
            importlib.import_module(imports.pop(0))
    gc.collect()
    gc.freeze()  # so that collections in forks leave these pages shared


def understood(arguments: list[str]) -> bool:
    """Does the command line have the form above?"""
    rest = arguments[1:] if arguments[:1] == ["-u"] else arguments
    return bool(rest) and (not rest[0].startswith("-") or (rest[0] in ("-m", "-c") and len(rest) > 1))


def same_imports(asked: dict[str, str], ours: dict[str, str]) -> bool:
    """Can a fork of this process, with the environment `ours`, be what an interpreter with `asked` is?"""
    absent = tuple(prefix for prefix, module in READ_BY.items() if module not in sys.modules)
    names = {name for name in {**asked, **ours} if name.startswith(READ_AT_IMPORT)}
    names = {name for name in names if not name.startswith((*READ_LATER, *absent))}
    if any(asked.get(name) != ours.get(name) and (name not in READ_AGAIN or name not in asked) for name in names):
        return False
    return not hidden(new_folders(asked, ours))


def folders(environment: dict[str, str]) -> list[str]:
    """Of PYTHONPATH, in which nothing between two colons is the working folder."""
    path = environment.get("PYTHONPATH", "")
    return [os.path.abspath(entry) for entry in path.split(os.pathsep)] if path else []


def new_folders(asked: dict[str, str], ours: dict[str, str]) -> list[str]:
    return [folder for folder in folders(asked) if folder not in folders(ours)]


def hidden(new: list[str]) -> bool:
    """Has a folder something that was imported from elsewhere?"""
    for folder in filter(os.path.isdir, new):
        for name in {entry.partition(".")[0] for entry in os.listdir(folder)} & sys.modules.keys():
            file = getattr(sys.modules[name], "__file__", None)
            if file and not os.path.realpath(file).startswith(os.path.realpath(folder) + os.sep):
                return True
    return False


# ---- a fork ----


def read_again(ours: dict[str, str]) -> None:
    """Do what an interpreter and its imports do with READ_AGAIN, where a value is not that of the server.

    And what bitshard does with its switches.
    """
    asked = {name: os.environ[name] for name in READ_AGAIN if os.environ.get(name) != ours.get(name)}
    if "OMP_NUM_THREADS" in asked:
        sys.modules["torch"].set_num_threads(int(asked["OMP_NUM_THREADS"]))
    if "PYTHONPATH" in asked:
        sys.path[:] = [*folders(os.environ), *(folder for folder in sys.path if folder not in folders(ours))]
    if "PYTHONWARNINGS" in asked:
        sys.warnoptions[:] = asked["PYTHONWARNINGS"].split(",")
        warnings._processoptions(sys.warnoptions)
    if "TRANSFORMERS_VERBOSITY" in asked and "transformers" in sys.modules:
        logging = sys.modules["transformers.utils.logging"]
        logging.set_verbosity(logging.log_levels[asked["TRANSFORMERS_VERBOSITY"]])
    if "bitshard.process.switches" in sys.modules:
        sys.modules["bitshard.process.switches"].read()


def interpret(arguments: list[str]) -> int:
    """Run a command line as `python` does; the status to exit with."""
    arguments = arguments[1:] if arguments[0] == "-u" else arguments
    try:
        if arguments[0] == "-m":
            run_module(arguments[1], arguments[2:])
        elif arguments[0] == "-c":
            run_code(arguments[1], "<string>", "", ["-c", *arguments[2:]])
        else:
            file = Path(arguments[0])
            run_code(file.read_bytes(), arguments[0], str(file.resolve().parent), arguments)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        error = error.with_traceback(without_ours(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def run_module(name: str, arguments: list[str]) -> None:
    sys.path.insert(0, os.getcwd())
    sys.argv = ["-m", *arguments]  # until the module is found, as `python -m` has it
    warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_code(source: str | bytes, name: str, folder: str, arguments: list[str]) -> None:
    """Source as the module `__main__`, which stays in sys.modules as that of an interpreter does."""
    sys.path.insert(0, folder)
    sys.argv = arguments
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if name != "<string>":
        main.__file__ = name
    exec(compile(source, name, "exec", dont_inherit=True), main.__dict__)


def without_ours(trace):
    """A traceback that begins where the interpreter's own would."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", runpy.__file__):
        trace = trace.tb_next
    return trace


def leave(status: int) -> None:
    """As an interpreter ends: its threads, what is registered to run at exit, its output."""
    with contextlib.suppress(BaseException):
        threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    del sys.path[0]  # this folder, which is none of a fork's
    Server(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])).loop()
