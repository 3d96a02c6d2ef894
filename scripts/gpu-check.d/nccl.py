"""On two GPUs, `vramctl pause --nccl` has NCCL give back its communicators' memory, and a resume takes it again: eager and captured
all-reduces are correct afterwards. Needs NCCL 2.29.7 or later; with an older one, checks that the pause leaves NCCL out and says so.

usage: nccl.py VRAMCTL [DIR]   DIR has a libnccl.so.2 to use in place of PyTorch's (or $GPU_CHECK_NCCL_DIR)

The ranks are those of two.py.
"""

import json
import os
import pathlib
import select
import subprocess
import sys
import time

import two
from suspend import check, used_mib

MIB = 1 << 20
CYCLES = 5


def main():
    vramctl = sys.argv[1]
    folder = sys.argv[2] if len(sys.argv) > 2 else os.environ.get("GPU_CHECK_NCCL_DIR")
    environment = dict(os.environ)
    if folder:
        # PyTorch finds its own by RPATH, which comes before LD_LIBRARY_PATH, unless a library with this name is loaded already.
        library = pathlib.Path(folder, "libnccl.so.2").resolve(strict=True)
        environment["LD_PRELOAD"] = ":".join(filter(None, [os.environ.get("LD_PRELOAD"), str(library)]))

    def command(*arguments):
        done = subprocess.run([vramctl, *arguments], capture_output=True, text=True, timeout=120)
        return done.returncode, " | ".join((done.stdout + done.stderr).strip().splitlines())

    def tell(base):
        for child in ranks:
            child.stdin.write(json.dumps({"step": base}) + "\n")
            child.stdin.flush()

    def hear():
        return [json.loads(child.stdout.readline() or '{"ended": true}') for child in ranks]

    def right(heard):
        return all(one.get("eager") and one.get("graph") for one in heard)

    def communicators():
        processes = json.loads(subprocess.run([vramctl, "status", "--json"], capture_output=True, text=True).stdout)["processes"]
        return [one for process in processes for one in process.get("communicators", [])]

    count = len(used_mib())
    if not check("there are two GPUs", count > 1, f"{count}"):
        return
    port = two.free_port()
    start = [vramctl, "run", "--name", "nccl", "--", sys.executable, two.__file__, "--rank"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    ranks = [subprocess.Popen([*start, str(number), str(port)], **pipes) for number in (0, 1)]
    try:
        heard = hear()
        check("started", all(one.get("ready") for one in heard), heard)
        tell(1)
        check("all-reduces are right, eager and captured", right(heard := hear()), heard)

        known = communicators()
        check("each rank's communicator of 2 ranks is known", [one["ranks"] for one in known].count(2) >= 2, known)
        version = known[0]["nccl"] if known else "?"
        print(f"note: NCCL {version}", flush=True)
        code, text = command("pause", "--name", "nccl")
        without = used_mib()
        check("paused without --nccl", code == 0, f"in use {without} MiB; {text}")
        command("resume", "--name", "nccl")
        if any("unfit" in one for one in known):
            code, text = command("pause", "--name", "nccl", "--nccl")
            check("an NCCL that cannot is named, and the rest is paused", code == 0 and "cannot give memory back" in text, text)
            command("resume", "--name", "nccl")
            tell(2)
            check("all-reduces are right", right(heard := hear()), heard)
            print("note: give a folder with a newer NCCL: nccl.py VRAMCTL DIR, or gpu-check --nccl-dir DIR", flush=True)
            return

        print(f"note: {command('pause', '--name', 'nccl', '--nccl', '--dry-run')[1]}", flush=True)
        for cycle in range(CYCLES):
            code, text = command("pause", "--name", "nccl", "--nccl")
            rest, told = used_mib(), [one.get("bytes", 0) for one in communicators() if one["state"] == "suspended"]
            freed = [before - after for before, after in zip(without, rest)]
            check(f"cycle {cycle}: paused with --nccl", code == 0 and len(told) >= 2, f"in use {rest} MiB; {text}")
            # nvidia-smi's figure against NCCL's, over both GPUs.
            fits = abs(sum(freed) - sum(told) / MIB) < 0.1 * sum(told) / MIB + 64
            check(f"cycle {cycle}: NCCL's memory is gone", min(freed) > 0 and fits, f"{freed} MiB less; NCCL: {sum(told) / MIB:.0f} MiB")
            tell(10 * cycle + 2)
            time.sleep(0.5)
            quiet = not select.select([child.stdout for child in ranks], [], [], 0)[0]
            check(f"cycle {cycle}: a collective waits meanwhile", quiet)
            code, text = command("resume", "--name", "nccl")
            check(f"cycle {cycle}: resumed", code == 0, text)
            check(f"cycle {cycle}: all-reduces are right, eager and captured", right(heard := hear()), heard)
            if code or not right(heard):
                return
        code, text = command("suspend", "nccl", "--nccl")
        check("suspend pauses by tag, and NCCL gives its memory back", code == 7 and "NCCL has given back" in text, text)
        code, text = command("resume", "--name", "nccl")
        tell(100)
        check("resumed, and right", code == 0 and right(heard := hear()), f"{text}; {heard}")
    finally:
        two.end(ranks)


if __name__ == "__main__":
    main()
