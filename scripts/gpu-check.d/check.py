"""The checks behind scripts/gpu-check, which sets everything up and runs this."""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time

import kinds
from child import Child, Deadline, Failed, end_once, kill, no_end, open_to_signals
from common import GIB, MIB, most_gib_of

HERE = pathlib.Path(__file__).resolve().parent
# What a paused program may keep on a GPU: the CUDA context and libraries.
LEFT_LIMIT_MIB = 1.2 * 1024
#: What the other process uses of a GPU that has more.
MOST_OTHER_GIB = 100
#: How much of its log is shown of a section that did not end.
LAST_LINES = 20


def unittest_result(text):
    """Unittest's test count and verdict. Other lines may surround them, such as what a library prints at exit."""
    found = re.findall(r"^Ran (\d+) tests? in .*?^((?:OK|FAILED|NO TESTS RAN)\b.*?)$", text, re.MULTILINE | re.DOTALL)
    return (int(found[-1][0]), found[-1][1]) if found else (0, "no verdict")


def dig(value, key):
    """The first value of `key` anywhere in a JSON value, or None."""
    if isinstance(value, dict):
        if key in value:
            return value[key]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            found = dig(item, key)
            if found is not None:
                return found
    return None


class Check:
    def __init__(self, options, name="gpu-check"):
        self.options = options
        self.bin = pathlib.Path(options.bin)
        self.out = pathlib.Path(options.out)
        self.log_file = open(self.out / f"{name}.log", "w")
        self.section, self.deadline = "", Deadline(60)
        self.children = []
        self.checks, self.cycles, self.notes, self.table = [], [], [], []
        self.overhead, self.demo, self.programs = None, [], []
        sockets = pathlib.Path(options.work) / "sockets"
        sockets.mkdir(mode=0o700, exist_ok=True)
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("VRAMCTL_")}
        self.env.update(
            VRAMCTL_DIR=str(sockets),
            VRAMCTL_LIB=str(self.bin / "libvramctl.so"),
            PYTHONUNBUFFERED="1",
        )
        # Only for the C programs: PyTorch bundles its own CUDA libraries.
        paths = [options.libcudart, os.environ.get("LD_LIBRARY_PATH", "")]
        self.app_env = {**self.env, "LD_LIBRARY_PATH": ":".join(p for p in paths if p)}

    # ---- output ----

    def log(self, text):
        self.log_file.write(f"[{self.section}] {text}\n")
        self.log_file.flush()

    def say(self, text):
        print(text, flush=True)
        self.log(text)

    def last_lines(self, since):
        """The end of the log from this byte on: what was done last, and what the programs wrote."""
        with open(self.log_file.name, "rb") as log:
            log.seek(since)
            return log.read().decode(errors="replace").rstrip().splitlines()[-LAST_LINES:]

    def expect(self, name, ok, detail=""):
        """Records a check; a failure does not end the section."""
        self.checks.append(
            {"section": self.section, "check": name, "ok": bool(ok), "detail": str(detail)[:2000]}
        )
        if not ok:
            self.say(f"  FAILED {self.section}: {name}: {detail}")
        else:
            self.log(f"ok: {name} {str(detail)[:500]}")
        return bool(ok)

    # ---- commands ----

    def start(self, *command, managed=None, env=None):
        command = [str(part) for part in command]
        # Name `python3 program.py` after its program.
        name = pathlib.Path(
            next((part for part in command if part.endswith(".py")), command[0])
        ).name
        if managed is not None:
            command = [str(self.bin / "vramctl"), "run", *managed, "--", *command]
        with no_end():
            child = Child(self, name, command, env or self.env)
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
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    env=env or self.env,
                    text=True,
                    start_new_session=True,
                    preexec_fn=open_to_signals,
                )
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
        code, text, taken = self.command(
            self.bin / "vramctl", *arguments, "--json", seconds=seconds
        )
        answer = None
        for part in (text, text[text.find("{") :], text.strip().rsplit("\n", 1)[-1]):
            with contextlib.suppress(ValueError):
                answer = json.loads(part)
                break
        return code, answer, text, taken

    def smi(self, *arguments):
        """The output of nvidia-smi or simgpu-smi."""
        done = subprocess.run(
            [self.options.smi, *arguments], capture_output=True, text=True, timeout=30, check=True
        )
        return done.stdout.strip()

    def gpu(self, what):
        """One property of GPU 0, by nvidia-smi's name; memory is in MiB."""
        if self.options.smi == "nvidia-smi":
            return self.smi("--id=0", f"--query-gpu={what}", "--format=csv,noheader,nounits")
        device = json.loads(self.smi("--json"))["devices"][0]
        where, _, which = what.partition(".")
        return str(device[which] // MIB) if where == "memory" else "simulated"

    def other_gib(self):
        """What the other process uses if nobody says."""
        return min(MOST_OTHER_GIB, most_gib_of(int(self.gpu("memory.total"))))

    def used_mib(self, below=None):
        """Memory in use on the GPU. nvidia-smi may lag after a process has ended, so with `below`
        we poll for up to two seconds."""
        end = time.monotonic() + 2
        used = int(self.gpu("memory.used"))
        while below is not None and used > below and time.monotonic() < end:
            time.sleep(0.1)
            used = int(self.gpu("memory.used"))
        return used

    def hog(self, mib, seconds=60):
        """Runs another process that allocates, fills and verifies `mib` MiB. Returns its error or None."""
        code, text, _ = self.command(
            self.bin / "hog", "--mib", mib, "--seconds", 0, seconds=seconds, env=self.app_env
        )
        return (
            None if code == 0 and f"verified {mib * MIB}" in text else f"exit code {code}: {text}"
        )

    def states(self, name):
        """The tags of a program in `vramctl status`."""
        code, answer, text, _ = self.vramctl("status", name)
        tags = dig(answer, "tags")
        if code != 0 or not isinstance(tags, list):
            raise Failed(f"vramctl status {name}: exit code {code}: {text}")
        return {tag["tag"]: tag for tag in tags}

    def expect_state(self, name, when, paused):
        """Checks that status shows everything in a program paused, or everything active."""
        tags = self.states(name)
        wanted = "paused" if paused else "active"
        right = all(
            tag["state"] == wanted and tag["paused_bytes"] == (tag["bytes"] if paused else 0)
            for tag in tags.values()
        )
        self.expect(f"status {when}", tags and right, json.dumps(tags))
        return tags

    # ---- sections ----

    def transition(self, what, program, arguments, own):
        """A pause or resume from the shell or (own) by the program itself: seconds, and the
        command line's JSON."""
        if own:
            start = time.perf_counter()
            for tag in arguments:
                program.ask_json(f"{what} {tag}", 120)
            return time.perf_counter() - start, None
        name = arguments[0]
        code, answer, text, taken = self.vramctl(what, *arguments[1:], "--name", name)
        if code != 0:
            raise Failed(f"vramctl {what}: exit code {code}: {text}")
        return taken, answer

    def torch_cycle(self, number, program, before, regions):
        options = self.options
        # Every second cycle the program pauses itself. Then the shell pauses what is neither
        # weights nor kv_cache (PyTorch's own buffers, the graph's).
        own = regions and number % 2 == 0
        name = self.section
        used = self.used_mib()
        tags = ["weights", "kv_cache"] if regions else []
        pause_s, told = self.transition("pause", program, tags if own else [name, *tags], own)
        if regions:
            # The first backup's host memory needs page tables on the GPU: at most 8 bytes
            # per 4 KiB page, plus some slack.
            wanted = options.gib * 1024 * 255 // 256
            given = used - self.used_mib(below=used - wanted)
            self.expect(
                f"cycle {number}: the memory of both tags is off the GPU",
                given >= wanted,
                f"{given} MiB given back",
            )
            rest_s, _ = self.transition("pause", program, [name], False)
            self.log(f"the rest paused in {rest_s:.3f} s")
        left = self.used_mib(below=LEFT_LIMIT_MIB)
        self.expect(
            f"cycle {number}: {options.smi} shows the memory as free",
            left < LEFT_LIMIT_MIB,
            f"{used} MiB before, {left} MiB after",
        )
        self.expect_state(name, f"while paused, cycle {number}", paused=True)
        other = self.hog(options.other_gib * 1024)
        self.expect(
            f"cycle {number}: another process uses {options.other_gib} GiB",
            other is None,
            other or "",
        )
        if regions:
            # Alternate the order of the tags.
            tags.reverse()
        resume_s, resumed = self.transition("resume", program, tags if own else [name, *tags], own)
        if regions:
            self.transition("resume", program, [name], False)
        self.expect_state(name, f"after the resume, cycle {number}", paused=False)

        found = program.ask_json("verify", 120)
        wanted = {**before["verify"], "kv": "zero"} if regions else before["verify"]
        self.expect(
            f"cycle {number}: tensors equal bit for bit", found == wanted, json.dumps(found)
        )
        if regions:
            program.ask_json("refill", 60)
            self.expect(
                f"cycle {number}: kv_cache is writable again",
                program.ask_json("verify", 120) == before["verify"],
            )
        addresses = program.ask_json("addresses")
        self.expect(f"cycle {number}: addresses unchanged", addresses == before["addresses"])
        digests = [program.ask_json(f"replay {seed}")["digest"] for seed in (1, 2)]
        self.expect(
            f"cycle {number}: the graph replays to the same result", digests == before["digests"]
        )

        # Rate the copied bytes only: discarding takes almost no time.
        kept = before["verify"]["bytes"] if regions else (used - left) * MIB
        self.cycles.append(
            {
                "section": name,
                "cycle": number,
                "by": "the program" if own else "the shell",
                "used_before_mib": used,
                "used_paused_mib": left,
                "other_process_gib": options.other_gib if other is None else None,
                "kept_bytes": kept,
                "pause_s": pause_s,
                "resume_s": resume_s,
                "pause_gb_s": kept / pause_s / 1e9,
                "resume_gb_s": kept / resume_s / 1e9,
                "pause": told,
                "resume": resumed,
            }
        )
        self.say(
            f"  cycle {number}: pause {pause_s:.2f} s, {used} -> {left} MiB in use, "
            f"other process {'ok' if other is None else 'FAILED'}, resume {resume_s:.2f} s"
        )

    def torch(self, regions=False):
        options = self.options
        script = HERE / ("torch_regions.py" if regions else "torch_program.py")
        program = self.start(
            sys.executable, script, "--gib", options.gib, managed=["--name", self.section]
        )
        ready = json.loads(program.hear(120))
        self.notes.append(f"{self.section}: torch {ready.get('torch')}")
        before = {
            "verify": program.ask_json("verify", 120),
            "addresses": program.ask_json("addresses"),
            "digests": [program.ask_json(f"replay {seed}")["digest"] for seed in (1, 2)],
        }
        again = [program.ask_json(f"replay {seed}")["digest"] for seed in (1, 2)]
        sound = before["verify"]["differing"] == [] and before["verify"]["checksums_equal"]
        sound = sound and before["verify"].get("kv", "filled") == "filled"
        self.expect("before: tensors as written", sound, json.dumps(before["verify"]))
        self.expect("before: the graph's result can be repeated", again == before["digests"])
        self.expect("before: the results hang on the input", len(set(again)) == 2)
        tags = self.expect_state(self.section, "before", paused=False)
        wanted = {"weights", "kv_cache"} if regions else {"default"}
        self.expect("before: the tags are there", wanted <= set(tags), json.dumps(tags))
        free = program.ask_json("memory")["free"]
        if options.other_gib * GIB > free:
            self.notes.append(
                f"{self.section}: {free / GIB:.1f} GiB are free before the pause, too few for the "
                f"other process's {options.other_gib} GiB"
            )
        for number in range(1, options.cycles + 1):
            self.torch_cycle(number, program, before, regions)
        with contextlib.suppress(BrokenPipeError):
            program.process.stdin.write("quit\n")
        self.expect("the program ends well", program.finish(60) == 0)

    def regions(self):
        self.torch(regions=True)

    def python(self):
        root = pathlib.Path(self.options.root)
        # Its exit, too: torch's pools outlive the interpreter.
        command = (self.bin / "vramctl", "run", "--", sys.executable, self.program("torch_package.py"))
        self.checked("torch_package.py", *command, env={**self.env, "VRAMCTL_PYTHON": str(root / "python" / "vramctl")}, seconds=90)

    def saver(self):
        package = self.package()
        name = "torch_memory_saver_hook_mode_{}{}.abi3.so"
        links = [package / "dropin" / name.format(mode, suffix) for mode in ("preload", "torch") for suffix in ("", "_cu12", "_cu13")]
        for link in links:
            link.unlink(missing_ok=True)
            link.symlink_to((self.bin / "libvramctl.so").resolve())
        try:
            self.saver_tests(package)
        finally:
            # They point into a temporary folder. scripts/test-python makes its own.
            for link in links:
                link.unlink(missing_ok=True)

    def saver_tests(self, package):
        code, text, taken = self.command(
            self.bin / "vramctl",
            "run",
            "--",
            sys.executable,
            package.parent / "tests" / "test_torch_memory_saver.py",
            "--verbose",
            env={**self.env, "VRAMCTL_PYTHON": str(package)},
            seconds=240,
        )
        for line in text.splitlines():
            if line.startswith(("FAIL: ", "ERROR: ")):
                self.expect(line[:80], False, "see the log")
        ran, verdict = unittest_result(text)
        told = f"{ran} tests ran: {verdict}, exit code {code}"
        self.expect("the tests pass", code == 0 and ran > 0 and verdict.startswith("OK"), told)
        self.say(f"  {told} ({taken:.1f} s)")

    def engine(self):
        options = self.options
        weights = max(256, options.gib * 1024 * 3 // 10)
        code, text, taken = self.command(
            pathlib.Path(options.root) / "scripts" / "demo",
            "--real",
            "--bin",
            self.bin,
            "--weights-mib",
            weights,
            "--kv-mib",
            weights // 3,
            seconds=150,
            env=self.app_env,
        )
        self.demo = text.splitlines()
        last = self.demo[-1] if self.demo else ""
        self.expect("scripts/demo, linked to the real libcudart", code == 0, last)
        self.say(f"  {last} ({taken:.1f} s)")

    def preloaded(self, name, seconds, **env):
        """Runs a program under `vramctl run` that prints a line for each check."""
        folder = pathlib.Path(self.options.libcudart)
        libraries = sorted(folder.glob("libcudart.so*")) if folder.is_dir() else [folder]
        command = (self.bin / "vramctl", "run", "--", sys.executable, self.program(name), libraries[-1])
        self.checked(name, *command, env={**self.app_env, **env}, seconds=seconds)

    def script(self, name, seconds, *arguments):
        """Runs a program that pauses what it starts, and prints a line for each check, and for each row of a table."""
        self.checked(name, sys.executable, self.program(name), self.bin / "vramctl", *arguments, seconds=seconds)

    def program(self, name):
        return pathlib.Path(self.options.root) / "scripts" / "gpu-check.d" / name

    def checked(self, name, *command, **how):
        try:
            code, text, taken = self.command(*command, **how)
        except Failed as late:
            # What it had found until then was found.
            self.heard(late.output)
            raise
        self.heard(text)
        self.expect(f"{name} ends well", code == 0, f"exit code {code}: {text[-500:]}")
        self.say(f"  {name} ({taken:.1f} s)")

    def heard(self, text):
        """The checks, notes and rows that a program has printed."""
        for line in text.splitlines():
            if line.startswith(("ok: ", "FAILED: ")):
                state, _, what = line.partition(": ")
                self.say(f"  {line}")
                self.expect(what, state == "ok", what)
            elif line.startswith("note: "):
                self.say(f"  {line}")
                self.notes.append(line.removeprefix("note: "))
            elif line.startswith("| "):
                self.say(f"  {line}")
                self.table.append(line)

    def oom(self):
        options = self.options
        real = options.smi == "nvidia-smi"
        mib = max(4096 if real else 64, options.gib * 1024 // 2)
        engine = self.start(
            self.bin / "engine",
            "--weights-mib",
            mib * 3 // 4,
            "--kv-mib",
            mib // 4,
            managed=["--name", "oom"],
            env=self.app_env,
        )
        if not engine.hear(60).startswith("ready"):
            raise Failed("the engine did not start")
        verified = engine.ask("verify", 60)
        self.transition("pause", engine, ["oom"], False)
        # Leave free half of what the engine needs.
        hog_mib = int(self.gpu("memory.free")) - mib // 2
        if real:
            hog_mib -= 700  # its own context
        hog = self.start(self.bin / "hog", "--mib", hog_mib, env=self.app_env)
        if not hog.hear(60).startswith("holding"):
            raise Failed("the other process did not get its memory")

        code, answer, text, taken = self.vramctl("resume", "--name", "oom", seconds=30)
        self.expect("a resume without room is refused", code != 0, f"exit code {code}")
        shortage = dig(answer, "shortage") or {}
        needed, free = shortage.get("needed"), shortage.get("free")
        self.expect(
            "it says how much is needed and how much is free",
            isinstance(needed, int) and isinstance(free, int) and needed >= mib * MIB > free,
            text,
        )
        listed = self.compute_processes()
        holders = [str(holder.get("pid")) for holder in shortage.get("holders") or []]
        if listed is None or str(hog.process.pid) not in listed:
            self.notes.append(
                f"oom: {options.smi} does not list the other process's pid ({listed}), so the "
                f"driver cannot tell who holds the memory; reported: {holders}"
            )
            self.expect("it says who holds the memory, as far as the driver knows", True, holders)
        else:
            self.expect("it says who holds the memory", str(hog.process.pid) in holders, text)
        # Again without --json, for the message.
        code, text, _ = self.command(self.bin / "vramctl", "resume", "--name", "oom", seconds=30)
        self.expect(
            "the message says it, too",
            code != 0 and re.search(r"need", text) and re.search(r"free", text),
            text,
        )
        self.say("  refused: " + " / ".join(text.strip().splitlines())[:400])
        self.expect_state("oom", "after the refused resume", paused=True)

        waiting = self.start(self.bin / "vramctl", "resume", "--name", "oom", "--timeout", 60)
        time.sleep(1.5)
        self.expect("with --timeout it waits", waiting.process.poll() is None)
        released = time.perf_counter()
        self.expect("the other process's memory is unharmed", hog.finish(60) == 0)
        code = waiting.finish(70)
        taken = time.perf_counter() - released
        self.expect("then it succeeds", code == 0, f"exit code {code}")
        self.expect("contents are as before", engine.ask("verify", 60) == verified, verified)
        self.expect_state("oom", "after it", paused=False)
        self.say(
            f"  waited for the memory and resumed {mib} MiB, {taken:.2f} s after the other's end began"
        )
        engine.ask("quit", 30)
        self.expect("the engine ends well", engine.finish() == 0)

    def compute_processes(self):
        """The pids that the GPU's own tool lists; None if it does not answer."""
        with contextlib.suppress(Exception):
            if self.options.smi == "nvidia-smi":
                return self.smi("--query-compute-apps=pid", "--format=csv,noheader").split()
            devices = json.loads(self.smi("--json"))["devices"]
            return [str(process["pid"]) for process in devices[0]["processes"]]
        return None

    def overhead_section(self):
        figures = pathlib.Path(self.options.work) / "overhead.json"
        code, text, _ = self.command(
            pathlib.Path(self.options.root) / "scripts" / "bench-overhead",
            "--real",
            "--bin",
            self.bin,
            "--rounds",
            7,
            "--json",
            figures,
            seconds=190,
        )
        if figures.exists():
            self.overhead = json.loads(figures.read_text())
            for row in self.overhead["rows"]:
                if row["limit"] is None:
                    continue  # no check: it shows how far measurements scatter
                self.expect(
                    f"{row['what']}: {row['how']}",
                    row["ok"],
                    f"{row['extra']:+.2f} {row['unit']}, at most {row['limit']} {row['unit']}",
                )
        else:
            self.expect("scripts/bench-overhead", False, f"exit code {code}: {text}")
        self.say(f"  {len((self.overhead or {}).get('rows', []))} rows measured")

    # ---- all of it ----

    def package(self):
        """The Python package's folder."""
        return pathlib.Path(self.options.root) / "python" / "vramctl"

    def run(self):
        # Seconds that each may take, whatever happens.
        sections = {
            "torch": (self.torch, 200),
            "regions": (self.regions, 200),
            "python": (self.python, 100),
            "saver": (self.saver, 250),
            "engine": (self.engine, 160),
            "waits": (lambda: self.preloaded("waits.py", 50), 60),
            "stalls": (lambda: self.script("stalls.py", 170), 180),
            "stream-ordered": (
                lambda: self.script("stream_ordered.py", 300, self.options.libcudart),
                310,
            ),
            "copies": (lambda: self.script("copies.py", 110), 120),
            "guard": (lambda: self.preloaded("guard.py", 80, VRAMCTL_GUARD="1"), 90),
            "hold": (lambda: self.script("hold.py", 150), 160),
            "kill": (lambda: self.script("kill.py", 110), 120),
            "suspend": (lambda: self.script("suspend.py", 150), 160),
            "ledger": (lambda: self.script("ledger.py", 150), 160),
            "report": (lambda: self.script("report.py", 110, self.package()), 120),
            "watch": (lambda: self.script("watch.py", 230, self.package()), 240),
            "trace": (lambda: self.script("trace.py", 110, self.package()), 120),
            "move": (lambda: self.script("move.py", 230), 240),
            "sharing": (lambda: self.script("handover.py", 110), 120),
            "two": (lambda: self.script("two.py", 150), 160),
            "registration": (lambda: self.script("registration.py", 110), 120),
            "nccl": (lambda: self.script("nccl.py", 400), 420),
            "ray": (lambda: self.script("many_nodes.py", 145), 150),
            "restore": (lambda: self.script("restore.py", 200), 210),
            "bandwidth": (lambda: self.script("bandwidth.py", 400), 420),
            "training": (lambda: self.script("training.py", 580), 590),
            "oom": (self.oom, 120),
            "overhead": (self.overhead_section, 200),
            "programs": (lambda: kinds.section(self), 540),
        }
        chosen = self.options.only.split(",")
        unknown = [name for name in chosen if name not in sections]
        if unknown:
            raise SystemExit(
                f"gpu-check: no such section: {', '.join(unknown)}; there are {', '.join(sections)}"
            )
        kinds.chosen(self.options.kinds)  # ends here if there is no such kind
        begin = time.monotonic()
        for name, (work, seconds) in sections.items():
            if name not in chosen:
                continue
            self.section = name
            self.say(f"== {name}")
            start, logged = time.monotonic(), self.log_file.tell()
            # The remaining time, less a little to write the report.
            rest = self.options.limit - 15 - (start - begin)
            self.deadline = Deadline(min(seconds, max(rest, 0.1)))
            try:
                work()
            except Exception as error:
                last = self.last_lines(logged)
                self.expect("runs to its end", False, f"{type(error).__name__}: {error}")
                print(f"  the end of its log, all of which is in {self.log_file.name}:")
                print(*(f"    {line}" for line in last), sep="\n", flush=True)
            finally:
                self.end_children()
            self.notes.append(f"{name} took {time.monotonic() - start:.0f} s")
            self.report()  # after each section, in case a later one crashes
        return self.report()

    def machine(self):
        facts = {
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        }
        for key, what in {
            "gpu": "name",
            "driver": "driver_version",
            "gpu_mib": "memory.total",
        }.items():
            with contextlib.suppress(Exception):
                facts[key] = self.gpu(what)
        with contextlib.suppress(Exception):
            text = self.smi()
            if found := re.search(r"CUDA Version:\s*([\d.]+)", text):
                facts["cuda_driver"] = found[1]
        with contextlib.suppress(Exception):
            code = "import torch; print(torch.__version__, torch.version.cuda)"
            facts["torch"], facts["torch_cuda"] = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
            ).stdout.split()
        facts["libcudart"] = self.options.libcudart
        facts["cores"] = os.cpu_count()
        with contextlib.suppress(Exception):
            facts["host_gib"] = round(
                os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB, 1
            )
        facts["kernel"] = platform.release()
        facts["python"] = platform.python_version()
        with contextlib.suppress(Exception):
            facts["vramctl"] = subprocess.run(
                [str(self.bin / "vramctl"), "--version"], capture_output=True, text=True, timeout=10
            ).stdout.strip()
        return facts

    def report(self):
        if not hasattr(self, "facts"):
            self.facts = self.machine()
        failed = [check for check in self.checks if not check["ok"]]
        everything = {
            "machine": self.facts,
            "options": vars(self.options),
            "ok": not failed,
            "checks": self.checks,
            "cycles": self.cycles,
            "overhead": self.overhead,
            "programs": self.programs,
            "demo": self.demo,
            "notes": self.notes,
        }
        (self.out / "gpu-check.json").write_text(json.dumps(everything, indent=1) + "\n")
        (self.out / "gpu-check.md").write_text(self.markdown(failed))
        return not failed

    def markdown(self, failed):
        facts = self.facts
        lines = [
            f"{facts.get('gpu', 'unknown GPU')} ({facts.get('gpu_mib', '?')} MiB), driver "
            f"{facts.get('driver', '?')}, CUDA {facts.get('cuda_driver', '?')}, torch "
            f"{facts.get('torch', 'none')}, {facts['cores']} cores, kernel {facts['kernel']}, "
            f"{facts['date']}, {facts.get('vramctl', '')}.",
            "",
            "| section | checks | passed |",
            "| --- | ---: | ---: |",
        ]
        for section in dict.fromkeys(check["section"] for check in self.checks):
            of = [check["ok"] for check in self.checks if check["section"] == section]
            lines.append(f"| {section} | {len(of)} | {sum(of)} |")
        for section in dict.fromkeys(cycle["section"] for cycle in self.cycles):
            cycles = [cycle for cycle in self.cycles if cycle["section"] == section]
            lines += [
                "",
                f"{section}: {cycles[0]['kept_bytes'] / 1e9:.1f} GB of contents kept; GB = 1e9 bytes",
                "",
                "| cycle | by | in use before | while paused | another process | pause | | resume | |",
                "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
            ]
            for c in cycles:
                other = f"{c['other_process_gib']} GiB" if c["other_process_gib"] else "FAILED"
                lines.append(
                    f"| {c['cycle']} | {c['by']} | {c['used_before_mib']} MiB | {c['used_paused_mib']} MiB "
                    f"| {other} | {c['pause_s']:.2f} s | {c['pause_gb_s']:.1f} GB/s "
                    f"| {c['resume_s']:.2f} s | {c['resume_gb_s']:.1f} GB/s |"
                )
            if len(cycles) > 2:
                later = cycles[1:]
                lines.append(
                    "| median without the first | | | | "
                    f"| {statistics.median(c['pause_s'] for c in later):.2f} s "
                    f"| {statistics.median(c['pause_gb_s'] for c in later):.1f} GB/s "
                    f"| {statistics.median(c['resume_s'] for c in later):.2f} s "
                    f"| {statistics.median(c['resume_gb_s'] for c in later):.1f} GB/s |"
                )
        if self.overhead:
            lines += ["", *self.overhead["table"]]
        if self.programs:
            lines += ["", *kinds.table(self.programs)]
        lines += ["", *self.table]
        if failed:
            lines += ["", "Failed:", ""]
            lines += [
                f"- {check['section']}: {check['check']}: {check['detail']}" for check in failed
            ]
        lines += ["", *[f"- {note}" for note in self.notes], ""]
        return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("root", "bin", "work", "out", "libcudart", "smi", "only"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("gib", "other-gib", "program-mib", "cycles", "limit"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--kinds", default="")
    options = parser.parse_args()
    check = Check(options)
    options.other_gib = options.other_gib or check.other_gib()
    end_once()
    try:
        passed = check.run()
    finally:
        check.end_children()
        check.log_file.close()
    print()
    print((check.out / "gpu-check.md").read_text())
    print(f"written to {check.out}")
    print("gpu-check OK" if passed else "gpu-check FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
