"""The section `programs` of scripts/gpu-check: one program for each way to reach GPU memory, paused from the shell.

The programs are in the folder programs/. If a program needs something that this machine lacks, that is named, and counts as a failure.
"""

import concurrent.futures
import importlib.util
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import typing

from common import MIB
from measure import tables

FOLDER = pathlib.Path(__file__).resolve().parent / "programs"
# What may stay in use on the GPU while a program is paused.
LIMIT_MIB = int(1.3 * 1024)
BUILD_SECONDS = 100

HOW = {
    "cc": "install gcc, or set CC",
    "libcuda.so.1": "install the NVIDIA driver",
    "nvcc": "install the CUDA toolkit, or put its bin on PATH",
    "torch": "pip install torch",
    "triton": "pip install triton",
    "cupy": "pip install cupy-cuda13x",
    "jax": "pip install 'jax[cuda13]'",
    "numba": "pip install 'numba-cuda[cu13]'",
}


class Kind(typing.NamedTuple):
    title: str
    # A target of Builder, or a Python program.
    program: str
    arguments: tuple = ()
    env: dict = {}
    # The commands and Python packages that it needs.
    needs: tuple = ()
    # How long all of its cycles may take.
    seconds: int = 60
    # Whether it must be reached.
    counted: bool = True


KINDS = {
    "shared": Kind("nvcc, shared runtime", "memory_shared", needs=("nvcc",)),
    "static": Kind("nvcc, static runtime (its default)", "memory_static", needs=("nvcc",)),
    "async": Kind("cudaMallocAsync, static runtime", "memory_static", ("--async",), needs=("nvcc",)),
    "driver": Kind("driver API, cuMemAlloc", "driver", needs=("cc", "libcuda.so.1")),
    "torch": Kind("PyTorch, with a CUDA graph", "torch_memory.py", ("--graph",), needs=("torch",), seconds=90),
    "torch_expandable": Kind(
        "PyTorch, expandable_segments:True",
        "torch_memory.py",
        ("--graph",),
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        ("torch",),
        seconds=90,
    ),
    "torch_async": Kind(
        "PyTorch, backend:cudaMallocAsync",
        "torch_memory.py",
        env={"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
        needs=("torch",),
        seconds=90,
    ),
    "triton": Kind("Triton", "triton_memory.py", needs=("torch", "triton"), seconds=90),
    "cupy": Kind("CuPy", "cupy_memory.py", needs=("cupy",), seconds=75),
    # It takes three quarters of the GPU, and all of that is saved.
    "jax": Kind("JAX, default allocator", "jax_memory.py", needs=("jax",), seconds=150),
    "numba": Kind("Numba", "numba_memory.py", needs=("numba",), seconds=75),
    "per_thread": Kind(
        "nvcc, per-thread default streams", "memory_per_thread", ("--threads", "4", "--async"), needs=("nvcc",), counted=False
    ),
    "virtual": Kind("driver API, virtual memory of its own", "driver", ("--virtual",), needs=("cc", "libcuda.so.1"), counted=False),
}


class Problem(Exception):
    """Why a kind fails."""


class NotRun(Exception):
    """Why a kind is not run."""


def chosen(names):
    """The kinds of a list of names, all for an empty one."""
    if not names:
        return KINDS
    unknown = [name for name in names.split(",") if name not in KINDS]
    if unknown:
        raise SystemExit(f"gpu-check: no such kind of program: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    return {name: kind for name, kind in KINDS.items() if name in names.split(",")}


class Machine:
    """The tools and packages that are installed here."""

    def __init__(self, real):
        self.real = real
        toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
        self.nvcc = shutil.which("nvcc") or next(
            (found for folder in toolkits if folder and (found := shutil.which(f"{folder}/bin/nvcc"))), None
        )
        self.cc = shutil.which(os.environ.get("CC", "cc"))
        self.libcuda = next((folder for folder in self.driver_folders() if (folder / "libcuda.so.1").exists()), None)

    @staticmethod
    def driver_folders():
        yield from (pathlib.Path(part) for part in os.environ.get("LD_LIBRARY_PATH", "").split(":") if part)
        for ldconfig in ("ldconfig", "/sbin/ldconfig"):
            if shutil.which(ldconfig):
                listed = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, timeout=20).stdout
                for path in re.findall(r"libcuda\.so\.1 .*x86-64.*=> (\S+)|libcuda\.so\.1 .*=> (\S+)", listed):
                    yield pathlib.Path(path[0] or path[1]).parent
                break
        for folder in ("/usr/local/nvidia/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"):
            yield pathlib.Path(folder)

    def missing(self, kind):
        """What a kind needs and this machine lacks, with how to get it."""
        here = {"nvcc": self.nvcc, "cc": self.cc, "libcuda.so.1": self.libcuda}
        needs = list(kind.needs)
        if kind.program == "driver" and self.real:
            needs.append("nvcc")  # for its kernels
        lacking = [name for name in needs if not (here[name] if name in here else importlib.util.find_spec(name))]
        if lacking:
            return "; ".join(f"{name} is missing ({HOW[name]})" for name in lacking)
        if kind.needs and kind.program != "driver" and not self.real:
            return "the simulated GPU runs no kernels"
        return ""


class Builder:
    """Compiles programs, several at a time."""

    def __init__(self, check, machine):
        self.check, self.machine = check, machine
        self.out = pathlib.Path(check.options.work) / "programs"
        self.out.mkdir(exist_ok=True)
        # The runtime that programs find when they start. In Python packages it has only its full name.
        runtimes = sorted(pathlib.Path(check.options.libcudart).glob("libcudart.so*"))
        if runtimes and not (self.out / "libcudart.so").exists():
            (self.out / "libcudart.so").symlink_to(runtimes[-1].resolve())
        self.running, self.pool = {}, concurrent.futures.ThreadPoolExecutor(8)

    def commands(self):
        nvcc, source = [self.machine.nvcc, "-O2"], FOLDER / "memory.cu"
        headers = pathlib.Path(self.check.options.root) / "tests" / "apps"
        return {
            "memory_shared": [*nvcc, "-cudart", "shared", "-L", self.out, source],
            "memory_static": [*nvcc, source],
            "memory_per_thread": [*nvcc, "--default-stream", "per-thread", source],
            "kernels.ptx": [*nvcc, "-ptx", "-x", "cu", FOLDER / "kernels.cuh"],
            "driver": [
                *(self.machine.cc, "-std=c11", "-O2", "-I", headers, FOLDER / "driver.c"),
                *("-L", self.machine.libcuda, "-l:libcuda.so.1", "-Wl,--allow-shlib-undefined"),
            ],
        }

    def start(self, target):
        if target not in self.running:
            command = [str(part) for part in [*self.commands()[target], "-o", self.out / target]]
            self.running[target] = self.pool.submit(self.build, command)

    @staticmethod
    def build(command):
        """The compiler's error, if any."""
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=BUILD_SECONDS
            )
        except subprocess.TimeoutExpired:
            return f"{command[0]} has not ended within {BUILD_SECONDS} s"
        return "" if done.returncode == 0 else f"{' '.join(command)}: {done.stdout.strip()}"

    def use(self, mib, check):
        """Another process takes, writes and compares so much memory: what went wrong, or None. On the GPU where there is a
        compiler, which takes a second for 100 GiB; else on the host.
        """
        if "memory_static" not in self.running or self.running["memory_static"].result():
            return check.hog(mib)
        code, text, _ = check.command(self.out / "memory_static", "--mib", mib, seconds=60, env=check.app_env)
        return None if code == 0 and f'"bytes": {mib * MIB}, "differing": 0' in text else f"exit code {code}: {text}"

    def targets(self, kind):
        if kind.program.endswith(".py"):
            return []
        return [kind.program, *(["kernels.ptx"] if kind.program == "driver" and self.machine.real else [])]

    def command(self, kind, mib):
        """The command that starts a kind, once it has been compiled."""
        arguments = ["--mib", mib, *kind.arguments]
        if kind.program.endswith(".py"):
            return [sys.executable, FOLDER / kind.program, *arguments]
        for target in self.targets(kind):
            self.start(target)
            complaint = self.running[target].result()
            if complaint:
                self.check.log(complaint)
                raise Problem(f"{target} does not compile: {complaint[-300:]}")
        if "kernels.ptx" in self.targets(kind):
            arguments += ["--kernels", self.out / "kernels.ptx"]
        return [self.out / kind.program, *arguments]

    def end(self):
        self.pool.shutdown(cancel_futures=True)


class Run:
    """One program, its cycles, and the results."""

    def __init__(self, check, name, kind, builder):
        self.check, self.name, self.kind, self.builder = check, name, kind, builder
        self.row = {
            "name": name,
            "title": kind.title,
            "counted": kind.counted,
            "version": "",
            "before_mib": None,
            "paused_mib": [],
            "managed_mib": [],
            "pause_ms": [],
            "resume_ms": [],
            "equal": 0,
            "cycles": check.options.cycles,
            "other_gib": None,
            "problems": [],
            "state": "failed",
        }

    def ask(self, program):
        """Whether all contents are correct. Records a problem."""
        answer = program.ask_json("check", 60)
        wrong = [key for key, value in answer.items() if value is False or (key.endswith("differing") and value != 0)]
        return not wrong, json.dumps(answer)

    def problem(self, text):
        self.row["problems"].append(text)
        self.check.log(f"problem: {text}")

    def transition(self, what):
        code, answer, text, taken = self.check.vramctl(what, "--name", self.name, seconds=60)
        error = answer.get("error") if isinstance(answer, dict) else None
        if isinstance(error, dict) and error.get("code") == "no_process":
            raise Problem("none of its memory is managed")
        if code != 0:
            said = error.get("message") if isinstance(error, dict) else text
            raise Problem(f"vramctl {what}: exit code {code}: {' '.join(str(said).split())[:300]}")
        self.row[f"{what}_ms"].append(taken * 1000)

    def tags(self, state):
        """The bytes that status shows, all of which must be in this state."""
        tags = self.check.states(self.name)
        wrong = [tag for tag, told in tags.items() if told["state"] != state]
        if wrong or not tags:
            raise Problem(f"status does not show everything as {state}: {json.dumps(tags)[:300]}")
        return sum(told["bytes"] for told in tags.values())

    def cycle(self, number, program, least):
        check, row = self.check, self.row
        self.transition("pause")
        used = check.used_mib(below=LIMIT_MIB)
        managed = self.tags("paused")
        row["paused_mib"].append(used)
        row["managed_mib"].append(managed // MIB)
        if used >= LIMIT_MIB:
            self.problem(f"cycle {number}: {used} MiB stay in use")
        if managed < least:
            self.problem(f"cycle {number}: only {managed // MIB} of {least // MIB} MiB are managed")
        if number == 1:
            other = self.builder.use(check.options.other_gib * 1024, check)
            if other is None:
                row["other_gib"] = check.options.other_gib
            else:
                self.problem(f"another process does not get {check.options.other_gib} GiB: {other[-200:]}")
        self.transition("resume")
        self.tags("active")
        equal, answer = self.ask(program)
        row["equal"] += equal
        if not equal:
            self.problem(f"cycle {number}: contents differ: {answer}")

    def cycles(self, command):
        check, row = self.check, self.row
        # The C programs need the shared runtime; Python packages bring their own.
        env = check.env if self.kind.program.endswith(".py") else check.app_env
        program = check.start(*command, managed=["--name", self.name], env={**env, **self.kind.env})
        line = program.hear(self.kind.seconds)
        while not line.startswith("{"):  # what a package prints when it is imported
            line = program.hear(self.kind.seconds)
        ready = json.loads(line)
        if "error" in ready:
            raise Problem(f"it does not start: {ready['error']}")
        row["version"] = ready.get("version", "")
        row["before_mib"] = check.used_mib()
        equal, answer = self.ask(program)
        if ready["differing"] != 0 or not equal:
            raise Problem(f"its contents are wrong before any pause: {answer}")
        for number in range(1, row["cycles"] + 1):
            self.cycle(number, program, ready["bytes"])
        code = program.finish(20)
        if code != 0:
            self.problem(f"it ends with {code}")

    def end(self):
        row = self.row
        if row["state"] != "not run" and not row["problems"] and row["equal"] == row["cycles"]:
            row["state"] = "ok"
        if self.check.expect(self.kind.title, row["state"] == "ok", summary(row)):
            self.check.say(f"  {self.kind.title}: {summary(row)}")
        return row


def verdict(row):
    if row["state"] == "ok":
        return "ok"
    first = row["problems"][0] if row["problems"] else "not all cycles ran"
    more = f" (and {len(row['problems']) - 1} more)" if len(row["problems"]) > 1 else ""
    return f"not run: {first}" if row["state"] == "not run" else f"FAILED: {first}{more}"


def summary(row):
    if not row["pause_ms"]:
        return verdict(row)
    figures = f"{row['before_mib']} -> {max(row['paused_mib'], default='?')} MiB in use"
    return f"{figures}, {row['equal']} of {row['cycles']} equal, {verdict(row)}"


def run_one(check, name, kind, machine, builder):
    """Runs one kind within its own time limit, and returns its row. Its failures do not affect the next one."""
    run, section = Run(check, name, kind, builder), check.deadline
    try:
        lacking = machine.missing(kind)
        if lacking:
            raise NotRun(lacking)
        if section.rest() < 5:
            raise NotRun("the section's time is used up (--limit)")
        command = builder.command(kind, check.options.program_mib)
        check.deadline = type(section)(min(kind.seconds, section.rest()))
        run.cycles(command)
    except NotRun as error:
        run.row["state"] = "not run"
        run.problem(str(error))
    except Exception as error:
        text = str(error) if isinstance(error, Problem) else f"{type(error).__name__}: {error}"
        if check.deadline is not section and check.deadline.rest() <= 0:
            text = f"not done within {kind.seconds} s: {text}"
        run.problem(text)
    finally:
        check.deadline = section
        check.end_children()
    return run.end()


def section(check):
    """Runs the chosen kinds. Adds each row to check.programs when it is done, so that a report is possible after an early end."""
    kinds = chosen(check.options.kinds)
    machine = Machine(check.options.smi == "nvidia-smi")
    builder = Builder(check, machine)
    try:
        # Compile all of them before the first one runs, so that no measurement competes with a compiler.
        runnable = [kind for kind in kinds.values() if not machine.missing(kind)]
        for target in [target for kind in runnable for target in builder.targets(kind)]:
            builder.start(target)
        if machine.nvcc and machine.real:
            builder.start("memory_static")  # for the other process
        concurrent.futures.wait(builder.running.values())
        idle = check.used_mib()
        for name, kind in kinds.items():
            check.programs.append(run_one(check, name, kind, machine, builder))
            check.used_mib(below=idle + 64)  # an ended process's memory takes a moment to go
    finally:
        builder.end()
    check.say(f"  {totals(check.programs)}")


def totals(rows):
    """How many kinds were reached, such as `11 of 11`, and those that need not be, separately."""

    def count(counted):
        of = [row["state"] == "ok" for row in rows if row["counted"] is counted]
        return f"{sum(of)} of {len(of)}" if of else ""

    main, more = count(True), count(False)
    return main + (f"{' and ' if main else ''}{more} more" if more else "")


def table(rows):
    def most(values, choose=max):
        return f"{choose(values):.0f}" if values else ""

    found = []
    for row in rows:
        title = row["title"] + (f" ({row['version']})" if row["version"] else "")
        before = "" if row["before_mib"] is None else f"{row['before_mib']} MiB"
        paused = most(row["paused_mib"])
        other = f"{row['other_gib']} GiB" if row["other_gib"] else ""
        times = [f"{most(row[key], statistics.median)} ms" if row[key] else "" for key in ("pause_ms", "resume_ms")]
        equal = f"{row['equal']}/{row['cycles']}"
        paused = f"{paused} MiB" if paused else ""
        found.append([title, before, paused, most(row["managed_mib"], min), *times, equal, other, verdict(row).replace("|", "/")])
    header = ["program", "in use before", "paused, at most", "MiB paused", "pause", "resume", "equal", "another process", "verdict"]
    return [
        f"Programs paused from the shell: under {LIMIT_MIB} MiB may stay in use on the whole GPU, and after each resume all "
        "contents are compared on the GPU and written anew. Times are those of the command `vramctl`, medians.",
        "",
        *tables.table(header, "lrrrrrrrl", found),
        "",
        f"{totals(rows)} paused and resumed with equal contents.",
    ]
