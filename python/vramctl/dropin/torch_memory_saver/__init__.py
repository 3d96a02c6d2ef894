"""The interface of torch_memory_saver 0.0.10, on top of vramctl.

Programs that were written for torch_memory_saver find this package in its place where vramctl's directory comes first on
``PYTHONPATH``; ``vramctl run`` sees to that::

    from torch_memory_saver import torch_memory_saver

    with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
        model = load_model()
    torch_memory_saver.pause("weights")
    torch_memory_saver.resume("weights")

`docs/torch_memory_saver.md` in vramctl's sources says what is the same and what differs.
"""

from .entrypoint import TorchMemorySaver
from .hooks.mode_preload import configure_subprocess

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]

#: The one that everybody uses: its settings are the process's.
torch_memory_saver = TorchMemorySaver()
