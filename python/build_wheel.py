"""Hatchling hooks that build the native part of the wheel: `libvramctl.so`, copies of it under torch_memory_saver's file
names, and the `vramctl` binary as a script.

Cargo builds them in the release profile. These variables override that:

    VRAMCTL_WHEEL_CARGO=WORDS       cargo's arguments (default: `build --release`)
    VRAMCTL_WHEEL_PLATFORM=TAG      the wheel's platform tag, such as manylinux_2_28_x86_64 (default: this machine's)
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

#: Paths in the wheel: the package, and the library under torch_memory_saver's names.
PACKAGE = "vramctl"
HOOKS = [
    f"{PACKAGE}/dropin/torch_memory_saver_hook_mode_{mode}{suffix}.abi3.so"
    for mode in ("preload", "torch")
    for suffix in ("", "_cu12", "_cu13")
]


class Readme(MetadataHookInterface):
    """Uses the README as the wheel's description, with its relative links made absolute."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text()
        repository = metadata["urls"]["Homepage"] + "/blob/HEAD/"
        text = re.sub(r"\]\((?!https?:|#)", f"]({repository}", text)
        # A picture's page is no picture.
        text = re.sub(r"(!\[[^]]*\]\([^)]*)\)", r"\1?raw=true)", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class BuildHook(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            raise SystemExit(
                "Editable installs are not supported: in a checkout, `target/release/vramctl run` finds the package by itself"
            )
        library, binary = build(Path(self.root))
        places = [f"{PACKAGE}/libvramctl.so"]
        # Wheels cannot hold links, so these are copies. Only the torch_memory_saver drop-in needs them.
        if (Path(self.root) / "python" / PACKAGE / "dropin" / "torch_memory_saver").is_dir():
            places += HOOKS
        # `force_include` maps each source file to one place, so make a file per copy.
        self.work = Path(self.directory) / ".vramctl-wheel"
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        for number, place in enumerate(places):
            copy = self.work / f"{number}.so"
            shutil.copyfile(library, copy)
            copy.chmod(0o755)
            build_data["force_include"][str(copy)] = place
        build_data["shared_scripts"][str(binary)] = "vramctl"
        platform = os.environ.get("VRAMCTL_WHEEL_PLATFORM") or sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self.work, ignore_errors=True)


def build(root: Path) -> tuple[Path, Path]:
    """Builds the library and the binary and returns their paths."""
    if shutil.which("cargo") is None:
        raise SystemExit("cargo not found. Install Rust (https://rustup.rs) to build the library, or install a prebuilt wheel")
    words = shlex.split(os.environ.get("VRAMCTL_WHEEL_CARGO") or "build --release")
    command = ["cargo", *words, "-p", "vramctl", "-p", "vramctl-cli", "--message-format", "json-render-diagnostics"]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"`{shlex.join(command)}` failed")
    files = {}
    # Ask cargo where the files are: the target directory may be anywhere.
    for message in map(json.loads, done.stdout.splitlines()):
        if message.get("reason") == "compiler-artifact" and message["target"]["name"] == "vramctl":
            files.update({Path(file).name: Path(file) for file in message["filenames"]})
    return files["libvramctl.so"], files["vramctl"]
