"""Two GPUs: peer copies, and NCCL on managed tensors, eager and in captured graphs, before and after pauses.

usage: two.py VRAMCTL               prints a line `ok: …` or `FAILED: …` for each check
       two.py --peers, two.py --rank N PORT: the programs, which two.py starts under `vramctl run`
"""

import json
import os
import socket
import subprocess
import sys

COUNT = 64 << 20


def answer(**fields):
    print(json.dumps(fields), flush=True)


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


def main():
    vramctl = sys.argv[1]

    def check(what, holds, detail=""):
        print(f"{'ok' if holds else 'FAILED'}: {what}{detail and f': {detail}'}", flush=True)

    def start(name, *arguments):
        command = [vramctl, "run", "--name", name, "--", sys.executable, __file__, *arguments]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(child, **request):
        child.stdin.write(json.dumps(request) + "\n")
        child.stdin.flush()

    def hear(child):
        return json.loads(child.stdout.readline() or '{"ended": true}')

    def used():
        smi = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return subprocess.run(smi, capture_output=True, text=True, check=True).stdout.split()

    def command(*arguments):
        done = subprocess.run([vramctl, *arguments], capture_output=True, text=True, timeout=120)
        return done.returncode == 0, " | ".join((done.stdout + done.stderr).strip().splitlines()[-4:])

    def pause_and_resume(name):
        paused, text = command("pause", "--name", name)
        check(f"{name}: paused", paused, f"in use {used()} MiB; {text}")
        resumed, text = command("resume", "--name", name)
        check(f"{name}: resumed", resumed, text)

    child = start("peers", "--peers")
    try:
        check("the GPUs can access each other", hear(child)["ready"])
        for number in range(4):
            tell(child)
            check(f"peers: copies in both directions, {number} pauses before", hear(child).get("same", False))
            if number < 3:
                pause_and_resume("peers")
    finally:
        child.stdin.close()
        child.wait(20)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [start("nccl", "--rank", str(number), str(port)) for number in (0, 1)]
    try:
        check("nccl: both ranks have started", all(hear(child).get("ready") for child in ranks))
        print(command("status")[1], flush=True)
        for number in range(4):
            for child in ranks:
                tell(child, step=number)
            seen = [hear(child) for child in ranks]
            check(f"nccl: eager, {number} pauses before", all(one.get("eager") for one in seen), seen)
            check(f"nccl: in a graph, {number} pauses before", all(one.get("graph") for one in seen), seen)
            if number < 3:
                pause_and_resume("nccl")
        for child in ranks:
            tell(child, register=True)
        check("nccl: memory registered by the program works", all(hear(child).get("registered") for child in ranks))
        paused, text = command("pause", "--name", "nccl")
        print(f"after a registration the pause {'succeeds' if paused else 'refuses'}: {text}", flush=True)
        if paused:
            print(command("resume", "--name", "nccl"), flush=True)
    finally:
        for child in ranks:
            child.stdin.close()
        for child in ranks:
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()


if __name__ == "__main__":
    if sys.argv[1] == "--peers":
        peers()
    elif sys.argv[1] == "--rank":
        rank(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
