"""Steps of an RL loop in which a trainer and a rollout engine take turns on one GPU.

    vramctl run -- python examples/rl_step.py

Both are small stand-ins made of torch alone; what matters is the order. A framework does the same through its engine's
calls (`release_memory_occupation`, `sleep`) or, as here, through vramctl's:

    train                        trainer and optimizer on the GPU, the engine paused
    resume the engine's weights  both models on the GPU, but no KV cache yet, which keeps the peak low
    sync                         copy the trained weights to the engine
    offload the trainer          its memory is free
    resume the KV cache          the engine has the GPU to itself
    rollout
    pause the engine             discard everything: the next weights come from the trainer, and the cache is stale
"""

import torch

import vramctl

LAYERS, WIDTH = 16, 4096
CACHE_GIB = 4


def gib():
    """GPU memory in use by all processes, in GiB."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


class Trainer:
    """A model with Adam's state: three times the weights."""

    def __init__(self):
        with vramctl.region("trainer"):
            self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)).cuda()
            self.optimizer = torch.optim.Adam(self.layers.parameters(), lr=1e-4)
            self.step(torch.ones(8, WIDTH, device="cuda"))  # Adam allocates its state in the first step

    def step(self, batch):
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        loss = (batch - 0.1).square().mean()
        loss.backward()
        self.optimizer.step()
        # Gradients are new in each step. Give their cached memory back for the engine.
        self.optimizer.zero_grad()
        torch.cuda.empty_cache()
        return loss.item()


class Engine:
    """Weights, a KV cache, and a CUDA graph of one step. The graph holds addresses, which a resume must not change."""

    def __init__(self):
        with vramctl.region("weights"):
            self.layers = [torch.zeros(WIDTH, WIDTH, device="cuda") for _ in range(LAYERS)]
        with vramctl.region("kv_cache", backup="discard"):
            self.cache = torch.zeros(CACHE_GIB << 28, device="cuda")
        self.input = torch.zeros(8, WIDTH, device="cuda")
        self.run()
        self.graph = torch.cuda.CUDAGraph()
        with vramctl.cuda_graph(self.graph):
            self.output = self.run()

    def run(self):
        hidden = self.input
        for layer in self.layers:
            hidden = torch.tanh(hidden @ layer.T)
        self.cache[: hidden.numel()].copy_(hidden.flatten())
        return hidden

    def rollout(self, prompt):
        self.input.copy_(prompt)
        self.graph.replay()
        return self.output.clone()


def main(steps=3):
    torch.manual_seed(0)
    trainer = Trainer()
    vramctl.pause("trainer")
    engine = Engine()
    vramctl.pause(["kv_cache", "weights", "cuda_graph"], backup="discard")
    vramctl.resume("trainer")
    prompt = torch.randn(8, WIDTH, device="cuda")

    for step in range(steps):
        loss = trainer.step(prompt)
        trained = gib()

        # The graph's memory was discarded, because a replay rewrites all of it.
        resumed = vramctl.resume(["weights", "cuda_graph"], timeout=10.0)
        with torch.no_grad():
            for mine, theirs in zip(engine.layers, trainer.layers):
                mine.copy_(theirs.weight)
            wanted = prompt
            for layer in trainer.layers:
                wanted = torch.tanh(layer(wanted))
        peak = gib()

        offloaded = vramctl.pause("trainer")
        vramctl.resume("kv_cache", timeout=10.0)
        answer = engine.rollout(prompt)
        rolled = gib()
        # The engine computes what the trainer does.
        torch.testing.assert_close(answer, wanted, rtol=1e-3, atol=1e-3)

        vramctl.pause(["kv_cache", "weights", "cuda_graph"], backup="discard")
        vramctl.resume("trainer", timeout=10.0)
        print(
            f"step {step}: loss {loss:.6f}; in use {trained:.1f} GiB training, {peak:.1f} in the sync, {rolled:.1f} in the rollout; "
            f"weights resumed in {resumed.ms:.0f} ms, trainer offloaded in {offloaded.ms:.0f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
