"""scripts/release: its archives unpack anywhere and work there, and its checksums hold."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python" / "tests"))

import vramctl  # noqa: E402
from support import ROOT, wheel  # noqa: E402

TOOL = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release-tools/bin/cargo-cyclonedx"


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
        ran = self.release("out", "--draft", "--without-sbom")
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
        for wanted in ("LICENSE", "docs/install.md", "include/vramctl.h", "scripts/pause.sh", "vramctl/site/sitecustomize.py"):
            self.assertTrue((place / wanted).is_file(), wanted)
        ours = ("LD_PRELOAD", "PYTHONPATH", "VRAMCTL_LIB", "VRAMCTL_PYTHON")
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        script = "import vramctl; print(vramctl.library_path())"
        command = [str(place / "bin/vramctl"), "run", "--", sys.executable, "-c", script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        self.assertEqual(done.stdout.strip(), str(place / "vramctl/libvramctl.so"), done.stderr)

        self.assertEqual(self.release("again", "--draft", "--without-sbom").returncode, 0)
        self.assertEqual((out / "SHA256SUMS").read_text(), (self.folder / "again/SHA256SUMS").read_text(), "not reproducible")
        self.assertIn("is not empty", self.release("out", "--draft", "--without-sbom").stderr)

    def test_a_release_has_a_section_in_the_changelog_and_its_own_version(self) -> None:
        wheel(self.wheels, vramctl.__version__)
        refused = self.release("out")
        self.assertNotEqual(refused.returncode, 0)
        self.assertRegex(refused.stderr, "the tree has changes|has no section")
        wheel(self.wheels, "9.9.9")
        self.assertIn("is not of version", self.release("out", "--draft", "--without-sbom").stderr)

    def test_the_bill_of_materials_has_what_is_linked(self) -> None:
        if not TOOL.exists():
            self.skipTest(f"not run: {TOOL} is missing; scripts/release installs it")
        wheel(self.wheels, vramctl.__version__)
        ran = self.release("out", "--draft")
        self.assertEqual(ran.returncode, 0, ran.stderr)
        text = (self.folder / f"out/vramctl-{vramctl.__version__}.cdx.json").read_text()
        bill = json.loads(text)
        names = {component["name"] for component in bill["components"]}
        self.assertLessEqual({"libc", "cudarc", "serde_json", "clap", "ratatui", "vramctl-core"}, names)
        self.assertFalse({"tempfile", "proptest", "simgpu"} & names, "what only tests need")
        self.assertNotIn(str(ROOT), text)
        self.assertFalse(list(ROOT.glob("src/*/release-sbom*")))


if __name__ == "__main__":
    unittest.main()
