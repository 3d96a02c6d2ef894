"""On two GPUs: every copy of one device's memory, whichever device is current and whichever device's stream it is in, answers and does the
same on managed memory as on memory of CUDA's own. And what that costs, with PyTorch.

usage: copies.py VRAMCTL

Prints a table, and a line `ok: …` or `FAILED: …` for each check.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys

from common import check

TURNS = 3
#: How much longer a copy may take; shorter differences are noise, in microseconds.
LIMIT, NOISE = 1.10, 5.0

#: Copies of device 1's memory while device 0 is current, without peer access. The first copy of each kind is timed apart.
TORCH = r"""
import json, time, torch
torch.cuda.set_device(0)
figures, wrong = {}, []
for name, mib, rounds in (("2 MiB", 2, 200), ("1 GiB", 1024, 20)):
    memory = torch.randint(0, 255, (mib << 20,), dtype=torch.uint8, device="cuda:1")
    pinned = torch.empty(mib << 20, dtype=torch.uint8, pin_memory=True)
    for kind, copy in {
        "to the other device": lambda: memory.to("cuda:0", non_blocking=True),
        "to the host": lambda: pinned.copy_(memory, non_blocking=True),
        "from the host": lambda: memory.copy_(pinned, non_blocking=True),
    }.items():
        copied = copy()
        torch.cuda.synchronize(0), torch.cuda.synchronize(1)
        if not torch.equal(copied.cpu(), memory.cpu()):
            wrong.append(f"{kind}, {name}")
        started = time.perf_counter()
        for _ in range(rounds):
            copy()
        torch.cuda.synchronize(0), torch.cuda.synchronize(1)
        figures[f"{kind}, {name}"] = (time.perf_counter() - started) / rounds * 1e6
print(json.dumps({"figures": figures, "wrong": wrong}))
"""


def run(command, managed):
    if managed:
        command = [sys.argv[1], "run", "--", *command]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}")
    return done.stdout


def table(managed, *arguments):
    """What each copy answered and changed."""
    program = pathlib.Path(sys.argv[1]).with_name("copies")
    lines = run([str(program), "plain", *arguments], managed).splitlines()
    return dict(line.split(": ", 1) for line in lines if ": " in line)


def same_table(*arguments):
    plain, managed = table(False, *arguments), table(True, *arguments)
    # Once memory is open to the other device, its memsets reach it, too. CUDA refuses those without peer access.
    differ = [copy for copy in plain if managed.get(copy) != plain[copy] and (arguments or "set" not in copy)]
    for copy in differ[:20]:
        print(f"note: {copy}: {plain[copy]}, managed: {managed.get(copy)}")
    access = "with peer access" if arguments else "without peer access"
    return check(f"{len(plain)} copies do the same {access}; {len(differ)} differ", len(plain) > 600 and not differ)


def same_speed():
    turns = {False: [], True: []}
    fine = True
    for _ in range(TURNS):
        for managed in turns:
            answer = json.loads(run([sys.executable, "-c", TORCH], managed).splitlines()[-1])
            turns[managed].append(answer["figures"])
            fine &= not answer["wrong"] or check(f"contents are right: {answer['wrong']}", holds=False)
    print("| a copy of another device's memory, with torch | without | with it | ratio |")
    print("| --- | ---: | ---: | ---: |")
    for name in turns[True][0]:
        without, with_it = (statistics.median(turn[name] for turn in turns[managed]) for managed in turns)
        print(f"| {name} | {without:.1f} µs | {with_it:.1f} µs | {with_it / without:.2f} |", flush=True)
        fine &= check(
            f"{name}: {with_it / without:.2f} times", with_it <= without * LIMIT or with_it - without < NOISE
        )
    return fine


def main():
    fine = same_table()
    fine &= same_table("peers")
    try:
        import torch

        has_two = torch.cuda.device_count() > 1
    except ImportError:
        has_two = False
    if has_two:
        fine &= same_speed()
    else:
        print("note: no PyTorch that sees two GPUs, so no copy is timed")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
