"""A guard under paused memory, on a real device: work that uses the memory keeps its context, and the resume reports it.

Run under `vramctl run` with VRAMCTL_GUARD=1; needs no PyTorch. Prints a line `ok: …`, `FAILED: …` or `note: …` for each check.
"""

import ctypes
import json
import os
import subprocess
import sys

from calls import cuda, hooked, must, pointer, runtime, size
from common import GIB, MIB, check, failures

#: An illegal address, and a launch that failed because of one.
LOST = {"700", "719"}
DISCARD, HOST = 1, 2
KEPT = 64 * MIB


def allocated(tag, policy, amount):
    address = pointer()
    must(hooked.vramctl_region_begin(tag, policy))
    must(hooked.cudaMalloc(ctypes.byref(address), size(amount)))
    must(hooked.vramctl_region_end())
    return address


def reported():
    text = ctypes.create_string_buffer(1 << 16)
    must(hooked.vramctl_last_report_json(text, size(len(text)), None))
    return json.loads(text.value)


def writing(stream, places):
    """A graph that writes there whenever it is launched."""
    graph, executable = pointer(), pointer()
    must(cuda.cuStreamBeginCapture_v2(stream, 2))
    for address, amount in places:
        must(cuda.cuMemsetD8Async(pointer(address), ctypes.c_ubyte(0x5A), size(amount), stream))
    must(cuda.cuStreamEndCapture(stream, ctypes.byref(graph)))
    must(runtime.cudaGraphInstantiate(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)))
    return executable


def strayed(stream, graph):
    return cuda.cuGraphLaunch(graph, stream) or cuda.cuStreamSynchronize(stream)


must(hooked.cudaFree(None))
stream, free, total = pointer(), size(), size()
must(cuda.cuStreamCreate(ctypes.byref(stream), 1))
must(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
amount = min(32 * GIB, free.value // 2 // GIB * GIB)
large, kept = allocated(b"large", DISCARD, amount), allocated(b"kept", HOST, KEPT)
contents = bytes(range(256)) * (KEPT // 256)
must(cuda.cuMemcpyHtoD_v2(kept, contents, size(KEPT)))
graph = writing(stream, [(large.value + amount - MIB, MIB), (kept.value, MIB)])

if len(sys.argv) > 2:
    must(hooked.vramctl_pause(None, ctypes.c_int64(10_000), 0))
    print(strayed(stream, graph), flush=True)
    os._exit(0)
control = [sys.executable, __file__, sys.argv[1], "without"]
control = subprocess.run(control, env={**os.environ, "VRAMCTL_GUARD": "0"}, stdout=subprocess.PIPE, text=True, timeout=60)
check(f"without a guard, such work destroys the context: error {control.stdout.strip()}", control.stdout.strip() in LOST)

for _ in range(3):
    must(hooked.vramctl_pause(None, ctypes.c_int64(10_000), 0))
    pause = reported()
    check("all of it is guarded", pause["guarded_bytes"] == amount + KEPT)
    check("a graph that writes there runs", strayed(stream, graph) == 0)
    found = (ctypes.c_ubyte * MIB)()
    check("a copy from there succeeds", cuda.cuMemcpyDtoH_v2(found, kept, size(MIB)) == 0)
    must(hooked.vramctl_resume(None, ctypes.c_int64(0)))
    resume = reported()
    check("the resume tells of it", resume.get("guard_written_bytes", 0) >= MIB)
    found = ctypes.create_string_buffer(KEPT)
    check("the context lives", cuda.cuMemcpyDtoH_v2(found, kept, size(KEPT)) == 0)
    check("the contents are as before", found.raw == contents)
    print(
        f"note: a guard of {pause['guard_bytes'] / MIB:.0f} MiB under {(amount + KEPT) / GIB:.2f} GiB:"
        f" {pause['stages']['guard']:.1f} ms at the pause, {resume['stages']['guard']:.1f} ms at the resume",
        flush=True,
    )
must(hooked.vramctl_pause(None, ctypes.c_int64(10_000), 0))
must(hooked.vramctl_resume(None, ctypes.c_int64(0)))
check("without such work, the resume tells of none", "guard_written_bytes" not in reported())
check("a graph that writes to active memory still does", strayed(stream, graph) == 0)
must(cuda.cuMemcpyDtoH_v2(found, kept, size(MIB)))
check("where it should", found.raw[:MIB] == b"\x5a" * MIB)
sys.exit(bool(failures))
