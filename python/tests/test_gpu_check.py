"""What scripts/gpu-check reads from the programs that it runs, and what these use."""

import ast
import importlib
import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PROGRAMS = ROOT / "scripts" / "gpu-check.d"
sys.path[:0] = [str(PROGRAMS), str(ROOT / "python")]

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


class Using(unittest.TestCase):
    def test_what_they_use_of_the_package_is_there(self):
        """They need a GPU with torch, so without this a name that has changed shows there only."""
        modules = {"vramctl": "vramctl", "_torch": "vramctl._torch"}
        used = set()
        for program in PROGRAMS.glob("*.py"):
            for node in ast.walk(ast.parse(program.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                    used.add((modules[node.value.id], node.attr))
        self.assertIn(("vramctl._torch", "free"), used)
        self.assertEqual([name for name in sorted(used) if not hasattr(importlib.import_module(name[0]), name[1])], [])


if __name__ == "__main__":
    unittest.main()
