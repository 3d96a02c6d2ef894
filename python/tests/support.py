"""Shared by the tests: the simulated GPU through the CUDA runtime, and programs to start."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any, Callable, Iterator

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "vramctl"

#: The command line that matches the library under test; set by scripts/test-python.
VRAMCTL = os.environ.get("VRAMCTL_TEST_COMMAND", "vramctl")

_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
#: Those that a process has looked at.
_PORTS = itertools.count()


def runtime() -> str:
    """The CUDA runtime already loaded (torch bundles one), else the one that the loader finds."""
    loaded = re.findall(r"/\S+/libcudart\S*\.so\S*", Path("/proc/self/maps").read_text())
    return loaded[0] if loaded else "libcudart.so.12"


class Cuda:
    """The CUDA runtime through the global scope, where a preloaded library comes first."""

    def __init__(self, path: str = "") -> None:
        ctypes.CDLL(path or runtime(), mode=ctypes.RTLD_GLOBAL)
        self._scope = ctypes.CDLL(None)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._scope, name)(*arguments)
        if code != 0:
            # Clear it, or torch would attribute it to its own next call in this thread.
            self._scope.cudaGetLastError()
            raise RuntimeError(f"{name}: error {code}")

    def malloc(self, size: int) -> int:
        pointer = ctypes.c_void_p()
        self.call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(size))
        return int(pointer.value or 0)

    def free(self, address: int) -> None:
        self.call("cudaFree", ctypes.c_void_p(address))

    def write(self, address: int, contents: bytes) -> None:
        self.call("cudaMemcpy", ctypes.c_void_p(address), contents, ctypes.c_size_t(len(contents)), _HOST_TO_DEVICE)

    def read(self, address: int, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        self.call("cudaMemcpy", buffer, ctypes.c_void_p(address), ctypes.c_size_t(size), _DEVICE_TO_HOST)
        return buffer.raw

    def memory_info(self) -> tuple[int, int]:
        """The device's free and total memory."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def free_memory(self) -> int:
        return self.memory_info()[0]


def freed(bytes: int) -> int:
    """How much of `bytes` must be free after a pause. Pinned host memory needs page tables on the GPU: 1 byte per 512, in
    units of 2 MiB.
    """
    return bytes - bytes // 512 - 2 * MIB


def eventually(what: str, is_so: Callable[[], bool]) -> None:
    """Waits until it is so. Only a hang takes longer than the limit, however busy the machine is."""
    end = time.monotonic() + 100
    while not is_so():
        assert time.monotonic() < end, f"not within 100 s: {what}"
        time.sleep(0.02)


class FolderOfPrograms(tempfile.TemporaryDirectory[str]):
    """A folder in the environment of programs. At its end, it waits for what they leave behind, which writes into it: keepers, of those that share."""

    def cleanup(self) -> None:
        eventually(f"nobody uses {self.name}", lambda: not any(map(self._uses, Path("/proc").glob("[0-9]*"))))
        super().cleanup()

    def _uses(self, process: Path) -> bool:
        try:
            return self.name.encode() in (process / "environ").read_bytes()
        except OSError:
            return False


def free_ports(count: int) -> list[int]:
    """Ports to serve at. Below those that the system gives to whoever asks for any port or connects, as others do before these are bound; and of
    another range for each process.
    """
    range_of_process = 10_000 + os.getpid() % 1000 * 20
    ports = []
    while len(ports) < count:
        port = range_of_process + next(_PORTS)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


def pattern(seed: int, size: int) -> bytes:
    """Bytes unique to this seed."""
    unit = bytes((seed * 31 + number * 7 + number // 251) % 251 + 1 for number in range(4093))
    return (unit * (size // len(unit) + 1))[:size]


#: A program that holds GPU memory under two tags and obeys commands, one per line.
HOLDER = """
import sys
sys.path.insert(0, {tests!r})
from support import Cuda, MIB, pattern
import vramctl
cuda = Cuda()
with vramctl.region("weights"):
    weights = cuda.malloc(8 * MIB)
with vramctl.region("kv_cache", backup="discard"):
    cache = cuda.malloc(4 * MIB)
cuda.write(weights, pattern(1, 8 * MIB))
cuda.write(cache, pattern(2, 4 * MIB))
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "check":
        kept = cuda.read(weights, 8 * MIB) == pattern(1, 8 * MIB)
        dropped = not any(cuda.read(cache, 4 * MIB))
        print(f"weights {{'ok' if kept else 'lost'}}, cache {{'zero' if dropped else 'there'}}", flush=True)
""".format(tests=str(Path(__file__).resolve().parent))


class Program:
    """A Python program under `vramctl run`."""

    def __init__(self, name: str | None, source: str = HOLDER, python: str = sys.executable, **environment: str) -> None:
        self.child = subprocess.Popen(
            [VRAMCTL, "run", *(["--name", name] if name else []), "--", python, "-c", source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        line = self.line()
        assert line == "ready", line

    @property
    def pid(self) -> int:
        return self.child.pid

    def line(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def ask(self, line: str) -> str:
        assert self.child.stdin is not None
        self.child.stdin.write(line + "\n")
        self.child.stdin.flush()
        return self.line()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops it for a while. Its threads run until each has noticed, and could still answer: that is awaited."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: Any) -> None:
        self.child.kill()
        self.child.communicate()


def wheel(folder: Path, version: str) -> Path:
    """A wheel of what is built already, as scripts/wheel makes it."""
    path = folder / f"vramctl-{version}-py3-none-manylinux_2_28_{os.uname().machine}.whl"
    about = f"vramctl-{version}.dist-info"
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: vramctl\nVersion: {version}\n",
        "WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-manylinux_2_28_{os.uname().machine}\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file in PACKAGE.rglob("*"):
            if file.suffix in (".py", ".typed"):
                archive.write(file, Path("vramctl") / file.relative_to(PACKAGE))
        archive.write(os.environ["VRAMCTL_LIB"], "vramctl/libvramctl.so")
        archive.write(VRAMCTL, f"vramctl-{version}.data/scripts/vramctl")
        archive.writestr(f"vramctl-{version}.data/data/share/man/man1/vramctl.1", ".TH vramctl 1\n")
        for name, text in texts.items():
            archive.writestr(f"{about}/{name}", text)
    return path


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program and captures its output."""
    return subprocess.run(arguments, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)


def bare(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Same as `run`, without the library and its Python directories."""
    without = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "PYTHONPATH")}
    return subprocess.run(arguments, env={**without, **environment}, capture_output=True, text=True, timeout=300)
