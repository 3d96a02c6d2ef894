"""The features of engines that change what is in GPU memory, or who has it: what an engine is started with, and the model that it needs."""

from typing import NamedTuple


class Feature(NamedTuple):
    """A feature. `vllm`, `sglang`: more arguments of `vllm.LLM` and `sglang.Engine`, made of the folder with the models."""

    title: str
    model: str
    vllm: object
    sglang: object
    #: Models besides.
    needs: tuple = ()
    gpus: int = 1
    #: Requests at once. One per data-parallel worker: which requests share a batch would be random, and batches change rounding.
    requests: int = 8
    #: vLLM's settings.
    vllm_env: dict[str, str] = {}


#: The tokens of the models that models.py makes, and those with a meaning of their own.
VOCABULARY = 32768
SPECIAL = {"<s>": 1, "</s>": 2, "<unk>": 3, "<pad>": 4, "<image>": 5}

ADAPTERS = ("one", "two")


def adapters(models):
    return {name: str(models / "lora" / name) for name in ADAPTERS}


FEATURES = {
    "lora": Feature(
        "LoRA adapters",
        "llama",
        lambda models: {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16},
        lambda models: {"enable_lora": True, "lora_paths": [f"{name}={path}" for name, path in adapters(models).items()]},
        needs=("lora",),
        # Otherwise, the adapters' kernel adds up the parts of a sum in the order in which they end (`split_k` of lora_shrink): two undisturbed runs
        # differ.
        vllm_env={"VLLM_BATCH_INVARIANT": "1"},
    ),
    "speculative": Feature(
        "speculative decoding with a draft model",
        "llama",
        lambda models: {
            "speculative_config": {"method": "draft_model", "model": str(models / "draft"), "num_speculative_tokens": 3},
        },
        lambda models: {
            "speculative_algorithm": "STANDALONE",
            "speculative_draft_model_path": str(models / "draft"),
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,
        },
        needs=("draft",),
    ),
    "fp8": Feature(
        "weights and KV cache in fp8",
        "llama",
        lambda models: {"quantization": "fp8", "kv_cache_dtype": "fp8"},
        lambda models: {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"},
    ),
    "data-parallel": Feature(
        "two data-parallel workers",
        "llama",
        lambda models: {"data_parallel_size": 2},
        lambda models: {"dp_size": 2},
        gpus=2,
        requests=2,
    ),
    "moe": Feature("a mixture of experts", "moe", lambda models: {}, lambda models: {}),
    "images": Feature(
        "images in requests",
        "llava",
        lambda models: {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}},
        lambda models: {"skip_tokenizer_init": False, "enable_multimodal": True},
    ),
    "hierarchical-cache": Feature(
        "a KV cache that continues in host memory",
        "llama",
        lambda models: {"kv_offloading_size": 4.0, "kv_offloading_backend": "native"},
        lambda models: {"enable_hierarchical_cache": True, "hicache_size": 4},
    ),
    "chunked-prefill": Feature(
        "prefills in chunks, of 64 tokens",
        "llama",
        lambda models: {"enable_chunked_prefill": True, "max_num_batched_tokens": 64},
        lambda models: {"chunked_prefill_size": 64},
    ),
}
