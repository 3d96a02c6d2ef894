//! Memory that several processes use. The codes are those of driver 580 on an H200.

// Every call here is a foreign function, with pointers to the test's own variables.
#![allow(clippy::undocumented_unsafe_blocks)]

#[macro_use]
mod common;
use common::{Access, Gpu, Ipc, MIB2, Prop, Scratch, command, isolated, on_gpu, prop};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};

const FILE: u32 = 1;
const LAZY: u32 = 1;

fn typed(kinds: u32) -> Prop {
    Prop { handle_types: kinds, ..prop(0) }
}

impl Gpu {
    fn create_shareable(&self, bytes: usize) -> u64 {
        let gpu = self;
        let mut handle = 0;
        ok!(gpu.cuMemCreate(&raw mut handle, bytes, &typed(FILE), 0));
        handle
    }

    fn map_at_new(&self, handle: u64, bytes: usize) -> u64 {
        let gpu = self;
        let pointer = self.reserve(bytes);
        ok!(gpu.cuMemMap(pointer, bytes, 0, handle, 0));
        self.access(pointer, bytes, 3);
        pointer
    }

    fn export(&self, handle: u64) -> i32 {
        let gpu = self;
        let mut file = -1;
        ok!(gpu.cuMemExportToShareableHandle(&raw mut file, handle, FILE, 0));
        file
    }

    fn unmap(&self, pointer: u64, bytes: usize) {
        let gpu = self;
        ok!(gpu.cuMemUnmap(pointer, bytes));
        ok!(gpu.cuMemAddressFree(pointer, bytes));
    }

    fn ipc(&self, pointer: u64) -> Ipc {
        let gpu = self;
        let mut handle = [0; 64];
        ok!(gpu.cuIpcGetMemHandle(&raw mut handle, pointer));
        Ipc(handle)
    }

    fn open(&self, handle: Ipc) -> Result<u64, u32> {
        let mut pointer = 0xdead;
        match unsafe { (self.cuIpcOpenMemHandle_v2)(&raw mut pointer, handle, LAZY) } {
            0 => Ok(pointer),
            code => {
                assert_eq!(pointer, 0xdead);
                Err(code)
            }
        }
    }

    /// Bytes of the device in use by all processes.
    fn used_by_all(&self) -> usize {
        let gpu = self;
        let (mut free, mut total) = (0, 0);
        ok!(gpu.cuMemGetInfo_v2(&raw mut free, &raw mut total));
        total - free
    }
}

fn hex(handle: Ipc) -> String {
    use std::fmt::Write as _;
    handle.0.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn unhex(text: &str) -> Ipc {
    Ipc(std::array::from_fn(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap()))
}

/// Another process on the same machine. It answers one line at a time.
struct Other(Child, BufReader<std::process::ChildStdout>);

impl Other {
    /// The number under which it gets a descriptor.
    const GIVEN: i32 = 77;

    fn start(directory: &str, give: Option<i32>) -> Self {
        let mut command = command("answers_another_process", &[("SIMGPU_DIR", directory), ("SIMGPU_MEMORY", "64M")]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some(file) = give {
            unsafe {
                command.pre_exec(move || if libc::dup2(file, Self::GIVEN) < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) });
            }
        }
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self(child, output)
    }

    fn ask(&mut self, request: &str) -> String {
        writeln!(self.0.stdin.as_mut().unwrap(), "{request}").unwrap();
        let answer = |line: std::io::Result<String>| line.unwrap().split_once("answer ").map(|(_, answer)| answer.to_owned());
        (&mut self.1).lines().find_map(answer).expect("an answer")
    }

    fn number(&mut self, request: &str) -> u64 {
        self.ask(request).parse().unwrap()
    }

    fn end(mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().unwrap().success());
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Not a test: the other process.
#[test]
#[ignore = "part of another test"]
fn answers_another_process() {
    if std::env::var_os("SIMGPU_DIR").is_none() {
        return;
    }
    let gpu = Gpu::start();
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<_> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        let answer = match words[0] {
            "import" => {
                let mut handle = 0xdead;
                let code = unsafe { (gpu.cuMemImportFromShareableHandle)(&raw mut handle, Other::GIVEN as usize, FILE) };
                if code == 0 { handle } else { u64::from(code) }
            }
            "map" => gpu.map_at_new(number(1), number(2) as usize),
            "unmap" => {
                gpu.unmap(number(1), number(2) as usize);
                0
            }
            "release" => u64::from(unsafe { (gpu.cuMemRelease)(number(1)) }),
            // A memset does not wait, and another process does not wait for it.
            "fill" => u64::from(unsafe { (gpu.cuMemsetD8_v2)(number(1), number(2) as u8, MIB2).max((gpu.cuCtxSynchronize)()) }),
            "read" => u64::from(gpu.download(number(1), MIB2)[MIB2 - 1]),
            "alloc" => gpu.alloc(number(1) as usize),
            "free" => u64::from(unsafe { (gpu.cuMemFree_v2)(number(1)) }),
            "open" => match gpu.open(unhex(words[1])) {
                Ok(pointer) => pointer,
                Err(code) => u64::from(code),
            },
            "close" => u64::from(unsafe { (gpu.cuIpcCloseMemHandle)(number(1)) }),
            "get" => {
                println!("answer {}", hex(gpu.ipc(number(1))));
                continue;
            }
            "get-fails" => u64::from(unsafe { (gpu.cuIpcGetMemHandle)(&mut [0; 64], number(1)) }),
            other => panic!("{other}"),
        };
        println!("answer {answer}");
    }
}

/// Runs a test's body on a machine that others can join.
fn on_a_machine(test: &str, body: fn()) {
    if std::env::var_os("SIMGPU_DIR").is_some() {
        return body();
    }
    let scratch = Scratch::new(test);
    isolated(test, &[("SIMGPU_DIR", scratch.text()), ("SIMGPU_MEMORY", "64M")], body);
}

fn directory() -> String {
    std::env::var("SIMGPU_DIR").unwrap()
}

#[test]
fn only_exportable_memory_is_exported_and_imported() {
    on_gpu("only_exportable_memory_is_exported_and_imported", &[], |gpu| {
        let (mut supported, mut handle, mut file) = (0, 0, 0);
        ok!(gpu.cuDeviceGetAttribute(&raw mut supported, 103, 0));
        assert_eq!(supported, 1);
        for (kinds, code) in [(2, 1), (4, 1), (3, 1), (8, 800), (9, 800)] {
            fails!(code, gpu.cuMemCreate(&raw mut handle, MIB2, &typed(kinds), 0));
        }
        let (plain, shareable) = (gpu.create(MIB2), gpu.create_shareable(MIB2));
        fails!(1, gpu.cuMemExportToShareableHandle(&raw mut file, plain, FILE, 0));
        fails!(1, gpu.cuMemExportToShareableHandle(&raw mut file, 0x1234, FILE, 0));
        for (kind, flags) in [(0, 0), (2, 0), (FILE, 1)] {
            fails!(1, gpu.cuMemExportToShareableHandle(&raw mut file, shareable, kind, flags));
        }
        let exported = gpu.export(shareable);
        assert_eq!(unsafe { libc::fcntl(exported, libc::F_GETFD) }, libc::FD_CLOEXEC);

        let foreign = File::open("/dev/null").unwrap();
        for descriptor in [foreign.as_raw_fd() as usize, 999, usize::MAX] {
            fails!(999, gpu.cuMemImportFromShareableHandle(&raw mut handle, descriptor, FILE));
        }
        fails!(1, gpu.cuMemImportFromShareableHandle(&raw mut handle, exported as usize, 0));
        ok!(gpu.cuMemImportFromShareableHandle(&raw mut handle, exported as usize, FILE));
        assert_ne!(handle, shareable);
        let mut found = prop(1);
        ok!(gpu.cuMemGetAllocationPropertiesFromHandle(&raw mut found, handle));
        assert_eq!((found.kind, found.handle_types, found.location, found.flags), (1, 0, [1, 0], [0; 8]));
        fails!(1, gpu.cuMemExportToShareableHandle(&raw mut file, handle, FILE, 0));

        // The descriptor alone keeps the contents.
        let (one, other) = (gpu.map_at_new(shareable, MIB2), gpu.map_at_new(handle, MIB2));
        fails!(1, gpu.cuIpcGetMemHandle(&mut [0; 64], one));
        ok!(gpu.cuMemsetD8_v2(one, 7, MIB2));
        ok!(gpu.cuCtxSynchronize());
        assert_eq!(gpu.download(other, MIB2), vec![7; MIB2]);
        assert_eq!(gpu.used(), 2 * MIB2 as u64);
        for (pointer, handle) in [(one, shareable), (other, handle)] {
            gpu.unmap(pointer, MIB2);
            ok!(gpu.cuMemRelease(handle));
        }
        assert_eq!(gpu.used(), MIB2 as u64);
        ok!(gpu.cuMemImportFromShareableHandle(&raw mut handle, exported as usize, FILE));
        assert_eq!(gpu.download(gpu.map_at_new(handle, MIB2), MIB2), vec![7; MIB2]);
        assert_eq!(gpu.used(), 2 * MIB2 as u64);
    });
}

#[test]
fn a_shareable_handle_is_the_same_memory_in_another_process() {
    on_a_machine("a_shareable_handle_is_the_same_memory_in_another_process", || {
        let gpu = Gpu::start();
        let handle = gpu.create_shareable(2 * MIB2);
        let pointer = gpu.map_at_new(handle, 2 * MIB2);
        ok!(gpu.cuMemsetD8_v2(pointer, 1, MIB2));
        ok!(gpu.cuCtxSynchronize());
        let file = gpu.export(handle);
        let mut other = Other::start(&directory(), Some(file));
        let (imported, again) = (other.number("import"), other.number("import"));
        assert_ne!(imported, again);
        let theirs = other.number(&format!("map {imported} {}", 2 * MIB2));
        assert_eq!(other.number(&format!("read {theirs}")), 1);
        assert_eq!(gpu.used_by_all(), 2 * MIB2);
        assert_eq!(other.ask(&format!("fill {theirs} 2")), "0");
        assert_eq!(gpu.download(pointer, MIB2), vec![2; MIB2]);

        // It lives as long as any process refers to it, in any way.
        assert_eq!((other.ask(&format!("release {again}")), other.ask(&format!("release {imported}"))), ("0".into(), "0".into()));
        gpu.unmap(pointer, 2 * MIB2);
        assert_eq!(gpu.used_by_all(), 2 * MIB2);
        ok!(gpu.cuMemRelease(handle));
        assert_eq!((gpu.used(), gpu.used_by_all()), (0, 2 * MIB2));
        let mut too_much = 0;
        fails!(2, gpu.cuMemCreate(&raw mut too_much, (64 << 20) - MIB2, &prop(0), 0));
        assert_eq!(other.number(&format!("read {theirs}")), 2);
        assert_eq!(other.ask(&format!("unmap {theirs} {}", 2 * MIB2)), "0");
        assert_eq!(gpu.used_by_all(), 0);
        other.end();
    });
}

/// Memory of the host that is made and passed like the device's, as NCCL's (`NCCL_CUMEM_HOST_ENABLE`). It takes nothing of a device, and the host uses it at
/// the same addresses.
#[test]
fn memory_of_the_host_is_created_and_passed_like_the_devices() {
    on_a_machine("memory_of_the_host_is_created_and_passed_like_the_devices", || {
        const NODE: [i32; 2] = [3, 0];
        let gpu = Gpu::start();
        let (mut handle, mut flags, mut granularity) = (0, 0, 0);
        let wanted = Prop { location: NODE, ..typed(FILE) };
        for (location, code) in [([3, 1], 1), ([2, 0], 801)] {
            fails!(code, gpu.cuMemCreate(&raw mut handle, MIB2, &Prop { location, ..typed(FILE) }, 0));
        }
        ok!(gpu.cuMemGetAllocationGranularity(&raw mut granularity, &raw const wanted, 1));
        ok!(gpu.cuMemCreate(&raw mut handle, granularity, &raw const wanted, 0));
        let mut found = prop(1);
        ok!(gpu.cuMemGetAllocationPropertiesFromHandle(&raw mut found, handle));
        assert_eq!((found.location, found.handle_types), (NODE, FILE));
        let pointer = gpu.map_at_new(handle, MIB2);
        ok!(gpu.cuMemGetAccess(&raw mut flags, &NODE, pointer));
        assert_eq!(flags, 0);
        ok!(gpu.cuMemSetAccess(pointer, MIB2, &Access { location: NODE, flags: 3 }, 1));
        ok!(gpu.cuMemGetAccess(&raw mut flags, &NODE, pointer));
        assert_eq!((flags, gpu.used_by_all()), (3, 0));

        let at = unsafe { std::slice::from_raw_parts_mut(pointer as *mut u8, MIB2) };
        assert!(at.iter().all(|byte| *byte == 0));
        at.fill(4);
        assert_eq!(gpu.download(pointer, MIB2), vec![4; MIB2]);
        let file = gpu.export(handle);
        let mut other = Other::start(&directory(), Some(file));
        let imported = other.number("import");
        let theirs = other.number(&format!("map {imported} {MIB2}"));
        assert_eq!(other.number(&format!("read {theirs}")), 4);
        assert_eq!(other.ask(&format!("fill {theirs} 5")), "0");
        assert!(at.iter().all(|byte| *byte == 5));
        assert_eq!((other.ask(&format!("unmap {theirs} {MIB2}")), other.ask(&format!("release {imported}"))), ("0".into(), "0".into()));
        gpu.unmap(pointer, MIB2);
        ok!(gpu.cuMemRelease(handle));

        // The device's memory is not for the host.
        let pointer = gpu.map_new(MIB2);
        fails!(801, gpu.cuMemSetAccess(pointer, MIB2, &Access { location: NODE, flags: 3 }, 1));
        other.end();
    });
}

#[test]
fn a_killed_process_releases_its_shared_memory() {
    on_a_machine("a_killed_process_releases_its_shared_memory", || {
        let gpu = Gpu::start();
        let handle = gpu.create_shareable(MIB2);
        let file = gpu.export(handle);
        let mut other = Other::start(&directory(), Some(file));
        other.number("import");
        ok!(gpu.cuMemRelease(handle));
        assert_eq!(gpu.used_by_all(), MIB2);
        other.kill();
        assert_eq!(gpu.used_by_all(), 0);

        let mut other = Other::start(&directory(), None);
        let theirs = other.number("alloc 4194304");
        assert_eq!(other.ask(&format!("fill {theirs} 5")), "0");
        let pointer = gpu.open(unhex(&other.ask(&format!("get {theirs}")))).unwrap();
        other.kill();
        assert_eq!((gpu.used(), gpu.used_by_all()), (0, 2 * MIB2));
        assert_eq!(gpu.download(pointer, MIB2), vec![5; MIB2]);
        ok!(gpu.cuIpcCloseMemHandle(pointer));
        assert_eq!(gpu.used_by_all(), 0);
    });
}

#[test]
fn plain_memory_is_opened_by_other_processes() {
    on_a_machine("plain_memory_is_opened_by_other_processes", || {
        let gpu = Gpu::start();
        let mut other = Other::start(&directory(), None);
        let pointer = gpu.alloc(2 * MIB2);
        ok!(gpu.cuMemsetD8_v2(pointer, 3, MIB2));
        ok!(gpu.cuCtxSynchronize());
        let handle = gpu.ipc(pointer);
        assert_eq!(gpu.ipc(pointer + 512), handle, "every address gives the handle of the allocation");
        assert_eq!(gpu.open(handle), Err(201), "not in the process itself");
        let open = format!("open {}", hex(handle));
        let theirs = other.number(&open);
        assert_eq!(other.number(&format!("read {theirs}")), 3);
        assert_eq!(other.ask(&format!("fill {theirs} 4")), "0");
        assert_eq!(gpu.download(pointer, MIB2), vec![4; MIB2]);
        assert_eq!(gpu.used_by_all(), 2 * MIB2);

        assert_eq!(other.number(&open), theirs, "the same address again");
        for wrong in [format!("close {}", theirs + 4096), format!("get-fails {theirs}"), format!("free {theirs}"), "close 0".into()] {
            assert_eq!(other.ask(&wrong), "1", "{wrong}");
        }
        let close = format!("close {theirs}");
        assert_eq!([other.ask(&close), other.ask(&close), other.ask(&close)], ["0", "0", "1"], "once per opening");

        // The memory outlives its owner's free.
        let theirs = other.number(&open);
        ok!(gpu.cuMemFree_v2(pointer));
        assert_eq!(other.number(&format!("read {theirs}")), 4);
        assert_eq!(gpu.used_by_all(), 2 * MIB2);
        assert_eq!(other.ask(&format!("close {theirs}")), "0");
        assert_eq!((gpu.used_by_all(), other.number(&open)), (0, 400));
        other.end();
    });
}

#[test]
fn stale_and_wrong_ipc_handles() {
    on_a_machine("stale_and_wrong_ipc_handles", || {
        let gpu = Gpu::start();
        let mut other = Other::start(&directory(), None);
        let theirs = other.number("alloc 4096");
        let handle = unhex(&other.ask(&format!("get {theirs}")));
        let mut pointer = 0;
        for flags in [0, 2] {
            fails!(1, gpu.cuIpcOpenMemHandle_v2(&raw mut pointer, handle, flags));
        }
        assert_eq!((gpu.open(Ipc([0; 64])), gpu.open(Ipc([255; 64]))), (Err(1), Err(1)));
        other.kill();
        assert_eq!(gpu.open(handle), Err(400), "of a dead process");
        fails!(1, gpu.cuIpcCloseMemHandle(0x1234));
    });
}
