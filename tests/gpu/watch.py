"""What the watch costs: training steps with collectives, plain, with `vramctl watch`, and with Relax's check before each collective
(`--enable-cuda-memory-check`), in turns in one run. Also checks that watch and trim work on a real GPU. Uses two GPUs if there are.

Relax wraps the functions of torch.distributed (relax/utils/reloadable_process_group.py, `_wrap_low_level_call`): before each it asks
torch.cuda.mem_get_info(), memory_allocated() and memory_reserved(), and below 5 GB free it synchronizes, collects garbage and empties
the cache. https://github.com/redai-infra/Relax, docs/en/guide/oom-troubleshooting.md: "approximately 20%".

usage: watch.py VRAMCTL PACKAGE        prints a line `ok: …` or `FAILED: …` for each check, and a table. PACKAGE: python/vramctl
       watch.py --rank N WORLD PORT    the program, which watch.py starts under `vramctl run`
"""

import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

from common import GIB, Job, answer, check, free_port

#: Steps as (what, width, rows, layers): a collective per layer.
SIZES = [("large layers", 4096, 4096, 32), ("small layers", 1024, 512, 64)]
#: What is measured in turns. Plain steps twice, to show the noise.
MODES = ["plain", "watch", "plain again", "watch again"]
#: Orders in which each mode follows each other one once: a GPU that was less busy before is faster for a while.
ORDERS = [(0, 1, 3, 2), (1, 2, 0, 3), (2, 3, 1, 0), (3, 0, 2, 1)]
#: How often each order is measured, and for how long each mode.
ROUNDS = 14
SECONDS = 0.25
#: How often Relax's check is measured, over half of the steps: it takes several times as long.
RELAX_ROUNDS = 8
#: The limit for the cost of the watch.
LIMIT = 0.005


def rank(number, world, port):
    import torch
    import torch.distributed as distributed

    torch.cuda.set_device(number)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    distributed.init_process_group("nccl", rank=number, world_size=world, device_id=torch.device("cuda", number))
    torch.manual_seed(7)
    weights = {
        what: [torch.randn(width, width, device="cuda", dtype=torch.bfloat16) / width for _ in range(layers)]
        for what, width, _, layers in SIZES
    }
    inputs = {what: torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for what, width, rows, _ in SIZES}

    def as_relax_does():
        free, _ = torch.cuda.mem_get_info()
        torch.cuda.memory_allocated()
        torch.cuda.memory_reserved()
        if free / GIB < 5:
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()

    def step(what, before_each):
        x = inputs[what]
        for weight in weights[what]:
            x = torch.relu(x @ weight)
            before_each()
            distributed.all_reduce(x)

    def ms_per_step(what, before_each, steps, empty=False):
        torch.cuda.synchronize()
        distributed.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            step(what, before_each)
            if empty:
                torch.cuda.empty_cache()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / steps * 1e3

    for what, *_ in SIZES:
        ms_per_step(what, as_relax_does, 10)
    answer(ready=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "steps" in request:
            before_each = as_relax_does if request["mode"] == "relax" else lambda: None
            answer(ms=ms_per_step(request["what"], before_each, request["steps"], request.get("empty", False)))
        elif "cache" in request:
            # Freed memory, and a small tensor that keeps its segment.
            kept, gone = torch.empty(2 << 20, dtype=torch.uint8, device="cuda"), torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
            del gone
            answer(reserved=torch.cuda.memory_reserved(), kept=kept.numel())
        elif "reserved" in request:
            answer(reserved=torch.cuda.memory_reserved())
        elif "capture" in request:
            x, graph = torch.ones(1024, device="cuda"), torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                y = x * 2
                answer(capturing=True)
                sys.stdin.readline()
                z = y + 1
            graph.replay()
            torch.cuda.synchronize()
            answer(graph=bool((z == 3).all()))
    os._exit(0)


def measure(vramctl, ask):
    """The cost of the watch and of Relax's check, as a fraction of a step, by size."""
    print("| step | | ms | more | ± |\n| --- | --- | ---: | ---: | ---: |")
    for what, *_ in SIZES:
        steps = max(10, int(SECONDS * 1e3 / ask(mode="plain", what=what, steps=20)["ms"]))

        def take(mode, steps, what=what):
            command(vramctl, "watch", "--name", "watch", *(["--below", "5G"] if "watch" in mode else ["--off"]))
            ask(mode=mode, what=what, steps=max(2, steps // 10))
            return ask(mode=mode, what=what, steps=steps)["ms"]

        ms = {mode: [] for mode in MODES}
        for order in ROUNDS * ORDERS:
            for number in order:
                ms[MODES[number]].append(take(MODES[number], steps))
        plain, watch, again, _ = ms.values()
        both = [[(one + other) / 2 for one, other in zip(ms[mode], ms[f"{mode} again"])] for mode in ("plain", "watch")]
        relax = list(zip(*((take("plain", steps // 2), take("relax", steps // 2)) for _ in range(RELAX_ROUNDS))))
        more, error = compare(*both)
        rows = {
            "plain": (plain, (0, 0)),
            "plain again": (again, compare(plain, again)),
            "watch": (watch, (more, error)),
            "Relax's check": (relax[1], compare(*relax)),
        }
        for mode, (one, (extra, scatter)) in rows.items():
            print(f"| {what} | {mode} | {statistics.median(one):.3f} | {extra:+.2%} | {scatter:.2%} |", flush=True)
        # Steps that are all launches vary by far more than the limit.
        beyond = more - 2 * error
        check(f"{what}: the watch costs less than {LIMIT:.1%} of a step beyond the noise", beyond < LIMIT, f"{more:+.2%} ± {error:.2%}")


def compare(plain, others):
    """By how much the others take longer, as a fraction: the median, and its standard error. Some of the times are far off."""
    more = [other / one - 1 for one, other in zip(plain, others)]
    middle = statistics.median(more)
    deviation = 1.4826 * statistics.median(abs(one - middle) for one in more)
    return middle, 1.2533 * deviation / len(more) ** 0.5


def command(vramctl, *arguments):
    done = subprocess.run([vramctl, *arguments], capture_output=True, text=True, timeout=60)
    if done.returncode:
        check(" ".join(arguments), False, (done.stdout + done.stderr)[:500])
    return done.stdout


def wait_for(happened, seconds=10):
    deadline = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.05)
    return happened()


def ranks(vramctl, name, world, package, log, *how):
    """The ranks of one job, each of which says when it is ready."""
    port = free_port()
    options = (("--rank", number, world, port) for number in range(world))
    here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "watch.py")
    return Job(vramctl, name, here, *options, how=how, log=log, VRAMCTL_PYTHON=package)


def first(job, **request):
    """The first rank's answer."""
    return job.ask(**request)[0]


def gpus():
    return len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines())


def main():
    vramctl, package = sys.argv[1:3]
    world = min(2, gpus())
    with tempfile.NamedTemporaryFile("a") as log:
        job = ranks(vramctl, "watch", world, package, log)

        def ask(**request):
            return first(job, **request)

        def falls():
            with open(log.name) as lines:
                return [line.strip() for line in lines if " is free on GPU" in line]

        try:
            check(f"{world} ranks have started", job.all("ready", job.hear()))
            measure(vramctl, ask)
            check("nothing was low", not falls(), "".join(falls()))

            before = ask(cache=True)["reserved"]
            trimmed = json.loads(command(vramctl, "trim", "--name", "watch", "--json"))["processes"]
            returned = [one.get("trimmed", {}).get("returned_bytes", 0) for one in trimmed]
            now = ask(reserved=True)["reserved"]
            detail = f"{[round(bytes_ / GIB, 2) for bytes_ in returned]} GiB in {[one.get('trimmed', {}).get('ms') for one in trimmed]} ms"
            check("a trim returns what is cached", min(returned) >= 4 * GIB and before - now >= 4 * GIB, detail)
            print(command(vramctl, "trim", "--name", "watch").strip(), flush=True)

            ask(cache=True)
            check("a graph is being captured", ask(capture=True).get("capturing", False))
            done = subprocess.run([vramctl, "trim", "--name", "watch"], capture_output=True, text=True, timeout=60)
            print(f"note: a trim during a capture: {(done.stdout + done.stderr).strip()[:300]}", flush=True)
            check("a capture survives a trim", ask(go="on").get("graph", False))

            ask(cache=True)
            high = ask(reserved=True)["reserved"]
            command(vramctl, "watch", "--name", "watch", "--below", "4000G", "--trim")
            check("a fall is told once per rank", wait_for(lambda: len(falls()) == world), " ".join(falls())[:600])
            low = wait_for(lambda: high - ask(reserved=True)["reserved"] >= 4 * GIB)
            check("and what is cached is returned", low, f"{high >> 20} MiB, then {ask(reserved=True)['reserved'] >> 20} MiB")
            line = re.sub(r"GPU-[0-9a-f-]+", "GPU-…", falls()[0]) if falls() else ""
            print(f"note: {line}", flush=True)
        finally:
            job.end()


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        rank(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main()
