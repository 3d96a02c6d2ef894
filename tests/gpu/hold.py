"""A PyTorch training loop (data from worker processes; eager, and compiled) is paused from outside at random moments: its losses are
those of an undisturbed run, bit for bit.

usage: hold.py VRAMCTL [TIMES]      prints a line `ok: …` or `FAILED: …` for each check
       hold.py --program            the training loop, which hold.py starts under `vramctl run`
"""

import hashlib
import json
import random
import statistics
import subprocess
import sys
import time

from common import ask, check, started, tell, used_mib_here

STEPS = 1000


def program():
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True)

    class Data(torch.utils.data.Dataset):
        """Made by worker processes, from the number of the step alone."""

        def __len__(self):
            return STEPS

        def __getitem__(self, step):
            return torch.randn(512, 2048, generator=torch.Generator().manual_seed(step % 16))

    def losses(compile):
        torch.manual_seed(7)
        model = torch.nn.Sequential(
            torch.nn.Linear(2048, 4096), torch.nn.GELU(), torch.nn.LayerNorm(4096), torch.nn.Linear(4096, 2048)
        ).cuda()
        forward = torch.compile(model, dynamic=False) if compile else model
        adam = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
        loader = torch.utils.data.DataLoader(Data(), batch_size=None, num_workers=4, pin_memory=True)
        seen = []
        for step, host in enumerate(loader):
            data = host.to("cuda", non_blocking=True)
            loss = (forward(data) - data.flip(0)).square().mean()
            adam.zero_grad(set_to_none=step % 2 == 0)
            loss.backward()
            adam.step()
            # Half of the steps are only queued, and half wait for the device.
            seen.append(loss.item() if step % 2 else loss.detach())
        return [float(loss) for loss in seen]

    keep = torch.empty(8 << 30, dtype=torch.uint8, device="cuda").fill_(7)
    graph_input = torch.ones(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph_output = (graph_input * 3).cumsum(0)
    losses(compile=True)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        began = time.monotonic()
        seen = losses(compile="compile" in line)
        graph.replay()
        same = bool((keep == 7).all()) and float(graph_output[-1]) == float(3 << 20)
        digest = hashlib.sha256(json.dumps(seen).encode()).hexdigest()
        print(json.dumps({"digest": digest, "last": seen[-1], "same": same, "s": time.monotonic() - began}), flush=True)


def rounds(vramctl, child, how, times):
    """A run of the loop that is paused at random moments. Returns whether the program can continue."""
    undisturbed, again = ask(child, how), ask(child, how)
    check(
        f"{how}: two undisturbed runs are the same", undisturbed["digest"] == again["digest"], f"{undisturbed['s']:.1f} s each"
    )

    chance, paused_ms, resumed_ms, least, refused = random.Random(how), [], [], [], []
    tell(child, how)
    for number in range(times):
        time.sleep(chance.uniform(0, 0.9 * undisturbed["s"] / times))
        answer = subprocess.run([vramctl, "pause", "--name", "hold", "--json"], capture_output=True, text=True, timeout=60)
        if answer.returncode:
            refused.append(answer.stdout + answer.stderr)
            continue
        paused_ms.append(json.loads(answer.stdout)["processes"][0]["report"]["ms"])
        least.append(used_mib_here())
        answer = subprocess.run([vramctl, "resume", "--name", "hold", "--json"], capture_output=True, text=True, timeout=60)
        if answer.returncode:
            check(f"{how}: resume {number}", False, answer.stdout + answer.stderr)
            return False
        resumed_ms.append(json.loads(answer.stdout)["processes"][0]["report"]["ms"])
    disturbed = json.loads(child.stdout.readline())
    check(f"{how}: {times} pauses at random moments", not refused and bool(paused_ms), f"{len(refused)} refused {refused[:1]}")
    check(
        f"{how}: every loss is the same, bit for bit",
        disturbed["digest"] == undisturbed["digest"],
        f"the last is {disturbed['last']}",
    )
    check(f"{how}: memory that the loop does not use, and a captured graph", disturbed["same"])
    check(
        f"{how}: the memory was free meanwhile",
        max(least, default=99999) < 1331,
        f"at most {max(least, default=0)} MiB in use; pause {statistics.median(paused_ms):.0f} ms, "
        f"resume {statistics.median(resumed_ms):.0f} ms (medians of {len(paused_ms)})",
    )
    return True


def main():
    vramctl, times = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20
    with started([vramctl, "run", "--name", "hold", "--", sys.executable, __file__, "--program"]) as child:
        for how, share in (("eager", times // 2), ("compile", times - times // 2)):
            if not rounds(vramctl, child, how, share):
                return
        child.stdin.close()
        check("the program ends well", child.wait(30) == 0)


if __name__ == "__main__":
    program() if sys.argv[1:] == ["--program"] else main()
