"""The policy `disk`: pause and resume with contents in a file.

In turns with `dd`, which writes and reads a file of the same size in the same directory with direct
I/O. Needs dd and fallocate.
"""

import os
import pathlib
import tempfile

from measure import run, setup
from measure.child import Failed
from measure.tables import GIB, gbs, median, seconds, table

#: Each row, and the one that it is compared with.
ROWS = {"dd, direct, write": "dd, direct, write", "pause, on disk": "dd, direct, write", "dd, direct, read": "dd, direct, read"}
ROWS["resume, from disk"] = "dd, direct, read"


def options(add):
    add("--gib", type=setup.count, default=8, metavar="N", help="GiB of contents (8)")
    add("--repeat", type=setup.count, default=5, metavar="N", help="rounds; reports medians (5)")
    add("--dir", default=tempfile.gettempdir(), metavar="DIR", help="directory for the file ($TMPDIR, else /tmp)")


def main(options):
    setup.machine(options, "--memory", f"{options.gib + 1}G")
    setup.prepare(options)
    setup.apps(options.work, options.libcudart)
    return Bench(options).all()


class Bench(run.Bench):
    def __init__(self, options):
        super().__init__(options, "disk", gib=options.gib, samples={row: [] for row in ROWS})
        self.file = pathlib.Path(options.dir) / f"bench-disk.{os.getpid()}"

    def run(self):
        self.step("contents on disk, and dd, in turns", 0, self.measure)

    def timed(self, row, *command):
        code, text, took = self.command(*command, seconds=300)
        if code:
            raise Failed(f"{row}: {text}")
        self.data["samples"][row].append(took)

    def measure(self):
        gib, blocks = self.options.gib, f"count={self.options.gib * 128}"
        env = {**self.app_env, "VRAMCTL_DISK_DIR": self.options.dir}
        program = [self.work / "engine", "--weights-mib", gib * 1024 - 64, "--kv-mib", 64]
        engine = self.start(*program, managed=["--name", "bench-disk", "--tag", "weights"], env=env)
        if not engine.hear(120).startswith("ready"):
            raise Failed("the engine did not start")
        vramctl, name = self.bin / "vramctl", ["--name", "bench-disk", "--quiet"]
        try:
            for number in range(self.options.repeat):
                self.say(f"round {number + 1} of {self.options.repeat}")
                self.command("fallocate", "-l", f"{gib}G", self.file)
                dd = ["dd", "bs=8M", blocks, "status=none"]
                self.timed("dd, direct, write", *dd, "if=/dev/zero", f"of={self.file}", "oflag=direct", "conv=notrunc,fsync")
                self.timed("dd, direct, read", *dd, f"if={self.file}", "of=/dev/null", "iflag=direct")
                self.file.unlink()
                self.timed("pause, on disk", vramctl, "pause", "--backup", "disk", *name)
                self.timed("resume, from disk", vramctl, "resume", *name)
        finally:
            self.file.unlink(missing_ok=True)
        answer = engine.ask("verify", 60)
        if "ok" not in answer or "corrupt" in answer:
            raise Failed(f"contents: {answer}")

    def markdown(self, data):
        middle = {row: median(samples) for row, samples in data["samples"].items()}
        rows = [
            [row, seconds(middle[row]), gbs(data["gib"] * GIB, middle[row]), f"{middle[base] / middle[row]:.0%}"]
            for row, base in ROWS.items()
            if middle[row]
        ]
        return "\n".join(table([f"{data['gib']} GiB", "time", "GB/s", "of dd"], "lr", rows)) + "\n"
