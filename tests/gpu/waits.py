"""What a pause and a free wait for, on a real device: a stream that waits for a value, in the primary context and in another.

Run under `vramctl run`; needs no PyTorch. Prints a line `ok: …` or `FAILED: …` for each check.
"""

import ctypes
import sys
import threading
import time

from calls import cuda, hooked, must, pointer
from common import MIB, check, failures

BUSY = 8
BYTES = 64 * MIB

word = ctypes.c_uint32


def pause(milliseconds):
    return hooked.vramctl_pause(None, ctypes.c_int64(milliseconds), 0)


def busy_stream(gate, address):
    """A stream of the current context that waits for the gate, and then writes."""
    stream = pointer()
    must(cuda.cuStreamCreate(ctypes.byref(stream), 1))
    must(cuda.cuStreamWaitValue32_v2(stream, pointer(gate), word(1), 0))
    must(cuda.cuMemsetD8Async(pointer(address), ctypes.c_ubyte(0x5A), ctypes.c_size_t(BYTES), stream))
    return stream


def round_of(name):
    gate, address = pointer(), pointer()
    must(cuda.cuMemHostAlloc(ctypes.byref(gate), ctypes.c_size_t(4096), 0))
    value = word.from_address(gate.value)
    value.value = 0
    must(hooked.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(BYTES)))
    stream = busy_stream(gate.value, address.value)
    check(f"{name}: a pause waits for a stream that waits for a value", pause(300) == BUSY)
    timer = threading.Timer(0.3, lambda: setattr(value, "value", 1))
    timer.start()
    check(f"{name}: and is done when that has ended", pause(-1) == 0 and value.value == 1)
    check(f"{name}: resumed", hooked.vramctl_resume(None, ctypes.c_int64(0)) == 0)
    check(f"{name}: nothing was taken from under the work", cuda.cuStreamSynchronize(stream) == 0)
    found = (ctypes.c_ubyte * 4096)()
    must(cuda.cuMemcpyDtoH_v2(found, address, ctypes.c_size_t(4096)))
    check(f"{name}: what the work wrote is kept", bytes(found) == b"\x5a" * 4096)
    value.value = 0
    stream = busy_stream(gate.value, address.value)
    started = time.monotonic()
    must(hooked.cudaFreeAsync(address, stream))
    check(f"{name}: cudaFreeAsync does not wait", value.value == 0 and time.monotonic() - started < 5)
    value.value = 1
    check(f"{name}: and takes nothing from under the work", cuda.cuStreamSynchronize(stream) == 0)


must(hooked.cudaFree(None))
round_of("the primary context")

# Memory of the primary context, used in another one.
address, gate, other = pointer(), pointer(), pointer()
must(hooked.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(BYTES)))
must(cuda.cuMemHostAlloc(ctypes.byref(gate), ctypes.c_size_t(4096), 1))
value = word.from_address(gate.value)
value.value = 0
must(cuda.cuCtxCreate_v2(ctypes.byref(other), 0, 0))
must(hooked.cudaFree(None))
stream = busy_stream(gate.value, address.value)
check("another context: a pause waits for it", pause(300) == BUSY)
value.value = 1
check("another context: and is done when that has ended", pause(-1) == 0)
check("another context: nothing was taken from under the work", cuda.cuStreamSynchronize(stream) == 0)
must(hooked.vramctl_resume(None, ctypes.c_int64(0)))
# Its memory goes with it, without a call that frees it.
must(hooked.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(BYTES)))
must(cuda.cuCtxDestroy_v2(other))
check("a context that the program destroys is noticed", pause(-1) == 0)
check("and nothing of it comes back", hooked.vramctl_resume(None, ctypes.c_int64(0)) == 0)
sys.exit(bool(failures))
