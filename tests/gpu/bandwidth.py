"""On two GPUs: NCCL's all-reduces of 8 bytes to 1 GiB, with and without the library in turns: each size takes at most 1% longer. Captured in a graph.

usage: bandwidth.py VRAMCTL [TURNS]   TURNS runs of each (4)
       bandwidth.py --rank N PORT     a rank, which bandwidth.py starts
"""

import json
import os
import statistics
import subprocess
import sys

from common import check, free_port, used_mib

SIZES = [8 << (3 * step) for step in range(10)]
#: Bytes that each measurement moves, and how often at least and at most.
MOVED, LEAST, MOST = 4 << 30, 20, 2000
MORE = 1.01
#: All-reduces in a captured graph: launched one by one from Python, small ones take 24 to 58 us, whatever NCCL does.
CAPTURED = 20
#: What two runs of a small all-reduce differ by, in microseconds.
NOISE_US = 0.3


def rank(number, port):
    import torch
    import torch.distributed as distributed

    torch.cuda.set_device(number)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    distributed.init_process_group("nccl", rank=number, world_size=2, device_id=torch.device("cuda", number))
    took = {}
    for size in SIZES:
        data = torch.zeros(size, dtype=torch.uint8, device="cuda").view(torch.float32)
        times = max(LEAST, min(MOST, MOVED // size))
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(LEAST):
            distributed.all_reduce(data)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CAPTURED):
                distributed.all_reduce(data)
        graph.replay()
        torch.cuda.synchronize()
        replays = -(-times // CAPTURED)
        began.record()
        for _ in range(replays):
            graph.replay()
        ended.record()
        torch.cuda.synchronize()
        took[size] = 1e3 * began.elapsed_time(ended) / (replays * CAPTURED)
        del graph, data
    print(json.dumps(took), flush=True)
    os._exit(0)


def measure(before):
    """Microseconds for each size; the slower rank's."""
    port = free_port()
    command = [*before, sys.executable, __file__, "--rank"]
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0"}
    ranks = [subprocess.Popen([*command, str(n), port], stdout=subprocess.PIPE, text=True, env=environment) for n in (0, 1)]
    both = [json.loads(child.communicate(timeout=120)[0].strip().splitlines()[-1]) for child in ranks]
    return {size: max(took[str(size)] for took in both) for size in SIZES}


def main():
    vramctl, turns = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 4
    if not check("there are two GPUs", len(used_mib()) > 1):
        return
    managed = [vramctl, "run", "--name", "bandwidth", "--"]
    plain, under = [], []
    for _ in range(turns):
        plain.append(measure([]))
        under.append(measure(managed))
    print("| all-reduce of | without | with | ratio of medians | GB/s with |", "| ---: | ---: | ---: | ---: | ---: |", sep="\n")
    for size in SIZES:
        without, with_it = (statistics.median(run[size] for run in runs) for runs in (plain, under))
        print(
            f"| {size} B | {without:.1f} us | {with_it:.1f} us | {with_it / without:.3f} | {size / with_it / 1e3:.1f} |",
            flush=True,
        )
        allowed = max(MORE * without, without + NOISE_US)
        spread = f"{min(run[size] for run in plain):.1f} to {max(run[size] for run in plain):.1f} us without"
        check(f"an all-reduce of {size} B is as fast", with_it <= allowed, f"{with_it:.1f} us against {without:.1f}; {spread}")


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        rank(int(sys.argv[2]), sys.argv[3])
    else:
        main()
