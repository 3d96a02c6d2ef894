"""Whether an installed engine accepts what scripts/gpu-engines --part features starts it with, and loads the models that it makes.

    scripts/test-engines-contract --installed PYTHON      the Python of an environment with SGLang or vLLM; no GPU is needed

Each argument goes through the engine's own parser of arguments, and each model, of a few MB, through the transformers that came with the engine.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts/gpu-engines.d"))

import program  # noqa: E402
from features import ADAPTERS, FEATURES  # noqa: E402


def feature_arguments(engine: str, feature: str, models: Path = Path("/models")) -> dict[str, Any]:
    """What the engine is started with."""
    options = argparse.Namespace(
        model=str(models / FEATURES[feature].model),
        fraction=0.6,
        gpus=1,
        kv_gib=None,
        sleep=False,
        feature=feature,
        models=models,
    )
    return {"vllm": program.Vllm, "sglang": program.Sglang}[engine].arguments(options)


class Features(unittest.TestCase):
    """Run by the engine's Python."""

    folder: tempfile.TemporaryDirectory[str]

    @classmethod
    def setUpClass(cls) -> None:
        import models

        cls.folder = tempfile.TemporaryDirectory()
        cls.models = Path(cls.folder.name)
        for name in models.NEEDS:
            models.make(name, cls.models, tiny=True)

    @classmethod
    def tearDownClass(cls) -> None:
        cls.folder.cleanup()

    def test_arguments(self) -> None:
        for engine in ("vllm", "sglang"):
            if importlib.util.find_spec(engine) is None:
                continue
            for feature in FEATURES:
                with self.subTest(engine, feature=feature):
                    getattr(self, engine)(feature_arguments(engine, feature, self.models))

    def vllm(self, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs

        parsed = AsyncEngineArgs(**arguments)
        config = parsed.create_model_config()
        self.assertEqual(config.model, arguments["model"])

    def sglang(self, arguments: dict[str, Any]) -> None:
        from sglang.srt.server_args import ServerArgs

        parsed = ServerArgs(**arguments)
        for name, value in arguments.items():
            if name != "lora_paths":
                self.assertEqual(getattr(parsed, name), value, name)

    def test_models_are_read_with_their_contents(self) -> None:
        import torch
        import transformers

        for name, kind in (
            ("llama", transformers.AutoModelForCausalLM),
            ("draft", transformers.AutoModelForCausalLM),
            ("moe", transformers.AutoModelForCausalLM),
            ("llava", transformers.AutoModelForImageTextToText),
        ):
            with self.subTest(name):
                model = kind.from_pretrained(self.models / name, dtype=torch.float32)
                tokens = torch.tensor([[1, 10, 20, 30]])
                scores = model(input_ids=tokens).logits[0, -1]
                self.assertGreater(float(scores.std()), 0.01, "answers depend on the weights")
                other = model(input_ids=torch.tensor([[1, 40, 50, 60]])).logits[0, -1]
                self.assertGreater(float((scores - other).abs().max()), 0.01, "and on the prompt")

    def test_a_picture_becomes_tokens(self) -> None:
        import transformers

        processor = transformers.AutoProcessor.from_pretrained(self.models / "llava")
        text = program.in_words(program.prompt(0, 8))
        ready = processor(text=text, images=program.picture(0), return_tensors="pt")
        words = ready["input_ids"][0].tolist()
        self.assertEqual(words.count(processor.tokenizer.convert_tokens_to_ids("<image>")), (224 // 14) ** 2)
        self.assertNotIn(processor.tokenizer.unk_token_id, words)

    def test_adapters_name_layers_of_the_model(self) -> None:
        import transformers
        from safetensors import safe_open

        model = transformers.AutoModelForCausalLM.from_pretrained(self.models / "llama")
        shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
        for adapter in ADAPTERS:
            with safe_open(self.models / "lora" / adapter / "adapter_model.safetensors", "pt") as weights:
                for name in weights.keys():
                    layer, _, half = name.removeprefix("base_model.model.").rpartition(".lora_")
                    rows, columns = shapes[f"{layer}.weight"]
                    wanted = columns if half.startswith("A") else rows
                    self.assertIn(wanted, weights.get_tensor(name).shape, name)


if __name__ == "__main__":
    unittest.main(verbosity=2)
