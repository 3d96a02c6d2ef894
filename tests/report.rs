//! Reports when device memory runs out: one per episode, with the cause, and without disturbing the program.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

mod common;

use common::{DEVICE_BYTES, Gpu, MIB, OwnContext, SHARED, Stream, eventually, free, malloc, malloc_tagged, pause, resume, warnings};
use log::LevelFilter;
use serde_json::Value;
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_void};
use std::fs::{self, DirBuilder};
use std::io::Read;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, Once};
use std::time::{Duration, Instant};
use std::{env, mem, ptr, thread};
use vramctl_core::cache::{self, Segment};
use vramctl_core::events::{self, Cause, Event, FailedRequest};
use vramctl_core::memory::{Memory, region};
use vramctl_driver::RelaxedCapture;
use vramctl_intercept::{entries, hooks};
use vramctl_observe::{out_of_memory, watch};

const OUT_OF_MEMORY: u32 = 2;
/// More than the device has.
const TOO_MUCH: usize = 300 * MIB;
/// Enough to make a block worth a stack.
const LARGE: usize = 64 * MIB;

fn warned_about(what: &str) -> Vec<String> {
    warnings::told(|text| text.contains(what))
}

/// The directory of this process's reports.
fn folder() -> PathBuf {
    common::own_folder().join("reports")
}

fn take() -> Gpu {
    static SET_UP: Once = Once::new();
    SET_UP.call_once(|| {
        // SAFETY: before any other thread reads the environment: the others wait here.
        unsafe { env::set_var("VRAMCTL_REPORT_DIR", folder()) };
        // SAFETY: as above.
        unsafe { env::set_var("VRAMCTL_TRACE", "1M") };
        warnings::collect();
    });
    let gpu = Gpu::take();
    // The environment has its own log level, which is not what this is about.
    log::set_max_level(LevelFilter::Warn);
    // Only so many episodes are followed at a time.
    out_of_memory::settle();
    // However slow the machine is: `settle` ends an episode.
    out_of_memory::set_same(Duration::from_secs(600));
    gpu
}

/// The reports of a library, the oldest first.
fn reports(library: &str) -> Vec<Value> {
    let mut found: Vec<_> = files().into_iter().map(|path| serde_json::from_slice::<Value>(&fs::read(path).unwrap()).unwrap()).collect();
    found.retain(|report| report["request"]["library"] == library);
    found.sort_by(|one, other| one["time"].as_f64().unwrap().total_cmp(&other["time"].as_f64().unwrap()));
    found
}

fn files() -> BTreeSet<PathBuf> {
    let entries = fs::read_dir(folder()).into_iter().flatten().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.extension().is_some_and(|kind| kind == "json")).collect()
}

type Allocate = unsafe extern "C-unwind" fn(*mut *mut c_void, usize) -> u32;

type Create = unsafe extern "C-unwind" fn(*mut *mut c_void, usize, *const c_void, u64) -> u32;

type Ask = unsafe extern "C" fn(Allocate, *mut *mut c_void, usize) -> u32;
type AskForPiece = unsafe extern "C" fn(Create, *mut *mut c_void, usize, *const c_void) -> u32;

/// A library that allocates.
struct Library {
    name: String,
    ask: Ask,
    ask_for_piece: AskForPiece,
}

impl Library {
    fn new(name: &str) -> Self {
        let library = common::own_folder().join(name);
        fs::copy(common::built("libasks.so", "asks.c", &SHARED), &library).unwrap();
        let path = CString::new(library.to_str().unwrap()).unwrap();
        unsafe {
            let opened = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
            assert!(!opened.is_null());
            let found = |name: &CStr| libc::dlsym(opened, name.as_ptr());
            Self {
                name: name.to_owned(),
                ask: mem::transmute::<*mut c_void, Ask>(found(c"ask")),
                ask_for_piece: mem::transmute::<*mut c_void, AskForPiece>(found(c"ask_for_piece")),
            }
        }
    }

    /// Physical memory, as torch gets it for expandable segments.
    fn ask_for_piece(&self, bytes: usize) -> Result<u64, u32> {
        let create = unsafe { mem::transmute::<*const c_void, Create>(entries::cuMemCreate as *const c_void) };
        // `CUmemAllocationProp` of plain memory on the first device.
        let (wanted, mut handle) = ([1_u32, 0, 1, 0, 0, 0, 0, 0], ptr::null_mut());
        match unsafe { (self.ask_for_piece)(create, &raw mut handle, bytes, wanted.as_ptr().cast()) } {
            0 => Ok(handle as u64),
            code => Err(code),
        }
    }

    fn ask_at(&self, door: Allocate, bytes: usize) -> Result<u64, u32> {
        let mut pointer = ptr::null_mut();
        match unsafe { (self.ask)(door, &raw mut pointer, bytes) } {
            0 => Ok(pointer as u64),
            code => Err(code),
        }
    }

    fn ask(&self, bytes: usize) -> Result<u64, u32> {
        self.ask_at(hooks::cudaMalloc, bytes)
    }

    /// Is refused, frees what it has cached, and asks again, as torch does. Gets it then.
    fn retry(&self, ask: impl Fn() -> Result<u64, u32>) -> u64 {
        let cached = self.ask(200 * MIB).unwrap();
        assert_eq!(ask(), Err(OUT_OF_MEMORY));
        assert_eq!(free(cached), 0);
        ask().unwrap()
    }

    fn reports(&self) -> Vec<Value> {
        reports(&self.name)
    }

    /// Its only report.
    fn report(&self) -> Value {
        out_of_memory::settle();
        let mut all = self.reports();
        assert_eq!(all.len(), 1, "{all:#?}");
        all.remove(0)
    }
}

fn drivers_door() -> Allocate {
    unsafe { mem::transmute::<*const c_void, Allocate>(entries::cuMemAlloc_v2 as *const c_void) }
}

fn rows(report: &Value, what: &str) -> Vec<(String, u64)> {
    let rows = report["in_use"].as_array().unwrap().iter().filter(|row| row["what"] == what);
    rows.map(|row| (row["of"].as_str().unwrap_or_default().to_owned(), row["bytes"].as_u64().unwrap())).collect()
}

#[test]
fn a_refusal_in_the_runtime_or_the_driver_is_reported_managed_or_not() {
    let gpu = take();
    malloc_tagged("weights", None, LARGE).unwrap();
    let doors: [(&str, Allocate, bool); 4] = [
        ("librefused_runtime.so", hooks::cudaMalloc, true),
        ("librefused_driver.so", drivers_door(), true),
        ("librefused_runtime_left.so", hooks::cudaMalloc, false),
        ("librefused_driver_left.so", drivers_door(), false),
    ];
    let before = gpu.footprint();
    for (name, door, is_managed) in doors {
        let library = Library::new(name);
        region::begin(is_managed.then_some("activations"), None).unwrap();
        assert_eq!(library.ask_at(door, TOO_MUCH), Err(OUT_OF_MEMORY));
        region::end().unwrap();
        let report = library.report();
        assert_eq!(report["request"]["bytes"], TOO_MUCH, "{report:#}");
        assert_eq!(report["request"]["refused_by"], "driver");
        assert_eq!(report["request"]["tag"].as_str(), is_managed.then_some("activations"));
        assert_eq!(report["request"]["call"].as_str(), is_managed.then_some("cuMemCreate"));
        assert_eq!(report["request"]["attempts"], 1);
        assert_eq!((&report["process"]["pid"], &report["version"]), (&std::process::id().into(), &1.into()));
        assert_eq!(report["thread"]["name"], thread_name());
        let first = report["native_stack"][0].as_str().unwrap();
        assert!(first.starts_with(&format!("{name}+0x")) && first.contains(" ask"), "the call is where the stack begins: {first}");
        assert_eq!(rows(&report, "tag"), [("weights".to_owned(), LARGE as u64)]);
        let (free, total) = (report["device"]["free_bytes"].as_u64().unwrap(), report["device"]["total_bytes"].as_u64().unwrap());
        let in_use: u64 = report["in_use"].as_array().unwrap().iter().map(|row| row["bytes"].as_u64().unwrap()).sum();
        assert_eq!((total, in_use), (common::DEVICE_BYTES as u64, total - free), "the rows add up: {report:#}");
        let largest = &report["largest"][0];
        assert_eq!((&largest["bytes"], &largest["tag"]), (&LARGE.into(), &"weights".into()));
        assert!(largest["native_stack"].as_array().unwrap().len() > 2 && largest["at"].is_string(), "where it was made: {largest}");
        let ways = report["could_be_freed"].as_array().unwrap();
        assert_eq!(ways[0]["command"], format!("vramctl pause --no-hold --pid {} weights", std::process::id()));
        assert_eq!(ways[0]["is_enough"], false, "more than the device has");
        let events = &report["events"];
        let owner = events["owners"].as_array().unwrap().iter().find(|owner| owner["tag"] == "weights").unwrap();
        let is_its = |event: &&Value| event["event"] == "allocated" && event["owner"] == owner["owner"] && event["bytes"] == LARGE;
        assert!(events["events"].as_array().unwrap().iter().any(|event| is_its(&event)), "the last minute: {events}");
        let page = warned_about(name);
        assert!(page[0].starts_with(&format!("out of memory: {name} asked for 300.00 MiB")), "{page:?}");
    }
    let changes = warned_about("Changes in the last minute: ");
    assert!(changes.iter().any(|line| line.contains("tag weights +64.00 MiB")), "{changes:?}");
    assert!(warned_about("The full report is in ").len() >= 4 && !warned_about("tag weights").is_empty());
    assert_eq!(gpu.footprint(), before, "a report leaves nothing on the device");
}

#[test]
fn a_refusal_of_unified_memory_is_reported_once() {
    let _gpu = take();
    let doors = [
        ("libunified_runtime.so", hooks::cudaMallocManaged as *const c_void),
        ("libunified_driver.so", entries::cuMemAllocManaged as *const c_void),
    ];
    for (name, door) in doors {
        let library = Library::new(name);
        let door = unsafe { mem::transmute::<*const c_void, Allocate>(door) };
        assert_eq!(library.ask_at(door, TOO_MUCH), Err(OUT_OF_MEMORY));
        let report = library.report();
        assert_eq!((&report["request"]["bytes"], &report["request"]["tag"]), (&TOO_MUCH.into(), &Value::Null));
    }
}

/// Only trimming returns it: pausing the tag would stop the program's own use of the rest.
#[test]
fn what_the_programs_own_allocator_has_cached_can_be_trimmed() {
    static CACHED: Mutex<Vec<Segment>> = Mutex::new(Vec::new());
    let _gpu = take();
    let address = malloc_tagged("default", None, 160 * MIB).unwrap();
    let segment =
        |mib: usize, live: usize| Segment { address: address + (mib * MIB) as u64, bytes: 80 << 20, live_bytes: (live * MIB) as u64 };
    *CACHED.lock().unwrap() = vec![segment(0, 0), segment(80, 70)];
    // As torch's thread of the package, for as long as the process lives.
    cache::answer(None);
    thread::spawn(|| {
        loop {
            cache::wait();
            let _ = cache::report(&CACHED.lock().unwrap());
            cache::answer(None);
        }
    });
    let command = format!("vramctl trim --pid {}", std::process::id());
    // On a slow machine, the allocator's thread may be too late.
    assert!((0..10).any(|number| {
        let library = Library::new(&format!("libnccl_fails{number}.so"));
        region::begin(None, None).unwrap();
        assert_eq!(library.ask(150 * MIB), Err(OUT_OF_MEMORY));
        region::end().unwrap();
        let report = library.report();
        let ways = report["could_be_freed"].as_array().unwrap();
        let way = ways.iter().find(|way| way["command"] == *command);
        way.is_some_and(|way| (&way["bytes"], &way["is_enough"]) == (&(80 << 20).into(), &true.into()))
    }));
    CACHED.lock().unwrap().clear();
}

#[test]
fn the_page_tells_how_far_back_its_events_go() {
    let _gpu = take();
    let library = Library::new("libbusy.so");
    malloc_tagged("busy", None, 2 * MIB).unwrap();
    for _ in 0..2100 {
        assert_eq!(free(malloc_tagged("churn", None, 2 * MIB).unwrap()), 0);
    }
    malloc_tagged("busy", None, 2 * MIB).unwrap();
    assert_eq!(library.ask(TOO_MUCH), Err(OUT_OF_MEMORY));
    let report = library.report();
    let covered = report["events_seconds"].as_f64().unwrap();
    let events = report["events"]["events"].as_array().unwrap();
    let first = (report["events"]["now_ns"].as_u64().unwrap() - events[0]["at_ns"].as_u64().unwrap()) as f64 / 1e9;
    assert!((covered - first).abs() < 1e-6 && covered < 60.0, "{covered} s, and the first is {first} s old");
    let within = if covered < 1.0 { format!("{:.0} ms", covered * 1e3) } else { format!("{covered:.1} s") };
    let lines = warned_about(&format!("Changes in the last {within}: "));
    assert!(lines.iter().any(|line| line.contains("tag busy +2.00 MiB")), "{lines:?}");
}

fn thread_name() -> String {
    vramctl_host::stack::thread_name()
}

#[test]
fn a_refusal_of_physical_memory_is_reported() {
    unsafe extern "C" fn create(handle: *mut *mut c_void, bytes: usize) -> u32 {
        // `CUmemAllocationProp` of plain memory on the second device.
        let wanted = [1_u32, 0, 1, 1, 0, 0, 0, 0];
        // Not through the library: its call site is this one.
        unsafe { entries::cuMemCreate(handle.cast(), bytes, wanted.as_ptr().cast(), 0) }
    }
    let _gpu = take();
    let this = env::current_exe().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
    common::set_device(1);
    for tag in [Some("pool"), None] {
        region::begin(tag, None).unwrap();
        common::set_device(0);
        let before = reports(&this).len();
        let mut handle = ptr::null_mut();
        assert_eq!(unsafe { create(&raw mut handle, TOO_MUCH + if tag.is_some() { 2 * MIB } else { 0 }) }, OUT_OF_MEMORY);
        region::end().unwrap();
        out_of_memory::settle();
        assert_eq!(reports(&this).len(), before + 1);
        let report = reports(&this).pop().unwrap();
        assert_eq!(report["request"]["tag"].as_str(), tag);
        assert_eq!(report["device"]["device"], 1, "the memory's device, which is not the thread's");
        assert_eq!(report["device"]["uuid"], vramctl_driver::uuid(1).unwrap());
    }
}

#[test]
fn a_refusal_by_the_margin_reports_its_size() {
    let _gpu = take();
    let library = Library::new("libmargin.so");
    Memory::get().set_margin(200 << 20);
    region::begin(Some("cache"), None).unwrap();
    assert_eq!(library.ask(100 * MIB), Err(OUT_OF_MEMORY));
    region::end().unwrap();
    let report = library.report();
    assert_eq!(report["request"]["refused_by"], "margin", "{report:#}");
    assert_eq!(report["request"]["margin_bytes"], 200_u64 << 20);
    assert_eq!(warned_about("refused by the memory margin of 200.00 MiB").len(), 1);
    assert!(warned_about("libmargin.so asked for")[0].ends_with(" short"), "{:?}", warned_about("libmargin.so"));
}

#[test]
fn a_resume_that_lacks_memory_is_reported_once_however_often_it_is_tried() {
    let gpu = take();
    malloc_tagged("kv_cache", None, 150 * MIB).unwrap();
    malloc_tagged("weights", None, 40 * MIB).unwrap();
    pause(&["kv_cache"]).unwrap();
    gpu.occupy(0, 100 * MIB);
    for _ in 0..5 {
        resume(&["kv_cache"]).unwrap_err();
    }
    gpu.occupy(0, 0);
    out_of_memory::settle();
    let all = reports("vramctl");
    assert_eq!(all.len(), 1, "{all:#?}");
    let report = &all[0];
    assert_eq!((&report["request"]["refused_by"], &report["request"]["tag"]), (&"resume".into(), &"kv_cache".into()));
    assert_eq!(report["request"]["bytes"], 150 * MIB);
    assert_eq!(report["paused"]["kv_cache"], 150 * MIB);
    let ways = report["could_be_freed"].as_array().unwrap();
    assert_eq!((&ways[0]["bytes"], &ways[0]["is_enough"]), (&(40 * MIB).into(), &true.into()), "{report:#}");
    assert!(warned_about("a resume (tag kv_cache) needs 150.00 MiB on GPU-73696d75;").len() == 1, "{:?}", warned_about("a resume"));
    resume(&["kv_cache"]).unwrap();
}

/// torch empties its cache and tries again: one page, with the state at that point.
#[test]
fn a_failed_retry_of_torch_is_one_episode() {
    let _gpu = take();
    let torch = Library::new("libc10_cuda_vain.so");
    region::begin(Some("default"), None).unwrap();
    let cached = torch.ask(40 * MIB).unwrap();
    assert_eq!(torch.ask(TOO_MUCH), Err(OUT_OF_MEMORY));
    assert_eq!(free(cached), 0);
    assert_eq!(torch.ask(TOO_MUCH), Err(OUT_OF_MEMORY));
    // With `max_split_size_mb`, torch tries a third time.
    assert_eq!(torch.ask(TOO_MUCH), Err(OUT_OF_MEMORY));
    region::end().unwrap();
    let report = torch.report();
    assert_eq!(report["request"]["attempts"], 2, "{report:#}");
    assert_eq!(report["request"]["freed_since_bytes"], 40 * MIB);
    assert_eq!(rows(&report, "tag"), [], "as it was at the second attempt");
    assert_eq!(warned_about("in 2 attempts; 40.00 MiB was freed in between").len(), 1);
    assert_eq!(
        warned_about(&torch.name).len(),
        1 + report["native_stack"].as_array().unwrap().iter().filter(|frame| frame.as_str().unwrap().contains(&torch.name)).count()
    );
}

#[test]
fn a_successful_retry_of_torch_is_one_line_and_no_page() {
    let _gpu = take();
    let torch = Library::new("libc10_cuda_saved.so");
    region::begin(Some("default"), None).unwrap();
    torch.retry(|| torch.ask(150 * MIB));
    region::end().unwrap();
    out_of_memory::settle();
    let lines = warned_about(&torch.name);
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains("asked for 150.00 MiB (tag default)") && lines[0].contains("a later attempt succeeded"), "{lines:?}");
    assert_eq!(torch.reports().len(), 0);
}

/// In a program that shares its GPUs, torch's second attempt waits until others have made room: the first was no failure worth a word.
#[test]
fn a_retry_that_waits_for_room_is_no_warning() {
    let _gpu = take();
    let torch = Library::new("libc10_cuda_shares.so");
    region::begin(Some("default"), None).unwrap();
    let cached = torch.ask(200 * MIB).unwrap();
    out_of_memory::set_same(Duration::from_millis(50));
    assert_eq!(torch.ask(150 * MIB), Err(OUT_OF_MEMORY));
    let waiting = events::waiting_for_room();
    // Longer than a second attempt may take otherwise.
    thread::sleep(Duration::from_millis(500));
    out_of_memory::set_same(Duration::from_secs(600));
    drop(waiting);
    assert_eq!(free(cached), 0);
    let got = torch.ask(150 * MIB).unwrap();
    region::end().unwrap();
    out_of_memory::settle();
    assert_eq!(free(got), 0);
    assert_eq!((warned_about(&torch.name).len(), torch.reports().len()), (0, 0));
}

/// Near the limit of memory, torch may retry all day. The failure that ends the program needs its page all the same.
#[test]
fn successful_retries_do_not_use_up_the_pages() {
    let _gpu = take();
    let torch = Library::new("libc10_cuda_often.so");
    for _ in 0..10 {
        assert_eq!(free(torch.retry(|| torch.ask(150 * MIB))), 0);
        out_of_memory::settle();
    }
    let lines = warned_about(&torch.name).len();
    assert!((3..10).contains(&lines), "{lines} lines");
    assert_eq!((torch.ask(TOO_MUCH), torch.ask(TOO_MUCH)), (Err(OUT_OF_MEMORY), Err(OUT_OF_MEMORY)));
    assert_eq!(torch.report()["request"]["attempts"], 2);
}

/// A step asks for the same sizes as the one before.
#[test]
fn each_successful_retry_is_an_episode_of_its_own() {
    let _gpu = take();
    let torch = Library::new("libc10_cuda_steps.so");
    for size in [150, 150, 150, 160, 150].map(|mib| mib * MIB) {
        assert_eq!(free(torch.retry(|| torch.ask(size))), 0);
    }
    assert_eq!((torch.ask(TOO_MUCH), torch.ask(TOO_MUCH)), (Err(OUT_OF_MEMORY), Err(OUT_OF_MEMORY)));
    assert_eq!(torch.report()["request"]["attempts"], 2);
}

/// Nor do retries for pieces of many sizes, any of which may need another piece, keep out another failure.
#[test]
fn successful_retries_of_many_sizes_do_not_keep_out_a_page() {
    let _gpu = take();
    let torch = Library::new("libc10_cuda_sizes.so");
    region::begin(Some("default"), None).unwrap();
    for size in (0..12).map(|more| (150 + 2 * more) * MIB) {
        let piece = torch.retry(|| torch.ask_for_piece(size));
        assert_eq!(unsafe { entries::cuMemRelease(piece) }, 0);
    }
    region::end().unwrap();
    assert_eq!((torch.ask(TOO_MUCH), torch.ask(TOO_MUCH)), (Err(OUT_OF_MEMORY), Err(OUT_OF_MEMORY)));
    assert_eq!(torch.report()["request"]["attempts"], 2);
}

/// Before its second attempt, torch waits for the GPU's work, and frees its cache block by block.
#[test]
fn a_retry_of_torch_may_take_long_while_it_frees_memory() {
    const BLOCKS: usize = 12;
    let _gpu = take();
    let is_one_line = |number: usize| {
        let torch = Library::new(&format!("libc10_cuda_slow{number}.so"));
        region::begin(Some("default"), None).unwrap();
        let cached: Vec<_> = (0..BLOCKS).map(|_| torch.ask(16 * MIB).unwrap()).collect();
        // The frees take longer than a second attempt may take otherwise.
        out_of_memory::set_same(Duration::from_millis(150));
        assert_eq!(torch.ask(150 * MIB), Err(OUT_OF_MEMORY));
        for address in cached {
            thread::sleep(Duration::from_millis(100));
            assert_eq!(free(address), 0);
        }
        let got = torch.ask(150 * MIB).unwrap();
        out_of_memory::set_same(Duration::from_secs(600));
        region::end().unwrap();
        out_of_memory::settle();
        assert_eq!(free(got), 0);
        let lines = warned_about(&torch.name);
        torch.reports().is_empty() && lines.len() == 1 && lines[0].contains("a later attempt succeeded")
    };
    // On a slow machine, one free may take as long as otherwise the end.
    assert!((0..5).any(is_one_line));
}

/// With expandable segments, torch gets some pieces before the next is refused again.
#[test]
fn a_smaller_success_does_not_end_torchs_episode() {
    const PIECE: usize = 20 * MIB;
    let _gpu = take();
    let torch = Library::new("libc10_cuda_pieces.so");
    region::begin(Some("default"), None).unwrap();
    let attempt = || {
        let mut pieces = Vec::new();
        loop {
            match torch.ask_for_piece(PIECE) {
                Ok(piece) => pieces.push(piece),
                Err(code) => return (pieces, code),
            }
        }
    };
    for _ in 0..2 {
        let (pieces, code) = attempt();
        assert!(pieces.len() > 5 && code == OUT_OF_MEMORY);
        for piece in pieces {
            assert_eq!(unsafe { entries::cuMemRelease(piece) }, 0);
        }
    }
    region::end().unwrap();
    assert_eq!(torch.report()["request"]["attempts"], 2);
}

/// Without its cache (`PYTORCH_NO_CUDA_MEMORY_CACHING`), torch does not try again.
#[test]
fn a_failure_that_torch_does_not_retry_is_reported_a_little_later() {
    let _gpu = take();
    let torch = Library::new("libc10_cuda_once.so");
    assert_eq!(torch.ask(TOO_MUCH), Err(OUT_OF_MEMORY));
    // A second is over.
    out_of_memory::settle();
    assert_eq!(torch.report()["request"]["attempts"], 1);
}

#[test]
fn a_search_for_the_largest_block_gets_few_pages() {
    let _gpu = take();
    let library = Library::new("libsearches.so");
    let begun = Instant::now();
    let mut bytes = TOO_MUCH;
    let found = loop {
        match library.ask(bytes) {
            Ok(address) => break address,
            Err(code) => assert_eq!(code, OUT_OF_MEMORY),
        }
        bytes -= MIB / 4;
    };
    assert_eq!(free(found), 0);
    out_of_memory::settle();
    // Three at once, and one every ten seconds.
    let (pages, most) = (library.reports().len(), 3 + begun.elapsed().as_secs() as usize / 10);
    assert!((3..=most).contains(&pages), "{pages} pages");
    // Another library's failures have their own pages, and these tell how many had none.
    let next = Library::new("libsearches_not.so");
    assert_eq!(next.ask(TOO_MUCH), Err(OUT_OF_MEMORY));
    let unreported = next.report()["unreported"].as_u64().unwrap();
    assert!(unreported > 100, "{unreported} requests without a page");
}

/// A capture in the strictest mode is invalidated by any disallowed call of any thread.
#[test]
fn a_failure_in_a_capture_is_reported_and_leaves_the_capture_valid() {
    let _gpu = take();
    let library = Library::new("libcaptures.so");
    let address = malloc_tagged("x", None, 4 * MIB).unwrap();
    let stream = Stream::create();
    stream.begin_capture(0);
    region::begin(Some("graph"), None).unwrap();
    {
        // The capture would forbid the program's call otherwise.
        let _relaxed = RelaxedCapture::enter();
        assert_eq!(library.ask(TOO_MUCH), Err(OUT_OF_MEMORY));
    }
    region::end().unwrap();
    assert_eq!(stream.fill(address, 7, MIB), 0);
    let graph = stream.end_capture().expect("the capture is intact");
    assert_eq!((stream.launch(&graph), stream.synchronize()), (0, 0));
    assert_eq!(common::read(address, 1).unwrap(), [7]);
    let report = library.report();
    assert_eq!(report["device"]["device"], 0, "{report:#}");
    drop((graph, stream));
}

/// A request of the program that fails.
fn fail(request: FailedRequest) {
    events::publish(Event::Failed(request));
}

fn asked(library: &'static str, bytes: u64) -> FailedRequest {
    FailedRequest { bytes, device: None, tag: None, library, caller: 1, cause: Cause::Refused(None) }
}

/// Only the last ten of this process are kept; all other files in the directory belong to others.
#[test]
fn a_process_keeps_its_last_ten_files_and_removes_only_its_own() {
    let _gpu = take();
    fs::create_dir_all(folder()).unwrap();
    let others = ["out-of-memory-1.000000-1.json.txt", ".out-of-memory-2.000000-3", "core.4711"];
    for name in others {
        fs::write(folder().join(name), "not ours").unwrap();
    }
    fs::create_dir_all(folder().join("out-of-memory-0.000000-1")).unwrap();
    for (number, name) in ["one", "two", "three", "four", "five"].into_iter().enumerate() {
        for bytes in 0..3 {
            fail(asked(name, number as u64 * 10 + bytes));
        }
        out_of_memory::settle();
        assert_eq!(reports(name).len(), 3);
    }
    assert_eq!(files().len(), 10);
    assert_eq!((reports("one").len(), reports("five").len()), (0, 3));
    for name in others {
        assert_eq!(fs::read_to_string(folder().join(name)).unwrap(), "not ours");
        fs::remove_file(folder().join(name)).unwrap();
    }
    let unfinished = fs::read_dir(folder()).unwrap().filter(|entry| entry.as_ref().unwrap().file_name().to_str().unwrap().starts_with('.'));
    assert_eq!(unfinished.count(), 0);
}

#[test]
fn a_forked_child_writes_reports_of_its_own() {
    let _gpu = take();
    // Its parent's allowance is used up, and episodes of its parent are open.
    let told = || warned_about("The full report is in").len();
    let before = told();
    for bytes in 0..5 {
        fail(asked("before the fork", bytes));
    }
    // By then, no other thread has the lock of the test's logger.
    eventually("three reports", || told() == before + 3);
    let before = files();
    // SAFETY: the child leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        events::succeeded(1 << 30, false);
        fail(asked("before the fork", 77));
        out_of_memory::settle();
        let own: Vec<_> = reports("before the fork").into_iter().filter(|report| report["process"]["pid"] == std::process::id()).collect();
        let fine = own.len() == 1 && own[0]["request"]["bytes"] == 77;
        // SAFETY: ends the child without running the test harness's exit handlers.
        unsafe { libc::_exit(i32::from(!fine)) };
    }
    let mut ended = -1;
    // SAFETY: `child` is ours and `ended` is writable.
    unsafe { libc::waitpid(child, &raw mut ended, 0) };
    assert_eq!(ended, 0);
    let of_child: Vec<_> = files().difference(&before).cloned().collect();
    assert_eq!(of_child.len(), 1, "its parent's are still there");
    fs::remove_file(&of_child[0]).unwrap();
}

/// Waits until the watch has told one more fall, and returns how many it has told.
fn falls(gpu: &Gpu, before: usize) -> usize {
    let told = || warned_about("is free on GPU").len();
    gpu.occupy(0, DEVICE_BYTES - 32 * MIB);
    eventually(&format!("fall {}", before + 1), || told() > before);
    gpu.occupy(0, 0);
    told()
}

/// Waits until the watch has seen that enough is free again.
fn until_it_has_looked(gpu: &Gpu) {
    let looks = || gpu.calls("cuMemGetInfo_v2");
    let before = looks();
    eventually("two looks", || looks() > before + 1);
}

/// Calls that the library does not see may destroy the context that it has asked in.
#[test]
fn a_watch_outlives_the_contexts_that_it_asks_in() {
    let gpu = take();
    watch::set(64 << 20, false);
    let told = falls(&gpu, 0);
    // The new context has the old one's handle.
    common::reset_unseen(0);
    common::use_again(0);
    until_it_has_looked(&gpu);
    let told = falls(&gpu, told);
    // Its device has another one, which was seen.
    let context = OwnContext::create(0);
    let address = malloc(2 * MIB).unwrap();
    common::reset_unseen(0);
    until_it_has_looked(&gpu);
    falls(&gpu, told);
    assert_eq!(free(address), 0);
    drop(context);
    watch::set(0, false);
    common::use_again(0);
}

/// The connection to a process that has not answered yet: in a child, nobody would ever close it.
#[test]
fn a_forked_child_does_not_keep_the_connections_to_the_others() {
    let _gpu = take();
    let sockets = common::own_folder().join("sockets");
    // The control thread creates it, later.
    DirBuilder::new().recursive(true).mode(0o700).create(&sockets).unwrap();
    // In the place of another process.
    let listener = UnixListener::bind(sockets.join("1.sock")).unwrap();
    let asking = thread::spawn(|| fail(FailedRequest { device: Some(0), ..asked("while another thread forks", 5) }));
    let asked = loop {
        let (mut stream, _) = listener.accept().unwrap();
        // It first only looks who is there.
        if stream.read(&mut [0]).unwrap() > 0 {
            break stream;
        }
    };
    let own = listener.as_raw_fd();
    // SAFETY: the child only asks about its descriptors, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_kept = |number: &i32| {
            // SAFETY: not closed through this value.
            let socket = ManuallyDrop::new(unsafe { UnixStream::from_raw_fd(*number) });
            // The test's own, and those that the library's server has accepted a moment before the fork.
            let is_accepted = socket.peer_addr().is_ok() && socket.local_addr().is_ok_and(|local| local.as_pathname().is_some());
            // One that another thread of the library has made in this moment is no connection yet.
            let is_new = socket.peer_addr().is_err() && socket.local_addr().is_ok_and(|local| local.is_unnamed());
            socket.local_addr().is_ok() && !is_accepted && !is_new && *number != own
        };
        let kept = (3..1024).filter(is_kept).count();
        // SAFETY: ends the child without running the test harness's exit handlers.
        unsafe { libc::_exit(kept as i32) };
    }
    let mut ended = -1;
    // SAFETY: `child` is ours and `ended` is writable.
    unsafe { libc::waitpid(child, &raw mut ended, 0) };
    fs::remove_file(sockets.join("1.sock")).unwrap();
    drop(asked);
    asking.join().unwrap();
    assert_eq!(ended, 0);
}

/// Runs one of the tests below in a process of its own, with the library's own log: what it wrote to stderr.
fn alone(test: &str, directory: &Path) -> String {
    let mut program = Command::new(env::current_exe().unwrap());
    program.args(["--ignored", "--exact", "--nocapture", test]).env(common::BUILT, "1").env("VRAMCTL_REPORT_DIR", directory);
    // The program's first device is the machine's second.
    program.env("CUDA_VISIBLE_DEVICES", "1,0").env("LD_LIBRARY_PATH", common::simulated_libraries());
    let done = program.env(common::LOG_LEVEL, "warn").output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success(), "{said}");
    said
}

fn fail_and_go_on() {
    let _gpu = Gpu::take();
    vramctl_config::set_up_logger();
    // However slowly NVML starts, the page waits for the GPU's index.
    out_of_memory::set_same(Duration::from_secs(600));
    for tag in ["first", "second"] {
        assert_eq!(malloc_tagged(tag, None, TOO_MUCH), Err(OUT_OF_MEMORY));
        out_of_memory::settle();
    }
    malloc_tagged("x", None, MIB).unwrap();
}

#[test]
#[ignore = "run by the tests below"]
fn fails_and_goes_on() {
    fail_and_go_on();
}

#[test]
fn an_unwritable_directory_is_named_and_the_page_is_still_logged() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), "").unwrap();
    let text = alone("fails_and_goes_on", &folder.path().join("file/reports"));
    assert_eq!(text.matches("Could not write it to VRAMCTL_REPORT_DIR: ").count(), 2, "{text}");
    assert!(text.contains("(tag second) on GPU 1 (GPU-73696d76); ") && text.contains("In use on the device:"), "{text}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_missing_directory_is_created_for_the_user_alone() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let reports = folder.path().join("a/b");
    alone("fails_and_goes_on", &reports);
    let files: Vec<_> =
        fs::read_dir(&reports).unwrap().map(|entry| entry.unwrap().metadata().unwrap().permissions().mode() & 0o777).collect();
    assert_eq!((files, fs::metadata(&reports).unwrap().permissions().mode() & 0o777), (vec![0o600, 0o600], 0o700));
}

#[test]
#[ignore = "run by the test below"]
fn ends_while_a_failure_is_held_back() {
    let _gpu = Gpu::take();
    vramctl_config::set_up_logger();
    let torch = Library::new("libc10_cuda_ends.so");
    assert_eq!(torch.ask(TOO_MUCH), Err(OUT_OF_MEMORY));
    std::process::exit(0);
}

/// torch may make no second attempt, and an exiting program does not wait for the first to be reported.
#[test]
fn a_held_back_failure_is_reported_when_the_program_exits() {
    let folder = tempfile::tempdir().unwrap();
    let text = alone("ends_while_a_failure_is_held_back", folder.path());
    assert!(text.contains("out of memory: libc10_cuda_ends.so asked for 300.00 MiB"), "{text}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}
