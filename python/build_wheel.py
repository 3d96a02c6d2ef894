"""Hatchling hooks that build the native part of the wheel: `libvramctl.so`, what stands for it under torch_memory_saver's file
names, and the `vramctl` binary as a script.

Cargo builds them in the release profile. These variables override that:

    VRAMCTL_WHEEL_CARGO=WORDS       cargo's arguments (default: `build --release`)
    VRAMCTL_WHEEL_PLATFORM=TAG      the wheel's platform tag, such as manylinux_2_28_x86_64 (default: this machine's)
    VRAMCTL_WHEEL_SHARE=DIR         what else belongs into it (scripts/wheel): manual pages and completions in DIR/share, licences in DIR/THIRD-PARTY
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

#: The package in the wheel.
PACKAGE = "vramctl"
#: The names under which frameworks look for torch_memory_saver's library, with the hook mode.
HOOKS = {
    f"torch_memory_saver_hook_mode_{mode}{suffix}.abi3.so": mode
    for mode in ("preload", "torch")
    for suffix in ("", "_cu12", "_cu13")
}


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
        library, binary, simulated = build(Path(self.root))
        self.work = Path(self.directory) / ".vramctl-wheel"
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        include = build_data["force_include"]
        include[str(library)] = f"{PACKAGE}/libvramctl.so"
        # For `vramctl demo`.
        include[str(simulated)] = f"{PACKAGE}/libsimgpu.so"
        # Only the torch_memory_saver drop-in needs them.
        if (Path(self.root) / "python" / PACKAGE / "dropin" / "torch_memory_saver").is_dir():
            for name, mode in HOOKS.items():
                file = self.work / name
                file.write_bytes(stand_in(name, mode, library.read_bytes()[:64]))
                file.chmod(0o755)
                include[str(file)] = f"{PACKAGE}/dropin/{name}"
        if share := os.environ.get("VRAMCTL_WHEEL_SHARE"):
            include[f"{share}/THIRD-PARTY"] = f"{PACKAGE}/THIRD-PARTY"
            build_data["shared_data"][f"{share}/share"] = "share"
        build_data["shared_scripts"][str(binary)] = "vramctl"
        platform = os.environ.get("VRAMCTL_WHEEL_PLATFORM") or sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self.work, ignore_errors=True)


def stand_in(name: str, mode: str, header: bytes) -> bytes:
    """A library of half a kilobyte that stands for `libvramctl.so` in the folder above, since wheels hold no links: an ELF object
    without code, of the machine that `header` is of.

    Preloaded, it is a filter (DT_AUXILIARY): the linker puts the library into its place, in front of all that the program has. A
    dependency would come after those of the program itself. What torch opens needs no place, so it is a dependency (DT_NEEDED):
    a C library before glibc 2.32 cannot open a filter, and ends the program. So nothing of ours opens those that are preloaded.
    """
    library = b"$ORIGIN/../libvramctl.so"
    # The last is what Miles looks for in the file, to see what the library can do.
    strings = b"\0".join((b"", name.encode(), library, b"TMS_INIT_ENABLE_DISK_BACKUP", b""))
    # In this order: the header, three segments, a symbol, a table of its hash, the dynamic section, the strings.
    symbol = 64 + 3 * 56
    table = symbol + 24
    dynamic = table + 24
    link = {"preload": 0x7FFFFFFD, "torch": 1}[mode]
    soname, hashes, text, symbols, text_size, symbol_size = 14, 4, 5, 6, 10, 11
    tags = {
        link: 2 + len(name),
        soname: 1,
        hashes: table,
        text: dynamic + 8 * 16,
        symbols: symbol,
        text_size: len(strings),
        symbol_size: 24,
    }
    entries = b"".join(struct.pack("<QQ", *tag) for tag in (*tags.items(), (0, 0)))
    size = dynamic + len(entries) + len(strings)
    shared, load, dynamic_segment, stack, readable = 3, 1, 2, 0x6474E551, 6
    machine, flags = struct.unpack_from("<H", header, 18)[0], struct.unpack_from("<I", header, 48)[0]
    return b"".join(
        (
            struct.pack("<16sHHIQQQIHHHHHH", header[:16], shared, machine, 1, 0, 64, 0, flags, 64, 56, 3, 0, 0, 0),
            struct.pack("<IIQQQQQQ", load, readable, 0, 0, 0, size, size, 0x10000),
            struct.pack("<IIQQQQQQ", dynamic_segment, readable, dynamic, dynamic, dynamic, len(entries), len(entries), 8),
            # Without it, the linker makes the program's stack executable.
            struct.pack("<IIQQQQQQ", stack, readable, 0, 0, 0, 0, 0, 16),
            bytes(24),
            struct.pack("<IIIIQ", 1, 1, 0, 0, 0),
            entries,
            strings,
        )
    )


def build(root: Path) -> tuple[Path, Path, Path]:
    """Builds the library, the binary and the simulated GPU, and returns their paths."""
    if shutil.which("cargo") is None:
        raise SystemExit("cargo not found. Install Rust (https://rustup.rs) to build the library, or install a prebuilt wheel")
    words = shlex.split(os.environ.get("VRAMCTL_WHEEL_CARGO") or "build --release")
    # The simulated GPU's own command is not in the wheel, and does not link with an old glibc.
    wanted = ["-p", "vramctl", "-p", "vramctl-cli", "-p", "simgpu", "--lib", "--bin", "vramctl"]
    command = ["cargo", *words, *wanted, "--message-format", "json-render-diagnostics"]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"`{shlex.join(command)}` failed")
    files = {}
    # Ask cargo where the files are: the target directory may be anywhere.
    for message in map(json.loads, done.stdout.splitlines()):
        if message.get("reason") == "compiler-artifact" and message["target"]["name"] in ("vramctl", "simgpu"):
            files.update({Path(file).name: Path(file) for file in message["filenames"]})
    return files["libvramctl.so"], files["vramctl"], files["libsimgpu.so"]
