"""An inference engine under the library on a real GPU: what scripts/gpu-engines checks without measuring for long."""

import importlib.util
import os
import unittest

from section import ROOT, gpus, section

#: A model for the engine, as for `scripts/gpu-engines --model`.
MODEL = os.environ.get("GPU_CHECK_MODEL", "")


@unittest.skipUnless(gpus() and MODEL, "there is no GPU, or $GPU_CHECK_MODEL is not set")
class Engine(unittest.TestCase):
    def works(self, run, engine):
        if not importlib.util.find_spec(engine):
            self.skipTest(f"{engine} is not installed")
        command = [ROOT / "scripts" / "gpu-engines", "--engine", engine, "--part", "outside,hold,suspend", "--pauses", 5]
        code, text, _ = run.command(*command, "--model", MODEL, "--bin", run.bin, "--out", run.out, seconds=570)
        run.expect(f"scripts/gpu-engines --engine {engine}", code == 0, text[-2000:])

    @section(580)
    def test_vllm(self, run):
        """vLLM is paused from outside, in the middle of requests, and suspended: same tokens and log-probabilities"""
        self.works(run, "vllm")

    @section(580)
    def test_sglang(self, run):
        """the same for SGLang"""
        self.works(run, "sglang")
