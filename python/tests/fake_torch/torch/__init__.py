"""A stand-in for torch: the parts of `torch.cuda` that this project uses, on the simulated GPU.

It was written from torch's documentation and observed behaviour, and behaves like torch where it matters here:

- A caching allocator gets segments from `cudaMalloc` and hands out blocks; freed blocks are cached and merged with free
  neighbours. Sizes are rounded as in torch (512 bytes; segments of 2 MiB, 20 MiB, or multiples of 2 MiB).
- Pools: `MemPool`, `use_mem_pool`, and the private pools of graphs. With several entered, the *first* applicable pool is
  used, not the innermost. A pool cannot be entered twice, not even by another thread.
- A segment belongs to the stream that was current when it was allocated, and serves only that stream.
- `memory_snapshot` in torch's form: segments with `address`, `total_size`, `segment_pool_id`, `stream`, `is_expandable`, and blocks
  with `address`, `size`, `state` (`active_allocated`, `active_awaiting_free`, `inactive`).
- With expandable segments, memory does not come from `cudaMalloc`. Settings that do not mention them leave them on or off.

A `Tensor` is just bytes.
"""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from . import _C as _C  # noqa: E402
from . import cuda as cuda  # noqa: E402

__version__ = "2.11.0"


class device:
    def __init__(self, name: str | int | device) -> None:
        if isinstance(name, device):
            self.type, self.index = name.type, name.index
            return
        kind, _, index = str(name).partition(":")
        self.type = kind
        self.index: int | None = int(index) if index else None


class Tensor:
    def __init__(self, size: int, at: Any) -> None:
        index = cuda.current_device() if at is None or device(at).index is None else device(at).index
        self.device_index, self.size = index, size
        self.block = cuda.memory.allocator(index).malloc(size)
        self._end = weakref.finalize(self, self.block.free)
        self._end.atexit = False

    def data_ptr(self) -> int:
        return self.block.address

    def numel(self) -> int:
        return self.size

    def element_size(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return True

    def record_stream(self, stream: Any = None) -> None:
        """When its memory is freed, it now waits for another stream."""
        self.block.used_elsewhere = True

    def copy_(self, contents: bytes) -> Tensor:
        cuda.memory.runtime().write(self.data_ptr(), contents)
        return self

    def tobytes(self) -> bytes:
        return cuda.memory.runtime().read(self.data_ptr(), self.size)


def empty(size: int, device: Any = "cuda") -> Tensor:
    return Tensor(size, device)
