//! Memory that processes pass each other by descriptor, as NCCL and torch's symmetric memory do (`cuMemExportToShareableHandle`).

use crate::common;
use crate::common::machine::{Machine, Program, Ran};
use crate::common::sharing::MIB;
use crate::common::some;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::{fs, io, ptr};
use vramctl_driver::Driver;

const BYTES: u64 = 4 * MIB;

/// What the ranks can do beyond [`common::sharing::PROGRAM`].
const MORE: &str = r#"
class Location(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("id", ctypes.c_int)]
class Properties(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("types", ctypes.c_int), ("location", Location), ("metadata", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8)]
class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", ctypes.c_int)]

def ok(code):
    if code:
        raise RuntimeError(f"error {code}")

def create(size):
    handle, wanted = ctypes.c_uint64(), Properties(1, 1, Location(1, 0))
    ok(cuda.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(wanted), ctypes.c_uint64(0)))
    return handle.value

def create_on_host(size):
    handle, wanted = ctypes.c_uint64(), Properties(1, 1, Location(3, 0))
    ok(cuda.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(wanted), ctypes.c_uint64(0)))
    return handle.value

def open_to_host(pointer, size):
    access = Access(Location(3, 0), 3)
    return cuda.cuMemSetAccess(ctypes.c_uint64(pointer), ctypes.c_size_t(size), ctypes.byref(access), ctypes.c_size_t(1))

def peek(pointer):
    return ctypes.string_at(pointer, 1)[0]

def create_by_nccl(library, size):
    handle, wanted = ctypes.c_uint64(), Properties(1, 1, Location(1, 0))
    ok(ctypes.CDLL(library).nccl_create(ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(wanted)))
    return handle.value

def reserve(size):
    pointer = ctypes.c_uint64()
    ok(cuda.cuMemAddressReserve(ctypes.byref(pointer), ctypes.c_size_t(size), ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0)))
    return pointer.value

def map(handle, size, pointer=None):
    pointer = pointer or reserve(size)
    ok(cuda.cuMemMap(ctypes.c_uint64(pointer), ctypes.c_size_t(size), ctypes.c_size_t(0), ctypes.c_uint64(handle), ctypes.c_uint64(0)))
    access = Access(Location(1, 0), 3)
    ok(cuda.cuMemSetAccess(ctypes.c_uint64(pointer), ctypes.c_size_t(size), ctypes.byref(access), ctypes.c_size_t(1)))
    return pointer

def unmap(pointer, size):
    return cuda.cuMemUnmap(ctypes.c_uint64(pointer), ctypes.c_size_t(size))

def release(handle):
    return cuda.cuMemRelease(ctypes.c_uint64(handle))

def export(handle):
    file = ctypes.c_int(-1)
    ok(cuda.cuMemExportToShareableHandle(ctypes.byref(file), ctypes.c_uint64(handle), 1, ctypes.c_uint64(0)))
    return file.value

def receive(pid, file):
    """Another process's descriptor, as torch's symmetric memory gets it."""
    PIDFD_GETFD = 438
    got = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, os.pidfd_open(pid), file, 0)
    assert got >= 0, os.strerror(ctypes.get_errno())
    return got

imported = set()
sim = ctypes.CDLL("libcuda.so.1")
sim.simgpu_calls.restype = ctypes.c_uint64

def arm(call, nth, code, times):
    return sim.simgpu_fail(call.encode(), ctypes.c_uint64(nth), ctypes.c_uint32(code), ctypes.c_uint64(times))

def disarm():
    sim.simgpu_clear_faults()
    sim.simgpu_reset_counts()
    return 0

def calls(names):
    return " ".join(str(sim.simgpu_calls(name.encode())) for name in names.split())

def import_(file):
    handle = ctypes.c_uint64()
    code = cuda.cuMemImportFromShareableHandle(ctypes.byref(handle), ctypes.c_void_p(file), 1)
    os.close(file)
    imported.add(handle.value)
    return f"error {code}" if code else handle.value
"#;

/// Makes the driver's calls in NCCL's name: the library goes by the caller's file.
const NCCL: &str = "
#include <stddef.h>
int cuMemCreate(unsigned long long *, size_t, const void *, unsigned long long);
int nccl_create(unsigned long long *handle, size_t bytes, const void *wanted) { int answer = cuMemCreate(handle, bytes, wanted, 0); return answer; }
";

/// One rank of a job.
struct Rank {
    program: Program,
    pointer: u64,
    handle: u64,
    /// What is in its memory.
    value: u64,
}

impl Rank {
    fn start(machine: &Machine, place: usize) -> Self {
        Self::start_with(machine, place, &format!("create({BYTES})"))
    }

    /// `create`: makes its memory.
    fn start_with(machine: &Machine, place: usize, create: &str) -> Self {
        Self::start_changed(machine, place, create, |_| ())
    }

    fn start_changed(machine: &Machine, place: usize, create: &str, change: impl FnOnce(&mut Command)) -> Self {
        let mut program = machine.python_with("job", |command| change(command.env("RANK", place.to_string())));
        let folder = machine.folder.path().join("more.py");
        std::fs::write(&folder, MORE).unwrap();
        program.ask(&format!("exec(open({:?}).read(), globals())", folder.display().to_string()));
        // A context for this thread.
        program.number("free(malloc(1 << 21))");
        let handle = program.number(create);
        let pointer = program.number(&format!("map({handle}, {BYTES})"));
        let mut rank = Self { program, pointer, handle, value: 0 };
        rank.fill(place as u64 + 1);
        rank
    }

    fn fill(&mut self, value: u64) {
        self.value = value;
        assert_eq!(self.program.number(&format!("fill({}, {value}, {BYTES})", self.pointer)), 0);
    }

    fn read(&mut self, pointer: u64) -> String {
        self.program.ask(&format!("read({pointer}, {BYTES})"))
    }

    /// Imports another rank's memory. Returns the handle and the address.
    fn import(&mut self, owner: &mut Rank) -> (u64, u64) {
        let (pid, file) = (owner.program.pid(), owner.program.number(&format!("export({})", owner.handle)));
        let handle = self.program.number(&format!("import_(receive({pid}, {file}))"));
        owner.program.ask(&format!("os.close({file})"));
        (handle, self.program.number(&format!("map({handle}, {BYTES})")))
    }
}

/// A job whose ranks have each other's memory, and where.
struct Job {
    machine: Machine,
    ranks: Vec<Rank>,
    /// For each rank, the addresses of the others' memory, with their places.
    imports: Vec<Vec<(usize, u64)>>,
}

impl Job {
    fn start(count: usize) -> Self {
        Self::of(Machine::pair(), count, &format!("create({BYTES})"))
    }

    /// The memory is NCCL's.
    fn of_nccl(count: usize) -> Self {
        let machine = Machine::pair();
        let (source, library) = (machine.folder.path().join("nccl.c"), machine.folder.path().join("libnccl.so.2"));
        std::fs::write(&source, NCCL).unwrap();
        // Its call must return to it: with -O2, the call would be a jump.
        common::compile(&library, &[source.to_str().unwrap()], &["-shared", "-fPIC", "-O1"]);
        Self::of(machine, count, &format!("create_by_nccl({:?}, {BYTES})", library.display().to_string()))
    }

    fn of(machine: Machine, count: usize, create: &str) -> Self {
        let mut ranks: Vec<_> = (0..count).map(|place| Rank::start_with(&machine, place, create)).collect();
        let mut imports = vec![Vec::new(); count];
        for owner in 0..count {
            for importer in (0..count).filter(|other| *other != owner) {
                let [of, to] = ranks.get_disjoint_mut([owner, importer]).unwrap();
                let (_, address) = to.import(of);
                imports[importer].push((owner, address));
            }
        }
        Self { machine, ranks, imports }
    }

    /// Each rank sees what each owner has.
    fn check(&mut self, value: impl Fn(usize) -> u64) {
        for place in 0..self.ranks.len() {
            let own = self.ranks[place].pointer;
            assert_eq!(self.ranks[place].read(own), format!("[{}]", value(place)));
            for (owner, address) in self.imports[place].clone() {
                assert_eq!(self.ranks[place].read(address), format!("[{}]", value(owner)), "rank {place} of {owner}");
            }
        }
    }

    /// What one writes, the others see.
    fn write(&mut self, value: impl Fn(usize) -> u64) {
        for place in 0..self.ranks.len() {
            self.ranks[place].fill(value(place));
        }
        self.check(value);
    }
}

/// The ranks give up what they have imported, and get it back at the same addresses: nothing of the job stays on the GPU meanwhile.
#[test]
fn a_job_with_imports_is_paused_suspended_and_moved_as_one() {
    let mut job = Job::start(3);
    job.check(|place| place as u64 + 1);
    for (round, (away, back)) in [
        (&["pause", "--name", "job"][..], &["resume", "--name", "job"][..]),
        (&["suspend", "job"], &["resume", "job"]),
        (&["move", "job", "--to", "1"], &["move", "job", "--to", "0"]),
        (&["pause", "--name", "job"], &["resume", "--name", "job"]),
    ]
    .into_iter()
    .enumerate()
    {
        let before = job.machine.used();
        job.machine.done(away);
        assert!(job.machine.used() + 3 * BYTES <= before, "{away:?}");
        job.machine.done(back);
        common::eventually("all is back", || job.machine.used() == before);
        job.check(|place| if round == 0 { place as u64 + 1 } else { (10 * round + place) as u64 });
        job.write(|place| (10 * (round + 1) + place) as u64);
    }
}

/// Memory of the host that ranks pass each other, as NCCL does with `NCCL_CUMEM_HOST_ENABLE=1`: a pause frees nothing by taking it, so it stays in use. The
/// driver cannot restore what is imported of it, so it goes in a suspend.
#[test]
fn memory_of_the_host_stays_in_a_pause_and_leaves_in_a_suspend() {
    let mut job = Job::of(Machine::pair(), 3, &format!("create_on_host({BYTES})"));
    let each: Vec<_> =
        (0..3).map(|place| (place, [vec![(place, job.ranks[place].pointer)], job.imports[place].clone()].concat())).collect();
    for (place, seen) in &each {
        for (_, address) in seen {
            assert_eq!(job.ranks[*place].program.number(&format!("open_to_host({address}, {BYTES})")), 0);
        }
    }
    let pid = job.ranks[0].program.pid().to_string();
    let status = job.machine.vramctl(&["status", "--pid", &pid, "--json"]).json();
    assert!(status["processes"][0]["devices"].as_array().unwrap().iter().all(|device| device["active_bytes"] == 0), "{status}");
    let mut other = Vec::new();
    for rank in &mut job.ranks {
        other.push(rank.program.number(&format!("malloc({BYTES})")));
    }
    let before = job.machine.used();
    for (away, back) in [
        (&["pause", "--name", "job"][..], &["resume", "--name", "job"][..]),
        (&["suspend", "job"], &["resume", "job"]),
        (&["move", "job", "--to", "1"], &["move", "job", "--to", "0"]),
        (&["suspend", "job"], &["resume", "job"]),
    ] {
        job.machine.done(away);
        let used = job.machine.used();
        assert!(
            if away[0] == "pause" { used + 3 * BYTES == before } else { used == 0 || away[0] == "move" },
            "{away:?}: {used} of {before}"
        );
        for (place, seen) in each.iter().filter(|_| away[0] != "suspend") {
            for (owner, address) in seen {
                assert_eq!(job.ranks[*place].program.number(&format!("peek({address})")), *owner as u64 + 1, "{away:?}");
            }
        }
        job.machine.done(back);
        common::eventually("all is back", || job.machine.used() == before);
        job.check(|place| place as u64 + 1);
    }
    job.write(|place| place as u64 + 10);
    for (place, seen) in &each {
        for (owner, address) in seen {
            assert_eq!(job.ranks[*place].program.number(&format!("peek({address})")), *owner as u64 + 10);
        }
    }
    for (rank, other) in job.ranks.iter_mut().zip(other) {
        assert_eq!(rank.program.number(&format!("free({other})")), 0);
    }
}

/// NCCL's memory stays in a pause of all tags, because a rank alone cannot give it up; it goes when it is named, and whenever nothing may stay.
#[test]
fn the_memory_of_nccl_goes_when_it_is_named_and_in_a_suspend() {
    let mut job = Job::of_nccl(2);
    job.check(|place| place as u64 + 1);
    let before = job.machine.used();
    let pid = job.ranks[0].program.pid();
    let status = job.machine.done(&["status", "--pid", &pid.to_string()]);
    assert!(status.contains("nccl") && !status.contains("communicators"), "{status}");
    // One rank by itself has other memory to pause.
    let other = job.ranks[0].program.number(&format!("malloc({BYTES})"));
    job.machine.done(&["pause", "--pid", &pid.to_string()]);
    assert_eq!(job.machine.used(), before);
    job.machine.done(&["resume", "--pid", &pid.to_string()]);
    assert_eq!(job.ranks[0].program.number(&format!("free({other})")), 0);
    for (away, back) in [
        (&["pause", "--name", "job", "nccl"][..], &["resume", "--name", "job"][..]),
        (&["suspend", "job"], &["resume", "job"]),
        (&["move", "job", "--to", "1"], &["move", "job", "--to", "0"]),
    ] {
        job.machine.done(away);
        assert!(job.machine.used() + 2 * BYTES <= before, "{away:?}");
        job.machine.done(back);
        common::eventually("all is back", || job.machine.used() == before);
        job.check(|place| place as u64 + 1);
    }
}

/// Whoever imports without the library cannot give the memory up, so it stays.
#[test]
fn memory_whose_importer_is_unknown_is_not_paused() {
    let machine = Machine::pair();
    let mut owner = Rank::start(&machine, 0);
    let file = owner.program.number(&format!("export({})", owner.handle));
    machine.vramctl("pause --name job").expect(1, "", "cuMemExportToShareableHandle");
    let mut importer = Rank::start(&machine, 1);
    let handle = importer.program.number(&format!("import_(receive({}, {file}))", owner.program.pid()));
    let address = importer.program.number(&format!("map({handle}, {BYTES})"));
    assert_eq!(importer.read(address), "[1]");
    // As long as the owner has the descriptor, others may import it.
    machine.vramctl("pause --name job").expect(1, "", "cuMemExportToShareableHandle");
    assert_eq!(owner.program.ask(&format!("os.close({file})")), "None");
    machine.done("pause --name job");
    machine.done("resume --name job");
    assert_eq!(importer.read(address), "[1]");
    // The owner alone cannot be paused, until the importer has released the memory.
    machine.refused(&owner.program, &importer.program);
    assert_eq!(importer.program.number(&format!("unmap({address}, {BYTES})")), 0);
    machine.refused(&owner.program, &importer.program);
    assert_eq!(importer.program.number(&format!("release({handle})")), 0);
    machine.done(&["pause", "--pid", &owner.program.pid().to_string()]);
    machine.done(&["resume", "--pid", &owner.program.pid().to_string()]);
    let own = owner.pointer;
    assert_eq!(owner.read(own), "[1]");
}

/// The program may map, unmap and release what is away, as its own paused memory.
#[test]
fn imports_are_mapped_and_released_while_they_are_away() {
    let mut job = Job::start(2);
    job.machine.done("pause --name job");
    let importer = &mut job.ranks[1];
    let address = job.imports[1][0].1;
    assert_eq!(importer.program.number(&format!("unmap({address}, {BYTES})")), 0);
    job.machine.done("resume --name job");
    let (again, handle) = {
        let [owner, importer] = job.ranks.get_disjoint_mut([0, 1]).unwrap();
        let (handle, again) = importer.import(owner);
        (again, handle)
    };
    assert_eq!(job.ranks[1].read(again), "[1]");
    assert_eq!(job.ranks[1].program.number(&format!("unmap({again}, {BYTES})")), 0);
    // Imported twice: one handle, released as often.
    assert_eq!(job.ranks[1].program.number(&format!("release({handle})")), 0);
    assert_eq!(job.ranks[1].program.number(&format!("release({handle})")), 0);
    assert_ne!(job.ranks[1].program.number(&format!("release({handle})")), 0);
    job.machine.done(&["pause", "--pid", &job.ranks[0].program.pid().to_string()]);
}

/// The driver keeps memory for whoever holds it, and so does the library, through a pause and a suspend.
#[test]
fn an_owner_that_frees_leaves_its_memory_to_those_who_hold_it() {
    let mut job = Job::start(2);
    let before = job.machine.used();
    let (own, handle, imported) = (job.ranks[0].pointer, job.ranks[0].handle, job.imports[1][0].1);
    // While it is paused, and while it is there.
    job.machine.done("pause --name job");
    assert_eq!(job.ranks[0].program.number(&format!("unmap({own}, {BYTES})")), 0);
    job.machine.done("resume --name job");
    assert_eq!(job.ranks[1].read(imported), "[1]");
    assert_eq!(job.ranks[0].program.number(&format!("release({handle})")), 0);
    assert_ne!(job.ranks[0].program.number(&format!("release({handle})")), 0);
    for (away, back) in [("pause --name job", "resume --name job"), ("suspend job", "resume job"), ("move job --to 1", "move job --to 0")] {
        assert_eq!(job.ranks[1].read(imported), "[1]", "before {away}");
        job.machine.done(away);
        job.machine.done(back);
    }
    assert_eq!(job.ranks[1].read(imported), "[1]");
    assert_eq!(job.machine.used(), before);
    let theirs = job.ranks[1].program.number("sorted(imported)[0]");
    assert_eq!(job.ranks[1].program.number(&format!("unmap({imported}, {BYTES})")), 0);
    assert_eq!(job.ranks[1].program.number(&format!("release({theirs})")), 0);
    common::eventually("the memory is free", || job.machine.used() + BYTES == before);
}

/// The driver gives a handle for each import, and counts them: one that is kept keeps the GPU memory for good.
#[test]
fn what_is_imported_twice_is_given_back() {
    let machine = Machine::pair();
    let (mut owner, mut importer) = (Rank::start(&machine, 0), Rank::start(&machine, 1));
    let (pid, before) = (owner.program.pid(), machine.used());
    let file = owner.program.number(&format!("export({})", owner.handle));
    let mut imports: Vec<_> = (0..3).map(|_| importer.program.number(&format!("import_(receive({pid}, {file}))"))).collect();
    // The owner may import its own memory.
    let own = owner.program.number(&format!("import_(os.dup({file}))"));
    assert!(imports.iter().all(|handle| *handle == imports[0]) && own == owner.handle, "{imports:?}");
    owner.program.ask(&format!("os.close({file})"));
    let address = importer.program.number(&format!("map({}, {BYTES})", imports[0]));
    assert_eq!(importer.read(address), "[1]");
    // Known memory that is away is no reason to keep one either.
    machine.done("pause --name job");
    machine.done("resume --name job");
    assert_eq!(importer.read(address), "[1]");
    assert_eq!(importer.program.number(&format!("unmap({address}, {BYTES})")), 0);
    imports.drain(..).for_each(|handle| assert_eq!(importer.program.number(&format!("release({handle})")), 0));
    assert_eq!(owner.program.number(&format!("unmap({}, {BYTES})", owner.pointer)), 0);
    assert_eq!((owner.program.number(&format!("release({own})")), owner.program.number(&format!("release({own})"))), (0, 0));
    common::eventually("the memory is free", || machine.used() + BYTES == before);
}

/// Nobody knows where it is, so its owner keeps the memory, and runs on.
#[test]
fn a_descriptor_that_never_arrives_keeps_its_memory_where_it_is() {
    let mut job = Job::start(2);
    let handle = job.ranks[0].handle;
    let file = job.ranks[0].program.number(&format!("export({handle})"));
    assert_eq!(job.ranks[0].program.ask(&format!("os.close({file})")), "None");
    job.machine.vramctl("pause --name job").expect(1, "", "cuMemExportToShareableHandle");
    job.check(|place| place as u64 + 1);
    // Another one of the same memory does.
    let [owner, importer] = job.ranks.get_disjoint_mut([0, 1]).unwrap();
    importer.import(owner);
    job.check(|place| place as u64 + 1);
}

/// What it stands for is not its owner's memory any more, and nobody but the log can tell.
#[test]
fn a_descriptor_from_before_a_pause_is_noticed() {
    let machine = Machine::pair();
    let log = machine.folder.path().join("log");
    let mut owner = Rank::start(&machine, 0);
    let mut importer = Rank::start(&machine, 1);
    let mut late =
        Rank::start_changed(&machine, 2, &format!("create({BYTES})"), |command| _ = command.stderr(fs::File::create(&log).unwrap()));
    let (pid, file) = (owner.program.pid(), owner.program.number(&format!("export({})", owner.handle)));
    importer.program.number(&format!("import_(receive({pid}, {file}))"));
    let kept = late.program.number(&format!("receive({pid}, {file})"));
    assert_eq!(owner.program.ask(&format!("os.close({file})")), "None");
    machine.done("pause --name job");
    machine.done("resume --name job");
    late.program.number(&format!("import_({kept})"));
    let said = fs::read_to_string(&log).unwrap();
    assert!(said.contains("no process says that it has exported the memory that this one has just imported"), "{said}");
    // Not of what is exported now.
    let before = said.len();
    late.import(&mut owner);
    assert_eq!(fs::read_to_string(&log).unwrap().len(), before);
}

/// A program that somebody has stopped is not asked: the importing thread would wait for it.
#[test]
fn an_import_does_not_wait_for_a_stopped_program() {
    let machine = Machine::pair();
    let log = machine.folder.path().join("log");
    let bystander = Rank::start(&machine, 0);
    let mut owner = Rank::start(&machine, 1);
    let to_log = |command: &mut Command| _ = command.env("VRAMCTL_LOG", "debug").stderr(fs::File::create(&log).unwrap());
    let mut importer = Rank::start_changed(&machine, 2, &format!("create({BYTES})"), to_log);
    bystander.program.stop();
    let (_, address) = importer.import(&mut owner);
    bystander.program.go_on();
    assert_eq!(importer.read(address), "[2]");
    let said = fs::read_to_string(&log).unwrap();
    assert!(!said.contains(&format!("process {} does not share its memory", bystander.program.pid())), "{said}");
    machine.done("pause --name job");
    machine.done("resume --name job");
    assert_eq!(importer.read(address), "[2]");
}

/// The memory of a rank that has died is lost to the others. They come back, and the resume says what they lack.
#[test]
fn a_rank_that_dies_while_its_job_is_away_is_named() {
    for (away, back) in [("suspend job", "resume job"), ("pause --name job", "resume --name job")] {
        let mut job = Job::start(3);
        job.machine.done(away);
        let dead = job.ranks[0].program.pid();
        job.ranks[0].program.kill();
        let ran = job.machine.vramctl(back);
        let lost = format!("has lost 4.00 MiB that it had opened from process {dead}, which has ended");
        assert!(ran.code == Some(1) && ran.text().matches(&lost).count() == 2, "{}", ran.text());
        for place in [1, 2] {
            let (own, other) = (job.ranks[place].pointer, job.imports[place][1]);
            assert_eq!(job.ranks[place].read(own), format!("[{}]", place + 1));
            assert_eq!(job.ranks[place].read(other.1), format!("[{}]", other.0 + 1));
        }
        // It is said once, and the others leave and come back as before.
        job.machine.done("pause --name job");
        job.machine.done("resume --name job");
    }
}

/// A rank may ask for memory that its owner is about to pause: it would have that as it was before the pause.
#[test]
fn what_an_owner_has_not_paused_yet_comes_back_with_the_resume_only() {
    let machine = Machine::pair();
    let (mut owner, mut other) = (Rank::start(&machine, 0), Rank::start(&machine, 1));
    let (_, address) = other.import(&mut owner);
    // With memory of its own that is paused, it does not ask.
    let (pointer, handle) = (other.pointer, other.handle);
    assert_eq!(other.program.ask(&format!("unmap({pointer}, {BYTES}), release({handle})")), "(0, 0)");
    assert_eq!(machine.request(&other.program, "pause", &[&owner.program])["reply"], "done");
    let imports = |other: &mut Rank| other.program.number("int(calls('cuMemImportFromShareableHandle'))");
    let before = imports(&mut other);
    common::eventually("it has got it twice", || {
        let status = machine.request(&other.program, "status", &[]);
        assert!(status["held"] == true && status["borrowed"][0]["paused_bytes"] == BYTES, "{status}");
        imports(&mut other) >= before + 2
    });
    let resumed = machine.request(&other.program, "resume", &[]);
    assert!(resumed["reply"] == "done" && resumed.get("missing").is_none(), "{resumed}");
    assert_eq!(other.read(address), "[1]");
}

/// A rank that has too few descriptors for what the others pass it stays held, and gets the memory once it has more.
#[test]
fn descriptors_may_be_lost_on_the_way_back() {
    let mut job = Job::start(3);
    let pid = job.ranks[1].program.pid();
    let mut free = (0..libc::rlim_t::from(u32::MAX)).filter(|number| !fs::exists(format!("/proc/{pid}/fd/{number}")).unwrap());
    let (mut few, mut stayed) = (free.next().unwrap(), 0);
    let limit = descriptors(pid, None);
    for _ in 0..common::cases(12).min(24) {
        job.machine.done("suspend job");
        descriptors(pid, Some(libc::rlimit { rlim_cur: few, ..limit }));
        let ran = job.machine.vramctl("resume job");
        assert!(ran.code != Some(0) || !ran.text().contains("stays held"), "{}", ran.text());
        stayed += u32::from(ran.code != Some(0));
        descriptors(pid, Some(limit));
        job.comes_back(&format!("{few} descriptors: {}", ran.text()));
        job.check(|place| place as u64 + 1);
        few += 1;
    }
    assert!(stayed > 0);
}

/// Sets how many descriptors a process may have, and returns how many it might before.
fn descriptors(pid: u32, limit: Option<libc::rlimit>) -> libc::rlimit {
    let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let new = limit.as_ref().map_or(ptr::null(), ptr::from_ref);
    let answer = unsafe { libc::prlimit(pid as i32, libc::RLIMIT_NOFILE, new, &raw mut before) };
    assert_eq!(answer, 0, "{}", io::Error::last_os_error());
    before
}

/// What goes wrong.
#[derive(Debug, Clone, Copy)]
struct Fault {
    /// While the job leaves, or while it comes back.
    leaving: bool,
    rank: usize,
    call: &'static str,
    nth: u64,
    code: u32,
    times: u64,
}

impl Job {
    fn command(&self, leaving: bool) -> Ran {
        self.machine.vramctl(if leaving { "suspend job" } else { "resume job" })
    }

    fn disarm(&mut self) {
        for rank in &mut self.ranks {
            assert_eq!(rank.program.number("disarm()"), 0);
        }
    }

    /// How often each rank makes each call.
    fn uses(&mut self, leaving: bool) -> Vec<(usize, &'static str, u64)> {
        self.disarm();
        let ran = self.command(leaving);
        assert_eq!(ran.code, Some(0), "{}", ran.text());
        let names = Driver::NAMES.join(" ");
        let of = |(place, rank): (usize, &mut Rank)| {
            let counts = rank.program.ask(&format!("calls({names:?})"));
            let counts: Vec<u64> = counts.split(' ').map(|count| count.parse().unwrap()).collect();
            Driver::NAMES
                .iter()
                .zip(counts)
                .filter(|(_, count)| *count > 0)
                .map(move |(call, count)| (place, *call, count))
                .collect::<Vec<_>>()
        };
        self.ranks.iter_mut().enumerate().flat_map(of).collect()
    }

    /// All faults of single calls.
    fn faults(&mut self, answers: &[(u32, u64)]) -> Vec<Fault> {
        let mut all = Vec::new();
        for leaving in [true, false] {
            for (rank, call, count) in self.uses(leaving) {
                let each = (1..=count).flat_map(|nth| answers.iter().map(move |(code, times)| (nth, *code, *times)));
                all.extend(each.map(|(nth, code, times)| Fault { leaving, rank, call, nth, code, times }));
            }
        }
        all
    }

    /// Suspends and resumes it while this fails, and then without. Returns what the commands have said.
    fn leave_and_come_back(&mut self, fault: Fault) -> String {
        let mut said = String::new();
        for leaving in [true, false] {
            if leaving == fault.leaving {
                let Fault { rank, call, nth, code, times, .. } = fault;
                assert_eq!(self.ranks[rank].program.number(&format!("arm({call:?}, {nth}, {code}, {times})")), 0);
            }
            said += &self.command(leaving).text();
        }
        said
    }

    fn comes_back(&self, case: &str) {
        common::eventually(&format!("it is back: {case}"), || {
            let ran = self.machine.vramctl("resume --name job");
            ran.code == Some(0) && self.ranks.iter().all(|rank| self.machine.state(&rank.program) == "active")
        });
    }
}

/// Whatever the driver refuses a rank, its job is back in the end, or one command brings it back.
#[test]
fn each_call_of_a_rank_may_fail() {
    any_call_may_fail(Job::start(2), 24);
}

#[test]
fn each_call_of_one_of_four_ranks_may_fail() {
    any_call_may_fail(Job::start(4), 6);
}

fn any_call_may_fail(mut job: Job, count: u32) {
    let faults = job.faults(&[(2, 1), (999, 1), (999, u64::MAX)]);
    for fault in some(faults, count) {
        let case = format!("{fault:?}");
        let said = job.leave_and_come_back(fault);
        assert!(!said.contains("lost"), "{case}: {said}");
        job.disarm();
        job.comes_back(&case);
        println!("{case}");
        job.check(|place| place as u64 + 1);
    }
}

/// Memory of another rank that the driver does not take back would stay imported, and the rank would be lost.
#[test]
fn an_import_that_the_driver_does_not_take_back_prevents_a_suspend() {
    let mut job = Job::start(2);
    for call in ["cuMemRelease", "cuMemUnmap"] {
        let uses = job.uses(true);
        let count = uses.iter().find(|(rank, name, _)| *rank == 0 && *name == call).unwrap().2;
        assert_eq!(job.command(false).code, Some(0));
        let mut refused = 0;
        for nth in 1..=count {
            job.disarm();
            assert_eq!(job.ranks[0].program.number(&format!("arm({call:?}, {nth}, 999, {})", u64::MAX)), 0);
            let ran = job.command(true);
            refused += u64::from(ran.text().contains("that the driver has refused to release"));
            job.disarm();
            let back = job.command(false).text();
            assert!(!back.contains("lost"), "{call} {nth}: {} {back}", ran.text());
            job.comes_back(&format!("{call} {nth}"));
            job.check(|place| place as u64 + 1);
        }
        assert!(refused > 0, "{call}: {uses:?}");
    }
}

/// A rank that dies takes its memory with it. The others keep theirs, and are brought back.
#[test]
fn a_rank_may_be_killed_at_each_call() {
    const KILLED: [(u32, u64); 2] = [(u32::MAX - 1, 1), (u32::MAX, 1)];
    let faults = Job::start(2).faults(&KILLED);
    for fault in some(faults, 5) {
        let case = format!("{fault:?}");
        let mut job = Job::start(2);
        job.leave_and_come_back(fault);
        job.ranks.retain_mut(|rank| {
            let Some(answer) = rank.program.ask_if_alive("disarm()") else {
                assert_eq!(rank.program.ended().signal(), Some(libc::SIGKILL), "{case}");
                return false;
            };
            assert_eq!(answer, "0", "{case}");
            true
        });
        job.comes_back(&case);
        for rank in &mut job.ranks {
            let (own, value) = (rank.pointer, rank.value);
            assert_eq!(rank.read(own), format!("[{value}]"), "{case}");
        }
    }
}

/// The command dies before or after each of its calls of the driver, or the driver refuses it: the next command brings the job back.
#[test]
fn the_command_may_be_killed_at_each_call() {
    let mut job = Job::start(2);
    let step = |name: &str| format!("cuCheckpointProcess{name}");
    let mut cases = Vec::new();
    for name in ["GetState", "Lock", "Checkpoint", "Restore", "Unlock"] {
        for nth in 1..=2 {
            cases.extend(["kill-before", "kill-after", "999", "999:*"].map(|how| {
                let (code, times) = how.split_once(':').unwrap_or((how, "1"));
                format!("{}:{nth}:{code}:{times}", step(name))
            }));
        }
    }
    for case in some(cases, 10) {
        for line in ["suspend job", "resume job"] {
            Ran::of(job.machine.cli(line).env("SIMGPU_FAIL", &case));
        }
        job.comes_back(&case);
        job.check(|place| place as u64 + 1);
    }
}

/// The message names the rank, and the others come back.
#[test]
fn a_rank_that_the_driver_loses_is_named() {
    let machine = Machine::pair();
    let mut lost = machine.python_with("job", |command| _ = command.env("RANK", "1").env("SIMGPU_UNRESTORABLE", "1"));
    lost.number("free(malloc(1 << 21))");
    lost.number("malloc(1 << 21)");
    let mut rank = Rank::start(&machine, 0);
    machine.done("suspend job");
    let ran = machine.vramctl("resume job");
    let named = format!("pid {}", lost.pid());
    assert!(ran.code != Some(0) && ran.text().contains(&named) && ran.text().contains("lost"), "{}", ran.text());
    lost.kill();
    common::eventually("the other is back", || machine.vramctl("resume --name job").code == Some(0));
    let own = rank.pointer;
    assert_eq!(rank.read(own), "[1]");
}
