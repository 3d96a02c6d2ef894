"""What a Python program tells when it runs out of device memory: the line of Python that made the request, who uses the memory, and the command
that would free some."""

from __future__ import annotations

import json
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

from support import MIB, Program, run

#: Asks for more than there is, in the same thread, in another one, and in a thread that does not run Python.
FAILS = """
import ctypes, os, sys, threading
sys.path.insert(0, {tests!r})
from support import Cuda, MIB, eventually
import vramctl
cuda = Cuda()

def keep(mib):
    with vramctl.region("weights"):
        return cuda.malloc(mib * MIB)

def logits(mib):
    try:
        cuda.malloc(mib << 20)
    except RuntimeError as error:
        assert "error 2" in str(error), error
    else:
        raise AssertionError("there is room")

kept = keep(80)
logits(8000)
other = threading.Thread(target=logits, args=(9000,))
other.start()
other.join()
# On a slow machine, a report is not waited for, and what ends does not wait for long.
eventually(
    "two reports", lambda: len([name for name in os.listdir(os.environ["VRAMCTL_REPORT_DIR"]) if name.endswith(".json")]) == 2
)
""".format(tests=str(Path(__file__).resolve().parent))

#: Has 20 MiB in use, and 20 MiB that torch keeps for later.
CACHES = """
import sys
sys.path[:0] = [{tests!r}, {tests!r} + "/fake_torch"]
import torch
live, cached = torch.empty(20 << 20), torch.empty(20 << 20)
del cached
print("ready", flush=True)
sys.stdin.read()
""".format(tests=str(Path(__file__).resolve().parent))

#: Python itself writes down its stack, if it can without its lock: from 3.11 to 3.12.
TELLS_ITS_STACK = hasattr(__import__("ctypes").pythonapi, "_Py_DumpTraceback")


class Reports(unittest.TestCase):
    def reports(self, source: str) -> tuple[list[dict[str, Any]], str]:
        with tempfile.TemporaryDirectory() as folder:
            done = run([sys.executable, "-c", source], VRAMCTL_REPORT_DIR=folder, VRAMCTL_TAG="default", VRAMCTL_NAME="fails")
            self.assertEqual(done.returncode, 0, done.stderr)
            found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
            return sorted(found, key=lambda report: report["time"]), done.stderr

    def report_that_names(self, command: str) -> tuple[dict[str, Any], str]:
        """The first report, and the log. Neighbours that do not answer at once are left out: on a slow machine, this may be anybody."""
        for _ in range(20):
            (report, _), log = self.reports(FAILS)
            if command in [way["command"] for way in report["could_be_freed"]]:
                return report, log
        self.fail(f"{command} is not in {report['could_be_freed']}")

    def test_the_python_line_that_asked_is_named(self) -> None:
        (first, second), log = self.reports(FAILS)
        self.assertEqual([report["request"]["bytes"] for report in (first, second)], [8000 * MIB, 9000 * MIB])
        calls = [[frame.rpartition(" in ")[2] for frame in report["python_stack"]] for report in (first, second)]
        if TELLS_ITS_STACK:
            self.assertEqual(calls[0], ["call", "malloc", "logits", "<module>"])
            self.assertEqual(calls[1][:4], ["call", "malloc", "logits", "run"], "the thread's own")
            self.assertIn("<string>:14 in logits", first["python_stack"])
            largest = first["largest"][0]
            self.assertEqual([frame.rpartition(" in ")[2] for frame in largest["python_stack"]][2:], ["keep", "<module>"])
        else:
            self.assertEqual(calls, [[], []])
        self.assertEqual((first["largest"][0]["tag"], first["largest"][0]["bytes"]), ("weights", 80 * MIB))
        self.assertNotEqual(first["thread"]["id"], second["thread"]["id"])
        # NVML may be too slow to tell the index.
        self.assertRegex(log, r"asked for 7\.81 GiB \(tag default\) on (GPU 0 \()?GPU-")

    def test_another_job_on_the_gpu_is_named_with_the_command_that_pauses_it(self) -> None:
        with Program("train er"):
            report, log = self.report_that_names("vramctl pause --name 'train er'")
        row = next(row for row in report["in_use"] if row["what"] == "process" and row["of"] == "train er")
        self.assertEqual(row["tags"], {"kv_cache": 4 * MIB, "weights": 8 * MIB})
        way = next(way for way in report["could_be_freed"] if "train er" in way["command"])
        self.assertEqual((way["command"], way["bytes"], way["is_enough"]), ("vramctl pause --name 'train er'", 12 * MIB, False))
        self.assertIn("vramctl pause --name 'train er'", log)

    def test_what_torch_has_cached_in_another_job_is_named_with_the_command_that_returns_it(self) -> None:
        with Program("caches", CACHES):
            report, _ = self.report_that_names("vramctl trim --name caches")
        ways = {way["command"]: way["bytes"] for way in report["could_be_freed"]}
        self.assertEqual(ways.get("vramctl trim --name caches"), 20 * MIB, ways)
        self.assertEqual(ways.get("vramctl pause --name caches"), 40 * MIB, ways)

    def test_a_process_that_does_not_answer_delays_nothing(self) -> None:
        with Program("stopped") as silent, silent.stopped():
            (report, _), _ = self.reports(FAILS)
        self.assertNotIn("stopped", [row.get("of") for row in report["in_use"]])


if __name__ == "__main__":
    unittest.main()
