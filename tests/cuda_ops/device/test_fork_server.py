from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cuda_ops.device import fork_server
from cuda_ops.device.compiling import own_folder
from cuda_ops.device.fork_server import Process, _servers, start

ROOT = Path(__file__).resolve().parents[3]
THIS = "tests.cuda_ops.device.test_fork_server"
both = pytest.mark.parametrize("afresh", [False, True], ids=["forked", "afresh"])


def greet(name: str, code: int) -> int:
    print("hello", name, os.environ.get("GREETING"), Path.cwd())  # noqa: T201
    print("torch" in sys.modules, file=sys.stderr)  # noqa: T201
    return code


def tell(text: str, file: int) -> None:
    os.write(file, text.encode())


def sleep() -> None:
    time.sleep(60)


def fail() -> None:
    raise ValueError("no such thing")


def leave() -> None:
    raise SystemExit(3)


def abort() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def train() -> int:
    """Backward in a process of the server: autograd must not have been initialised before the fork."""
    import torch

    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()
    return int(x.grad is not None and float(x.grad.sum()) == 6.0 and not torch.cuda.is_initialized())


def run(name: str, *arguments: object, **options: object) -> tuple[int, str]:
    """Exit code and output of a function of this file."""
    with tempfile.TemporaryFile("w+") as output:
        process = begin(name, arguments, output.fileno(), **options)
        code = process.wait(60)
        output.seek(0)
        return code, output.read()


def begin(name: str, arguments: Sequence[object], output: int, **options: object) -> Process:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GREETING": "again"}
    options = {"loads": [], **options}
    return start(f"{THIS}:{name}", arguments, environment=environment, output=output, **options)  # type: ignore[arg-type]


def compile_nowhere(temporary: str) -> None:
    """As a rank does whose cache cannot be written; it ends by an exception."""
    tempfile.tempdir = temporary
    made = own_folder(Path("/dev/null/cache"))
    raise SystemExit(0 if made.parent == Path(temporary) and made.is_dir() else 1)


@both
def test_a_process_has_its_arguments_environment_folder_and_output(
    afresh: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = run("greet", "you", 7, afresh=afresh)
    assert code == 7
    assert f"hello you again {tmp_path}" in text


@both
def test_variables_of_one_process_need_no_server_of_its_own(afresh: bool) -> None:
    before = set(_servers)
    assert "hello you for once" in run("greet", "you", 0, variables={"GREETING": "for once"}, afresh=afresh)[1]
    assert "hello you again" in run("greet", "you", 0, afresh=afresh)[1]
    assert len(set(_servers) - before) <= 1


def test_what_is_loaded_once_is_there_for_all() -> None:
    assert "True" in run("greet", "you", 0, loads=["torch"])[1]
    assert "True" in run("greet", "you", 0)[1]


@both
def test_files_are_given_to_the_function(afresh: bool) -> None:
    reads, writes = os.pipe()
    assert run("tell", "through a pipe", files=[writes], afresh=afresh)[0] == 0
    os.close(writes)
    with open(reads) as file:
        assert file.read() == "through a pipe"  # to its end: nobody else holds the other side


def test_a_server_that_was_stopped_starts_processes_and_tells_of_their_end() -> None:
    process = begin("sleep", (), 2)
    server = process.server._process.pid
    for _ in range(2):
        os.kill(server, signal.SIGSTOP)
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
        os.kill(server, signal.SIGSTOP)
        process = begin("sleep", (), 2)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL


@both
@pytest.mark.parametrize(("name", "code"), [("fail", 1), ("leave", 3), ("abort", -signal.SIGSEGV)])
def test_how_a_process_ends_is_told(name: str, code: int, afresh: bool) -> None:
    found, text = run(name, afresh=afresh)
    assert found == code
    assert ("ValueError: no such thing" in text) is (name == "fail")


@both
def test_a_process_is_killed(afresh: bool) -> None:
    with tempfile.TemporaryFile() as output:
        process = begin("sleep", [], output.fileno(), afresh=afresh)
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
        process.kill()
        assert process.poll() == -signal.SIGKILL


def test_a_process_leaves_no_folder_of_compiled_code(tmp_path: Path) -> None:
    assert run("compile_nowhere", str(tmp_path))[0] == 0
    assert list(tmp_path.iterdir()) == []


def test_gradients_are_found_in_a_forked_process() -> None:
    assert run("train", loads=["torch"])[0] == 1


def test_a_module_that_cannot_be_loaded_is_the_process_s_own_error() -> None:
    with tempfile.TemporaryFile("w+") as output:
        process = start("halopipe.nowhere:main", environment=dict(os.environ), output=output.fileno(), loads=[])
        assert process.wait(60) == 1
        output.seek(0)
        assert "No module named 'halopipe.nowhere'" in output.read()


def ends(pid: int) -> bool:
    """Whether a process of somebody else is gone within a few seconds."""
    for _ in range(1000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


PARENT = """
import os, sys, tempfile, time
from cuda_ops.device.fork_server import start, _servers
from tests.cuda_ops.device.test_fork_server import begin
process = begin("sleep", [], 2)
server = next(iter(_servers.values()))._process.pid if _servers else process.pid
print(process.pid, server, flush=True)
{then}
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux 5.3")
@pytest.mark.parametrize(
    "then", ["os._exit(0)", "sys.exit(0)", "os.kill(os.getpid(), 9)", "os.kill(server, 9); time.sleep(60)"]
)
def test_nothing_is_left_when_the_parent_or_the_server_ends(then: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT.format(then=then)], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid, server = map(int, parent.stdout.readline().split())
        assert ends(pid)
        assert ends(server)
        parent.kill()


KILLED = """
import os, sys, tempfile
from cuda_ops.device.fork_server import start

print(os.getpid(), flush=True)
with tempfile.TemporaryFile() as output:
    start("time:sleep", [60], environment=dict(os.environ), output=output.fileno(), loads=["slow"], leaves=sys.argv[1])
"""


def test_the_folder_of_a_job_goes_with_a_parent_that_is_killed_while_it_starts_a_process(tmp_path: Path) -> None:
    """The server has the request, and nobody to whom it could send the process."""
    folder = tmp_path / "job"
    begun = tmp_path / "begun"
    goes_on = tmp_path / "goes_on"
    folder.mkdir()
    wait = f"while not pathlib.Path({str(goes_on)!r}).exists(): time.sleep(0.01)"
    (tmp_path / "slow.py").write_text(f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\n{wait}\n")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    with subprocess.Popen([sys.executable, "-c", KILLED, folder], env=environment, stdout=subprocess.PIPE) as parent:
        end_s = time.monotonic() + 60
        while not begun.exists() and time.monotonic() < end_s:
            time.sleep(0.01)
        parent.kill()
        parent.wait()
        goes_on.touch()
    while folder.exists() and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not folder.exists()


def test_a_server_that_died_is_replaced() -> None:
    assert run("greet", "you", 0)[0] == 0
    for server in fork_server._servers.values():
        server._process.kill()
        server._process.wait()
    assert run("greet", "you", 0)[0] == 0


def test_variables_that_libraries_read_when_they_are_loaded_have_a_server_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run("greet", "you", 0)[0] == 0
    before = len(fork_server._servers)
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    assert run("greet", "you", 0)[0] == 0
    assert len(fork_server._servers) == before + 1
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert run("greet", "you", 0)[0] == 0
    assert len(fork_server._servers) == before + 1


def test_the_end_of_this_process_ends_them() -> None:
    ended: Callable[[], None] = fork_server.end_servers
    assert run("greet", "you", 0)[0] == 0
    pids = [server._process.pid for server in fork_server._servers.values()]
    assert pids
    ended()
    assert all(ends(pid) for pid in pids)
    assert not fork_server._servers
