"""`scripts/with-limit`: a test that does not end is named, and what it has started is ended with it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "with-limit"

#: As Rust's harness tells: both tests take long, one of them does not end.
RUST = """
import os, subprocess, sys, time
print("running 2 tests")
print("test one has been running for over 1 seconds", flush=True)
print("test the::other has been running for over 1 seconds", flush=True)
print("test one ... ok", flush=True)
child = subprocess.Popen(["sleep", "1000"])
print("child", child.pid, flush=True)
time.sleep(1000)
"""

UNITTEST = """
import sys, time, unittest
class Tests(unittest.TestCase):
    def test_that_ends(self): pass
    def test_that_waits(self):
        print("something", file=sys.stderr)
        time.sleep(1000)
unittest.main(argv=["", "-v"])
"""


def run(*arguments: str, program: str) -> subprocess.CompletedProcess[str]:
    # Without gdb, which takes seconds: its folder may have other programs, so with these alone.
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sleep").symlink_to("/bin/sleep")
        environment = {**os.environ, "PATH": folder}
        command = [sys.executable, str(SCRIPT), *arguments, sys.executable, "-X", "faulthandler", "-c", program]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)


class WithLimit(unittest.TestCase):
    def test_names_the_test_that_does_not_end(self) -> None:
        told = run("3", program=RUST)
        self.assertEqual(told.returncode, 1, told)
        self.assertIn("FAILED, not ended within 3 s: the::other\n", told.stdout)
        self.assertNotIn(": one", told.stdout)
        self.assertRegex(told.stdout, r"thread \d+ 'sleep': S \(sleeping\)")
        child = int(told.stdout.partition("child ")[2].split()[0])
        state = Path(f"/proc/{child}/stat")
        self.assertTrue(not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z", "it still runs")

    def test_names_the_test_of_a_harness_with_one_thread(self) -> None:
        told = run("--stderr", "3", program=UNITTEST)
        self.assertEqual(told.returncode, 1, told)
        self.assertIn("FAILED, not ended within 3 s: test_that_waits", told.stdout)
        self.assertIn("in test_that_waits", told.stdout, "faulthandler tells the line")

    def test_passes_on_what_is_said_and_how_it_ended(self) -> None:
        told = run("100", program="import os; os.write(1, b'out'); os.write(2, b'error'); os._exit(7)")
        self.assertEqual((told.returncode, told.stdout, told.stderr), (7, "out", "error"))
        told = run("100", program="print('test a ... ok', flush=True); import os; os.kill(os.getpid(), 9)")
        self.assertEqual((told.returncode, told.stdout), (-9, "test a ... ok\n"))

    def test_a_program_that_is_left_behind_is_not_waited_for(self) -> None:
        told = run("--stderr", "100", program="import subprocess; print(subprocess.Popen(['sleep', '50']).pid)")
        self.assertEqual(told.returncode, 0, told)
        os.kill(int(told.stdout), 9)


if __name__ == "__main__":
    unittest.main()
