"""The README's blocks, pasted: a block is typed into a shell, the answers are those that the README promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from support import ROOT, VRAMCTL, FolderOfPrograms

BUILT = os.path.dirname(VRAMCTL)
README = (ROOT / "README.md").read_text()


def blocks() -> list[str]:
    """Those of the section for the simulated GPU."""
    section = README.split("### By hand, on the simulated GPU\n")[1].split("\n### ")[0]
    return re.findall(r"^```sh\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


class Terminal:
    def __init__(self, environment: dict[str, str]) -> None:
        self.shell = subprocess.Popen(
            ["bash"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def type(self, text: str) -> None:
        assert self.shell.stdin is not None
        self.shell.stdin.write(text)
        self.shell.stdin.flush()

    def close_input(self) -> None:
        assert self.shell.stdin is not None
        self.shell.stdin.close()

    def read_until(self, beginning: str) -> str:
        """The lines up to one with this beginning."""
        text = ""
        assert self.shell.stdout is not None
        for line in self.shell.stdout:
            text += line
            if line.startswith(beginning):
                return text
        raise AssertionError(f"{beginning} is not in\n{text}")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shell.poll() is None:
            self.shell.kill()
        self.shell.wait()
        for pipe in (self.shell.stdin, self.shell.stdout):
            assert pipe is not None
            pipe.close()


def environment(folder: str, *kept: str) -> dict[str, str]:
    """That of a user who has set nothing, but for what the simulated machine needs."""
    ours = tuple(name for name in ("VRAMCTL_", "SIMGPU_", "LD_PRELOAD", "PYTHONPATH", "LD_LIBRARY_PATH") if name not in kept)
    found = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**found, "VRAMCTL_DIR": f"{folder}/sockets"}


#: An engine: it loads its weights, and says at the end of its input whether they are still the same.
SERVE = """
import sys
sys.path.insert(0, {tests!r})
from support import Cuda, MIB, pattern
cuda = Cuda()
weights = cuda.malloc(64 * MIB)
cuda.write(weights, pattern(1, 64 * MIB))
print("serving", flush=True)
sys.stdin.read()
print("same" if cuda.read(weights, 64 * MIB) == pattern(1, 64 * MIB) else "lost", flush=True)
""".format(tests=str(Path(__file__).resolve().parent))


class First(unittest.TestCase):
    def test_a_program_is_paused_and_resumed(self) -> None:
        (block,) = re.findall(r"^```\n(\$ vramctl run.*?)^```", README, re.DOTALL | re.MULTILINE)
        start, *rest = [line.removeprefix("$ ") for line in block.splitlines()]
        # In the place of the other program.
        rest = ["simgpu-smi used" if line.startswith("…") else line for line in rest]
        self.assertIn("simgpu-smi used", rest)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "serve.py").write_text(SERVE)
            os.symlink(sys.executable, Path(folder) / "python")
            given = environment(folder, "LD_LIBRARY_PATH", "SIMGPU_")
            given["PATH"] = os.pathsep.join([*([BUILT] if BUILT else []), folder, given["PATH"]])
            with Terminal(given) as engine, Terminal(given) as other:
                engine.type(f"cd {folder}\n{start}\n")
                engine.read_until("serving")
                other.type("\n".join(["set -e", "simgpu-smi used", *rest, "simgpu-smi used", "echo the end"]) + "\n")
                told = other.read_until("the end")
                used = re.findall(r"^\d+$", told, re.MULTILINE)
                self.assertEqual([int(mib) >= 64 for mib in used], [True, False, True], told)
                for step in ("default .*active", "paused default of engine", "resumed default of engine"):
                    self.assertRegex(told, step)
                engine.close_input()
                engine.read_until("same")


def in_folder(folder: str, text: str) -> str:
    """The places that the README names belong to whoever runs this; all is built already."""
    return text.replace("/tmp/", f"{folder}/").replace("cargo build --workspace\n", "").replace("$PWD/target/debug", BUILT)


class ByHand(unittest.TestCase):
    def test_the_blocks_do_what_the_readme_says(self) -> None:
        first, second, _ = blocks()
        with tempfile.TemporaryDirectory() as folder:
            at_home = [in_folder(folder, text) for text in (first, second)]
            given = environment(folder)
            with Terminal(given) as engine, Terminal(given) as other:
                engine.type(at_home[0])
                engine.read_until("ready")
                engine.type("generate 7\n")
                engine.read_until("answer 7 ")
                other.type(at_home[1] + "echo the end\n")
                told = other.read_until("the end")
                steps = (
                    "kv_cache .* discard",
                    "cudaErrorMemoryAllocation",
                    "paused kv_cache of engine",
                    "paused default, weights of engine",
                    "verified",
                    "resumed default, kv_cache, weights of engine",
                    "moved engine .* to GPU 1",
                    "engine_regions",
                )
                self.assertRegex(told, re.compile(".*".join(f"(?:{step})" for step in steps), re.DOTALL))
                engine.type("verify\n")
                verified = engine.read_until("verify")
                self.assertIn("weights ok", verified)
                self.assertIn("kv zero", verified)
                engine.type("memory\nquit\n")
                engine.read_until("bye")

    def test_two_engines_share_a_gpu(self) -> None:
        first, second, sharing = blocks()
        one, another, look = [line.partition(" #")[0].rstrip() + "\n" for line in sharing.splitlines()]
        self.assertEqual(look, "vramctl top\n")
        machine, joined = first.partition("vramctl run")[0], second.partition("vramctl status")[0]
        with FolderOfPrograms() as folder:
            given = environment(folder)
            with Terminal(given) as a, Terminal(given) as b, Terminal(given) as third:
                for terminal, text in ((a, machine + one), (b, joined + another)):
                    terminal.type(in_folder(folder, text))
                    terminal.read_until("ready")
                for terminal in (a, b) * 2:
                    terminal.type("generate 7\n")
                    terminal.read_until("answer 7 ")
                # Without a screen of its own.
                third.type(in_folder(folder, joined) + "vramctl top --once\nvramctl share\necho the end\n")
                told = third.read_until("the end")
                self.assertRegex(told, r"(?s)Share +one gave way to two .*: it was idle.*two came.*scheduler: process")
                for terminal in (a, b):
                    terminal.type("verify\nquit\n")
                    self.assertIn("weights ok", terminal.read_until("bye"))


if __name__ == "__main__":
    unittest.main()
