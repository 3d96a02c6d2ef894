"""A stand-in for vLLM 0.33: the parts that this project hooks, on the simulated GPU.

The engine's loop, its queue and its prefix cache behave as in vLLM (`v1/engine/core.py`, `v1/core/`): one thread takes requests from the queue
and makes all calls of the GPU; blocks of finished requests stay in the prefix cache until it is reset, which fails while a block is in use. What
is in a block counts: a request that hits the cache answers from it.
"""

__version__ = "0.33.0"
