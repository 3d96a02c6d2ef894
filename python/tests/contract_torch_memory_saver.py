"""Compares the drop-in with the release of torch_memory_saver that it stands in for (scripts/test-saver-contract): every public name
and signature, the internals that frameworks use, the C functions, the environment variables and the files.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path
from typing import Any

from contract_engines import parameters, pip

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "torch_memory_saver"
VERSION = "0.0.10"

#: What the drop-in leaves out, and why. An entry that no longer holds is an error.
LEFT_OUT = {
    r"module .*\.logger": "vramctl has its own log",
    r".*xpu_.*": "Intel's GPUs are not supported",
    r"function .*\._sanity_checks": "expandable segments are supported",
    r"function .*\._setup_function_signatures": "the constructor does it",
    r"module .*\._SUPPORTED_CUDA_MAJORS": "one library serves every CUDA runtime",
    r"module .*\._TAG_DEFAULT": "the signatures have it",
    r"method TorchMemorySaver\._validate_cpu_backup_backend": "regions check their arguments",
    r"method _TorchMemorySaverImpl\._current_device": "torch's function does it",
    r"attribute _TorchMemorySaverImpl\._(is_xpu|device_module)": "Intel's GPUs are not supported",
    r"attribute TorchMemorySaver\._impl_ctor_kwargs": "the hook mode can be changed until it is used",
    r"file torch_memory_saver-[^/]*/(RECORD|LICENSE)": "pip must not remove parts of vramctl",
}


def archive() -> zipfile.ZipFile | None:
    """The released wheel; None without a package index."""
    with tempfile.TemporaryDirectory() as work:
        asked = ["--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--retries=1", "--timeout=15", "-d", work]
        asked += ["--python-version=3.12", "--platform=manylinux2014_x86_64"]
        if pip("download", *asked, f"{PACKAGE}=={VERSION}").returncode != 0:
            return None
        (wheel,) = Path(work).glob("*.whl")
        # It stays readable without its name.
        return zipfile.ZipFile(wheel.open("rb"))


def targets(node: ast.stmt) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []


class Contract(unittest.TestCase):
    maxDiff = None
    release: zipfile.ZipFile

    def setUp(self) -> None:
        self.missing: list[str] = []
        self.used: set[str] = set()

    def expect(self, what: str, there: bool) -> None:
        reasons = [pattern for pattern in LEFT_OUT if re.fullmatch(pattern, what)]
        self.used.update(reasons)
        if there and reasons:
            self.missing.append(f"{what} is there, and is listed as left out")
        elif not there and not reasons:
            self.missing.append(what)

    def signature(self, what: str, node: ast.FunctionDef, ours: Any) -> None:
        """Whatever the release's function can be called with, ours can, too."""
        wanted = parameters(node)
        found = inspect.signature(ours).parameters
        for name, default in wanted.items():
            if name not in found:
                self.missing.append(f"{what}: parameter {name}")
            elif default is not inspect.Parameter.empty and found[name].default is inspect.Parameter.empty:
                self.missing.append(f"{what}: parameter {name} has no default")
            elif default not in (inspect.Parameter.empty, ...) and found[name].default != default:
                self.missing.append(f"{what}: parameter {name} is {default!r} there, {found[name].default!r} here")
        for name in set(found) - set(wanted):
            one = found[name]
            if one.default is inspect.Parameter.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
                self.missing.append(f"{what}: needs {name}")

    def klass(self, node: ast.ClassDef, ours: Any) -> None:
        for member in node.body:
            if isinstance(member, ast.FunctionDef):
                what = f"method {node.name}.{member.name}"
                found = inspect.getattr_static(ours, member.name, None)
                self.expect(what, found is not None)
                if isinstance(found, property):
                    self.assertTrue(member.decorator_list, f"{what} is a property here")
                elif found is not None:
                    self.signature(what, member, found.__func__ if isinstance(found, staticmethod) else found)
        text = inspect.getsource(ours)
        stored = {
            place.attr
            for member in ast.walk(node)
            for place in targets(member)  # type: ignore[arg-type]
            if isinstance(place, ast.Attribute) and isinstance(place.value, ast.Name) and place.value.id == "self"
        }
        for name in sorted(stored):
            if inspect.getattr_static(ours, name, None) is None:  # properties are compared as methods
                self.expect(f"attribute {node.name}.{name}", re.search(rf"self\.{name}\b", text) is not None)

    def test_everything_of_the_release_is_there_or_left_out_for_a_reason(self) -> None:
        names = self.release.namelist()
        self.assertIn(f"{PACKAGE}/entrypoint.py", names)
        for file in names:
            if file.startswith(f"{PACKAGE}/") and file.endswith(".py"):
                self.module(file)
        self.files(names)
        binary = self.release.read("torch_memory_saver_hook_mode_preload_cu13.abi3.so")
        binary += self.release.read("torch_memory_saver_hook_mode_torch_cu13.abi3.so")
        self.functions(binary)
        for variable in sorted(set(re.findall(rb"\bTMS_[A-Z_]+\b", binary))):
            self.expect(f"variable {variable.decode()}", self.has(variable))
        self.missing += [
            f"{pattern!r} is listed as left out, and the release has no such thing" for pattern in set(LEFT_OUT) - self.used
        ]
        self.assertEqual(self.missing, [])

    def module(self, file: str) -> None:
        name = file[: -len(".py")].replace("/", ".")
        name = name[: -len(".__init__")] if name.endswith(".__init__") else name
        try:
            ours = importlib.import_module(name)
        except ImportError:
            self.expect(f"module {name}", False)
            return
        for node in ast.parse(self.release.read(file)).body:
            for place in targets(node):
                if isinstance(place, ast.Name):
                    self.expect(f"module {name}.{place.id}", hasattr(ours, place.id))
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found = getattr(ours, node.name, None)
                self.expect(
                    f"{'class' if isinstance(node, ast.ClassDef) else 'function'} {name}.{node.name}", found is not None
                )
                if isinstance(node, ast.ClassDef) and found is not None:
                    self.klass(node, found)
                elif isinstance(node, ast.FunctionDef) and found is not None:
                    self.signature(f"{name}.{node.name}", node, found)

    def files(self, names: list[str]) -> None:
        built: dict[str, Any] = {}
        for node in ast.parse((ROOT / "python" / "build_wheel.py").read_text()).body:
            if any(isinstance(place, ast.Name) and place.id in ("PACKAGE", "HOOKS") for place in targets(node)):
                exec(compile(ast.Module([node], []), "build_wheel.py", "exec"), built)  # noqa: S102
        ours = {Path(place).name for place in built["HOOKS"]}
        folder = next((ROOT / "python" / "vramctl" / "dropin").glob("*.dist-info"))
        for file in names:
            if file.endswith(".so"):
                self.expect(f"file {file}", file in ours)
            elif ".dist-info/" in file:
                self.expect(f"file {file}", (folder / Path(file).name).is_file())

    def functions(self, binary: bytes) -> None:
        wanted = set(re.findall(rb"(?<=\x00)(?:tms_[a-z_]+|set_memory_margin_bytes)(?=\x00)", binary))
        self.assertGreater(len(wanted), 15)
        for function in sorted(wanted):
            self.expect(f"C function {function.decode()}", self.has(function))

    @staticmethod
    def has(name: bytes) -> bool:
        """Whether the library's sources have a word."""
        word = re.compile(rb"\b" + name + rb"\b")
        return any(word.search(file.read_bytes()) for file in (ROOT / "src").rglob("*.rs"))


def main() -> int:
    # testing_utils needs torch, if only to import it.
    sys.path[:0] = [str(ROOT / "python" / folder) for folder in ("vramctl/dropin", "tests/fake_torch")]
    release = archive()
    if release is None:
        print(f"not run: no package index offers {PACKAGE} {VERSION}")
        return 0
    Contract.release = release
    ran = unittest.TextTestRunner(verbosity=2).run(unittest.defaultTestLoader.loadTestsFromTestCase(Contract))
    return 0 if ran.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
