"""A measurement: its log, the programs and commands that it runs, and the GPU's own tool."""

import contextlib
import datetime
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import time

from measure.child import Child, Deadline, Failed, kill, no_end, open_to_signals
from measure.setup import SMI
from measure.tables import GIB, MIB


def host_memory(what):
    """A line of /proc/meminfo in bytes."""
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1]) << 10
    return 0


def environment(sockets, keep=()):
    """This process's variables without those of the library, and a socket directory of its own."""
    ours = ("VRAMCTL_", "TMS_", "LD_PRELOAD")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours) or name in keep}
    pathlib.Path(sockets).mkdir(mode=0o700, exist_ok=True)
    return {**env, "VRAMCTL_DIR": str(sockets)}


class Run:
    """`options` has out, work, bin, libcudart and smi. The log is NAME.log."""

    def __init__(self, options, name, seconds=60):
        self.options, self.name = options, name
        self.out, self.bin, self.work = (pathlib.Path(folder) for folder in (options.out, options.bin, options.work))
        self.out.mkdir(parents=True, exist_ok=True)
        self.log_file = open(self.out / f"{name}.log", "w")
        self.began, self.deadline, self.section = time.monotonic(), Deadline(seconds), ""
        self.children = []
        self.env = {**environment(self.work / "sockets"), "VRAMCTL_LIB": str(self.bin / "libvramctl.so"), "PYTHONUNBUFFERED": "1"}
        # Only for the C programs: PyTorch bundles its own CUDA libraries.
        paths = [options.libcudart, os.environ.get("LD_LIBRARY_PATH", "")]
        self.app_env = {**self.env, "LD_LIBRARY_PATH": ":".join(path for path in paths if path)}

    def log(self, text):
        print(f"[{self.section}] {text}" if self.section else text, file=self.log_file, flush=True)

    def say(self, text):
        print(text, flush=True)
        self.log(text)

    def left(self):
        return self.deadline.rest()

    # ---- programs and commands ----

    def start(self, *command, managed=None, env=None, kind=Child, name=None):
        """A program that answers lines. `managed`: the options of the `vramctl run` that starts it."""
        command = [str(part) for part in command]
        # Name `python3 program.py` after its program.
        name = name or pathlib.Path(next((part for part in command if part.endswith(".py")), command[0])).name
        if managed is not None:
            command = [str(self.bin / "vramctl"), "run", *managed, "--", *command]
        with no_end():
            child = kind(self, name, command, env or self.env)
            self.children.append(child)
        return child

    def end_children(self, keep=()):
        for child in self.children:
            if child not in keep:
                with contextlib.suppress(Exception):
                    child.kill()
        self.children[:] = keep

    def command(self, *command, seconds=120, env=None, stderr=subprocess.STDOUT):
        """Runs a command: (exit code, output, seconds)."""
        command = [str(part) for part in command]
        self.log(f"$ {' '.join(command)}")
        start = time.perf_counter()
        process = None
        try:
            with no_end():
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, env=env or self.env, text=True,
                    start_new_session=True, preexec_fn=open_to_signals,
                )  # fmt: skip
            text, _ = process.communicate(timeout=self.deadline.left(seconds))
        except BaseException as error:
            # However the wait ended (even by Ctrl-C or SIGTERM), leave nothing on the GPU.
            output = "" if process is None else kill(process)
            self.log(output)
            if not isinstance(error, (subprocess.TimeoutExpired, Failed)):
                raise
            name = f"{pathlib.Path(command[0]).name} {command[1]}"
            late = self.deadline.late(f"{name}: no end", seconds)
            late.output = output
            raise late from None
        taken = time.perf_counter() - start
        self.log(f"{text.rstrip()}\n-> {process.returncode} after {taken:.3f} s")
        return process.returncode, text, taken

    def vramctl(self, *arguments, seconds=120):
        """Runs `vramctl … --json`: (exit code, JSON or None, text, seconds)."""
        code, text, taken = self.command(self.bin / "vramctl", *arguments, "--json", seconds=seconds)
        answer = None
        for part in (text, text[text.find("{") :], text.strip().rsplit("\n", 1)[-1]):
            with contextlib.suppress(ValueError):
                answer = json.loads(part)
                break
        return code, answer, text, taken

    def told(self, *arguments, seconds=120):
        """The JSON of a command that succeeds."""
        code, answer, text, _ = self.vramctl(*arguments, seconds=seconds)
        if code or answer is None:
            raise Failed(f"vramctl {' '.join(map(str, arguments))}: {text}")
        return answer

    # ---- the machine ----

    def smi(self, *arguments):
        """The output of nvidia-smi or simgpu-smi."""
        done = subprocess.run([self.options.smi, *arguments], capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip()

    def gpu(self, what):
        """One property of the first GPU that programs see, by nvidia-smi's name; memory is in MiB."""
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() or "0"
        if self.options.smi == SMI:
            return self.smi(f"--id={first}", f"--query-gpu={what}", "--format=csv,noheader,nounits")
        where, _, which = what.partition(".")
        if where != "memory":
            return "simulated"
        devices = json.loads(self.smi("--json"))["devices"]
        return str(devices[int(first) if first.isdigit() else 0][which] // MIB)

    def used_mib(self, below=None):
        """Memory in use on the GPU. nvidia-smi may lag after a process has ended, so with `below` we poll for up to two seconds."""
        end = time.monotonic() + 2
        used = int(self.gpu("memory.used"))
        while below is not None and used > below and time.monotonic() < end:
            time.sleep(0.1)
            used = int(self.gpu("memory.used"))
        return used

    def machine(self):
        """What a report says about where it was made."""
        facts = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")}
        for key, what in {"gpu": "name", "driver": "driver_version", "gpu_mib": "memory.total"}.items():
            with contextlib.suppress(Exception):
                facts[key] = self.gpu(what)
        with contextlib.suppress(Exception):
            if found := re.search(r"CUDA Version:\s*([\d.]+)", self.smi()):
                facts["cuda_driver"] = found[1]
        with contextlib.suppress(Exception):
            code = "import torch; print(torch.__version__, torch.version.cuda)"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
            facts["torch"], facts["torch_cuda"] = done.stdout.split()
        facts.update(libcudart=self.options.libcudart, cores=os.cpu_count(), kernel=platform.release(), python=platform.python_version())
        facts["host_gib"] = round(host_memory("MemTotal") / GIB, 1)
        with contextlib.suppress(Exception):
            command = [str(self.bin / "vramctl"), "--version"]
            facts["vramctl"] = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
        return facts


class Bench(Run):
    """A benchmark in steps, of which one that fails or has no time left does not end the others. `data` is what NAME.json has, `markdown(data)` the
    text of NAME.md."""

    def __init__(self, options, name, **data):
        super().__init__(options, name, options.limit)
        self.data = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": options.command,
            "commit": options.commit,
            "gpu": options.gpu,
            "driver": self.gpu("driver_version") if options.gpu else "",
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "host_bytes": host_memory("MemTotal"),
            "simulated": options.smi != SMI,
            **data,
            "notes": [],
            "missed": [],
        }

    def say(self, text):
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", file=sys.stderr, flush=True)
        self.log(f"# {text}")

    def note(self, text):
        if text not in self.data["notes"]:
            self.data["notes"].append(text)

    def miss(self, text):
        self.data["missed"].append(text)
        self.say(text)

    def step(self, name, seconds, function, *arguments):
        """Runs one step, if there is time for it."""
        if self.left() < seconds:
            self.miss(f"{name}: skipped, {self.left():.0f} s left and it takes {seconds:.0f}")
            return
        self.say(name)
        self.step_end = time.monotonic() + 2.5 * seconds
        try:
            function(*arguments)
        except (Failed, OSError, subprocess.SubprocessError) as error:
            self.miss(f"{name}: {error}")
        finally:
            self.end_children()
            self.write()

    def turns(self, number, least=1):
        """0, 1 … while the step is within its time; at least this often."""
        for turn in range(number):
            if turn >= least and time.monotonic() > self.step_end:
                self.say(f"  only {turn} of {number} repeats: slower than expected")
                return
            yield turn

    def write(self):
        text = self.markdown(self.data)
        if self.data["missed"]:
            text += "\nFailed or not reached:\n\n" + "".join(f"- {missed}\n" for missed in self.data["missed"])
        (self.out / f"{self.name}.json").write_text(json.dumps(self.data, indent=1) + "\n")
        (self.out / f"{self.name}.md").write_text(text)
        return text

    def all(self):
        """Runs everything; the exit code."""
        try:
            self.run()
        except KeyboardInterrupt:
            self.data["missed"].append("everything after the interruption")
        finally:
            self.end_children()
            print(self.write())
        self.say(f"{self.out / self.name}.md, .json and .log")
        return 1 if self.data["missed"] else 0
