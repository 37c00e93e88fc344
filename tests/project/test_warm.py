"""helpers/warm.py: forks of the server are interpreters like others, and end when whoever waits for them ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fsdp.launch import run
from helpers import warm

pytestmark = pytest.mark.skipif(warm.PROGRAM not in os.environ, reason="this run has no server of interpreters")
FORKED = "import os; print(os.readlink(f'/proc/{os.getppid()}/exe'), open(f'/proc/{os.getppid()}/cmdline').read())"


def start(*arguments: str, **variables: str) -> subprocess.Popen:
    environment = {**warm.without_launcher(), **warm.WORKER, **variables}
    pipe = subprocess.PIPE
    return subprocess.Popen([warm.python(), *arguments], env=environment, stdout=pipe, stderr=pipe, text=True)


def ended(process: int) -> bool:
    """Is it gone within a second or so?"""
    for _ in range(200):
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_a_script_is_main(tmp_path):
    """Its folder, arguments, environment, working folder; the functions of `__main__` can be found by pickle."""
    (tmp_path / "beside.py").write_text("name = 'beside'\n")
    (tmp_path / "script.py").write_text(
        "import beside, os, pickle, sys\ndef f(): return 7\n"
        "assert pickle.loads(pickle.dumps(f))() == 7 and __name__ == '__main__' and __file__ == sys.argv[0]\n"
        "print(beside.name, sys.argv[1:], os.environ['WHAT'], os.getcwd() == sys.argv[1], 'torch' in sys.modules)\n"
    )
    said = run([sys.executable, str(tmp_path / "script.py"), os.getcwd(), "--x"], 60, WHAT="that")
    assert said == f"beside {[os.getcwd(), '--x']} that True True\n"
    assert run([sys.executable, "-c", "import os; print('WHAT' in os.environ)"], 60) == "False\n"


@pytest.mark.parametrize(
    "code, status, words",
    [
        ("raise SystemExit(3)", 3, ""),
        ("import sys; sys.exit('in words')", 1, "in words\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; os.abort()", -6, ""),
        ("import atexit; atexit.register(print, 'last'); print('first')", 0, ""),
    ],
)
def test_how_it_ends(code, status, words):
    process = start("-c", code)
    out, error = process.communicate(timeout=60)
    assert process.returncode == status and error == words
    assert out == ("first\nlast\n" if "atexit" in code else "")


def test_a_failure_shows_its_own_lines_only(tmp_path):
    (tmp_path / "script.py").write_text("def f():\n    1 / 0\n\n\nf()\n")
    process = start(str(tmp_path / "script.py"))
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and error.endswith("ZeroDivisionError: division by zero\n")
    assert error.count("File ") == 2 and "line 5, in <module>" in error and "warm.py" not in error


def test_what_is_read_at_import_gets_a_real_interpreter(tmp_path):
    """A PYTHONPATH too, where a folder of it has something that the server has imported from elsewhere."""
    assert "warm.py" in run([sys.executable, "-c", FORKED], 60)
    code = "import sys; print(sys.executable, 'torch' in sys.modules)"
    assert run([sys.executable, "-c", code], 60, HF_HOME=str(tmp_path)) == f"{sys.executable} False\n"
    (tmp_path / "beside.py").write_text("")
    program = run([sys.executable, "-c", f"import beside; {code}"], 60, PYTHONPATH=str(tmp_path))
    assert program == f"{warm.python()} True\n"
    (tmp_path / "bitsandbytes").mkdir()
    assert run([sys.executable, "-c", code], 60, PYTHONPATH=str(tmp_path)) == f"{sys.executable} False\n"
    assert run([sys.executable, "-I", "-c", code], 60) == f"{sys.executable} False\n"
    assert run([sys.executable, "-c", code], 60, fresh=True) == f"{sys.executable} False\n"


@pytest.mark.skipif(warm.BARE not in os.environ, reason="this run has no second server")
def test_the_second_server_has_torch_alone(tmp_path):
    """What a PYTHONPATH names is imported from there, by ranks too."""
    (tmp_path / "bitsandbytes.py").write_text("import sys\nfound = [n for n in sys.argv if n in sys.modules]\n")
    code = "import bitsandbytes as b, os; print(b.__file__, b.found, os.environ.get('RANK'))"
    names = ["torch", "bitshard", "transformers"]
    said = f"{tmp_path / 'bitsandbytes.py'} ['torch']"
    assert run([sys.executable, "-c", code, *names], 60, bare=True, PYTHONPATH=str(tmp_path)) == f"{said} None\n"
    (tmp_path / "rank.py").write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ranks = run([*command, str(tmp_path / "rank.py"), *names], 60, bare=True, PYTHONPATH=str(tmp_path))
    assert f"{said} 0\n" in ranks and f"{said} 1\n" in ranks
    (tmp_path / "torch.py").write_text("print('not the one that was imported')")
    assert "not the one" in run([sys.executable, "-c", "import torch"], 60, bare=True, PYTHONPATH=str(tmp_path))


def test_what_a_fork_reads_again(tmp_path):
    """A demo's variables: the fork does with them what a real interpreter does."""
    code = "import sys, torch, transformers, warnings; warnings.warn('heard')\n"
    code += "print(torch.get_num_threads(), transformers.logging.get_verbosity(), sys.warnoptions, sys.executable)"
    environment = {"OMP_NUM_THREADS": "2", "PYTHONWARNINGS": "error::DeprecationWarning,ignore"}
    environment["TRANSFORMERS_VERBOSITY"] = "error"
    for fresh in (False, True):
        pipe, program = subprocess.PIPE, sys.executable if fresh else warm.python()
        variables = {**warm.without_launcher(), **warm.WORKER, **environment}
        done = subprocess.run([program, "-c", code], env=variables, stdout=pipe, stderr=pipe, text=True, timeout=60)
        assert done.stderr == "" and done.stdout == f"2 40 ['error::DeprecationWarning', 'ignore'] {program}\n"
    assert "heard" in start("-c", code).communicate(timeout=60)[1]


def test_ranks_are_forks_too(tmp_path):
    (tmp_path / "rank.py").write_text(f"{FORKED}\nprint('rank', os.environ['RANK'], os.environ['WORLD_SIZE'])\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = run([*command, str(tmp_path / "rank.py")], 120)
    assert said.count("warm.py") == 2 and "rank 0 2\n" in said and "rank 1 2\n" in said


CHILD = "import os, subprocess, time; c = subprocess.Popen(['sleep', '600']); print(os.getpid(), c.pid, flush=True)\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_who_is_killed_takes_the_fork_and_its_children(number):
    process = start("-c", CHILD + "time.sleep(600)")
    pids = [int(word) for word in process.stdout.readline().split()]
    process.send_signal(number)
    assert process.wait(timeout=60) == -number
    assert all(ended(pid) for pid in pids)


def test_a_fork_leaves_no_children():
    process = start("-c", CHILD)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and all(ended(int(word)) for word in out.split())


def test_a_server_takes_all_with_it(tmp_path):
    """As where a run of the suite is killed: its end of the pipe is closed."""
    code = (
        "import os, signal, subprocess, sys; from helpers import warm\n"
        "warm.IMPORTS.clear(); server = warm.start()\n"
        "environment = {**warm.without_launcher(), **warm.WORKER}\n"
        "code = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'\n"
        "program = subprocess.Popen([warm.python(), '-c', code], env=environment, stdout=subprocess.PIPE, text=True)\n"
        "print(server.pid, program.pid, program.stdout.readline(), server.folder, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != warm.PROGRAM}
    command = [sys.executable, "-c", code]
    folder = Path(__file__).parents[1]
    done = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == -9
    *pids, place = done.stdout.split()
    assert len(pids) == 3 and all(ended(int(pid)) for pid in pids)
    assert not Path(place).exists()


def test_a_signal_that_comes_too_late_ends_nothing():
    """torchrun's may, to a rank that has ended while its program has not read so yet."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as program:
        program.connect(str(Path(os.environ[warm.PROGRAM]).with_name("socket")))
        environment = {**warm.without_launcher(), **warm.WORKER}
        request = {"arguments": ["-c", "pass"], "folder": os.getcwd(), "environment": environment}
        with open(os.devnull, "r+") as nowhere:
            socket.send_fds(program, [json.dumps(request).encode()], [nowhere.fileno()] * 3)
        assert json.loads(program.recv(1 << 16)) == {"status": 0}
        program.send(str(int(signal.SIGTERM)).encode())
        assert "threads" in warm.ask({"cpu": ""})
    assert "warm.py" in run([sys.executable, "-c", FORKED], 60)
