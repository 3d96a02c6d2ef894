"""A trainer sends weights to an engine by CUDA IPC, bucket by bucket, and the engine is paused in between. Both processes are managed.

usage: handover.py VRAMCTL [GIB]    prints a line `ok: …` or `FAILED: …` for each check
       handover.py --trainer GIB, handover.py --engine GIB: the two programs, which handover.py starts under `vramctl run`

The trainer copies parameters into a bucket of 512 MiB, shares it with torch's own tensor sharing, and waits until the engine has
copied it out, as frameworks do that update weights in buckets. In the end the engine keeps the bucket open, and the trainer is paused
and suspended with `--shared`: the engine waits, and finds the bucket where it was when the trainer is resumed.
"""

import base64
import json
import pickle
import subprocess
import sys
import time

from common import Job, answer, check, failures

BUCKET = 512 << 20


def parameters(torch, gib, round_number):
    """The weights of a round, in pieces of a bucket each."""
    count = (gib << 30) // BUCKET
    return [torch.full((BUCKET // 4,), round_number * 1000.0 + number, device="cuda") for number in range(count)]


def trainer(gib):
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    weights = parameters(torch, gib, 0)
    bucket = torch.empty(BUCKET // 4, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(3):
        for piece in weights:
            bucket.copy_(piece)
    torch.cuda.synchronize()
    answer(ready=True, device_gbs=3 * len(weights) * BUCKET / (time.perf_counter() - start) / 1e9)
    for line in sys.stdin:
        request = json.loads(line)
        if "fill" in request:
            for number, piece in enumerate(weights):
                piece.fill_(request["fill"] * 1000.0 + number)
            torch.cuda.synchronize()
            answer(done=True)
            continue
        bucket.copy_(weights[request["bucket"]])
        torch.cuda.synchronize()
        answer(tensor=base64.b64encode(pickle.dumps(reduce_tensor(bucket))).decode())


def engine(gib):
    import torch

    weights = parameters(torch, gib, -1)
    for piece in weights:
        piece.zero_()
    torch.cuda.synchronize()
    answer(ready=True, addresses=[piece.data_ptr() for piece in weights])
    kept = None
    for line in sys.stdin:
        request = json.loads(line)
        if "check" in request:
            wrong = [
                number
                for number, piece in enumerate(weights)
                if not bool((piece == request["check"] * 1000.0 + number).all())
            ]
            answer(wrong=wrong, addresses=[piece.data_ptr() for piece in weights])
            continue
        if "kept" in request:
            value = float(kept[0])
            answer(address=kept.data_ptr(), value=value if bool((kept == value).all()) else None)
            continue
        rebuild, arguments = pickle.loads(base64.b64decode(request["tensor"]))
        shared = rebuild(*arguments)
        if "keep" in request:
            kept = shared
            answer(done=True)
            continue
        weights[request["bucket"]].copy_(shared)
        torch.cuda.synchronize()
        del shared
        answer(done=True)


def ask_one(job, **request):
    return job.ask(**request)[0]


def paused_together(sender, receiver, command):
    ask_one(receiver, keep=True, tensor=ask_one(sender, bucket=0)["tensor"])
    before = ask_one(receiver, kept=True)
    refused, text = command("pause", "--name", "trainer")
    check("the trainer is not paused while the engine keeps its bucket", not refused and "shared" in text, text if refused else "")
    for number, verb in enumerate(("pause", "pause", "suspend")):
        paused, text = command(verb, "--name", "trainer", "--shared")
        missing = [one for process in json.loads(text)["processes"] for one in process["report"].get("missing", [])] if paused else []
        check(f"{verb} --shared takes it, and the engine sets the bucket aside", len(missing) == 1, text if not missing else "")
        receiver.tell(kept=True)
        check("the engine waits for it", receiver.hear(1) == [None])
        began = time.perf_counter()
        resumed, text = command("resume", "--name", "trainer")
        after = receiver.hear()[0]
        took = time.perf_counter() - began
        check("after the resume of the trainer it goes on, with the same bucket", resumed and after == before, f"{took:.2f} s; {after}")
        ask_one(sender, bucket=number + 1)
        before = {**before, "value": before["value"] + 1}
        after = ask_one(receiver, kept=True)
        check("which is the trainer's", after == before, after if after != before else "")


def main():
    vramctl, gib = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 15

    def command(*arguments):
        done = subprocess.run([vramctl, *arguments, "--json"], capture_output=True, text=True, timeout=120)
        return done.returncode == 0, done.stdout if done.returncode == 0 else (done.stdout + done.stderr).strip()[-400:]

    sender, receiver = (Job(vramctl, role, __file__, (f"--{role}", gib)) for role in ("trainer", "engine"))
    try:
        device_gbs, addresses = sender.hear()[0]["device_gbs"], receiver.hear()[0]["addresses"]
        # The parent forwards each handle, as frameworks do in their own messages. The first round also opens the bucket.
        for number in range(3):
            ask_one(sender, fill=number)
            began = time.perf_counter()
            for bucket in range(len(addresses)):
                ask_one(receiver, bucket=bucket, tensor=ask_one(sender, bucket=bucket)["tensor"])
            took = time.perf_counter() - began
            seen = ask_one(receiver, check=number)
            gbs = (gib << 30) / took / 1e9
            check(
                f"round {number}: {gib} GiB arrive at the same addresses",
                not seen["wrong"] and seen["addresses"] == addresses,
                f"{took:.2f} s, {gbs:.1f} GB/s; the device copies one bucket after the other at {device_gbs:.0f} GB/s; {seen['wrong']}",
            )
            paused, text = command("pause", "--name", "engine")
            check("the engine is paused", paused, text if not paused else "")
            resumed, text = command("resume", "--name", "engine")
            check("and resumed", resumed, text if not resumed else "")
            check("with what was sent", not ask_one(receiver, check=number)["wrong"])
        paused, text = command("pause", "--name", "trainer")
        # Torch keeps the bucket open in the engine until its cache of opened memory is emptied.
        check("the trainer is paused, or refuses because its bucket is open", paused or "shared" in text, text if not paused else "")
        if paused:
            check("and resumed", command("resume", "--name", "trainer")[0])
        paused_together(sender, receiver, command)
    finally:
        sender.end()
        receiver.end()
    return bool(failures)


if __name__ == "__main__":
    if sys.argv[1] == "--trainer":
        trainer(int(sys.argv[2]))
    elif sys.argv[1] == "--engine":
        engine(int(sys.argv[2]))
    else:
        sys.exit(main())
