"""An RL loop in which a trainer and a rollout engine take turns on one GPU, phase by phase.

    vramctl run -- python examples/rl_step.py
    VRAMCTL_REPORT_DIR=reports vramctl run -- python examples/rl_step.py --oom backward

Both are small stand-ins written in torch; what matters is the order. A framework does the same through its engine's API
(`release_memory_occupation`, `sleep`) or, as here, through vramctl's:

    log-probabilities            of the last answers, by the trainer; the engine is paused
    train                        forward, backward, optimizer
    resume the engine's weights  both models on the GPU, but no KV cache yet: this keeps the peak lowest
    sync                         copy the trained weights into the engine's, bucket by bucket
    offload the trainer          its memory is free
    resume the KV cache          the engine has the GPU to itself
    rollout
    pause the engine             keep nothing: its next weights come from the trainer, and its cache is stale

`--oom PHASE` makes a phase run out of memory as it happens in practice, whatever the GPU's size: docs/out-of-memory.md shows what is
reported then.
"""

import argparse

import torch

import vramctl

LAYERS, WIDTH, VOCABULARY = 16, 4096, 65536
CACHE_BYTES = 4 << 30
BUCKET_BYTES = 256 << 20
TOKENS = 1024
#: The phases for `--oom`, and what goes wrong in each.
PHASES = {
    "rollout": "a KV cache sized for the whole GPU, and a trainer that was not offloaded",
    "logprobs": "log-probabilities over the whole vocabulary in fp32 at once",
    "forward": "activations of too many tokens, all kept for the backward pass",
    "backward": "logits whose gradients no longer fit beside them",
    "optimizer": "Adam's state, which the first step allocates",
    "sync": "a bucket for the weights that is larger than what is free",
}


def free_bytes():
    """GPU memory that torch could still allocate."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def gib():
    """GPU memory in use by all processes, in GiB."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


class Trainer:
    """A model with Adam's state: three times the weights."""

    def __init__(self, oom):
        with vramctl.region("trainer"):
            self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)).cuda()
            self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False).cuda()
            parameters = [*self.layers.parameters(), *self.head.parameters()]
            self.table = None
            if oom == "optimizer":
                # Weights and gradients fit, weights, gradients and state do not.
                rest = int(0.3 * free_bytes()) - sum(each.nbytes for each in parameters)
                self.table = torch.nn.Parameter(torch.zeros(rest // 4, device="cuda"))
                parameters.append(self.table)
            self.optimizer = torch.optim.Adam(parameters, lr=1e-4)
            # Adam allocates its state in the first step.
            self.train(torch.ones(8, WIDTH, device="cuda"), torch.zeros(8, dtype=torch.long, device="cuda"))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden

    def log_probabilities(self, hidden, answers):
        """Log-probabilities of the chosen tokens. Needs the logits of the whole vocabulary twice."""
        logits = torch.log_softmax(self.head(hidden).float(), dim=-1)
        return logits.gather(-1, answers[:, None])

    def train(self, prompts, answers):
        loss = -self.log_probabilities(self.forward(prompts), answers).mean()
        if self.table is not None:
            loss = loss + self.table.mean()
        loss.backward()
        self.optimizer.step()
        # Gradients are recreated in each step; return their memory, so that the engine can use it.
        self.optimizer.zero_grad()
        torch.cuda.empty_cache()
        return loss.item()


class Engine:
    """Weights, a KV cache, and a CUDA graph of one step. The graph captures addresses, so they must not change."""

    def __init__(self, cache_bytes):
        with vramctl.region("weights"):
            self.layers = [torch.zeros(WIDTH, WIDTH, device="cuda") for _ in range(LAYERS)]
        with vramctl.region("kv_cache", backup="discard"):
            self.cache = torch.zeros(cache_bytes // 4, device="cuda")
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


def sync(trainer, engine, bucket_bytes):
    """Copies the trained weights, through a bucket: engines in other processes get them that way."""
    bucket = torch.empty(bucket_bytes // 4, device="cuda")
    for mine, theirs in zip(engine.layers, trainer.layers):
        for place in range(0, mine.numel(), bucket.numel()):
            piece = theirs.weight.detach().view(-1)[place : place + bucket.numel()]
            bucket[: piece.numel()].copy_(piece)
            mine.view(-1)[place : place + piece.numel()].copy_(bucket[: piece.numel()])


def tokens_for(phase, oom):
    """The number of tokens in a batch: too many, if that is how the phase is to run out of memory."""
    if phase != oom:
        return TOKENS
    activations, logits = LAYERS * WIDTH * 4, VOCABULARY * 4
    needed = {
        "logprobs": 1.6 * logits,  # the second tensor of this size no longer fits
        "forward": 0.7 * activations,
        # The forward pass keeps the activations and one tensor of logits, and has two for a moment. The backward pass has three.
        "backward": activations + 2.5 * logits,
    }
    return int(free_bytes() / needed[phase])


def main(steps=3, oom=None):
    torch.manual_seed(0)
    trainer = Trainer(oom)
    vramctl.pause("trainer")
    # The engine takes all free memory, as with a memory fraction of 0.9 or more.
    engine = Engine(free_bytes() - (5 << 30) if oom == "rollout" else CACHE_BYTES)
    vramctl.pause(["kv_cache", "weights", "cuda_graph"], backup="discard")
    vramctl.resume("trainer")
    prompt = torch.randn(8, WIDTH, device="cuda")

    for step in range(steps):
        with torch.no_grad():
            hidden = torch.randn(tokens_for("logprobs", oom), WIDTH, device="cuda")
            answers = torch.zeros(len(hidden), dtype=torch.long, device="cuda")
            trainer.log_probabilities(hidden, answers)
            del hidden, answers

        batch = torch.randn(tokens_for("backward" if oom == "backward" else "forward", oom), WIDTH, device="cuda")
        loss = trainer.train(batch, torch.zeros(len(batch), dtype=torch.long, device="cuda"))
        del batch
        trained = gib()

        # The graph's memory was discarded, too: a replay rewrites all of it.
        resumed = vramctl.resume(["weights", "cuda_graph"], timeout=10.0)
        sync(trainer, engine, 2 * free_bytes() if oom == "sync" else BUCKET_BYTES)
        with torch.no_grad():
            wanted = trainer.forward(prompt)
        peak = gib()
        torch.cuda.empty_cache()

        offloaded = None if oom == "rollout" else vramctl.pause("trainer")
        vramctl.resume("kv_cache", timeout=0.0 if oom == "rollout" else 10.0)
        answer = engine.rollout(prompt)
        rolled = gib()
        # After every switch, the engine must compute the same as the trainer.
        torch.testing.assert_close(answer, wanted, rtol=1e-3, atol=1e-3)

        vramctl.pause(["kv_cache", "weights", "cuda_graph"], backup="discard")
        vramctl.resume("trainer", timeout=10.0)
        print(
            f"step {step}: loss {loss:.6f}; in use {trained:.1f} GiB training, {peak:.1f} in the sync, {rolled:.1f} in the rollout; "
            f"weights resumed in {resumed.ms:.0f} ms, trainer offloaded in {offloaded.ms if offloaded else 0:.0f} ms",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="An RL loop on one GPU.")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--oom", choices=PHASES, help="make this phase run out of memory: " + "; ".join(f"{k}: {v}" for k, v in PHASES.items())
    )
    options = parser.parse_args()
    main(options.steps, options.oom)
