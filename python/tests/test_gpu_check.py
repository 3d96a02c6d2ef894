"""How scripts/gpu-check parses the output of its programs, and which of our functions those use."""

import ast
import importlib
import pathlib
import sys
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PROGRAMS = ROOT / "scripts" / "gpu-check.d"
sys.path[:0] = [str(PROGRAMS), str(ROOT / "python/tests/fake_torch")]

import check  # noqa: E402
import torch  # noqa: E402
import torch_package  # noqa: E402


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


class Package(unittest.TestCase):
    """Catches, without a GPU, mistakes in the checks for the real torch."""

    def test_what_holds_for_torch_holds_for_its_stand_in(self):
        """Everything except what kernels compute."""
        with mock.patch.object(torch_package, "tensor", lambda mib, value=0: torch.empty(mib << 20, device="cuda")):
            for part in (torch_package.pools, torch_package.threads, torch_package.expandable, torch_package.costs):
                part()
        self.assertEqual(torch_package.failed, [])

    def test_what_is_used_is_there(self):
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
