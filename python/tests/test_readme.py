"""The README's blocks for two terminals, pasted: a block is typed into a shell, the answers are those that the README promises."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import unittest

from support import ROOT, VRAMCTL

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
        self.shell.communicate()


class ByHand(unittest.TestCase):
    def test_the_blocks_do_what_the_readme_says(self) -> None:
        first, second = blocks()
        with tempfile.TemporaryDirectory() as folder:
            # The places that the README names belong to whoever runs this; all is built already.
            at_home = [
                text.replace("/tmp/", f"{folder}/").replace("cargo build --workspace\n", "").replace("$PWD/target/debug", BUILT)
                for text in (first, second)
            ]
            ours = ("VRAMCTL_", "SIMGPU_", "LD_PRELOAD", "PYTHONPATH", "LD_LIBRARY_PATH")
            environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
            environment["VRAMCTL_DIR"] = f"{folder}/sockets"
            with Terminal(environment) as engine, Terminal(environment) as other:
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


if __name__ == "__main__":
    unittest.main()
