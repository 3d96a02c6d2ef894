"""On two GPUs: peer copies; NCCL on managed tensors, eager and in captured graphs, before and after pauses; and a distributed training
loop that is paused as a job at random moments, in the middle of its collectives.

usage: two.py VRAMCTL               prints a line `ok: …` or `FAILED: …` for each check, and a table
       two.py --peers, two.py --rank N PORT, two.py --train N PORT,
       two.py --train-sharded N PORT: the programs, which two.py starts under `vramctl run`
"""

import hashlib
import json
import os
import random
import statistics
import sys
import time

from common import Job, answer, check, free_port, run, used_mib

COUNT = 64 << 20
STEPS = 600


def peers():
    import torch

    there, here = torch.empty(COUNT, device="cuda:1"), torch.arange(COUNT, device="cuda:0", dtype=torch.float32)
    answer(ready=torch.cuda.can_device_access_peer(0, 1))
    for number, _ in enumerate(sys.stdin):
        here.add_(1)
        there.copy_(here)
        back = there.to("cuda:0")
        torch.cuda.synchronize()
        answer(same=bool(torch.equal(back, here)) and float(here[0]) == number + 1)


def rank(number, port):
    import torch
    import torch.distributed as distributed

    torch.cuda.set_device(number)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    distributed.init_process_group("nccl", rank=number, world_size=2, device_id=torch.device("cuda", number))
    data = torch.zeros(COUNT, device="cuda")
    registered = None

    # Warm up outside the capture.
    distributed.all_reduce(data)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    source = torch.zeros(COUNT, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = source * 1.0
        distributed.all_reduce(output)
        output = output + 1
    answer(ready=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "step" in request:
            mine, sum_of_both = float(request["step"] + number), float(2 * request["step"] + 1)
            data.fill_(mine)
            distributed.all_reduce(data)
            source.fill_(mine)
            graph.replay()
            torch.cuda.synchronize()
            answer(eager=bool((data == sum_of_both).all()), graph=bool((output == sum_of_both + 1).all()))
        else:
            # Registered with NCCL by the program itself.
            backend = distributed.group.WORLD._get_backend(torch.device("cuda", number))
            pool = torch.cuda.MemPool(backend.mem_allocator)
            with torch.cuda.use_mem_pool(pool):
                registered = torch.ones(8 << 20, device="cuda")
            backend.register_mem_pool(pool)
            distributed.all_reduce(registered)
            torch.cuda.synchronize()
            answer(registered=float(registered[0]) == 2.0)
    os._exit(0)


class Trainer:
    """One of two ranks of a training job over NCCL, and 4 GiB to keep."""

    def __init__(self, number, port, is_sharded=False, device=None):
        import torch
        import torch.distributed as distributed
        import torch.distributed.fsdp

        self.torch, self.number, self.is_sharded = torch, number, is_sharded
        self.device = number if device is None else device
        torch.cuda.set_device(self.device)
        torch.use_deterministic_algorithms(True)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        distributed.init_process_group("nccl", rank=number, world_size=2, device_id=torch.device("cuda", self.device))
        self.keep = torch.full((4 << 30,), number + 1, dtype=torch.uint8, device="cuda")

    def losses(self, steps):
        torch = self.torch
        torch.manual_seed(7)
        layers = torch.nn.Sequential(torch.nn.Linear(2048, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 2048)).cuda()
        if self.is_sharded:
            model = torch.distributed.fsdp.FullyShardedDataParallel(layers, device_id=self.device, use_orig_params=True)
        else:
            model = torch.nn.parallel.DistributedDataParallel(layers, device_ids=[self.device])
        adam = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
        data = torch.randn(16, 512, 2048, device="cuda", generator=torch.Generator("cuda").manual_seed(self.number))
        seen = []
        for step in range(steps):
            loss = (model(data[step % 16]) - data[step % 16].flip(0)).square().mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
            seen.append(loss.item() if step % 4 == 3 else loss.detach())
        return [float(loss) for loss in seen]

    def work(self, steps=STEPS):
        """Trains from the beginning."""
        began = time.monotonic()
        digest = hashlib.sha256(json.dumps(self.losses(steps)).encode()).hexdigest()
        return {"digest": digest, "same": bool((self.keep == self.number + 1).all()), "s": time.monotonic() - began}


def train(number, port, is_sharded=False):
    trainer = Trainer(number, port, is_sharded)
    trainer.losses(STEPS)
    answer(ready=True)
    for _ in sys.stdin:
        answer(**trainer.work())
    os._exit(0)


def pause_and_resume(job):
    code, text = job.command("pause", "--name", job.name)
    check(f"{job.name}: paused", code == 0, f"in use {used_mib()} MiB; {text}")
    code, text = job.command("resume", "--name", job.name)
    check(f"{job.name}: resumed", code == 0, text)


def peer_copies(job):
    check("the GPUs can access each other", job.all("ready", job.hear()))
    for number in range(4):
        check(f"peers: copies in both directions, {number} pauses before", job.all("same", job.ask()))
        if number < 3:
            pause_and_resume(job)


def collectives(job):
    check("nccl: both ranks have started", job.all("ready", job.hear()))
    print(job.command("status")[1], flush=True)
    for number in range(4):
        seen = job.ask(step=number)
        check(f"nccl: eager, {number} pauses before", job.all("eager", seen), seen)
        check(f"nccl: in a graph, {number} pauses before", job.all("graph", seen), seen)
        if number < 3:
            pause_and_resume(job)
    check("nccl: memory registered by the program works", job.all("registered", job.ask(register=True)))
    code, text = job.command("pause", "--name", "nccl")
    print(f"note: after a registration the pause {'refuses' if code else 'succeeds'}: {text}", flush=True)
    if code == 0:
        print(job.command("resume", "--name", "nccl"), flush=True)


def trainings(job):
    ready, undisturbed = job.all("ready", job.hear()), job.ask()
    chance, failed, jobs, least = random.Random(11), [], [], []
    while ready and len(jobs) < 10 and not failed:
        job.tell()
        for _ in range(3):
            time.sleep(chance.uniform(0, 0.25 * undisturbed[0]["s"]))
            code, text, _ = run(job.vramctl, "pause", "--name", "training", "--json")
            if code:
                failed.append(text)
                break
            jobs += json.loads(text)["jobs"]
            least.append(max(used_mib()))
            code, text = job.command("resume", "--name", "training")
            if code:
                failed.append(text)
        seen = job.hear()
        if [(one or {}).get("digest") for one in seen] != [one["digest"] for one in undisturbed] or not job.all("same", seen):
            failed.append(f"{seen} instead of {undisturbed}")
    check(f"training: paused {len(jobs)} times as a job, every loss the same on both ranks", jobs and not failed, "; ".join(failed)[:1500])
    if jobs:
        check("training: the memory was free meanwhile", max(least) < 4096, f"at most {max(least)} MiB in use")
        tried, ms = [job["attempts"] for job in jobs], [job["ms"] for job in jobs]
        print("| paused as a job | pauses | in 1 / 2 / more attempts | from the request to memory freed | at most |")
        print("| --- | ---: | ---: | ---: | ---: |")
        print(
            f"| DistributedDataParallel over NCCL, 2 ranks | {len(jobs)} | "
            f"{tried.count(1)} / {tried.count(2)} / {sum(attempts > 2 for attempts in tried)} | "
            f"{statistics.median(ms):.0f} ms | {max(ms):.0f} ms |",
            flush=True,
        )


def main():
    ranks = lambda option: ((option, number, port) for port in [free_port()] for number in (0, 1))
    for name, options, work in (("peers", [("--peers",)], peer_copies), ("nccl", ranks("--rank"), collectives), ("training", ranks("--train"), trainings)):
        job = Job(sys.argv[1], name, __file__, *options)
        try:
            work(job)
        finally:
            job.end()


if __name__ == "__main__":
    if sys.argv[1] == "--peers":
        peers()
    elif sys.argv[1] in ("--train", "--train-sharded"):
        train(int(sys.argv[2]), int(sys.argv[3]), sys.argv[1] == "--train-sharded")
    elif sys.argv[1] == "--rank":
        rank(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
