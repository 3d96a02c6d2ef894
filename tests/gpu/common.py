"""What the programs of gpu-check share: what they print, nvidia-smi, and programs that they start.

usage: common.py GIB GPU    allocates and writes this much, prints a line, and holds it until its input ends
"""

import contextlib
import ctypes
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import time

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "scripts"))

from measure.check import most_gib_of  # noqa: E402
from measure.tables import GIB, MIB  # noqa: E402, F401

#: The checks that have failed.
failures = []


def smi(query):
    """A property of each GPU that programs see, in their order, by nvidia-smi's name."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    asked = [command] if not visible else [[*command, f"--id={gpu.strip()}"] for gpu in visible.split(",")]
    return [line for one in asked for line in subprocess.run(one, capture_output=True, text=True, check=True).stdout.split()]


def used_mib():
    return [int(mib) for mib in smi("memory.used")]


def used_mib_here():
    """In use on the first GPU that programs see."""
    return used_mib()[0]


def most_gib(gpu):
    """How many GiB another program takes to leave no room for one that is checked."""
    return most_gib_of(int(smi("memory.free")[gpu]))


def check(what, ok, detail=""):
    """Prints a line that scripts/gpu-check reads."""
    if not ok:
        failures.append(what)
    print(f"{'ok' if ok else 'FAILED'}: {what}{detail and f': {detail}'}", flush=True)
    return ok


def start(command, log=None, **environment):
    settings = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **environment}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=settings)


@contextlib.contextmanager
def started(command, **environment):
    """Starts a program, and waits until it is ready."""
    child = start(command, **environment)
    try:
        child.stdout.readline()
        yield child
    finally:
        child.kill()
        child.wait()


@contextlib.contextmanager
def filled(gib, gpu):
    """Another program takes this much of a GPU."""
    with start([sys.executable, os.path.abspath(__file__), str(gib), str(gpu)]) as child:
        check(f"another program has filled GPU {gpu}", bool(child.stdout.readline()), f"{gib} GiB")
        try:
            yield
        finally:
            child.stdin.close()


def tell(child, request):
    child.stdin.write(request + "\n")
    child.stdin.flush()


def ask(child, request):
    tell(child, request)
    return json.loads(child.stdout.readline())


def run(*command):
    began = time.monotonic()
    answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    ms = 1e3 * (time.monotonic() - began)
    return answer.returncode, (answer.stdout + answer.stderr).strip(), ms


def stages(text):
    """The report of the first process in a JSON answer."""
    report = json.loads(text)["processes"][0]
    return report.get("report", {}).get("stages", {})


def median(rows, stage):
    values = [row[stage] for row in rows if stage in row]
    return f"{statistics.median(values):.0f}" if values else "-"


def answer(**fields):
    """Answers the program that asks."""
    print(json.dumps(fields), flush=True)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def end(children):
    for child in children:
        child.stdin.close()
    for child in children:
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()


class Job:
    """Processes under the library with one name, each of which answers a line of JSON for a line of JSON. `options`: the arguments of each;
    `how`: those of `vramctl run`."""

    def __init__(self, vramctl, name, program, *options, how=(), **environment):
        self.vramctl, self.name = vramctl, name
        command = [vramctl, "run", "--name", name, *how, "--", sys.executable, os.path.abspath(program)]
        self.ranks = [start([*command, *map(str, one)], **environment) for one in options]

    def hear(self, patience=120.0):
        """The answer of each; None if it does not answer in time, and `ended` if it has ended."""
        until, heard = time.monotonic() + patience, []
        for rank in self.ranks:
            ready, _, _ = select.select([rank.stdout], [], [], max(0.0, until - time.monotonic()))
            heard.append(json.loads(rank.stdout.readline() or '{"ended": true}') if ready else None)
        return heard

    def tell(self, **request):
        for rank in self.ranks:
            with contextlib.suppress(OSError):  # hear() says that it has ended
                tell(rank, json.dumps(request))

    def ask(self, patience=120.0, **request):
        self.tell(**request)
        return self.hear(patience)

    def all(self, field, heard):
        """Whether all have answered so."""
        return all((one or {}).get(field) for one in heard)

    def command(self, *arguments):
        """Runs the command line: exit code, and what it has printed, in a line."""
        code, text, _ = run(self.vramctl, *arguments)
        return code, " | ".join(text.splitlines()[-6:])

    def processes(self):
        return json.loads(run(self.vramctl, "status", "--name", self.name, "--json")[1])["processes"]

    def end(self):
        end(self.ranks)


def fill(gib, gpu):
    """Allocates and writes memory, without PyTorch, which is slow to start."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, address = ctypes.c_void_p(), ctypes.c_uint64()
    for code in (
        cuda.cuInit(0),
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu),
        cuda.cuCtxSetCurrent(context),
        cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(gib << 30)),
        cuda.cuMemsetD8_v2(address, ctypes.c_ubyte(0xA5), ctypes.c_size_t(gib << 30)),
        cuda.cuCtxSynchronize(),
    ):
        if code:
            sys.exit(f"CUDA error {code}")
    print(json.dumps({"filled": gib}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    fill(int(sys.argv[1]), int(sys.argv[2]))
