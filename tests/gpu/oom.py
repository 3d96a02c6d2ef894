"""A resume without enough memory: the section `oom`."""

import contextlib
import json
import re
import time

from measure.check import dig
from measure.child import Failed
from measure.tables import MIB
from section import transition


def oom(check):
    options = check.options
    real = options.smi == "nvidia-smi"
    mib = max(4096 if real else 64, options.gib * 1024 // 2)
    engine = check.start(
        check.bin / "engine",
        "--weights-mib",
        mib * 3 // 4,
        "--kv-mib",
        mib // 4,
        managed=["--name", "oom"],
        env=check.app_env,
    )
    if not engine.hear(60).startswith("ready"):
        raise Failed("the engine did not start")
    verified = engine.ask("verify", 60)
    transition(check, "pause", engine, ["oom"], False)
    # Leave free half of what the engine needs.
    hog_mib = int(check.gpu("memory.free")) - mib // 2
    if real:
        hog_mib -= 700  # its own context
    hog = check.start(check.bin / "hog", "--mib", hog_mib, env=check.app_env)
    if not hog.hear(60).startswith("holding"):
        raise Failed("the other process did not get its memory")

    code, answer, text, taken = check.vramctl("resume", "--name", "oom", seconds=30)
    check.expect("a resume without room is refused", code != 0, f"exit code {code}")
    shortage = dig(answer, "shortage") or {}
    needed, free = shortage.get("needed"), shortage.get("free")
    check.expect(
        "it says how much is needed and how much is free",
        isinstance(needed, int) and isinstance(free, int) and needed >= mib * MIB > free,
        text,
    )
    listed = compute_processes(check)
    holders = [str(holder.get("pid")) for holder in shortage.get("holders") or []]
    if listed is None or str(hog.process.pid) not in listed:
        check.notes.append(
            f"oom: {options.smi} does not list the other process's pid ({listed}), so the "
            f"driver cannot tell who holds the memory; reported: {holders}"
        )
        check.expect("it says who holds the memory, as far as the driver knows", True, holders)
    else:
        check.expect("it says who holds the memory", str(hog.process.pid) in holders, text)
    # Again without --json, for the message.
    code, text, _ = check.command(check.bin / "vramctl", "resume", "--name", "oom", seconds=30)
    check.expect(
        "the message says it, too",
        code != 0 and re.search(r"need", text) and re.search(r"free", text),
        text,
    )
    check.say("  refused: " + " / ".join(text.strip().splitlines())[:400])
    check.expect_state("oom", "after the refused resume", paused=True)

    waiting = check.start(check.bin / "vramctl", "resume", "--name", "oom", "--timeout", 60)
    time.sleep(1.5)
    check.expect("with --timeout it waits", waiting.process.poll() is None)
    released = time.perf_counter()
    check.expect("the other process's memory is unharmed", hog.finish(60) == 0)
    code = waiting.finish(70)
    taken = time.perf_counter() - released
    check.expect("then it succeeds", code == 0, f"exit code {code}")
    check.expect("contents are as before", engine.ask("verify", 60) == verified, verified)
    check.expect_state("oom", "after it", paused=False)
    check.say(
        f"  waited for the memory and resumed {mib} MiB, {taken:.2f} s after the other's end began"
    )
    engine.ask("quit", 30)
    check.expect("the engine ends well", engine.finish() == 0)

def compute_processes(check):
    """The pids that the GPU's own tool lists; None if it does not answer."""
    with contextlib.suppress(Exception):
        if check.options.smi == "nvidia-smi":
            return check.smi("--query-compute-apps=pid", "--format=csv,noheader").split()
        devices = json.loads(check.smi("--json"))["devices"]
        return [str(process["pid"]) for process in devices[0]["processes"]]
    return None
