"""What scripts/gpu-check reads from the programs that it runs."""

import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts" / "gpu-check.d"))

import check  # noqa: E402


class Reading(unittest.TestCase):
    def test_what_unittest_says_wherever_it_stands(self):
        result = """\
test_a (__main__.Tests.test_a) ... ok
test_b (__main__.Tests.test_b) ... skipped 'OK without it'
%s
----------------------------------------------------------------------
Ran %d test%s in 55.394s

%s
%s"""
        warning = "[W1120 20:47:23.472399454 CudaIPCTypes.cpp:16] Producer process has been terminated"
        for before, after in (("", ""), ("", f"{warning}\n"), (warning, f"{warning}\nOK, all else is well\n")):
            for count, verdict in ((32, "OK"), (32, "OK (skipped=3)"), (1, "FAILED (failures=1)"), (0, "NO TESTS RAN")):
                text = result % (before, count, "" if count == 1 else "s", verdict, after)
                self.assertEqual(check.unittest_result(text), (count, verdict), text)
        for text in ("", "OK\n", "test_a ... ok\nSegmentation fault\n", "Ran 3 tests in 1.0s\n"):
            self.assertEqual(check.unittest_result(text), (0, "no verdict"), text)


if __name__ == "__main__":
    unittest.main()
