"""The interface of torch_memory_saver 0.0.10, on top of vramctl.

``vramctl run`` puts vramctl's directory first on ``PYTHONPATH``, so programs written for torch_memory_saver import this
package instead::

    from torch_memory_saver import torch_memory_saver

    with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
        model = load_model()
    torch_memory_saver.pause("weights")
    torch_memory_saver.resume("weights")

`docs/torch_memory_saver.md` in vramctl's sources lists the differences.
"""

from .entrypoint import TorchMemorySaver
from .hooks.mode_preload import configure_subprocess

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]

#: The singleton that programs use: its settings are process-wide.
torch_memory_saver = TorchMemorySaver()
