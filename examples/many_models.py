"""Engines that take turns on one GPU: which of them has it, and how one makes room for another.

`Gpu.give_to(model)` brings a suspended engine back and suspends the one that was active. What is in the way of the first token comes
first: the old engine pauses (its weights are in host memory already, and its KV cache is dropped or, if requests are in flight, kept),
then the new one comes back. Only then does the old one's CUDA context leave. `scripts/gpu-engines --part many` measures it.

Start the engines with the settings below: `env VRAMCTL_RETAIN=… vramctl run --name NAME -- …`.
"""

import asyncio
import contextlib

import vramctl

#: Kept in host memory for good: weights do not change. Dropped when an engine leaves: its KV cache.
SETTINGS = {"VRAMCTL_RETAIN": "weights", "VRAMCTL_BACKUP": "kv_cache=discard", "VLLM_SERVER_DEV_MODE": "1"}


class Model:
    """An engine, and the requests to it."""

    def __init__(self, name, url=None):
        self.name, self.url = name, url
        self.job = vramctl.Job(name)
        self.in_flight = 0
        #: Requests that wait for its turn.
        self.waiting = []

    async def pause(self):
        """Gives nearly all of its GPU memory back, at once: nothing is copied, unless requests are in flight."""
        if self.in_flight == 0:
            # An engine that is not idle after all, or cannot reset its prefix cache, keeps its KV cache.
            with contextlib.suppress(vramctl.errors.Error):
                await self.job.pause_async(engine=self.url)
                return
        await self.job.pause_async(backup="host")


class Gpu:
    """Gives the GPU to one model at a time."""

    def __init__(self, say=print):
        self.say = say
        #: Whether the old model's context leaves while the new one comes back, not after it.
        self.beside = False
        self.active = None
        #: What takes the rest of the last one off the GPU.
        self.leaving = None

    async def give_to(self, model):
        """Returns when `model` can answer. If it fails, nobody is active, and whoever asks next gets the GPU."""
        if model is self.active:
            return
        await self.left()
        old = self.active
        if old is not None:
            try:
                await old.pause()
            except vramctl.errors.NoProcess:
                old = None  # it has ended, and so has nothing here
        self.active = None
        # `old` has only its CUDA context left, which need not be gone before the first token.
        coming = asyncio.ensure_future(model.job.resume_async(timeout=60))
        if old is not None:
            self.leaving = asyncio.ensure_future(self._leave(old, coming))
        await coming
        self.active = model

    async def _leave(self, old, coming):
        if not self.beside:
            await asyncio.wait([coming])
        try:
            await old.job.suspend_async()
        except vramctl.errors.Error as error:
            # It is paused, and costs its context.
            self.say(f"{old.name} stays on the GPU with its CUDA context: {error}")

    async def left(self):
        """Waits until the model that was active before is off the GPU."""
        if self.leaving is not None:
            await self.leaving
