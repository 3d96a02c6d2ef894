//! Programs that share memory by CUDA IPC, under the preloaded library on a simulated machine.

use super::machine::{Machine, Program};
use serde_json::{Value, json};
use std::process::Command;

/// What each process runs: it evaluates one expression per line.
pub const PROGRAM: &str = r#"
import ctypes, os, resource, signal, sys, threading
ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)
# The runtime loads the driver for itself alone.
ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
cuda = ctypes.CDLL(None)

class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]

def malloc(size):
    pointer = ctypes.c_void_p()
    code = cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size))
    return pointer.value if code == 0 else f"error {code}"

def free(pointer):
    return cuda.cudaFree(ctypes.c_void_p(pointer))

def get(pointer):
    handle = Handle()
    code = cuda.cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(pointer))
    return bytes(handle.bytes).hex() if code == 0 else f"error {code}"

def open_(text, flags=1):
    handle, pointer = Handle(), ctypes.c_void_p(0xdead)
    handle.bytes[:] = list(bytes.fromhex(text))
    code = cuda.cudaIpcOpenMemHandle(ctypes.byref(pointer), handle, flags)
    if code != 0:
        assert pointer.value == 0xdead
        return f"error {code}"
    return pointer.value

def close(pointer):
    return cuda.cudaIpcCloseMemHandle(ctypes.c_void_p(pointer))

def fill(pointer, value, size):
    # Another process must not read before it is done.
    return cuda.cudaMemset(ctypes.c_void_p(pointer), value, ctypes.c_size_t(size)) or cuda.cudaDeviceSynchronize()

def values(data):
    # Byte by byte, Python takes 60 ms for 2 MiB: a test with many reads would do nothing else.
    found = []
    while data:
        found.append(data[0])
        data = data.translate(None, data[:1])
    return sorted(found)

def read(pointer, size):
    data = (ctypes.c_ubyte * size)()
    code = cuda.cudaMemcpy(data, ctypes.c_void_p(pointer), ctypes.c_size_t(size), 2)
    return values(bytes(data)) if code == 0 else f"error {code}"

def queries(pointer):
    """What the driver says of a pointer: type, device, context or not, range, mapping, handle types, address range, and its handle."""
    def attribute(which, kind=ctypes.c_uint64):
        value = kind(77)
        code = cuda.cuPointerGetAttribute(ctypes.byref(value), which, ctypes.c_uint64(pointer))
        return f"error {code}" if code else value.value
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64()
    code = cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
    narrow = [attribute(which, ctypes.c_uint32) for which in (2, 9)]
    spans = [attribute(11) - pointer, attribute(12), attribute(19) - pointer, attribute(18)]
    kept = cuda.cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_void_p(pointer))
    return [*narrow, attribute(1) != 0, *spans, attribute(14), code, base.value - pointer, size.value, kept]

def fork(work):
    child = os.fork()
    if child == 0:
        os._exit(work() & 0x7f)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def start(work):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()
    def end():
        thread.join()
        return answers[0]
    return end

def with_descriptors(count, work):
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
    taken = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        pass
    for _ in range(count):
        os.close(taken.pop())
    answer = work()
    for descriptor in taken:
        os.close(descriptor)
    return answer

print("ready", flush=True)
for line in sys.stdin:
    print(eval(line), flush=True)
"#;

pub const MIB: u64 = 1 << 20;
/// The size of the library's pieces of physical memory in debug builds.
pub const PIECE: u64 = 32 * MIB;

impl Machine {
    /// Two GPUs of 512 MiB.
    pub fn pair() -> Self {
        Self::with(2, "512M")
    }

    /// Starts a process of [`PROGRAM`].
    pub fn python(&self, name: &str) -> Program {
        self.python_with(name, |_| ())
    }

    #[track_caller]
    pub fn python_with(&self, name: &str, change: impl FnOnce(&mut Command)) -> Program {
        let mut command = self.cli(&["run", "--name", name, "--", "python3", "-c", PROGRAM]);
        // Programs of one name belong together.
        change(command.env("VRAMCTL_JOB", format!("run-of-{name}")));
        Program::ready(&mut command)
    }

    /// An owner with 4 MiB, another process, the memory's address in the owner, and its handle.
    pub fn sharing(&self) -> (Program, Program, u64, String) {
        let (mut owner, other) = (self.python("owner"), self.python("other"));
        let pointer = owner.number(&format!("malloc({})", 4 * MIB));
        let handle = owner.ask(&format!("get({pointer})"));
        (owner, other, pointer, handle)
    }

    /// A pause that must be refused because another process has the memory open.
    #[track_caller]
    pub fn refused(&self, owner: &Program, by: &Program) {
        let ran = self.vramctl(&format!("pause --pid {}", owner.pid())).expect(5, "", &format!("pid {} (python3", by.pid()));
        ran.has(5, "", "default");
    }

    /// The answer to one request.
    pub fn answer(&self, process: &Program, request: &Value) -> Value {
        self.connect(process).ask(request)
    }

    /// What a client sends for one process of several.
    pub fn request(&self, process: &Program, verb: &str, partners: &[&Program]) -> Value {
        let mut request = json!({ "request": verb });
        if verb == "pause" {
            request["partners"] = partners.iter().map(|partner| partner.pid()).collect();
            request["hold_ms"] = 60_000.into();
        }
        self.answer(process, &request)
    }

    pub fn both(&self, verb: &str, one: &Program, two: &Program) {
        for (process, partner) in [(one, two), (two, one)] {
            let answer = self.request(process, verb, &[partner]);
            assert_eq!(answer["reply"], "done", "{verb}: {answer}");
        }
    }

    pub fn is_held(&self, process: &Program) -> bool {
        self.request(process, "status", &[])["held"] == true
    }

    /// Waits until a process continues by itself.
    #[track_caller]
    pub fn goes_on(&self, process: &Program) {
        super::eventually("it goes on", || !self.is_held(process));
    }
}
