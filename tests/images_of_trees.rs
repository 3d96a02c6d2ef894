//! Images of programs of several processes, on a simulated machine, by the real CRIU. As `tests/images.rs`, which has those of one process.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

mod common;

use common::images::{Images, OwnSharedMemory, in_own_session, without_inherited};
use common::machine::{Machine, Program, Ran};
use common::sharing::{self, MIB};
use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::Duration;

/// The first process: it starts others, passes lines on to those that it is told, and evaluates all other lines itself.
const FIRST: &str = r#"
import ctypes, mmap, os, socket, subprocess, sys, threading
cuda = ctypes.CDLL("libcuda.so.1")
nvml = ctypes.CDLL("libnvidia-ml.so.1")
children, kept = {}, {}

def start(name, program):
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    children[name] = child
    return child.stdout.readline().strip()

def ask(name, line):
    children[name].stdin.write(line + "\n")
    children[name].stdin.flush()
    return children[name].stdout.readline().strip()

def attempt(work):
    try:
        return work()
    except OSError as error:
        return f"error {error.errno}"

def keep(name, value):
    kept[name] = value
    return "kept"

def devices():
    count = ctypes.c_int()
    return cuda.cuDeviceGetCount(ctypes.byref(count)) or count.value

def cards():
    count = ctypes.c_uint()
    return nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) or count.value

def serve(listener):
    """A server that evaluates what it is sent."""
    def converse(connection):
        with connection, connection.makefile("rw") as lines:
            for line in lines:
                lines.write(f"{eval(line)}\n")
                lines.flush()
    def accept():
        while True:
            threading.Thread(target=converse, args=(listener.accept()[0],), daemon=True).start()
    threading.Thread(target=accept, daemon=True).start()

def fork():
    """A forked child, with which this process shares memory and two pipes."""
    shared = mmap.mmap(-1, 4096)
    here, there = os.pipe(), os.pipe()
    kept["child"] = os.fork()
    if kept["child"] == 0:
        # It ends when its parent has.
        os.close(here[1])
        while os.read(here[0], 1):
            shared[0] += 1
            os.write(there[1], b".")
        os._exit(0)
    def step():
        os.write(here[1], b".")
        os.read(there[0], 1)
        return shared[0]
    return step

def main():
    print("ready", flush=True)
    for line in sys.stdin:
        name, _, rest = line.strip().partition(" ")
        print(ask(name, rest) if name in children else eval(line), flush=True)
    # A server needs no input.
    if "server" in kept:
        threading.Event().wait()
    for child in children.values():
        child.stdin.close()
        child.wait()
if __name__ == "__main__" and "IS_CHILD" not in os.environ:
    main()
"#;

/// A child with what [`FIRST`] has.
const CHILD: &str = "exec(__import__('os').environ['FIRST'], globals()); main()";

impl Images {
    /// Starts such a program, which is ready.
    #[track_caller]
    fn program(&self, name: &str) -> Program {
        let mut command = self.cli(&format!("run --name {name} --no-python -- python3 -c"));
        command.arg("import os; exec(os.environ['FIRST'], globals()); main()");
        command.env("FIRST", FIRST).env("CHILD", CHILD).env("RANK", sharing::PROGRAM).env("IS_CHILD", "1");
        in_own_session(without_inherited(command.env("SIMGPU_RESTORE_THREAD", "1")));
        Program::ready(&mut command)
    }
}

fn machine() -> Machine {
    Machine { context_bytes: 1 << 20, ..Machine::with(2, "512M") }
}

#[track_caller]
fn says(program: &mut Program, line: &str, answer: &str) {
    assert_eq!(program.ask(line), answer, "{line}");
}

/// What a server is: a front end that has the driver open, an engine, a monitor, a helper and its fork. Each is connected to another.
#[track_caller]
fn start_five(images: &Images) -> (Program, u64) {
    let mut program = images.program("server");
    says(&mut program, "cuda.cuInit(0)", "0");
    says(&mut program, "start('engine', os.environ['RANK'])", "ready");
    let memory = program.number(&format!("engine malloc({})", 24 * MIB));
    says(&mut program, &format!("engine fill({memory}, 7, {})", 24 * MIB), "0");
    // It has a title over its environment, as setproctitle writes it: only the others say now which run they are of.
    let environment = "map(int, open('/proc/self/stat').read().rsplit(')')[1].split()[47:49])";
    says(&mut program, &format!("engine (lambda at, end: __import__('ctypes').memset(at, 0, end - at) > 0)(*{environment})"), "True");
    for name in ["monitor", "helper"] {
        says(&mut program, &format!("start('{name}', os.environ['CHILD'])"), "ready");
    }
    says(&mut program, "monitor nvml.nvmlInit_v2()", "0");
    says(&mut program, "helper keep('step', fork())", "kept");
    says(&mut program, "helper kept['step']()", "1");
    let port = program.number("keep('listener', socket.create_server(('127.0.0.1', 0))) and kept['listener'].getsockname()[1]");
    let connect = format!("engine globals().update(link=__import__('socket').create_connection(('127.0.0.1', {port})))");
    says(&mut program, &connect, "None");
    says(&mut program, "keep('link', kept['listener'].accept()[0])", "kept");
    says(&mut program, "kept['link'].send(b'before')", "6");
    // Another one of it may run here.
    says(&mut program, "kept['listener'].close()", "None");
    (program, memory)
}

/// All five work, and are connected as before. `steps`: how often this has been called.
#[track_caller]
fn all_five_work(program: &mut Program, memory: u64, steps: u32) {
    says(program, &format!("engine read({memory}, {})", 24 * MIB), "[7]");
    says(program, "devices()", "2");
    says(program, "monitor cards()", "2");
    says(program, "helper kept['step']()", &(steps + 1).to_string());
    says(program, "engine link.recv(6)", "b'before'");
    says(program, "kept['link'].send(b'before')", "6");
}

#[test]
fn a_program_of_five_kinds_of_processes_is_saved_and_loaded() {
    let Some(images) = Images::on(machine) else { return };
    let (mut program, memory) = start_five(&images);
    all_five_work(&mut program, memory, 1);
    images.vramctl(&format!("save server {} --keep", images.image("first"))).expect(0, "5 processes", "");
    all_five_work(&mut program, memory, 2);
    images.save("server", "second").expect(0, "5 processes", "");
    program.ended();
    assert_eq!(images.machine.gpus()[0].1, 0);
    let [mut one, mut other] = [("first", "e1", 2), ("second", "e2", 3)].map(|(image, name, steps)| {
        let mut loaded = images.load(image, name);
        all_five_work(&mut loaded, memory, steps);
        loaded
    });
    images.vramctl("status e2").expect(0, "", "");
    // Each is a program of its own.
    images.vramctl("pause e2").expect(0, "paused", "");
    all_five_work(&mut one, memory, 3);
    images.vramctl("resume e2").expect(0, "resumed", "");
    images.save("e2", "third").expect(0, "5 processes", "");
    other.ended();
    let mut again = images.load("third", "e3");
    all_five_work(&mut again, memory, 4);
    // They end with the first one.
    again.signal(libc::SIGTERM);
    assert_eq!(again.ended().code(), Some(128 + libc::SIGTERM));
    images.vramctl("status e3").expect(3, "", "e3");
    one.end();
}

#[test]
fn a_connection_to_outside_is_closed_in_the_image_alone() {
    let Some(images) = Images::on(machine) else { return };
    let (mut program, memory) = start_five(&images);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    says(&mut program, &format!("keep('out', socket.create_connection(('127.0.0.1', {})))", address.port()), "kept");
    let (mut outside, _) = listener.accept().unwrap();
    let saved = images.vramctl(&format!("save server {} --keep", images.image("image")));
    saved.expect(0, "5 processes", &format!("to {address}"));
    // The running one keeps it.
    says(&mut program, "kept['out'].send(b'still')", "5");
    let mut heard = [0; 5];
    std::io::Read::read_exact(&mut outside, &mut heard).unwrap();
    assert_eq!(&heard, b"still");
    all_five_work(&mut program, memory, 1);
    let mut loaded = images.load("image", "loaded");
    all_five_work(&mut loaded, memory, 1);
    says(&mut loaded, "attempt(lambda: kept['out'].recv(1))", &format!("error {}", libc::ENOTCONN));
    says(&mut loaded, "attempt(lambda: kept['out'].send(b'x'))", &format!("error {}", libc::EPIPE));
    loaded.end();
    program.end();
}

#[test]
fn a_forked_child_with_its_parents_driver_files_is_refused_by_name() {
    let Some(images) = Images::on(machine) else { return };
    let (mut program, memory) = start_five(&images);
    says(&mut program, "monitor keep('step', fork())", "kept");
    let refused = images.save("server", "image").expect(7, "", "nvidiactl of the process that it was forked from");
    assert!(refused.err.contains("spawn") && refused.err.contains("Nothing has changed"), "{refused:?}");
    all_five_work(&mut program, memory, 1);
    says(&mut program, "monitor kept['step']()", "1");
}

/// Two ranks that have each other's memory open.
#[track_caller]
fn start_ranks(images: &Images, name: &str) -> (Program, [u64; 4]) {
    let mut program = images.program(name);
    let own = ["one", "two"].map(|rank| {
        says(&mut program, &format!("start('{rank}', os.environ['RANK'])"), "ready");
        let memory = program.number(&format!("{rank} malloc({})", 8 * MIB));
        let handle = program.ask(&format!("{rank} get({memory})"));
        (memory, handle)
    });
    let theirs = [("one", &own[1].1), ("two", &own[0].1)].map(|(rank, handle)| program.number(&format!("{rank} open_('{handle}')")));
    says(&mut program, &format!("one fill({}, 1, {})", own[0].0, 8 * MIB), "0");
    says(&mut program, &format!("two fill({}, 2, {})", own[1].0, 8 * MIB), "0");
    (program, [own[0].0, own[1].0, theirs[0], theirs[1]])
}

/// Each sees its own memory and the other's, and what the other writes there.
#[track_caller]
fn both_see(program: &mut Program, [own_one, own_two, of_two, of_one]: [u64; 4], values: [u8; 2], next: [u8; 2]) {
    for (rank, address, value) in [("one", own_one, 0), ("two", of_one, 0), ("two", own_two, 1), ("one", of_two, 1)] {
        says(program, &format!("{rank} read({address}, {})", 8 * MIB), &format!("[{}]", values[value]));
    }
    says(program, &format!("two fill({of_one}, {}, {})", next[0], 8 * MIB), "0");
    says(program, &format!("one fill({of_two}, {}, {})", next[1], 8 * MIB), "0");
}

#[test]
fn two_ranks_with_each_others_memory_are_one_image() {
    let Some(images) = Images::on(machine) else { return };
    let (mut program, addresses) = start_ranks(&images, "job");
    both_see(&mut program, addresses, [1, 2], [3, 4]);
    images.vramctl(&format!("save job {} --keep", images.image("kept"))).expect(0, "3 processes", "");
    both_see(&mut program, addresses, [3, 4], [5, 6]);
    images.save("job", "image").expect(0, "3 processes", "");
    program.ended();
    let [mut one, mut other] = [("image", "copy1"), ("kept", "copy2")].map(|(image, name)| images.load(image, name));
    both_see(&mut one, addresses, [5, 6], [7, 8]);
    both_see(&mut other, addresses, [3, 4], [9, 10]);
    images.vramctl("suspend copy1").expect(0, "suspended", "");
    both_see(&mut other, addresses, [9, 10], [1, 2]);
    images.vramctl("resume copy1").expect(0, "resumed", "");
    both_see(&mut one, addresses, [7, 8], [1, 2]);
    images.save("copy1", "again").expect(0, "3 processes", "");
    one.ended();
    other.end();
    let mut again = images.load("again", "copy3");
    both_see(&mut again, addresses, [1, 2], [3, 4]);
    again.end();
}

/// Each rank sees a GPU of its own, the first process both, and a monitor asks NVML alone. They come back on each other's, also on another machine.
#[test]
fn a_job_of_two_gpus_is_loaded_with_its_gpus_exchanged() {
    let Some(mut images) = Images::on(machine) else { return };
    let mut program = images.program("job");
    says(&mut program, "cuda.cuInit(0)", "0");
    let memory = [("one", "0", 3), ("two", "1", 4)].map(|(rank, gpu, value)| {
        says(&mut program, &format!("os.environ.update(CUDA_VISIBLE_DEVICES='{gpu}')"), "None");
        says(&mut program, &format!("start('{rank}', os.environ['RANK'])"), "ready");
        let memory = program.number(&format!("{rank} malloc({})", 8 * MIB));
        says(&mut program, &format!("{rank} fill({memory}, {value}, {})", 8 * MIB), "0");
        memory
    });
    says(&mut program, "start('monitor', os.environ['CHILD'])", "ready");
    says(&mut program, "monitor nvml.nvmlInit_v2()", "0");
    let image = images.image("image");
    images.save("job", "image").expect(0, "4 processes", "");
    program.ended();
    images.vramctl(&format!("load {image} --gpus 1 --dry-run")).expect(2, "", "the program has 2 GPUs, and --gpus names 1");

    let comes_back = |images: &Images, uuids: [&str; 2]| {
        let mut loaded = Program::spawn(&mut images.cli(&format!("load {image} --gpus 1,0 --name job")));
        for (rank, memory, value) in [("one", memory[0], "[3]"), ("two", memory[1], "[4]")] {
            says(&mut loaded, &format!("{rank} read({memory}, {})", 8 * MIB), value);
        }
        for (rank, uuid) in ["one", "two"].iter().zip(uuids) {
            let ask = "(lambda uuid: cuda.cuDeviceGetUuid(uuid, 0) or 'GPU-' + uuid.raw[:4].hex())(ctypes.create_string_buffer(16))";
            says(&mut loaded, &format!("{rank} {ask}"), uuid);
        }
        says(&mut loaded, "devices()", "2");
        says(&mut loaded, "monitor cards()", "2");
        // The ranks' order may be any.
        assert_eq!(images.uuids("job").iter().collect::<BTreeSet<_>>(), uuids.map(str::to_owned).iter().collect());
        images.vramctl("suspend job").expect(0, "suspended", "");
        images.vramctl("resume job").expect(0, "resumed", "");
        says(&mut loaded, &format!("two read({}, {})", memory[1], 8 * MIB), "[4]");
        loaded.end();
    };
    comes_back(&images, ["GPU-73696d76", "GPU-73696d75"]);
    common::eventually("all have ended", || images.machine.gpus().iter().all(|gpu| gpu.1 == 0));
    images.machine.becomes(2, 7, 0);
    comes_back(&images, ["GPU-73697476", "GPU-73697475"]);
}

/// What they have of each other goes along.
#[test]
fn ranks_with_each_others_memory_are_loaded_on_another_gpu() {
    let Some(images) = Images::on(machine) else { return };
    let (mut program, addresses) = start_ranks(&images, "job");
    images.save("job", "image").expect(0, "3 processes", "");
    program.ended();
    let mut loaded = Program::spawn(&mut images.cli(&format!("load {} --gpus 1,0 --name job", images.image("image"))));
    both_see(&mut loaded, addresses, [1, 2], [3, 4]);
    let used = images.machine.gpus();
    assert!(used[0].0 < 16 * MIB && used[1].0 >= 16 * MIB, "{used:?}");
    loaded.end();
}

#[test]
fn ranks_that_were_started_separately_are_refused() {
    let Some(images) = Images::on(machine) else { return };
    let mut ranks = [1, 2].map(|_| images.machine.engine_with("job", |command| _ = command.env("VRAMCTL_JOB", "one")));
    let refused: Ran = images.save("job", "image").expect(7, "", "have been started separately");
    assert!(refused.err.contains("one `vramctl run`") && refused.err.contains("Ray"), "{refused:?}");
    ranks.iter_mut().for_each(Program::verify);
}

#[test]
fn a_command_may_be_killed_at_each_step_of_the_driver() {
    let Some(images) = Images::on(machine) else { return };
    let (mut program, memory) = start_five(&images);
    let mut steps = 1;
    // The front end, the engine and the monitor.
    let calls = ["Lock", "Checkpoint"].into_iter().flat_map(|call| (1..=3).map(move |nth| (call, nth)));
    for (call, nth) in calls {
        let fault = format!("cuCheckpointProcess{call}:{nth}:kill-after");
        let mut save = images.cli(&format!("save server {}", images.image("image")));
        let saved = Ran::of(save.env("SIMGPU_FAIL", &fault));
        assert_eq!(saved.code, None, "{fault}: the command was not killed: {saved:?}");
        // This does not reach those without memory: a child of the command has freed them.
        images.vramctl("resume server").expect(0, "", "");
        all_five_work(&mut program, memory, steps);
        steps += 1;
    }
    images.save("server", "image").expect(0, "5 processes", "");
    program.ended();
    all_five_work(&mut images.load("image", "loaded"), memory, steps);
}

#[test]
fn a_command_may_be_killed_at_any_time() {
    let Some(images) = Images::on(machine) else { return };
    let (mut program, memory) = start_five(&images);
    for round in 1..12_u32 {
        let mut save = images.cli(&format!("save server {} --keep", images.image("image")));
        let mut save = save.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        thread::sleep(Duration::from_millis(u64::from(round) * 60));
        let _ = save.kill();
        save.wait().unwrap();
        images.vramctl("resume server").expect(0, "", "");
        all_five_work(&mut program, memory, round);
        if Path::new(&images.image("image")).join("manifest.json").exists() {
            break;
        }
    }
    program.end();
}

/// What kinds there are, with the expression that is each one's id.
const MEMBERS: [(&str, &str); 5] = [
    ("first", "os.getpid()"),
    ("engine", "children['engine'].pid"),
    ("monitor", "children['monitor'].pid"),
    ("helper", "children['helper'].pid"),
    ("fork", "helper kept['child']"),
];

/// All of the five work that do not need what has ended.
#[track_caller]
fn others_work(program: &mut Program, memory: u64, dead: &str) {
    says(program, "devices()", "2");
    if dead != "engine" {
        says(program, &format!("engine read({memory}, {})", 24 * MIB), "[7]");
        says(program, "engine link.recv(6)", "b'before'");
        says(program, "kept['link'].send(b'before')", "6");
    }
    if dead != "monitor" {
        says(program, "monitor cards()", "2");
    }
    match dead {
        "helper" => (),
        "fork" => says(program, "helper 1 + 1", "2"),
        _ => says(program, "helper kept['step']()", "2"),
    }
}

/// What is killed is the program's loss; what is left of it goes on, and an image is whole or is not there.
#[test]
fn any_process_may_be_killed_before_and_after_a_dump() {
    let Some(images) = Images::on(machine) else { return };
    let cases = [
        ("dump-before", "", &["first", "engine", "monitor", "helper", "fork"][..]),
        ("dump-after", "", &["first", "engine", "helper"][..]),
        ("dump-after", " --keep", &["engine"][..]),
    ];
    for (at, keeps, victims) in cases {
        for (victim, id) in MEMBERS.into_iter().filter(|(victim, _)| victims.contains(victim)) {
            let about = format!("{victim} {at}{keeps}");
            let (mut program, memory) = start_five(&images);
            let pid = program.ask(id);
            let mut save = images.cli(&format!("save server {}{keeps}", images.image("image")));
            let saved = Ran::of(images.killing(at, &pid, &mut save));
            assert_eq!(saved.code == Some(0), images.has_image(), "{about}: {saved:?}");
            // Without the first, there is no program; without the engine, no server.
            let is_lost = victim == "first" || victim == "engine" && at == "dump-before";
            assert_eq!(saved.code != Some(0), is_lost, "{about}: {saved:?}");
            if victim == "first" {
                assert!(saved.err.contains("The program has ended"), "{about}: {saved:?}");
            } else if is_lost || !keeps.is_empty() {
                others_work(&mut program, memory, victim);
                program.kill();
            }
            images.nothing_is_left(&about);
            if images.has_image() {
                let mut loaded = images.load("image", "loaded");
                // A process that came of it is another's by then, so CRIU has run again.
                let was_there = at == "dump-after" && victim != "helper";
                others_work(&mut loaded, memory, if was_there { "" } else { victim });
                loaded.end();
                let folder = images.machine.folder.path().join("images");
                images.vramctl(&format!("images {} rm image", folder.display())).expect(0, "removed", "");
            }
        }
    }
}

/// A load ends with nothing left, or the program runs without what was killed.
#[test]
fn any_process_and_criu_may_be_killed_in_a_load() {
    let Some(images) = Images::on(machine) else { return };
    let (mut program, memory) = start_five(&images);
    let ids: Vec<_> = MEMBERS.iter().map(|(victim, id)| (*victim, program.ask(id))).collect();
    images.save("server", "image").expect(0, "5 processes", "");
    program.ended();
    let load = || images.cli(&format!("load {} --name e --log /dev/null", images.image("image")));
    let fails = |at: &str, victim: &str| {
        let mut command = load();
        let load = images.killing(at, victim, &mut command).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut load = load.spawn().unwrap();
        // Without input, the program would end by itself.
        let _input = load.stdin.take();
        let ran = Ran::end_of(load);
        images.nothing_is_left(&format!("{victim} {at}: {ran:?}"));
        ran
    };
    for at in ["restore-before", "restore-after"] {
        fails(at, "criu").expect(1, "", "CRIU could not bring the process back");
    }
    for after in ["0.02", "0.05", "0.1"] {
        // It may have done all by then.
        let mut command = images.cli(&format!("load {} --name e", images.image("image")));
        let mut loaded = Program::spawn(images.killing("restore-during", after, &mut command));
        if loaded.ask_if_alive("devices()").is_some() {
            others_work(&mut loaded, memory, "");
            loaded.end();
        }
        images.nothing_is_left(after);
    }
    for (victim, id) in ids {
        match victim {
            "first" => {
                let failed = fails("restore-after", &id);
                // Whichever process is missed first.
                assert!(failed.code != Some(0) && failed.err.contains("has ended"), "{failed:?}");
            }
            "engine" => _ = fails("restore-after", &id).expect(3, "", "has ended meanwhile"),
            _ => {
                let mut command = images.cli(&format!("load {} --name e", images.image("image")));
                let mut loaded = Program::spawn(images.killing("restore-after", &id, &mut command));
                others_work(&mut loaded, memory, victim);
                loaded.end();
                images.nothing_is_left(victim);
            }
        }
    }
}

/// A program with workers as torch's data loaders have them, each with queues, a lock, a counter and shared memory: a forked one, from before CUDA was
/// used, and a spawned one, with the tracker that Python starts for it. Beside those it has shared memory without a name.
const LOADERS: &str = r#"
import ctypes, multiprocessing, sys
from multiprocessing import shared_memory

def work(name, tasks, results, lock, counter):
    # It ends with its parent.
    ctypes.CDLL(None).prctl(1, 9)
    shared = shared_memory.SharedMemory(name=name)
    for task in iter(tasks.get, None):
        with lock:
            counter.value += 1
            shared.buf[0] += 1
        results.put(task * task)
    shared.close()

def main():
    shared = shared_memory.SharedMemory(create=True, size=4096)
    unnamed = shared_memory.SharedMemory(create=True, size=3 << 20)
    unnamed.buf[:] = bytes([7]) * (3 << 20)
    unnamed.unlink()
    contexts = {"fork": "fork", "spawn": "spawn", "late": "spawn"}
    workers = {}

    def prepare(name):
        # The semaphores of forked ones have no name any more; those of spawned ones have, which is not that by which they were opened.
        context = multiprocessing.get_context(contexts[name])
        parts = context.Queue(), context.Queue(), context.Lock(), context.Value("i", 0)
        workers[name] = (context.Process(target=work, args=(shared.name, *parts)), *parts)

    def start(name):
        workers[name][0].start()
        return "started"

    def ask(name, task):
        worker, tasks, results, lock, counter = workers[name]
        tasks.put(task)
        result = results.get()
        # Once the program is back.
        assert cuda.cudaMemset(pointer, task, ctypes.c_size_t(4096)) == 0
        with lock:
            return result, counter.value, shared.buf[0], unnamed.buf[-1]

    prepare("fork")
    start("fork")
    cuda, pointer = ctypes.CDLL("libcudart.so.13"), ctypes.c_void_p()
    assert cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(4 << 20)) == 0
    prepare("spawn")
    start("spawn")
    prepare("late")
    print("ready", flush=True)
    for line in sys.stdin:
        print(eval(line), flush=True)
    for worker, tasks, *_ in workers.values():
        if worker.pid:
            tasks.put(None)
            worker.join()
    shared.close()
    shared.unlink()
    print("bye")

if __name__ == "__main__":
    main()
"#;

/// Whatever a save does and however it ends, `/dev/shm` has afterwards what it had before.
#[test]
fn workers_of_data_loaders_are_saved_again_and_again() {
    let Some(images) = Images::on(machine) else { return };
    let shared_memory = OwnSharedMemory::mount();
    let script = images.machine.folder.path().join("loaders.py");
    fs::write(&script, LOADERS).unwrap();
    let mut command = images.cli(&format!("run --name loaders --no-python -- python3 {}", script.display()));
    in_own_session(without_inherited(command.env("SIMGPU_RESTORE_THREAD", "1")));
    let mut program = Program::ready(&mut command);
    let both_work = |program: &mut Program, rounds: u64| {
        says(program, "ask('fork', 7)", &format!("(49, {rounds}, {}, 7)", 2 * rounds - 1));
        says(program, "ask('spawn', 8)", &format!("(64, {rounds}, {}, 7)", 2 * rounds));
    };
    both_work(&mut program, 1);
    let before = shared_memory.names();
    assert!(before.iter().any(|name| name.starts_with("sem.")) && before.iter().any(|name| name.starts_with("psm_")), "{before:?}");
    let is_as_before = |about: &str| assert_eq!(shared_memory.names(), before, "{about}");
    for round in 1..4 {
        images.vramctl(&format!("save loaders {} --keep", images.image(&format!("kept{round}")))).expect(0, "4 processes", "");
        is_as_before("kept");
        both_work(&mut program, round + 1);
    }
    // Whoever is killed, and what another CRIU has left.
    for (at, victim) in [("dump-before", "criu"), ("dump-after", "criu"), ("dump-after", "command")] {
        let mut save = images.cli(&format!("save loaders {}", images.image("killed")));
        let failed = Ran::of(images.killing(at, victim, &mut save));
        assert_ne!(failed.code, Some(0), "{failed:?}");
        if victim == "command" {
            images.vramctl("resume loaders").expect(0, "", "");
        }
        is_as_before(&format!("{victim} {at}"));
    }
    let strange: Vec<_> = (1..200).map(|number| shared_memory.folder().join(format!("link_remap.{number}"))).collect();
    for path in &strange {
        fs::write(path, "").unwrap();
    }
    let refused = images.save("loaders", "strange").expect(7, "", "link_remap.");
    assert!(refused.err.contains("The program goes on") && strange.iter().all(|path| path.exists()), "{refused:?}");
    for path in &strange {
        fs::remove_file(path).unwrap();
    }
    both_work(&mut program, 5);
    images.save("loaders", "image").expect(0, "4 processes", "");
    is_as_before("ended");
    program.ended();
    // What a killed program leaves, the next one does not need.
    for name in &before {
        fs::remove_file(shared_memory.folder().join(name)).unwrap();
    }
    // Carried elsewhere, where nothing is left of the others.
    let folder = images.machine.folder.path();
    let [own, elsewhere] = ["images", "elsewhere"].map(|name| folder.join(name).display().to_string());
    images.vramctl(&format!("images {own} export image {elsewhere}")).expect(0, "exported image", "");
    images.vramctl(&format!("images {own} rm image")).expect(0, "removed", "");
    let mut one = Program::spawn(&mut images.cli(&format!("load {elsewhere}/image --name one")));
    let mut other = images.load("kept3", "other");
    both_work(&mut one, 6);
    both_work(&mut other, 4);
    says(&mut one, "start('late')", "started");
    says(&mut one, "ask('late', 9)", "(81, 1, 13, 7)");
    one.end();
    for image in ["again1", "again2"] {
        images.vramctl(&format!("save other {} --keep", images.image(image))).expect(0, "4 processes", "");
    }
    both_work(&mut other, 5);
    images.save("other", "last").expect(0, "4 processes", "");
    other.ended();
    let mut last = images.load("last", "last");
    both_work(&mut last, 6);
    last.end();
    assert!(shared_memory.names().is_empty(), "a load has left {:?}", shared_memory.names());
    images.nothing_is_left("workers");
}

/// CRIU gives the same names for every program: of two saves at once, one waits. A file elsewhere that has lost its name is refused by that.
#[test]
fn files_that_have_lost_a_name_are_written_one_program_at_a_time() {
    let Some(images) = Images::on(machine) else { return };
    let shared_memory = OwnSharedMemory::mount();
    let open = |program: &mut Program, folder: &Path| {
        let [first, second] = ["first", "second"].map(|name| folder.join(format!("{name}-{}", program.pid())));
        says(program, &format!("keep('file', open('{}', 'w'))", first.display()), "kept");
        says(program, &format!("os.link('{0}', '{1}') or os.unlink('{0}')", first.display(), second.display()), "None");
    };
    let mut programs = ["one", "two"].map(|name| {
        let mut program = images.program(name);
        says(&mut program, "keep('cudart', ctypes.CDLL('libcudart.so.13'))", "kept");
        says(&mut program, "keep('memory', ctypes.c_void_p())", "kept");
        says(&mut program, "kept['cudart'].cudaMalloc(ctypes.byref(kept['memory']), ctypes.c_size_t(1 << 20))", "0");
        open(&mut program, shared_memory.folder());
        program
    });
    let before = shared_memory.names();
    let begin = |command: &mut Command| command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut command = images.cli(&format!("save one {} --keep", images.image("one")));
    let (held, command) = images.holding("dump-after", &mut command);
    let one = begin(command);
    held.is_reached();
    assert!(shared_memory.names().iter().any(|name| name.starts_with("link_remap.")));
    let two = begin(&mut images.cli(&format!("save two {}", images.image("two"))));
    let is_saved = |file: fs::DirEntry| file.file_name().to_str().unwrap().starts_with(&format!("{}-", programs[1].pid()));
    let marks = || fs::read_dir(images.machine.sockets()).unwrap().map(Result::unwrap);
    common::eventually("the second is being saved", || marks().any(is_saved));
    // By then, its CRIU would have failed.
    thread::sleep(Duration::from_millis(300));
    held.go();
    Ran::end_of(one).expect(0, "saved one", "");
    Ran::end_of(two).expect(0, "saved two", "");
    assert_eq!(shared_memory.names(), before);
    programs[1].ended();
    let mut loaded = images.load("two", "two");
    says(&mut loaded, "kept['file'].write('still') and kept['file'].flush()", "None");
    let paths = "[os.stat(p).st_size for p in os.scandir('/dev/shm') if p.is_file()]";
    says(&mut loaded, paths, "[5]");
    says(&mut loaded, "kept['cudart'].cudaMemset(kept['memory'], 1, ctypes.c_size_t(4096))", "0");
    loaded.end();
    open(&mut programs[0], images.machine.folder.path());
    let refused = images.save("one", "elsewhere").expect(7, "", "removed while the file has another name");
    assert!(refused.err.contains(&format!("first-{}", programs[0].pid())) && refused.err.contains("The program goes on"), "{refused:?}");
    let left = fs::read_dir(images.machine.folder.path()).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    assert!(left.into_iter().all(|name| !name.starts_with("link_remap.")) && shared_memory.names() == before);
}

/// What somebody has stopped goes on when that one says so, and not when a save has ended, however it has, or in a load.
#[test]
fn a_process_that_was_stopped_stays_so() {
    let Some(images) = Images::on(machine) else { return };
    let (mut program, memory) = start_five(&images);
    let helper = program.number("children['helper'].pid");
    let tell = |pid: u64, signal: i32| assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0);
    let is_stopped = |pid: u64| fs::read_to_string(format!("/proc/{pid}/status")).unwrap().contains("State:\tT");
    tell(helper, libc::SIGSTOP);
    common::eventually("it is stopped", || is_stopped(helper));
    images.vramctl(&format!("save server {} --keep", images.image("kept"))).expect(0, "5 processes", "");
    assert!(is_stopped(helper));
    let mut save = images.cli(&format!("save server {}", images.image("killed")));
    assert_eq!(Ran::of(images.killing("dump-after", "command", &mut save)).code, None);
    images.vramctl("resume server").expect(0, "", "");
    assert!(is_stopped(helper));
    tell(helper, libc::SIGCONT);
    all_five_work(&mut program, memory, 1);
    let mut loaded = images.load("kept", "loaded");
    says(&mut loaded, "devices()", "2");
    let status = images.vramctl("status loaded --json").expect(0, "", "").json();
    let engine = status["processes"][0]["pid"].as_u64().unwrap();
    let parent = |pid: u64| proc_field(pid, "PPid:");
    let folders = fs::read_dir("/proc").unwrap().flatten();
    let pids = folders.filter_map(|entry| entry.file_name().to_str()?.parse::<u64>().ok());
    let stopped: Vec<_> =
        pids.filter(|pid| parent(*pid) == parent(engine) && proc_field(*pid, "State:").is_some_and(|state| state == "T")).collect();
    assert_eq!(stopped.len(), 1, "{stopped:?}");
    tell(stopped[0], libc::SIGCONT);
    all_five_work(&mut loaded, memory, 1);
    loaded.end();
}

/// The first word of a line in `/proc/PID/status`.
fn proc_field(pid: u64, name: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next().map(str::to_owned)
}

/// Processes that come and go while a program is looked at are in nobody's way. There is an image, or at every attempt one had come or gone.
#[test]
fn a_program_that_starts_processes_all_the_time_is_saved_or_goes_on() {
    let Some(images) = Images::on(machine) else { return };
    let (mut program, memory) = start_five(&images);
    let start = "kept.__setitem__('goes', True) or threading.Thread(target=lambda: \
                 [subprocess.run(['true']) and __import__('time').sleep(0.01) for _ in iter(lambda: kept['goes'], False)]).start()";
    says(&mut program, start, "None");
    let saved = images.vramctl(&format!("save server {} --keep", images.image("image")));
    if saved.code != Some(0) {
        saved.expect(5, "", "at every attempt, a process had just started or ended").expect(5, "", "The program goes on");
    }
    says(&mut program, "keep('goes', False)", "kept");
    all_five_work(&mut program, memory, 1);
    program.end();
}

/// What would be in the way of a program is told before anything is started: its name, the address at which it listens, and room on each GPU.
#[test]
fn a_load_says_first_what_is_in_the_way_of_a_server() {
    let Some(images) = Images::on(machine) else { return };
    let mut program = images.program("server");
    says(&mut program, "keep('cudart', ctypes.CDLL('libcudart.so.13'))", "kept");
    says(&mut program, "keep('memory', ctypes.c_void_p())", "kept");
    for (device, mib) in [(0, 4), (1, 64)] {
        let allocate = format!("kept['cudart'].cudaMalloc(ctypes.byref(kept['memory']), ctypes.c_size_t({mib} << 20))");
        says(&mut program, &format!("kept['cudart'].cudaSetDevice({device}) or {allocate}"), "0");
    }
    let port = program.number("keep('listener', socket.create_server(('127.0.0.1', 0))) and kept['listener'].getsockname()[1]");
    images.vramctl(&format!("save server {} --keep", images.image("image"))).expect(0, "saved", "");
    let load = |more: &str| images.cli(&format!("load {}{more}", images.image("image")));
    let listens = format!("the program listens at 127.0.0.1:{port}");
    let dry = Ran::of(&mut load(" --dry-run")).expect(1, "", &listens);
    assert!(dry.err.contains("is called server"), "{dry:?}");
    Ran::of(&mut load("")).expect(1, "", "is called server");
    Ran::of(&mut load(" --name other")).expect(1, "", &listens);
    let new = free_ports(1);
    Ran::of(&mut load(&format!(" --name other --dry-run --port {port}={new}"))).expect(0, "can be loaded", "");
    let elsewhere = format!("the program listens at 127.0.0.1:{port}, and not at port 1, which is to be reached at 127.0.0.1:{new}");
    Ran::of(&mut load(&format!(" --name other --dry-run --port 1={new}"))).expect(0, "can be loaded", &elsewhere);
    program.end();
    let hog = images.machine.hog(1, 512 - 40);
    let short = Ran::of(&mut load(" --dry-run"));
    assert!(short.code != Some(0) && short.err.contains("too little memory on GPU 1"), "{short:?}");
    drop(hog);
    Ran::of(&mut load(" --dry-run")).expect(0, "can be loaded", "");
    // Of two at once, one is first.
    let mut first = load("");
    let (held, command) = images.holding("restore-before", &mut first);
    let mut loaded = Program::spawn(command);
    held.is_reached();
    Ran::of(&mut load("")).expect(5, "", "loads a program of the name server");
    held.go();
    says(&mut loaded, "kept['cudart'].cudaMemset(kept['memory'], 1, ctypes.c_size_t(4096))", "0");
    loaded.end();
    images.nothing_is_left("a server");
}

/// The first of several free ports, one after the other: of another range for each process, and below those that the system gives to whoever asks for
/// any port or connects, as others do before these are bound.
fn free_ports(count: u16) -> u16 {
    static TAKEN: AtomicU16 = AtomicU16::new(0);
    let range = 10_000 + (std::process::id() % 1000 * 20) as u16;
    loop {
        let first = range + TAKEN.fetch_add(count, Ordering::Relaxed);
        if (first..first + count).all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok()) {
            return first;
        }
    }
}

/// Saves the five as `image`, with a server among them. Returns its port, and where the memory of the engine is.
fn save_server(images: &Images) -> (u64, u64) {
    let (mut program, memory) = start_five(images);
    let port = program.number("keep('server', socket.create_server(('127.0.0.1', 0))) and kept['server'].getsockname()[1]");
    says(&mut program, "serve(kept['server'])", "None");
    images.save("server", "image").expect(0, "5 processes", "");
    program.ended();
    (port, memory)
}

/// Its processes without GPU memory say of the name that it had, in their environment.
#[test]
fn no_process_of_a_loaded_server_is_meant_by_its_old_name() {
    let Some(images) = Images::on(machine) else { return };
    let (port, _) = save_server(&images);
    let new = free_ports(1);
    images.vramctl(&format!("load {} --name other --detach --port {port}={new}", images.image("image"))).expect(0, "", "loaded other");
    let listed = images.vramctl("ps").expect(0, "other", "");
    assert!(!listed.out.contains("starting"), "{listed:?}");
    images.vramctl("stop server").expect(3, "", "no managed process is named server");
    for pid in images.processes() {
        unsafe { libc::kill(pid as i32, libc::SIGKILL) };
    }
    images.nothing_is_left("a server");
}

/// With `SO_REUSEPORT`, two programs could listen at one port, and each would get some of the requests: one is loaded there, whenever the other begins.
#[test]
fn a_port_that_could_be_shared_is_one_programs_alone() {
    let Some(images) = Images::on(machine) else { return };
    let (mut program, _) = start_five(&images);
    let listen = "keep('server', socket.create_server(('127.0.0.1', 0), reuse_port=True)) and kept['server'].getsockname()[1]";
    let port = program.number(listen);
    says(&mut program, "serve(kept['server'])", "None");
    images.vramctl(&format!("save server {} --keep", images.image("image"))).expect(0, "5 processes", "");
    // One that is loaded all the same is no end to wait for.
    let load = |name: &str| images.cli(&format!("load {} --name {name} --detach", images.image("image")));
    let listens = format!("the program listens at 127.0.0.1:{port}");
    Ran::of(&mut load("beside")).expect(1, "", &listens);
    program.signal(libc::SIGTERM);
    program.ended();
    common::eventually("all have ended", || images.processes().is_empty());

    let mut first = images.cli(&format!("load {} --name first", images.image("image")));
    let (held, first) = images.holding("restore-before", &mut first);
    let mut first = first.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    held.is_reached();
    Ran::of(&mut load("second")).expect(5, "", &format!("loads a program that listens at port {port}, too. Nothing was started"));
    held.go();
    common::eventually("it is loaded", || images.vramctl("status first").code == Some(0));
    common::eventually("it listens", || Ran::of(&mut load("third")).err.contains(&listens));
    assert_eq!(unsafe { libc::kill(first.id() as i32, libc::SIGTERM) }, 0);
    first.wait().unwrap();
    images.nothing_is_left("servers at one port");
}

/// The kernel keeps ends of connections for a minute. Those of a server that lets others listen there are in nobody's way, also after it was saved.
#[test]
fn a_server_is_loaded_right_after_it_has_ended() {
    let Some(images) = Images::on(machine) else { return };
    let mut program = images.program("server");
    says(&mut program, "keep('cudart', ctypes.CDLL('libcudart.so.13'))", "kept");
    says(&mut program, "keep('memory', ctypes.c_void_p())", "kept");
    says(&mut program, "kept['cudart'].cudaMalloc(ctypes.byref(kept['memory']), ctypes.c_size_t(4 << 20))", "0");
    // As torch's `TCPStore`: its own connection has an address of IPv4 at the other end.
    says(&mut program, "keep('listener', socket.create_server(('::', 0), family=socket.AF_INET6, dualstack_ipv6=True))", "kept");
    let port = program.number("kept['listener'].getsockname()[1]");
    says(&mut program, &format!("keep('to', socket.create_connection(('127.0.0.1', {port})))"), "kept");
    says(&mut program, "keep('by', kept['listener'].accept()[0])", "kept");
    let works = |program: &mut Program| {
        says(program, "kept['to'].send(b'hello')", "5");
        says(program, "kept['by'].recv(5)", "b'hello'");
        says(program, "kept['cudart'].cudaMemset(kept['memory'], 1, ctypes.c_size_t(4096))", "0");
        says(program, "kept['by'].getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)", "1");
    };
    works(&mut program);
    let ends = |mut program: Program| {
        // Whoever closes first is left behind.
        says(&mut program, "kept['by'].close()", "None");
        program.end();
        assert!(left_at(port), "the kernel keeps nothing");
    };
    images.vramctl(&format!("save server {} --keep", images.image("image"))).expect(0, "saved", "");
    works(&mut program);
    images.vramctl(&format!("save server {} --keep", images.image("again"))).expect(0, "saved", "");
    ends(program);
    for (image, name) in [("image", "first"), ("again", "second"), ("image", "third")] {
        images.vramctl(&format!("load {} --dry-run", images.image(image))).expect(0, "can be loaded", "");
        let mut loaded = images.load(image, name);
        works(&mut loaded);
        ends(loaded);
    }
    images.nothing_is_left("servers");
}

/// Whether the kernel keeps an end of a connection at a port (`TIME_WAIT`).
fn left_at(port: u64) -> bool {
    let text = ["tcp", "tcp6"].map(|table| fs::read_to_string(format!("/proc/net/{table}")).unwrap()).concat();
    let rows = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    rows.into_iter().any(|row| row[1].ends_with(&format!(":{port:04X}")) && row[3] == "06")
}

/// Where the program has not let others listen, a load waits until the kernel lets go of that.
#[test]
fn a_load_waits_for_what_is_left_at_its_port() {
    let Some(images) = Images::on(machine) else { return };
    let mut program = images.program("server");
    says(&mut program, "keep('cudart', ctypes.CDLL('libcudart.so.13'))", "kept");
    says(&mut program, "keep('memory', ctypes.c_void_p())", "kept");
    says(&mut program, "kept['cudart'].cudaMalloc(ctypes.byref(kept['memory']), ctypes.c_size_t(4 << 20))", "0");
    says(
        &mut program,
        "keep('listener', socket.socket()) and kept['listener'].bind(('127.0.0.1', 0)) or kept['listener'].listen()",
        "None",
    );
    let port = program.number("kept['listener'].getsockname()[1]");
    images.vramctl(&format!("save server {} --keep", images.image("image"))).expect(0, "saved", "");
    says(&mut program, &format!("keep('to', socket.create_connection(('127.0.0.1', {port})))"), "kept");
    says(&mut program, "keep('by', kept['listener'].accept()[0]) and kept['by'].close()", "None");
    program.end();
    assert!(left_at(port));
    images.vramctl(&format!("load {} --dry-run", images.image("image"))).expect(0, "can be loaded", "");
    // It can be interrupted meanwhile.
    let load = || images.cli(&format!("load {} --name loaded", images.image("image")));
    let mut interrupted = load().stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(interrupted.stderr.take().unwrap()).lines();
    let waits = "the kernel keeps connections of a program that has ended at 127.0.0.1";
    assert!(lines.by_ref().map_while(Result::ok).any(|line| line.contains(waits)));
    assert_eq!(unsafe { libc::kill(interrupted.id() as i32, libc::SIGINT) }, 0);
    assert_eq!(interrupted.wait().unwrap().code(), Some(128 + libc::SIGINT));
    let mut loaded = Program::spawn(&mut load());
    says(&mut loaded, "kept['cudart'].cudaMemset(kept['memory'], 1, ctypes.c_size_t(4096))", "0");
    assert!(!left_at(port));
    loaded.end();
    images.nothing_is_left("a server");
}

/// The machine's own addresses, by which it would send to others.
fn own_addresses() -> Vec<std::net::IpAddr> {
    let address = |any: &str, other: &str| {
        let socket = std::net::UdpSocket::bind((any, 0)).ok()?;
        socket.connect((other, 9)).ok()?;
        socket.local_addr().ok().map(|own| own.ip()).filter(|own| !own.is_loopback())
    };
    [("0.0.0.0", "192.0.2.1"), ("::", "2001:db8::1")].into_iter().filter_map(|(any, other)| address(any, other)).collect()
}

/// As torch's `TCPStore` does, the program listens at an address of the machine, and is connected to itself by it. A network of its own has it, too.
#[test]
fn a_network_of_its_own_has_the_addresses_that_the_program_uses() {
    let Some(images) = Images::on(machine) else { return };
    let addresses = own_addresses();
    if addresses.is_empty() {
        return eprintln!("not run: this machine has no address but that of loopback");
    }
    let mut program = images.program("server");
    says(&mut program, "keep('cudart', ctypes.CDLL('libcudart.so.13'))", "kept");
    says(&mut program, "keep('memory', ctypes.c_void_p())", "kept");
    says(&mut program, "kept['cudart'].cudaMalloc(ctypes.byref(kept['memory']), ctypes.c_size_t(4 << 20))", "0");
    let mut port = 0;
    for address in &addresses {
        let family = if address.is_ipv6() { "socket.AF_INET6" } else { "socket.AF_INET" };
        port = program.number(&format!(
            "keep('at {address}', socket.create_server(('{address}', 0), family={family})) and kept['at {address}'].getsockname()[1]"
        ));
        says(&mut program, &format!("keep('to {address}', socket.create_connection(('{address}', {port})))"), "kept");
        says(&mut program, &format!("keep('by {address}', kept['at {address}'].accept()[0])"), "kept");
    }
    images.vramctl(&format!("save server {} --keep", images.image("image"))).expect(0, "saved", "");
    let load = format!("load {} --name loaded --port {port}={}", images.image("image"), free_ports(1));
    let mut loaded = Program::spawn(&mut images.cli(&load));
    for program in [&mut program, &mut loaded] {
        for address in &addresses {
            says(program, &format!("kept['to {address}'].send(b'hello')"), "5");
            says(program, &format!("kept['by {address}'].recv(5)"), "b'hello'");
            let again = format!("keep('again', socket.create_connection(kept['at {address}'].getsockname()[:2]))");
            says(program, &again, "kept");
            says(program, &format!("kept['at {address}'].accept()[1][0]"), &address.to_string());
        }
        // Once it is back.
        says(program, "kept['cudart'].cudaMemset(kept['memory'], 1, ctypes.c_size_t(4096))", "0");
    }
    loaded.end();
    program.end();
    images.nothing_is_left("a program with a network of its own");
}

/// All copies go on, or none is left: one that finds its port taken, one that is killed, and the command itself.
#[test]
fn copies_are_loaded_together_or_not_at_all() {
    let Some(images) = Images::on(machine) else { return };
    let (port, _) = save_server(&images);
    let first = free_ports(2);
    let load = format!("load {} --name copy --copies 2 --port {port}={first} --quiet", images.image("image"));
    let taken = TcpListener::bind(("127.0.0.1", first + 1)).unwrap();
    for more in ["", " --detach"] {
        let failed = images.vramctl(&format!("{load}{more}")).expect(1, "", "copy-2 cannot be loaded; no copy is left");
        assert!(failed.err.contains(&format!("cannot listen at 127.0.0.1:{}", first + 1)), "{failed:?}");
        images.nothing_is_left(more);
    }
    drop(taken);
    // While they are being loaded, the command ends by a signal as any other.
    let mut command = images.cli(&load);
    let (held, command) = images.holding("restore-after", &mut command);
    let mut ended = Program::spawn(command);
    held.is_reached();
    ended.signal(libc::SIGTERM);
    assert_eq!(ended.ended().code(), Some(128 + libc::SIGTERM));
    images.nothing_is_left("a signal");
    // Once all go on, which each command says, each is a program of its own.
    let mut copies = images.cli(&load.replace(" --quiet", ""));
    let mut copies = copies.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(copies.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert_eq!(lines.by_ref().filter(|line| line.starts_with("loaded copy-")).take(2).count(), 2);
    let served = |number: u16| {
        let mut lines = BufReader::new(common::patiently(|| TcpStream::connect(("127.0.0.1", first + number))).expect("a port"));
        writeln!(lines.get_mut(), "devices()").unwrap();
        let mut answer = String::new();
        lines.read_line(&mut answer).unwrap();
        answer
    };
    assert_eq!([served(0), served(1)], ["2\n", "2\n"]);
    let pid = images.vramctl("status copy-1 --json").expect(0, "", "").json()["processes"][0]["pid"].as_i64().unwrap();
    assert_eq!(unsafe { libc::kill(pid as i32, libc::SIGKILL) }, 0);
    images.vramctl("status copy-2").expect(0, "", "");
    assert_eq!(served(1), "2\n");
    assert_eq!(unsafe { libc::kill(copies.id() as i32, libc::SIGTERM) }, 0);
    copies.wait().unwrap();
    images.nothing_is_left("copies");
}

#[test]
fn four_copies_run_at_once_each_behind_a_port_of_its_own() {
    let Some(images) = Images::on(machine) else { return };
    let (port, memory) = save_server(&images);
    let first = free_ports(4);
    let mut copies =
        Program::spawn(&mut images.cli(&format!("load {} --name copy --copies 4 --port {port}={first} --quiet", images.image("image"))));
    let mut lines: Vec<_> = (0..4)
        .map(|number| BufReader::new(common::patiently(|| TcpStream::connect(("127.0.0.1", first + number))).expect("a port")))
        .collect();
    let mut ask = |number: usize, line: &str| {
        writeln!(lines[number].get_mut(), "{line}").unwrap();
        let mut answer = String::new();
        lines[number].read_line(&mut answer).unwrap();
        answer.trim_end().to_owned()
    };
    for number in 0..4 {
        assert_eq!(ask(number, &format!("ask('engine', 'read({memory}, {})')", 24 * MIB)), "[7]");
        assert_eq!(ask(number, &format!("ask('engine', 'fill({memory}, {number}, {})')", 24 * MIB)), "0");
        assert_eq!(ask(number, "ask('monitor', 'cards()')"), "2");
        assert_eq!(ask(number, "ask('helper', \"kept['step']()\")"), "2");
    }
    // Each is a program of its own, with a name of its own, and is alone in its network.
    for number in 0..4 {
        assert_eq!(ask(number, &format!("ask('engine', 'read({memory}, {})')", 24 * MIB)), format!("[{number}]"));
        let reached = ask(number, &format!("attempt(lambda: socket.create_connection(('127.0.0.1', {first}), 1))"));
        assert_eq!(reached, format!("error {}", libc::ECONNREFUSED));
    }
    let listed = images.vramctl("ps").expect(0, "copy-1", "").out;
    assert!((1..=4).all(|number| listed.contains(&format!("copy-{number}"))), "{listed}");
    images.vramctl("suspend copy-2").expect(0, "suspended", "");
    assert_eq!(ask(0, "devices()"), "2");
    images.vramctl("resume copy-2").expect(0, "resumed", "");
    assert_eq!(ask(1, &format!("ask('engine', 'read({memory}, {})')", 24 * MIB)), "[1]");
    copies.signal(libc::SIGTERM);
    assert_eq!(copies.ended().code(), Some(128 + libc::SIGTERM));
    images.vramctl("ps").expect(0, "", "no process is managed");
}
