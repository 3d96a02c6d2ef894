"""The wheel builds, installs on the oldest and newer Pythons, and works when installed.

Its programs run on the simulated GPU without the checkout on their paths. VRAMCTL_TEST_WHEEL=FILE tests an existing wheel.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path

import vramctl
from support import HOLDER, ROOT

HOME = "https://github.com/vramctl/vramctl"

#: Variables that a user of the wheel does not have.
_OURS = (
    "LD_PRELOAD",
    "PYTHONPATH",
    "VRAMCTL_LIB",
    "VRAMCTL_PYTHON",
    "VRAMCTL_TAG",
    "PYTHONPYCACHEPREFIX",
    "PYTHONWARNINGS",
)
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in _OURS}


#: Skip optimisation: it dominates the build time and does not affect these tests.
QUICK = {f"CARGO_PROFILE_RELEASE_{name}": value for name, value in (("LTO", "off"), ("OPT_LEVEL", "0"), ("CODEGEN_UNITS", "1"))}


def done(arguments: list[str], **environment: str) -> str:
    """Runs a command that must succeed and returns its output."""
    ran = subprocess.run(
        arguments,
        cwd=ROOT,
        env={**ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
    )
    if ran.returncode != 0:
        raise AssertionError(f"{' '.join(arguments)} ended with {ran.returncode}:\n{ran.stdout}")
    return ran.stdout


def interpreters() -> dict[tuple[int, int], str]:
    """The working Pythons on this machine that can create virtual environments, by version."""
    candidates = [sys.executable, *(f"python3.{minor}" for minor in range(9, 16))]
    candidates += map(str, Path.home().glob(".pyenv/versions/3.*/bin/python3"))
    if shutil.which("uv"):
        listed = subprocess.run(["uv", "python", "list", "--only-installed"], capture_output=True, text=True).stdout
        candidates += re.findall(r"\S+/bin/python3\S*", listed)
    found: dict[tuple[int, int], str] = {}
    for candidate in candidates:
        try:
            ran = subprocess.run(
                [candidate, "-c", "import ensurepip, venv, sys; print(*sys.version_info[:2])"],
                env=ENVIRONMENT,
                capture_output=True,
                text=True,
            )
        except OSError:
            continue
        if ran.returncode == 0:
            major, minor = map(int, ran.stdout.split())
            found.setdefault((major, minor), candidate)
    return found


def reachable() -> bool:
    """Whether pip can get the build requirements."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "hatchling>=1.26"]
        return subprocess.run(command, env=ENVIRONMENT, capture_output=True).returncode == 0


#: ELF machine numbers.
MACHINES = {"x86_64": 62, "aarch64": 183}


def machines(wheel: Path) -> set[int]:
    """The ELF machines of the library and the command line."""
    with zipfile.ZipFile(wheel) as archive:
        binaries = [name for name in archive.namelist() if name.endswith((".so", "/scripts/vramctl"))]
        assert len(binaries) >= 2, binaries
        return {int.from_bytes(archive.read(name)[18:20], "little") for name in binaries}


def exported(wheel: Path) -> set[str]:
    """The symbols that the library exports."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        symbols = done(["readelf", "--dyn-syms", "--wide", archive.extract("vramctl/libvramctl.so", folder)])
    rows = [line.split() for line in symbols.splitlines()]
    return {row[7] for row in rows if len(row) > 7 and row[4] in ("GLOBAL", "WEAK") and row[6] != "UND"}


class Wheel(unittest.TestCase):
    wheel: Path

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        given = os.environ.get("VRAMCTL_TEST_WHEEL")
        if given is None and not reachable():
            raise unittest.SkipTest("not run: pip cannot install the build requirements; is there a network?")
        cls.wheel = Path(given or done([str(ROOT / "scripts/wheel"), str(cls.folder)], **QUICK).splitlines()[-1])

    def test_it_is_one_for_all_and_has_everything_in_it(self) -> None:
        self.assertRegex(self.wheel.name, rf"^vramctl-[\d.]+-py3-none-manylinux_2_28_{os.uname().machine}\.whl$")
        with zipfile.ZipFile(self.wheel) as archive:
            names = archive.namelist()
            for wanted in ("__init__.py", "py.typed", "libvramctl.so", "client.py", "site/vramctl.py"):
                self.assertIn(f"vramctl/{wanted}", names)
            self.assertTrue(any(name.endswith(".data/scripts/vramctl") for name in names), names)
            hooks = [name for name in names if "dropin/torch_memory_saver_hook_mode_" in name]
            if "vramctl/dropin/torch_memory_saver/__init__.py" in names:
                self.assertEqual(len(hooks), 6, "beside the drop-in, under the names that frameworks look for")
                self.assertTrue(
                    all(archive.getinfo(name).file_size < 1000 for name in hooks), "each stands for the one library"
                )
            else:
                self.assertEqual(hooks, [])
            metadata = archive.read(
                next(name for name in names if re.fullmatch(r"vramctl-[^/]+\.dist-info/METADATA", name))
            ).decode()
            for wanted in ("man/man1/vramctl-pause.1", "bash-completion/completions/vramctl", "zsh/site-functions/_vramctl"):
                self.assertTrue(any(name.endswith(f".data/data/share/{wanted}") for name in names), wanted)
            licences = archive.read("vramctl/THIRD-PARTY").decode()
        self.assertRegex(licences, "\nserde_json [0-9.]+: MIT OR Apache-2.0\n")
        self.assertIn("Permission is hereby granted, free of charge", licences)
        self.assertIn("Requires-Python: >=3.9", metadata)
        self.assertNotIn("Requires-Dist", metadata, "the wheel has no dependencies")
        self.assertIn(f"Version: {vramctl.__version__}", metadata)
        self.assertIn(f"Project-URL: Homepage, {HOME}", metadata)
        self.assertIn("Description-Content-Type: text/markdown", metadata)
        links = re.findall(r"\]\(([^)]*)\)", metadata)
        self.assertGreater(len(links), 10)
        for link in links:
            self.assertRegex(link, "^https://")
            if link.startswith(f"{HOME}/blob/HEAD/"):
                file = link[len(f"{HOME}/blob/HEAD/") :].partition("#")[0].removesuffix("?raw=true")
                self.assertTrue((ROOT / file).exists(), link)

    def test_it_is_built_for_another_machine(self) -> None:
        target = "aarch64-unknown-linux-gnu" if os.uname().machine == "x86_64" else "x86_64-unknown-linux-gnu"
        command = [str(ROOT / "scripts/wheel"), "--target", target, str(self.folder)]
        sysroot = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True).stdout.strip()
        if not Path(sysroot, "lib/rustlib", target).is_dir():
            with self.assertRaises(AssertionError) as missing:
                done(command)
            self.assertIn(f"rustup target add {target}", str(missing.exception))
            self.skipTest(f"not run: Rust's {target} is missing here")
        wheel = Path(done(command, **QUICK).splitlines()[-1])
        machine = target.partition("-")[0]
        self.assertTrue(wheel.name.endswith(f"-py3-none-manylinux_2_28_{machine}.whl"), wheel.name)
        self.assertEqual(machines(wheel), {MACHINES[machine]})
        self.assertEqual(machines(self.wheel), {MACHINES[os.uname().machine]})
        self.assertEqual(exported(wheel), exported(self.wheel))

    def test_it_works_where_it_is_installed_in_the_oldest_python(self) -> None:
        self.in_environment(interpreters().get((3, 9)), "Python 3.9")

    def test_it_works_where_it_is_installed_in_a_newer_python(self) -> None:
        newer = {version: python for version, python in interpreters().items() if version >= (3, 11)}
        self.in_environment(newer[max(newer)] if newer else None, "Python 3.11 or later")

    def in_environment(self, python: str | None, wanted: str) -> None:
        if python is None:
            self.skipTest(f"not run: there is no {wanted} here")
        place = Path(tempfile.mkdtemp(dir=self.folder))
        done([python, "-m", "venv", str(place)])
        done([str(place / "bin/pip"), "install", "--quiet", "--no-index", "--disable-pip-version-check", str(self.wheel)])
        self.works(str(place / "bin/vramctl"), str(place / "bin/python"), place)

    def test_pip_builds_it_where_rust_is_and_installs_it_into_a_directory(self) -> None:
        """Uses the debug profile, which is built already; pip does the same with it."""
        place = self.folder / "target"
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--target",
            str(place),
            ".",
        ]
        done(command, VRAMCTL_WHEEL_CARGO="build")
        # A Python that finds the package only through `vramctl run`.
        self.works(str(place / "bin/vramctl"), sys.executable, place)

    def works(self, command: str, python: str, place: Path) -> None:
        """Pauses and resumes, from Python and the shell, with the installation at `place`."""
        where = [command, "run", "--", python, "-c", "import vramctl; print(vramctl.__file__, vramctl.library_path())"]
        package, library = done(where).split()
        for path in (package, library):
            self.assertTrue(path.startswith(str(place)), path)
        said = done([command, "--version"])
        self.assertEqual(done([python, "-m", "vramctl", "--version"], PYTHONPATH=str(Path(library).parents[1])), said)
        self.assertEqual(done([command, "run", "--", python, "-m", "vramctl", "--version"]), said)
        for folder in done([command, "python-path"]).strip().split(":"):
            self.assertTrue(folder.startswith(str(place)) and Path(folder).is_dir(), folder)
        stand_in = "import importlib.metadata, os, torch_memory_saver; print(os.path.dirname(torch_memory_saver.__file__)); "
        stand_in += "print(importlib.metadata.version('torch_memory_saver'), torch_memory_saver.torch_memory_saver.pause())"
        package, version = done([command, "run", "--", python, "-c", stand_in]).splitlines()
        self.assertTrue(package.startswith(str(place)), package)
        self.assertRegex(version, r"^0\.0\.10\+vramctl None$")
        # As training frameworks start workers: what stands for the library beside the drop-in, without `vramctl run`.
        folder = Path(package).parent
        if (folder / "torch_memory_saver_hook_mode_torch.abi3.so").exists():
            preload = str(folder / "torch_memory_saver_hook_mode_preload.abi3.so")
            done([python, "-c", stand_in], LD_PRELOAD=preload, PYTHONPATH=str(folder))
            # In its place: its functions come before those of what the program is linked with.
            whose = "import vramctl; print(*(line.split()[-1] for line in open('/proc/self/maps') if 'vramctl.so' in line)); "
            whose += "print(vramctl.is_preloaded())"
            maps, is_preloaded = done(
                [python, "-c", whose], LD_PRELOAD=preload, PYTHONPATH=str(folder.parent / "site")
            ).splitlines()
            self.assertEqual(
                {os.path.realpath(path) for path in maps.split()}, {os.path.realpath(folder.parent / "libvramctl.so")}
            )
            self.assertEqual(is_preloaded, "True")
            scopes = done(["/bin/true"], LD_PRELOAD=preload, LD_DEBUG="scopes")
            self.assertRegex(
                scopes, r"scope 0: \S*true \S*libvramctl\.so \S*hook_mode_preload\S* \S*libc\.so", "the library's place"
            )
            # As torch opens an allocator.
            opened = f"import ctypes; print(bool(ctypes.CDLL('{folder}/torch_memory_saver_hook_mode_torch.abi3.so').tms_torch_malloc))"
            self.assertEqual(done([python, "-c", opened]), "True\n")
        done(
            [
                command,
                "run",
                "--",
                python,
                str(ROOT / "tests/apps/engine.py"),
                "--weights-mib",
                "16",
                "--kv-mib",
                "8",
                "--cycles",
                "1",
            ]
        )
        holder = subprocess.Popen(
            [command, "run", "--name", "wheel", "--", python, "-c", HOLDER],
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert holder.stdin is not None and holder.stdout is not None
        try:
            self.assertEqual(holder.stdout.readline(), "ready\n")
            self.assertIn("12.00 MiB", done([command, "pause", "--name", "wheel"]))
            done([command, "resume", "--name", "wheel"])
            client = "import vramctl\nwith vramctl.Client('wheel') as c:\n    print(c.pause('weights').bytes, c.resume().bytes)"
            self.assertEqual(done([command, "run", "--", python, "-c", client]), f"{8 << 20} {8 << 20}\n")
            holder.stdin.write("check\n")
            holder.stdin.flush()
            self.assertEqual(holder.stdout.readline(), "weights ok, cache zero\n")
        finally:
            holder.kill()
            holder.communicate()

    def test_the_engine_of_the_demonstration_is_paused_by_what_is_installed(self) -> None:
        """Runs scripts/demo with the installed binary and library."""
        place = Path(tempfile.mkdtemp(dir=self.folder))
        done(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-index",
                "--disable-pip-version-check",
                "--target",
                str(place),
                str(self.wheel),
            ]
        )
        (place / "bin" / "libvramctl.so").symlink_to(place / "vramctl" / "libvramctl.so")
        without_gpu = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("SIMGPU_")}
        demo = [str(ROOT / "scripts/demo"), "--simulated", "--bin", str(place / "bin"), "--weights-mib", "64", "--kv-mib", "16"]
        ran = subprocess.run(demo, env=without_gpu, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=540)
        self.assertEqual(ran.returncode, 0, ran.stdout)
        self.assertIn("demo OK", ran.stdout)
        # Its own demo needs nothing of the checkout, nor the link that scripts/demo needs.
        (place / "bin" / "libvramctl.so").unlink()
        own = subprocess.run(
            [str(place / "bin/vramctl"), "demo"],
            env=without_gpu,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=540,
        )
        self.assertEqual(own.returncode, 0, own.stdout)
        self.assertIn("Demo OK", own.stdout)


if __name__ == "__main__":
    unittest.main()
