"""A PyTorch program with a captured graph leaves the GPU in the middle of its work and comes back, again and again. For comparison, the
driver's checkpoint alone, with the same program.

usage: suspend.py VRAMCTL [TIMES]      prints a line `ok: …` or `FAILED: …` for each check, and a table
       suspend.py --program GIB        the program, which suspend.py starts under `vramctl run`
       suspend.py --driver PID [STEP…] the driver's checkpoint of a process, and back, or only these steps
"""

import ctypes
import hashlib
import json
import os
import random
import statistics
import sys
import time

import common
from common import ask, check, median, most_gib, run, stages, started, tell, used_mib

#: Of the program's memory.
PROGRAM_GIB = 16
STEPS = 2000


def program(gib):
    import torch

    torch.use_deterministic_algorithms(True)
    keep = torch.empty(gib << 30, dtype=torch.uint8, device="cuda")
    for at, part in enumerate(keep.split(1 << 30)):
        part.fill_(at + 1)
    x = torch.ones(1 << 20, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x * 3).cumsum(0)
    host = torch.randn(16, 512, 2048, generator=torch.Generator().manual_seed(1)).pin_memory()

    def work():
        torch.manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Linear(2048, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 2048)).cuda()
        adam = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
        seen = []
        for step in range(STEPS):
            data = host[step % 16].to("cuda", non_blocking=True)
            loss = (model(data) - data.flip(0)).square().mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
            seen.append(loss.item() if step % 2 else loss.detach())
        return [float(loss) for loss in seen]

    work()
    print(json.dumps({"ready": True}), flush=True)
    for request in sys.stdin:
        began = time.monotonic()
        digest = hashlib.sha256(json.dumps(work()).encode()).hexdigest() if request.strip() == "work" else ""
        y.zero_()
        graph.replay()
        new = torch.empty(64 << 20, dtype=torch.uint8, device="cuda").fill_(9)
        same = all(bool((part == at + 1).all()) for at, part in enumerate(keep.split(1 << 30)))
        same = same and float(y[-1]) == float(3 << 20) and bool((new == 9).all())
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        print(json.dumps({"digest": digest, "same": same, "uuid": uuid, "s": time.monotonic() - began}), flush=True)


def driver(pid, steps):
    """Makes these of the four calls, and prints how many milliseconds each took."""
    cuda = ctypes.CDLL("libcuda.so.1")
    times = {"cuInit": 0.0}

    def call(name, *arguments):
        began = time.monotonic()
        code = getattr(cuda, name)(*arguments)
        times[name] = 1e3 * (time.monotonic() - began)
        if code:
            times["failed"] = f"{name} returned {code}"
        return code == 0

    call("cuInit", 0) and all(call(f"cuCheckpointProcess{step}", pid, None) for step in steps)
    print(json.dumps(times))


def suspend_and_resume(vramctl, times):
    own = [sys.executable, os.path.abspath(__file__), "--program", str(PROGRAM_GIB)]
    with started([vramctl, "run", "--name", "suspended", "--", *own]) as child:
        undisturbed = ask(child, "work")
        there = used_mib()[0]
        chance, down, up, meanwhile, taken, fitted = random.Random(3), [], [], [], [], None
        down_ms, up_ms, failed = [], [], []
        for number in range(times):
            tell(child, "work")
            time.sleep(chance.uniform(0.05, 0.8 * undisturbed["s"]))
            code, text, ms = run(vramctl, "suspend", "suspended", "--json")
            if code:
                failed.append(f"suspend {number}: exit code {code}: {text}")
                break
            down.append(stages(text))
            down_ms.append(ms)
            meanwhile.append(used_mib()[0])
            if number in (0, times - 1):
                taken.append(most_gib(0))
                code, text, _ = run(sys.executable, common.__file__, str(taken[-1]), "0")
                fitted = code == 0 and fitted is not False
            code, text, ms = run(vramctl, "resume", "--name", "suspended", "--json")
            if code:
                failed.append(f"resume {number}: exit code {code}: {text}")
                break
            up.append(stages(text))
            up_ms.append(ms)
            after = json.loads(child.stdout.readline())
            if not after["same"] or after["digest"] != undisturbed["digest"]:
                failed.append(f"round {number}: {after}, undisturbed {undisturbed}")
        check(
            f"{times} times suspended in the middle of its work, resumed, and every loss equal",
            not failed,
            " ".join(failed)[:2000],
        )
        check("nothing of it was on the GPU", meanwhile and max(meanwhile) <= 16, f"{meanwhile} MiB in use, {there} before")
        check("another process took most of the GPU meanwhile", fitted, f"{taken} GiB")
        # Torch's cache grows meanwhile.
        check("it ends as it was", abs(used_mib()[0] - there) < 2048, f"{used_mib()[0]} MiB in use")
        if down_ms and up_ms:
            print(
                f"  vramctl suspend: {statistics.median(down_ms):.0f} ms (pause {median(down, 'pause')}, lock {median(down, 'lock')}, "
                f"checkpoint {median(down, 'checkpoint')}); resume: {statistics.median(up_ms):.0f} ms "
                f"({', '.join(f'{stage} {median(up, stage)}' for stage in dict.fromkeys(stage for row in up for stage in row))})",
                flush=True,
            )
    with started(own) as child:
        ask(child, "check")
        alone = []
        for _ in range(2):
            _, text, _ = run(sys.executable, os.path.abspath(__file__), "--driver", str(child.pid))
            alone.append(json.loads(text))
        check(
            "the driver alone, without a pause by tag",
            not any("failed" in row for row in alone) and ask(child, "check")["same"],
            str(alone[-1].get("failed", "")),
        )
        first = " ".join(
            f"{name.removeprefix('cuCheckpointProcess')} {median(alone, name)}" for name in alone[0] if name != "failed"
        )
        print(f"  the driver's checkpoint alone: {first} ms", flush=True)


def main():
    vramctl, times = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10
    suspend_and_resume(vramctl, times)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--program"]:
        program(int(sys.argv[2]))
    elif sys.argv[1:2] == ["--driver"]:
        driver(int(sys.argv[2]), sys.argv[3:] or ["Lock", "Checkpoint", "Restore", "Unlock"])
    else:
        main()
