from __future__ import annotations

from typing import Any

import torch


def allocate_kv_cache(kv_cache_config: Any, device: str, layout: Any, kernel_block_sizes: Any = None) -> torch.Tensor:
    return torch.empty(kv_cache_config)
