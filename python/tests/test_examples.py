"""The examples parse on the oldest Python, import only torch and this package, and are documented."""

import ast
import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
if str(ROOT / "python") not in sys.path:
    sys.path.insert(0, str(ROOT / "python"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
#: These do not import the package: one shows that a script needs no changes, the others run the command.
WITHOUT_THE_PACKAGE = {"torch_script.py", "two_models.py", "empty_gpu.py"}


class Examples(unittest.TestCase):
    def test_there_are_examples(self):
        self.assertGreaterEqual(len(EXAMPLES), 3)

    def test_they_parse_and_need_nothing_more(self):
        known = {"torch", "vramctl"} | set(getattr(sys, "stdlib_module_names", ()))
        for path in EXAMPLES:
            with self.subTest(path.name):
                tree = ast.parse(path.read_text(), feature_version=(3, 9))
                names = set()
                for node in ast.walk(tree):
                    if isinstance(node, ast.Import):
                        names |= {alias.name.partition(".")[0] for alias in node.names}
                    elif isinstance(node, ast.ImportFrom):
                        names.add((node.module or "").partition(".")[0])
                if hasattr(sys, "stdlib_module_names"):
                    self.assertLessEqual(names, known)
                self.assertEqual("vramctl" in names, path.name not in WITHOUT_THE_PACKAGE)

    def test_what_they_use_of_the_package_is_there(self):
        import vramctl

        used = 0
        for path in EXAMPLES:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "vramctl":
                    self.assertTrue(hasattr(vramctl, node.attr), f"{path.name}: vramctl.{node.attr}")
                    used += 1
        self.assertGreater(used, 5)

    def test_the_documentation_names_them(self):
        text = (ROOT / "docs/engines.md").read_text()
        for path in EXAMPLES:
            self.assertIn(f"examples/{path.name}", text)


if __name__ == "__main__":
    unittest.main()
