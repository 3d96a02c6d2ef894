"""Runs the examples in docs/python.md, and checks the names in its tables."""

from __future__ import annotations

import builtins
import re
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "fake_torch"))

import vramctl  # noqa: E402
from support import ROOT, Program, run  # noqa: E402

PAGE = (ROOT / "docs" / "python.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


class Examples(unittest.TestCase):
    def test_each_runs_as_it_is_written(self) -> None:
        self.assertEqual(len(EXAMPLES), 5)
        with Program("engine"):
            for number, example in enumerate(EXAMPLES):
                with self.subTest(example.splitlines()[0], number=number):
                    ran = run([sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path[:1]!r}\n{example}"])
                    self.assertEqual((ran.returncode, ran.stderr), (0, ""), example)
                    if number == 0:
                        self.assertIn("32 MiB in", ran.stdout)
                        self.assertIn("weights active", ran.stdout)

    def test_what_the_tables_name_exists(self) -> None:
        functions, exceptions = PAGE.split("## Errors")
        names = re.findall(r"`(\w+)\(", "\n".join(line for line in functions.splitlines() if line.startswith("| `")))
        self.assertGreater(len(names), 8)
        for name in names:
            self.assertIn(name, vramctl.__all__)
        rows = [line.split("|")[1:4] for line in exceptions.splitlines() if line.startswith("| `")]
        self.assertGreater(len(rows), 8)
        documented = set()
        for names, base, numbers in rows:
            for name in re.findall(r"\w+", names):
                kind = getattr(vramctl.errors, name)
                documented.add(name)
                for other in re.findall(r"`(\w+)`", base):
                    self.assertTrue(issubclass(kind, getattr(builtins, other)), f"{name} is no {other}")
                for number in re.findall(r"`(\w+)`", numbers):
                    self.assertTrue(number == "vramctl run" or hasattr(kind, number), f"{name} has no {number}")
        self.assertEqual(set(vramctl.errors.__all__) - documented, {"Error", "BufferTooSmall"})

    def test_every_public_name_has_a_docstring(self) -> None:
        for module in (vramctl, vramctl.errors):
            for name in module.__all__:
                self.assertTrue((getattr(module, name).__doc__ or "").strip(), f"{name} has none")


if __name__ == "__main__":
    unittest.main()
