//! Programs that share memory by CUDA IPC, under the preloaded library on a simulated machine.

use super::machine::Wire;
use super::{artifacts, simulated_libraries};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

/// What each process runs: it evaluates one expression per line.
pub const PROGRAM: &str = r#"
import ctypes, os, resource, signal, sys, threading
ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)
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

pub struct Machine(pub tempfile::TempDir);

impl Machine {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("gpu")).unwrap();
        Self(folder)
    }

    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .env_remove("LD_PRELOAD")
            .env("LD_LIBRARY_PATH", simulated_libraries())
            .env("SIMGPU_DIR", self.0.path().join("gpu"))
            .env("SIMGPU_MEMORY", "512M")
            .env("SIMGPU_DEVICES", "2")
            .env("VRAMCTL_DIR", self.0.path().join("sockets"))
            .env("VRAMCTL_LIB", artifacts().join("libvramctl.so"));
        command
    }

    pub fn start(&self, name: &str) -> Program {
        self.start_with(name, |_| ())
    }

    /// An owner with 4 MiB, another process, the memory's address in the owner, and its handle.
    pub fn sharing(&self) -> (Program, Program, u64, String) {
        let (mut owner, other) = (self.start("owner"), self.start("other"));
        let pointer = owner.number(&format!("malloc({})", 4 * MIB));
        let handle = owner.ask(&format!("get({pointer})"));
        (owner, other, pointer, handle)
    }

    pub fn start_with(&self, name: &str, change: impl FnOnce(&mut Command)) -> Program {
        let mut command = self.command(super::command_line());
        // Programs of one name belong together.
        command.env("VRAMCTL_JOB", format!("run-of-{name}")).args(["run", "--name", name, "--", "python3", "-c", PROGRAM]);
        change(&mut command);
        Program::spawn(&mut command)
    }

    pub fn ask(&self, arguments: &[&str]) -> Output {
        self.command(super::command_line()).args(arguments).output().unwrap()
    }

    pub fn done(&self, arguments: &[&str]) -> String {
        let output = self.ask(arguments);
        let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "vramctl {arguments:?}: {text}");
        text
    }

    /// A pause that must be refused because another process has the memory open.
    pub fn refused(&self, target: &str, by: &Program) {
        let output = self.ask(&["pause", "--pid", target]);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(5), "{text}");
        assert!(text.contains(&format!("pid {} (python3", by.child.id())) && text.contains("default"), "{text}");
    }

    pub fn used(&self) -> u64 {
        let output = self.command(artifacts().join("simgpu-smi")).arg("--json").output().unwrap();
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["devices"][0]["used"].as_u64().unwrap()
    }
}

pub struct Program {
    pub child: Child,
    pub output: BufReader<ChildStdout>,
}

impl Program {
    pub fn spawn(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut program = Self { child, output };
        assert_eq!(program.line(), "ready");
        program
    }

    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    pub fn ask(&mut self, expression: &str) -> String {
        writeln!(self.child.stdin.as_mut().unwrap(), "{expression}").unwrap();
        self.line()
    }

    pub fn number(&mut self, expression: &str) -> u64 {
        let answer = self.ask(expression);
        answer.parse().unwrap_or_else(|_| panic!("{expression}: {answer}"))
    }

    pub fn pid(&self) -> String {
        self.child.id().to_string()
    }

    pub fn end(mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().unwrap().success());
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Machine {
    fn connect(&self, process: &Program) -> UnixStream {
        UnixStream::connect(self.0.path().join("sockets").join(format!("{}.sock", process.pid()))).unwrap()
    }

    /// What a client sends for one process of several.
    pub fn request(&self, process: &Program, verb: &str, partners: &[&Program]) -> Value {
        let partners: Vec<_> = partners.iter().map(|partner| partner.child.id()).collect();
        let hold = if verb == "pause" { 60_000 } else { 0 };
        let mut request = serde_json::json!({ "version": 1, "request": verb, "partners": partners });
        if hold > 0 {
            request["hold_ms"] = hold.into();
        }
        self.answer(process, &request)
    }

    /// The answer to one request.
    pub fn answer(&self, process: &Program, request: &Value) -> Value {
        let mut socket = self.connect(process);
        writeln!(socket, "{request}").unwrap();
        let mut line = String::new();
        BufReader::new(socket).read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    /// A connection for requests that follow each other.
    pub fn wire(&self, process: &Program) -> Wire {
        Wire(BufReader::new(self.connect(process)))
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
