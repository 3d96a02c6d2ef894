"""Empties a GPU, for maintenance or for a job that needs all of it, while its jobs live on.

    python examples/empty_gpu.py GPU [OTHER ...]

GPU and OTHER: indices in `nvidia-smi`. Each job on GPU moves, in the middle of its work, to the
first OTHER of the same model with enough room. A job that fits nowhere is suspended; `vramctl
resume` brings it back once the GPU is in service again. A job that can be neither moved nor
suspended (NCCL across GPUs, unified memory) is named and left as it is. The exit code is 1 if there
is such a job, or if programs without vramctl are on the GPU. With several GPUs per job, move it by
hand: `vramctl move JOB --to GPU,GPU`.
"""

import json
import subprocess
import sys


def vramctl(*arguments):
    return subprocess.run(["vramctl", *arguments], capture_output=True, text=True)


def tell(done):
    print((done.stdout + done.stderr).strip(), flush=True)


def users_of(gpu):
    """The jobs on the GPU, and the programs on it without vramctl."""
    ledger = json.loads(vramctl("gpus", "--json", "--gpu", str(gpu)).stdout)
    shares = [share for one in ledger["gpus"] for share in one["shares"] if "pid" in share]
    others = {f"{share.get('name')} (pid {share['pid']})" for share in shares if share["what"] == "process"}
    return sorted({share["name"] for share in shares if share["what"] != "process"}), sorted(others)


def leave(job, others):
    for other in others:
        done = vramctl("move", job, "--to", str(other))
        if done.returncode == 0:
            return tell(done)
        print(f"{job} does not go to GPU {other}: {done.stderr.strip()}", flush=True)
    # Check first: a suspend that is refused leaves the job paused.
    for arguments in (["suspend", job, "--dry-run"], ["suspend", job]):
        done = vramctl(*arguments)
        if done.returncode != 0:
            break
    tell(done)


def main():
    if len(sys.argv) < 2 or not all(argument.isdigit() for argument in sys.argv[1:]):
        sys.exit(__doc__)
    gpu, *others = map(int, sys.argv[1:])
    for job in users_of(gpu)[0]:
        leave(job, others)
    jobs, programs = users_of(gpu)
    tell(vramctl("gpus", "--gpu", str(gpu)))
    if jobs or programs:
        sys.exit(f"still on GPU {gpu}: {', '.join(jobs + programs)}")


if __name__ == "__main__":
    main()
