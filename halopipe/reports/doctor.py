"""What of this machine is missing or odd for halopipe, and what to do about it; a few seconds.

    needed     Python, torch with gloo, memory, a host that can talk to itself: without one nothing runs
    wanted     what makes runs fast or figures true: cores of one's own, a compiler, AVX-512, shared memory, links
    optional   packages of extras, GPUs

Nothing is changed, and nothing is written.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cuda_ops.device import compiling, gpus, host, torch_versions
from halopipe.terminal import units

OK = "ok"
ODD = "odd"
MISSING = "missing"

EXTRAS: Mapping[str, Mapping[str, str]] = {
    "demo": {"scikit-learn": "sklearn"},
    "docs": {"mkdocs-material": "material", "mkdocstrings": "mkdocstrings"},
    "graphs": {"torch_geometric": "torch_geometric"},
    "mpi": {"mpi4py": "mpi4py", "mpich": "mpi4py"},
    "networks": {"timm": "timm", "torchvision": "torchvision", "transformers": "transformers"},
    "notebooks": {"ipykernel": "ipykernel", "nbclient": "nbclient", "nbformat": "nbformat"},
    "ray": {"ray": "ray"},
    "report": {"bokeh": "bokeh", "jinja2": "jinja2"},
    "scans": {"laspy": "laspy", "lazrs": "lazrs"},
    "serve": {"starlette": "starlette", "uvicorn": "uvicorn"},
    "tensorboard": {"tensorboard": "tensorboard"},
}
"""Extras of the installation: their packages, and what these are called when imported.

MPICH is a library alone, which mpi4py loads.
"""

OLDEST_PYTHON = (3, 11)
NEWEST_PYTHON = (3, 13)
"""Those that are tested; the oldest is also that of ``pyproject.toml``."""
_PYTHONS = "{}.{} to {}.{}".format(*OLDEST_PYTHON, *NEWEST_PYTHON)
_LITTLE_MEMORY = 2 * 2**30
_LITTLE_SHARED = 256 * 2**20
_FEW_FILES = 1024
_FEW_PROCESSES = 256
_SLOW_WAKING_S = 1e-3
_OWN_SHARE = 0.95  # of a core's time
_BUSY_S = 0.2
_NAP_S = 1e-3
_SLOW_LOOPBACK = 200e6
_SENT_BYTES = 32 * 2**20
_DEADLINE_S = 5.0

BUILT_FOR_TORCH = ("torchvision", "torchaudio")
"""Packages whose operators are compiled for one build of torch; beside another they cannot be loaded."""
_IMPORT_S = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the examination.

    Attributes:
        status: ``ok``, ``odd`` or ``missing``.
        text: what there is.
        remedy: what to do; empty if it is ok, or if nothing can be done.
        needed: whether nothing runs without it; then ``missing`` is a failure.
    """

    what: str
    status: str
    text: str
    remedy: str = ""
    needed: bool = False

    @property
    def fails(self) -> bool:
        """Whether halopipe cannot run because of it."""
        return self.needed and self.status == MISSING


def _judged(what: str, text: str, is_odd: bool, remedy: str, *, needed: bool = False) -> Finding:
    """A finding that is ok, or odd with something to do about it."""
    return Finding(what, ODD if is_odd else OK, text, remedy if is_odd else "", needed)


def examine() -> tuple[Finding, ...]:
    """All findings, the needed ones first.  One that cannot be made is itself a finding."""
    findings: list[Finding] = []
    for what, look in _LOOKS:
        try:
            findings += look()
        except Exception as error:  # noqa: BLE001  # a machine may be odd in ways nobody thought of
            findings.append(Finding(what, ODD, f"cannot be looked at: {type(error).__name__}: {error}"))
    return tuple(findings)


def can_run(findings: tuple[Finding, ...]) -> bool:
    """Whether nothing that is needed is missing."""
    return not any(finding.fails for finding in findings)


def render(findings: tuple[Finding, ...]) -> str:
    """A table, what to do below each line that is not ok, and the verdict."""
    width = max((len(finding.what) for finding in findings), default=0)
    shown = []
    for finding in findings:
        shown.append(f"{finding.status:<7}  {finding.what:<{width}}  {finding.text}")
        shown += [f"{'':<{width + 9}}  try: {finding.remedy}"] if finding.remedy else []
    odd = sum(finding.status != OK for finding in findings)
    failing = [finding.what for finding in findings if finding.fails]
    verdict = f"halopipe cannot run here: {', '.join(failing)}" if failing else "halopipe can run here"
    return "\n".join([*shown, "", f"{verdict}; {units.count(odd, 'line')} not ok" if odd else verdict])


def data(findings: tuple[Finding, ...]) -> dict[str, Any]:
    """The same for JSON."""
    return {"can_run": can_run(findings), "findings": [asdict(finding) for finding in findings]}


def _python() -> Iterator[Finding]:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}; tested: {_PYTHONS}"
    status = _in_range(sys.version_info[:2], OLDEST_PYTHON, NEWEST_PYTHON)
    yield Finding("python", status, text, "" if status == OK else f"install Python {_PYTHONS}", needed=True)


def _in_range(version: tuple[int, ...], oldest: tuple[int, int], newest: tuple[int, int]) -> str:
    """A newer release than those tested may do; an older one lacks what is used."""
    return MISSING if version < oldest else ODD if version > newest else OK


def _torch() -> Iterator[Finding]:
    install = torch_versions.INSTALL
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:  # OSError: a library that it needs
        yield Finding("torch", MISSING, f"{type(error).__name__}: {error}", install, needed=True)
        return
    version = str(torch.__version__)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "processor only"
    text = f"{version}, {build}; tested: {torch_versions.RANGE}"
    status = _in_range(numbers, torch_versions.OLDEST, torch_versions.NEWEST)
    try:
        importlib.import_module("cuda_ops._torch")
    except torch_versions.TorchVersionError as error:
        status = MISSING
        text = f"{error.title}; {error.tested}"
    yield Finding("torch", status, text, "" if status == OK else install, needed=True)
    has_gloo = dist.is_available() and dist.is_gloo_available()
    text = "moves messages between processes" if has_gloo else "this build of torch has no gloo"
    yield Finding("gloo", OK if has_gloo else MISSING, text, "" if has_gloo else install, needed=True)
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's has no types
    speed = "convolutions have fast kernels" if has_onednn else "this build of torch lacks it: convolutions are slow"
    yield _judged("oneDNN", speed, not has_onednn, install)
    level = str(torch.backends.cpu.get_cpu_capability())
    flags = _cpu_flags()
    why = "the processor has no AVX-512" if "avx512f" not in flags else "torch does not use AVX-512"
    text = level if level == "AVX512" or not flags else f"{level}: {why}"
    yield _judged("vectors", text, level == "DEFAULT" and text != level, "")


def _cores() -> Iterator[Finding]:
    usable = host.device_description().num_cores
    there = os.cpu_count() or usable
    quota = cpu_quota(_read(Path("/sys/fs/cgroup/cpu.max")))
    text = f"{usable} of {there} usable"
    if quota is not None and quota < usable:
        text = f"{text}, but the control group allows the time of {quota:.2f}"
        yield Finding("cores", ODD, text, "raise the CPU limit of the container, or plan for fewer ranks")
    else:
        text = f"{text}: ranks will share it" if usable < 2 else text
        yield _judged("cores", text, usable < 2, "taskset or the job's limits leave one core; ask for more")
    threads = hyperthreads()
    if threads > 1:
        yield Finding(
            "hyperthreads",
            ODD,
            f"{threads} threads share a core",
            "plan for as many ranks as there are cores: two threads of one core slow each other",
        )
    governor = _read(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"))
    if governor:
        is_slow = governor in ("powersave", "ondemand", "conservative")
        yield _judged("clock", f"governor {governor}", is_slow, "cpupower frequency-set -g performance")
    share = own_share()
    waking = waking_s()
    text = f"a busy thread gets {units.percent(share)} of a core; load {os.getloadavg()[0]:.1f}"
    remedy = "wait until nothing else runs before you profile"
    yield _judged("cores are free", text, share < _OWN_SHARE, remedy)
    remedy = "messages will wait that long; profile on this machine, whose links include it"
    text = f"a sleeping thread wakes {units.seconds(waking)} late"
    yield _judged("cores that sleep", text, waking > _SLOW_WAKING_S, remedy)


def cpu_quota(text: str) -> float | None:
    """Cores of a control group's ``cpu.max`` (``200000 100000``); None for no limit."""
    fields = text.split()
    return float(fields[0]) / float(fields[1]) if len(fields) == 2 and fields[0] != "max" else None


def hyperthreads(folder: Path = Path("/sys/devices/system/cpu")) -> int:
    """Threads of the first core, of those that are shared; 1 where it is not known."""
    siblings = _read(folder / "cpu0" / "topology" / "thread_siblings_list")
    total = 0
    for part in siblings.split(","):
        first, _, last = part.partition("-")
        total += int(last or first) - int(first) + 1 if first.strip().isdecimal() else 0
    return max(1, total)


def own_share() -> float:
    """The part of a core's time that a thread gets which wants all of it."""
    start_s = time.perf_counter()
    used_s = time.thread_time()
    while time.perf_counter() - start_s < _BUSY_S:
        pass
    return min(1.0, (time.thread_time() - used_s) / (time.perf_counter() - start_s))


def waking_s() -> float:
    """By how much a nap is longer than asked for, in the median."""
    delays_s = []
    for _ in range(60):
        start_s = time.perf_counter()
        time.sleep(_NAP_S)
        delays_s.append(time.perf_counter() - start_s - _NAP_S)
    return max(0.0, statistics.median(delays_s))


def _memory() -> Iterator[Finding]:
    available = host.available_bytes()
    remedy = "close other programs, or raise the container's limit"
    yield _judged("memory", f"{units.size(available)} available", available < _LITTLE_MEMORY, remedy)
    with contextlib.suppress(OSError):
        shared = os.statvfs("/dev/shm")
        size = shared.f_frsize * shared.f_blocks
        remedy = "docker run --shm-size 1g: loaders with workers pass batches through it"
        yield _judged("shared memory", f"/dev/shm has {units.size(size)}", size < _LITTLE_SHARED, remedy)


def _limits() -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = "no limit" if files < 0 else f"{files} at most"
    yield _judged("open files", text, 0 <= files < _FEW_FILES, "ulimit -n 4096")
    space, processes = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC))
    if space != resource.RLIM_INFINITY:
        yield Finding(
            "address space", ODD, f"limited to {units.size(space)}", "ulimit -v unlimited, unless it is meant"
        )
    if 0 <= processes < _FEW_PROCESSES:
        yield Finding("processes", ODD, f"{processes} at most", "ulimit -u 4096")


def _compiler() -> Iterator[Finding]:
    try:
        toolchain = compiling.find_toolchain(os.environ)
    except compiling.CannotCompileError as error:
        yield Finding(
            "C++ compiler",
            ODD,
            f"{error}".splitlines()[0],
            "apt install g++: without it sparse kernels run in plain torch, several times slower, and a profile does"
            " not see what convolutions allocate for themselves",
        )
    else:
        yield Finding("C++ compiler", OK, f"{toolchain.compiler}, {toolchain.version.splitlines()[0]}")
    folder = compiling.cache_folder(os.environ)
    above = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    fault = compiling.foreign(folder) if above == folder else "" if os.access(above, os.W_OK) else f"{above} is closed"
    remedy = "set XDG_CACHE_HOME to a folder of your own: kernels are compiled in every process otherwise"
    yield _judged("cache", f"{folder}: {fault}" if fault else f"{folder} can be written", bool(fault), remedy)


def _gpus() -> Iterator[Finding]:
    if not gpus.may_have_gpus():
        yield Finding("GPU", OK, "no driver of NVIDIA's: devices are cores")
        return
    program = shutil.which("nvidia-smi")
    driver = "driver there, nvidia-smi is not"
    if program is not None:
        query = (program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
        driver = "; ".join(answer.stdout.strip().splitlines()) or answer.stderr.strip() or "nvidia-smi says nothing"
    why = gpus.why_no_gpu()
    if why:
        yield Finding(
            "GPU",
            ODD,
            f"{driver}; {why}",
            "install the build of torch for CUDA: https://pytorch.org/get-started/locally",
        )
        return
    import torch
    import torch.distributed as dist

    yield Finding(
        "GPU",
        OK,
        f"{units.count(gpus.num_gpus(), 'GPU')}: {driver}; "
        "plans of one rank were tested on one H200, two GPUs and NCCL never",
    )
    has_nccl = dist.is_nccl_available()
    text = "this build of torch has none"
    if has_nccl:
        text = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # torch's has no types
    yield _judged("NCCL", text, not has_nccl, "install the build of torch for CUDA")


def _links() -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        yield Finding("host name", OK, f"{name} is {address}")
    except OSError as error:
        yield Finding(
            "host name",
            ODD,
            f"{name}: {error.strerror or error}",
            f"add '127.0.1.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME",
        )
    names = [name for _, name in socket.if_nameindex()]
    alone = " (no other host can be reached)" if names == ["lo"] else ""
    yield Finding("interfaces", OK, ", ".join(names) + alone)
    try:
        speed = loopback_bytes_per_s()
    except OSError as error:
        yield Finding("loopback", MISSING, f"127.0.0.1: {error.strerror or error}", "ip link set lo up", needed=True)
        return
    remedy = "something slows messages down: a sandbox, or a busy machine"
    yield _judged("loopback", f"{units.size(speed)}/s over TCP", speed < _SLOW_LOOPBACK, remedy, needed=True)


def loopback_bytes_per_s() -> float:
    """How fast one thread sends to another over TCP on this host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_DEADLINE_S)

        def send() -> None:
            with contextlib.suppress(OSError), socket.create_connection(server.getsockname(), _DEADLINE_S) as out:
                out.sendall(bytes(_SENT_BYTES))

        sender = threading.Thread(target=send)
        sender.start()
        try:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(_DEADLINE_S)
                buffer = bytearray(2**20)
                got = 0
                start_s = time.perf_counter()
                while got < _SENT_BYTES and (size := connection.recv_into(buffer)):
                    got += size
        finally:
            sender.join()
    return got / max(1e-9, time.perf_counter() - start_s)


def _packages() -> Iterator[Finding]:
    for extra, packages in EXTRAS.items():
        lacking = [name for name, module in packages.items() if importlib.util.find_spec(module) is None]
        what = f"extra {extra}"
        text = f"not installed: {', '.join(lacking)}"
        if lacking:
            yield Finding(what, MISSING, text, f"pip install 'halopipe[{extra}]'")
        else:
            yield Finding(what, OK, ", ".join(f"{name} {_version(name)}" for name in packages))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not by pip"  # a cluster's own MPI


def _built_for_torch() -> Iterator[Finding]:
    """Imported, each in a process of its own: their versions do not tell what they were compiled for."""
    for name in BUILT_FOR_TORCH:
        if importlib.util.find_spec(name) is None:
            continue
        version = importlib.metadata.version(name)
        trouble = _import_error(name)
        torch_version = importlib.metadata.version("torch")
        build = torch_version.partition("+")[2]
        index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
        apart = f"cannot be loaded beside torch {torch_version}: {trouble}; nor can what imports it, such as models of"
        remedy = f"pip install --force-reinstall --no-deps {name}=={version.partition('+')[0]}{index}"
        text = f"{version} {apart} transformers" if trouble else version
        yield _judged(name, text, bool(trouble), f"{remedy}, or pip uninstall {name}")


def _import_error(name: str, deadline_s: float = _IMPORT_S) -> str:
    """Why a fresh process cannot import ``name``; empty if it can."""
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; import {name}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired:
        return f"importing it takes above {deadline_s:g} s"
    lines = done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"]
    return lines[-1] if done.returncode else ""


def _cpu_flags() -> frozenset[str]:
    match = re.search(r"^flags\s*:(.*)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


_LOOKS: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
    ("python", _python),
    ("torch", _torch),
    ("memory", _memory),
    ("links", _links),
    ("cores", _cores),
    ("compiler", _compiler),
    ("GPU", _gpus),
    ("limits", _limits),
    ("packages", _packages),
    ("packages for torch", _built_for_torch),
)
