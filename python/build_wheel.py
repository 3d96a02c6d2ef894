"""The part of the wheel that is not Python: `libvramctl.so` in the package, its copies under the names by which users of
torch_memory_saver look for theirs, and the `vramctl` binary as a script.

They are built with cargo, in the release profile unless the environment says otherwise:

    VRAMCTL_WHEEL_CARGO=WORDS       what cargo is told, in place of `build --release`
    VRAMCTL_WHEEL_PLATFORM=TAG      the wheel's platform tag, such as manylinux_2_28_x86_64 (this machine's if not given)
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

#: Where the package is in a wheel, and where its stand-in for torch_memory_saver.
PACKAGE = "vramctl"
HOOKS = [f"{PACKAGE}/dropin/torch_memory_saver_hook_mode_preload{suffix}.abi3.so" for suffix in ("", "_cu12", "_cu13")]


class Readme(MetadataHookInterface):
    """The README as the wheel's description. Its links are relative to the repository, so here they are to the project's."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text()
        repository = metadata["urls"]["Homepage"] + "/blob/HEAD/"
        text = re.sub(r"\]\((?!https?:|#)", f"]({repository}", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class BuildHook(BuildHookInterface):
    """Called by hatchling."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            raise SystemExit(
                "There is no editable install: in a checkout, `target/release/vramctl run` finds the package by itself"
            )
        library, binary = build(Path(self.root))
        places = [f"{PACKAGE}/libvramctl.so"]
        # A wheel has no links, so these are copies. They are of use beside the stand-in alone.
        if (Path(self.root) / "python" / PACKAGE / "dropin" / "torch_memory_saver").is_dir():
            places += HOOKS
        # One source can have one place in `force_include`, so each copy is a file of its own until the wheel is written.
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
    """The library and the binary, built now."""
    if shutil.which("cargo") is None:
        raise SystemExit("cargo is missing, which builds the library. Install Rust (https://rustup.rs), or a built wheel")
    words = shlex.split(os.environ.get("VRAMCTL_WHEEL_CARGO") or "build --release")
    command = ["cargo", *words, "-p", "vramctl", "-p", "vramctl-cli", "--message-format", "json-render-diagnostics"]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"`{shlex.join(command)}` failed")
    files = {}
    # Cargo says where it put them: the target directory may be anywhere.
    for message in map(json.loads, done.stdout.splitlines()):
        if message.get("reason") == "compiler-artifact" and message["target"]["name"] == "vramctl":
            files.update({Path(file).name: Path(file) for file in message["filenames"]})
    return files["libvramctl.so"], files["vramctl"]
