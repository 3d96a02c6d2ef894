"""A PyTorch program that is paused again and again: the sections `torch` and `regions`."""

import contextlib
import json
import pathlib
import sys

from measure.tables import GIB, MIB
from section import transition

HERE = pathlib.Path(__file__).resolve().parent
# What a paused program may keep on a GPU: the CUDA context and libraries.
LEFT_LIMIT_MIB = 1.2 * 1024


def torch_cycle(check, number, program, before, regions):
    options = check.options
    # Every second cycle the program pauses itcheck. Then the shell pauses what is neither
    # weights nor kv_cache (PyTorch's own buffers, the graph's).
    own = regions and number % 2 == 0
    name = check.section
    used = check.used_mib()
    tags = ["weights", "kv_cache"] if regions else []
    pause_s, told = transition(check, "pause", program, tags if own else [name, *tags], own)
    if regions:
        # The first backup's host memory needs page tables on the GPU: at most 8 bytes
        # per 4 KiB page, plus some slack.
        wanted = options.gib * 1024 * 255 // 256
        given = used - check.used_mib(below=used - wanted)
        check.expect(
            f"cycle {number}: the memory of both tags is off the GPU",
            given >= wanted,
            f"{given} MiB given back",
        )
        rest_s, _ = transition(check, "pause", program, [name], False)
        check.log(f"the rest paused in {rest_s:.3f} s")
    left = check.used_mib(below=LEFT_LIMIT_MIB)
    check.expect(
        f"cycle {number}: {options.smi} shows the memory as free",
        left < LEFT_LIMIT_MIB,
        f"{used} MiB before, {left} MiB after",
    )
    check.expect_state(name, f"while paused, cycle {number}", paused=True)
    other = check.hog(options.other_gib * 1024)
    check.expect(
        f"cycle {number}: another process uses {options.other_gib} GiB",
        other is None,
        other or "",
    )
    if regions:
        # Alternate the order of the tags.
        tags.reverse()
    resume_s, resumed = transition(check, "resume", program, tags if own else [name, *tags], own)
    if regions:
        transition(check, "resume", program, [name], False)
    check.expect_state(name, f"after the resume, cycle {number}", paused=False)

    found = program.ask_json("verify", 120)
    wanted = {**before["verify"], "kv": "zero"} if regions else before["verify"]
    check.expect(
        f"cycle {number}: tensors equal bit for bit", found == wanted, json.dumps(found)
    )
    if regions:
        program.ask_json("refill", 60)
        check.expect(
            f"cycle {number}: kv_cache is writable again",
            program.ask_json("verify", 120) == before["verify"],
        )
    addresses = program.ask_json("addresses")
    check.expect(f"cycle {number}: addresses unchanged", addresses == before["addresses"])
    digests = [program.ask_json(f"replay {seed}")["digest"] for seed in (1, 2)]
    check.expect(
        f"cycle {number}: the graph replays to the same result", digests == before["digests"]
    )

    # Rate the copied bytes only: discarding takes almost no time.
    kept = before["verify"]["bytes"] if regions else (used - left) * MIB
    check.cycles.append(
        {
            "section": name,
            "cycle": number,
            "by": "the program" if own else "the shell",
            "used_before_mib": used,
            "used_paused_mib": left,
            "other_process_gib": options.other_gib if other is None else None,
            "kept_bytes": kept,
            "pause_s": pause_s,
            "resume_s": resume_s,
            "pause_gb_s": kept / pause_s / 1e9,
            "resume_gb_s": kept / resume_s / 1e9,
            "pause": told,
            "resume": resumed,
        }
    )
    check.say(
        f"  cycle {number}: pause {pause_s:.2f} s, {used} -> {left} MiB in use, "
        f"other process {'ok' if other is None else 'FAILED'}, resume {resume_s:.2f} s"
    )

def torch(check, regions=False):
    options = check.options
    script = HERE / ("torch_regions.py" if regions else "torch_program.py")
    program = check.start(
        sys.executable, script, "--gib", options.gib, managed=["--name", check.section]
    )
    ready = json.loads(program.hear(120))
    check.notes.append(f"{check.section}: torch {ready.get('torch')}")
    before = {
        "verify": program.ask_json("verify", 120),
        "addresses": program.ask_json("addresses"),
        "digests": [program.ask_json(f"replay {seed}")["digest"] for seed in (1, 2)],
    }
    again = [program.ask_json(f"replay {seed}")["digest"] for seed in (1, 2)]
    sound = before["verify"]["differing"] == [] and before["verify"]["checksums_equal"]
    sound = sound and before["verify"].get("kv", "filled") == "filled"
    check.expect("before: tensors as written", sound, json.dumps(before["verify"]))
    check.expect("before: the graph's result can be repeated", again == before["digests"])
    check.expect("before: the results hang on the input", len(set(again)) == 2)
    tags = check.expect_state(check.section, "before", paused=False)
    wanted = {"weights", "kv_cache"} if regions else {"default"}
    check.expect("before: the tags are there", wanted <= set(tags), json.dumps(tags))
    free = program.ask_json("memory")["free"]
    if options.other_gib * GIB > free:
        check.notes.append(
            f"{check.section}: {free / GIB:.1f} GiB are free before the pause, too few for the "
            f"other process's {options.other_gib} GiB"
        )
    for number in range(1, options.cycles + 1):
        torch_cycle(check, number, program, before, regions)
    with contextlib.suppress(BrokenPipeError):
        program.process.stdin.write("quit\n")
    check.expect("the program ends well", program.finish(60) == 0)
