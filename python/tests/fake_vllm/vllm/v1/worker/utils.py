from __future__ import annotations

import os
from typing import Any

import torch

#: Bytes of a layer, which is a tensor of its own.
LAYER = int(os.environ.get("FAKE_VLLM_LAYER_MIB", "72")) << 20


def allocate_kv_cache(kv_cache_config: int, device: str, layout: Any, kernel_block_sizes: Any = None) -> list[torch.Tensor]:
    """So many bytes."""
    layers = []
    for begin in range(0, kv_cache_config, LAYER):
        size = min(LAYER, kv_cache_config - begin)
        layers.append(torch.empty(size).copy_(bytes(size)))
    return layers
