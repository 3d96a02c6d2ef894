"""Makes small models with seeded random weights, which an engine loads like any checkpoint.

    models.py NAME DIR [--tiny]      with --tiny, of a few MB, for tests without a GPU

An engine's own dummy weights are so small that every prompt gets the same log-probabilities, so they cannot show a lost byte.
"""

import argparse
import json
import pathlib
import shutil

import torch
import transformers
from features import ADAPTERS, SPECIAL, VOCABULARY
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

#: The models, and those that each needs besides.
NEEDS = {"llama": [], "draft": [], "lora": ["llama"], "moe": [], "llava": []}


def size(tiny):
    """The shape that all text models have: about two billion parameters."""
    wide = {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    if not tiny:
        wide = {"hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 4}
    special = {"bos_token_id": SPECIAL["<s>"], "eos_token_id": SPECIAL["</s>"], "pad_token_id": SPECIAL["<pad>"]}
    return {**wide, **special, "vocab_size": VOCABULARY, "max_position_embeddings": 8192, "tie_word_embeddings": False}


def llama(tiny, **more):
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**{**size(tiny), **more})


def draft(tiny):
    """What a speculative decoding drafts with. Random weights agree on little, so most drafts are rejected."""
    return llama(tiny, num_hidden_layers=2)


def moe(tiny):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128 if tiny else 1024}
    heads = {"head_dim": size(tiny)["hidden_size"] // size(tiny)["num_attention_heads"]}
    return transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(**size(tiny), **experts, **heads)


def llava(tiny):
    """A model that sees images."""
    eye = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 2}
    if not tiny:
        eye = {"hidden_size": 1024, "num_hidden_layers": 12, "intermediate_size": 4096, "num_attention_heads": 16}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**eye, image_size=224, patch_size=14, projection_dim=eye["hidden_size"]),
        text_config=transformers.LlamaConfig(**size(tiny)),
        image_token_index=SPECIAL["<image>"],
    )
    return transformers.LlavaForConditionalGeneration, config


def write_tokenizer(place):
    """A token for each of the words t0, t1, …"""
    words = {number: word for word, number in SPECIAL.items()}
    words = {words.get(number, f"t{number}"): number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        additional_special_tokens=["<image>"],
    )
    fast.save_pretrained(place)
    return fast


def write_processor(place, tokenizer):
    transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(size={"shortest_edge": 224}, crop_size={"height": 224, "width": 224}),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    ).save_pretrained(place)


def write_adapters(place, base):
    """LoRA adapters of the queries and values, in the format of PEFT."""
    config = json.loads((base / "config.json").read_text())
    wide, dim = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
    rank, out = 16, {"q_proj": wide, "v_proj": config["num_key_value_heads"] * dim}
    for adapter in ADAPTERS:
        weights = {}
        for layer in range(config["num_hidden_layers"]):
            for name, rows in out.items():
                at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                weights[f"{at}.lora_A.weight"] = torch.randn(rank, wide, dtype=torch.bfloat16) * 0.05
                weights[f"{at}.lora_B.weight"] = torch.randn(rows, rank, dtype=torch.bfloat16) * 0.05
        folder = place / adapter
        folder.mkdir(parents=True)
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.0, "bias": "none"}
        about.update(base_model_name_or_path=str(base), target_modules=sorted(out), inference_mode=True)
        (folder / "adapter_config.json").write_text(json.dumps(about))


def make(name, place, tiny=False):
    """Makes a model in a folder of this folder, and what it needs; one that exists is left as it is. Returns its folder."""
    for other in NEEDS[name]:
        make(other, place, tiny)
    folder = pathlib.Path(place) / name
    if folder.exists():
        return folder
    half = folder.with_suffix(".half")
    # Of an attempt that failed.
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    torch.manual_seed(7)
    if name == "lora":
        write_adapters(half, folder.with_name("llama"))
    else:
        kind, config = globals()[name](tiny)
        with torch.device("cuda" if torch.cuda.is_available() and not tiny else "cpu"):
            kind(config).to(torch.bfloat16).save_pretrained(half, max_shard_size="2GB")
        tokenizer = write_tokenizer(half)
        if name == "llava":
            write_processor(half, tokenizer)
    half.rename(folder)
    return folder


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=NEEDS)
    parser.add_argument("place")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    print(make(options.name, options.place, options.tiny))


if __name__ == "__main__":
    main()
