"""scripts/release: its archives unpack anywhere and work there, and its checksums hold."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python" / "tests"))

import vramctl  # noqa: E402
from support import ROOT, wheel  # noqa: E402


class Release(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.wheels = self.folder / "wheels"
        self.wheels.mkdir()

    def release(self, to: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "scripts/release"), "--wheels", str(self.wheels), *options]
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        return subprocess.run([*command, str(self.folder / to)], env=environment, capture_output=True, text=True)

    def test_an_archive_works_where_it_is_unpacked(self) -> None:
        wheel(self.wheels, vramctl.__version__)
        ran = self.release("out", "--draft")
        self.assertEqual(ran.returncode, 0, ran.stderr)
        out = self.folder / "out"
        name = f"vramctl-{vramctl.__version__}-{os.uname().machine}-linux"
        lines = [line.split("  ") for line in (out / "SHA256SUMS").read_text().splitlines()]
        self.assertEqual({file for _, file in lines}, {path.name for path in out.iterdir()} - {"SHA256SUMS"})
        for digest, file in lines:
            self.assertEqual(hashlib.sha256((out / file).read_bytes()).hexdigest(), digest)
        with tarfile.open(out / f"{name}.tar.gz") as archive:
            archive.extractall(self.folder)
        place = self.folder / name
        self.assertIn(f"# vramctl {vramctl.__version__} for {os.uname().machine}", (place / "README.md").read_text())
        self.links_resolve(place / "README.md")
        for wanted in (
            "LICENSE",
            "share/man/man1/vramctl.1",
            "docs/install.md",
            "include/vramctl.h",
            "scripts/pause.sh",
            "vramctl/site/sitecustomize.py",
        ):
            self.assertTrue((place / wanted).is_file(), wanted)
        ours = ("LD_PRELOAD", "PYTHONPATH", "VRAMCTL_LIB", "VRAMCTL_PYTHON")
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        script = "import vramctl; print(vramctl.library_path())"
        command = [str(place / "bin/vramctl"), "run", "--", sys.executable, "-c", script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        self.assertEqual(done.stdout.strip(), str(place / "vramctl/libvramctl.so"), done.stderr)

        self.assertEqual(self.release("again", "--draft").returncode, 0)
        self.assertEqual((out / "SHA256SUMS").read_text(), (self.folder / "again/SHA256SUMS").read_text(), "not reproducible")
        self.assertIn("is not empty", self.release("out", "--draft").stderr)

    def links_resolve(self, page: Path) -> None:
        links = re.findall(r"\]\(([^)#]+)", page.read_text())
        self.assertGreater(len(links), 5)
        for link in links:
            self.assertTrue((page.parent / link).exists(), link)

    def test_packages_have_the_same_where_the_system_looks(self) -> None:
        wheel(self.wheels, vramctl.__version__)
        self.assertEqual(self.release("out", "--draft").returncode, 0)
        if shutil.which("dpkg-deb"):
            (deb,) = (self.folder / "out").glob("*.deb")
            place = self.folder / "root"
            subprocess.run(["dpkg-deb", "--extract", deb, place], check=True)
            self.assertTrue((place / "usr/share/man/man1/vramctl.1").is_file())
            command = [
                str(place / "usr/bin/vramctl"),
                "run",
                "--",
                sys.executable,
                "-c",
                "import vramctl; print(vramctl.library_path())",
            ]
            ours = ("LD_PRELOAD", "PYTHONPATH", "VRAMCTL_LIB", "VRAMCTL_PYTHON")
            environment = {name: value for name, value in os.environ.items() if name not in ours}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            self.assertEqual(done.stdout.strip(), str(place / "usr/lib/vramctl/vramctl/libvramctl.so"), done.stderr)
            said = subprocess.run(
                ["dpkg-deb", "--field", deb, "Architecture", "Depends"], capture_output=True, text=True, check=True
            ).stdout
            self.assertIn("libc6 (>= 2.28)", said)
        if shutil.which("rpmbuild"):
            (rpm,) = (self.folder / "out").glob("*.rpm")
            listed = subprocess.run(["rpm", "-qlp", rpm], capture_output=True, text=True, check=True).stdout.split()
            for wanted in ("/usr/bin/vramctl", "/usr/lib/vramctl/vramctl/libvramctl.so", "/usr/share/man/man1/vramctl.1"):
                self.assertIn(wanted, listed)

    def test_a_release_has_a_section_in_the_changelog_and_its_own_version(self) -> None:
        loader = importlib.machinery.SourceFileLoader("release", str(ROOT / "scripts/release"))
        spec = importlib.util.spec_from_loader("release", loader)
        assert spec is not None
        release = importlib.util.module_from_spec(spec)
        with mock.patch.object(sys, "dont_write_bytecode", True):
            loader.exec_module(release)
        with mock.patch.object(release, "output", return_value=""):
            release.check(vramctl.__version__)
            with self.assertRaisesRegex(SystemExit, "has no section"):
                release.check("9.9.9")
        with (
            mock.patch.object(release, "output", return_value=" M README.md"),
            self.assertRaisesRegex(SystemExit, "the tree has changes"),
        ):
            release.check(vramctl.__version__)
        wheel(self.wheels, "9.9.9")
        self.assertIn("is not of version", self.release("out", "--draft").stderr)

    def test_the_bill_of_materials_has_what_is_linked(self) -> None:
        wheel(self.wheels, vramctl.__version__)
        ran = self.release("out", "--draft")
        self.assertEqual(ran.returncode, 0, ran.stderr)
        text = (self.folder / f"out/vramctl-{vramctl.__version__}-{os.uname().machine}-linux.cdx.json").read_text()
        bill = json.loads(text)
        self.assertEqual((bill["bomFormat"], bill["specVersion"]), ("CycloneDX", "1.6"))
        refs = {component["bom-ref"] for component in [bill["metadata"]["component"], *bill["components"]]}
        self.assertEqual({entry["ref"] for entry in bill["dependencies"]}, refs)
        self.assertLessEqual({on for entry in bill["dependencies"] for on in entry["dependsOn"]}, refs)
        names = {component["name"] for component in bill["components"]}
        self.assertLessEqual({"libc", "cudarc", "serde_json", "clap", "ratatui", "vramctl-core"}, names)
        self.assertFalse({"tempfile", "proptest", "serde_derive"} & names, "what only tests and compilers need")
        self.assertNotIn(str(ROOT), text)


if __name__ == "__main__":
    unittest.main()
