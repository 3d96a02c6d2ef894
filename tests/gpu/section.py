"""The sections of scripts/gpu-check as tests: each is one test, which runs its programs in processes of their own, and records what it checks.

With pytest or without it: they are unittest's. Options are in $GPU_CHECK as JSON; without it, everything has its usual value.
"""

import argparse
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "scripts")]

import kinds  # noqa: E402
from benchmarks import overhead  # noqa: E402
from measure import check as checks  # noqa: E402
from measure import setup  # noqa: E402
from measure.child import Failed  # noqa: E402
from measure.tables import MIB, table  # noqa: E402

#: The sample programs, where they are given because there is no C compiler.
APPS = ("engine", "engine_regions", "hog", "churn", "overhead", "overhead_driver", "stream_ordered", "copies")
USUAL = {
    "gib": 40, "other_gib": 0, "program_mib": 8192, "cycles": 10, "kinds": "", "limit": 1000, "bin": "", "out": str(ROOT / "target" / "gpu-check"),
}  # fmt: skip


def unittest_result(text):
    """Unittest's test count and verdict. Other lines may surround them, such as what a library prints at exit."""
    found = re.findall(r"^Ran (\d+) tests? in .*?^((?:OK|FAILED|NO TESTS RAN)\b.*?)$", text, re.MULTILINE | re.DOTALL)
    return (int(found[-1][0]), found[-1][1]) if found else (0, "no verdict")


class Check(checks.Check):
    """All sections of a run, and their report."""

    def __init__(self, options):
        super().__init__(options, "gpu-check")
        self.table, self.overhead, self.demo, self.programs = [], [], [], []

    def hog(self, mib, seconds=60):
        """Runs another process that allocates, fills and verifies `mib` MiB. Returns its error or None."""
        code, text, _ = self.command(self.bin / "hog", "--mib", mib, "--seconds", 0, seconds=seconds, env=self.app_env)
        return None if code == 0 and f"verified {mib * MIB}" in text else f"exit code {code}: {text}"

    def preloaded(self, name, seconds, **env):
        """Runs a program under `vramctl run` that prints a line for each check."""
        folder = pathlib.Path(self.options.libcudart)
        libraries = sorted(folder.glob("libcudart.so*")) if folder.is_dir() else [folder]
        command = (self.bin / "vramctl", "run", "--", sys.executable, HERE / name, libraries[-1])
        self.checked(name, *command, env={**self.app_env, **env}, seconds=seconds)

    def script(self, name, seconds, *arguments):
        """Runs a program that pauses what it starts, and prints a line for each check, and for each row of a table."""
        self.checked(name, sys.executable, HERE / name, self.bin / "vramctl", *arguments, seconds=seconds)

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

    def report(self):
        if not hasattr(self, "facts"):
            self.facts = self.machine()
        failed = [check for check in self.checks if not check["ok"]]
        names = ("checks", "overhead", "programs", "demo", "notes")
        options = {name: str(value) for name, value in vars(self.options).items()}
        everything = {"machine": self.facts, "options": options, "ok": not failed, **{name: getattr(self, name) for name in names}}
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
        ]
        counts = []
        for section in dict.fromkeys(check["section"] for check in self.checks):
            of = [check["ok"] for check in self.checks if check["section"] == section]
            counts.append([section, len(of), sum(of)])
        lines += table(["section", "checks", "passed"], "lrr", counts)
        if self.overhead:
            lines += ["", *overhead.table(self.overhead)]
        if self.programs:
            lines += ["", *kinds.table(self.programs)]
        lines += ["", *self.table]
        if failed:
            lines += ["", "Failed:", ""]
            lines += [f"- {check['section']}: {check['check']}: {check['detail']}" for check in failed]
        lines += ["", *[f"- {note}" for note in self.notes], ""]
        return "\n".join(lines)


@functools.cache
def session():
    """Builds and finds what the sections need, once."""
    options = argparse.Namespace(**{**USUAL, **json.loads(os.environ.get("GPU_CHECK", "{}"))})
    setup.need_gpu("Without one, scripts/demo and scripts/test use a simulated GPU.")
    given, options.out, options.root = options.bin, os.path.abspath(options.out), str(ROOT)
    setup.prepare(options)
    if shutil.which(os.environ.get("CC", "cc")):
        setup.apps(options.bin, options.libcudart)
    else:
        setup.copy(setup.built(given, files=APPS), APPS, options.bin)
    run = Check(options)
    options.other_gib = options.other_gib or run.other_gib()
    return run


def section(seconds):
    """Makes a test of a method that checks something within so many seconds."""

    def decorate(work):
        name = work.__name__.removeprefix("test_").replace("_", "-")

        @functools.wraps(work)
        def test(self):
            run = session()
            with run.within(name, seconds):
                work(self, run)
            run.report()  # after each section, in case a later one crashes
            failed = [f"{one['check']}: {one['detail']}" for one in run.checks if one["section"] == name and not one["ok"]]
            self.assertEqual(failed, [])

        return test

    return decorate


@functools.cache
def gpus():
    """How many there are."""
    if setup.on_simulated_gpu():
        return len(json.loads(subprocess.run([setup.SIMULATED_SMI, "--json"], capture_output=True, text=True).stdout)["devices"])
    if not shutil.which(setup.SMI):
        return 0
    return len(subprocess.run([setup.SMI, "-L"], capture_output=True, text=True).stdout.splitlines())
