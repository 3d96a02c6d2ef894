//! Pauses of programs that are not idle: their calls wait at the gate, and the program notices only a delay.

use crate::common::{
    self, EmptyGraph, Gate, Gpu, MIB, OwnContext, Stream, malloc_tagged, pattern, read, resume, state, without_waiting, write,
};
use std::ffi::{CStr, c_void};
use std::mem::transmute;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};
use vramctl_backup::{HOST_PIECE, quiet};
use vramctl_core::gate;
use vramctl_core::memory::Memory;
use vramctl_core::transition::Preparation;
use vramctl_driver::{Activity, CopyBetween, CopySide, Current};
use vramctl_intercept::{entries, hooks, launch};
use vramctl_model::{Error, Kind, Observer, Policy, Progress, Report, TagState, code};

fn pause_held(tags: &[&str], limit: Duration) -> Result<Report, Error> {
    Memory::get().pause(&common::pausing_with(tags, |request| request.hold = Some(limit)), &mut ())
}

const LONG: Duration = Duration::from_secs(100);
const SHORT: Duration = Duration::from_millis(100);

/// Threads wait until everything is back, not only a part.
#[test]
fn the_program_continues_when_everything_is_resumed() {
    let _gpu = Gpu::take();
    let (one, two) = (malloc_tagged("one", None, 2 * MIB).unwrap(), malloc_tagged("two", None, 2 * MIB).unwrap());
    let bytes = pattern(3, MIB);
    assert_eq!((write(one, &bytes), write(two, &bytes)), (0, 0));
    pause_held(&[], LONG).unwrap();
    assert!(Memory::get().status().held);
    thread::scope(|scope| {
        let copy = scope.spawn(move || {
            common::set_device(0);
            unsafe { launch::cuMemsetD8_v2(one as usize, 1, MIB) }
        });
        while Memory::get().status().waiting_threads == 0 {
            thread::yield_now();
        }
        resume(&["one"]).unwrap();
        thread::sleep(Duration::from_millis(20));
        assert!(!copy.is_finished() && gate::is_held(), "`two` is still paused");
        // A second pause of the same memory, and a failed one, leave the program held.
        pause_held(&["two"], LONG).unwrap();
        assert!(pause_held(&["nothing"], LONG).is_err() && gate::is_held());
        assert_eq!(common::free(two), 0);
        assert_eq!(copy.join().unwrap(), 0, "what was paused last is gone");
    });
    assert!(!gate::is_held() && !Memory::get().status().held);
    assert_eq!(read(one, MIB), Ok(vec![1; MIB]));
}

/// A stream-ordered allocation is work of its stream and waits. A free does not: it may be what releases memory.
#[test]
fn stream_ordered_allocations_wait_while_held() {
    let _gpu = Gpu::take();
    let (address, stream) = (malloc_tagged("one", None, 2 * MIB).unwrap(), Stream::create());
    pause_held(&[], LONG).unwrap();
    let handle = stream.handle();
    thread::scope(|scope| {
        let allocated = scope.spawn(move || {
            common::set_device(0);
            let mut pointer = std::ptr::null_mut();
            (unsafe { hooks::cudaMallocAsync(&raw mut pointer, 2 * MIB, handle) }, pointer as u64)
        });
        while Memory::get().status().waiting_threads == 0 {
            thread::yield_now();
        }
        resume(&[]).unwrap();
        let (code, pointer) = allocated.join().unwrap();
        assert_eq!((code, common::free(pointer), common::free(address)), (0, 0, 0));
    });
}

/// Calls a function of up to six arguments as the program does: through its entry, which it must have.
fn call_entry(symbol: &CStr, arguments: &[usize]) -> u32 {
    type Function = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> u32;
    let function = entries::of_symbol(symbol).unwrap_or_else(|| panic!("{symbol:?} has no entry"));
    let [one, two, three, four, five, six] = std::array::from_fn(|index: usize| arguments.get(index).copied().unwrap_or(0));
    unsafe { transmute::<*const c_void, Function>(function.entry)(one, two, three, four, five, six) }
}

/// Makes these calls in the held program, each in a thread of its own. They must all wait for the resume. Returns what they answer then.
fn answers_after_the_resume(calls: &[(&CStr, Vec<usize>)]) -> Vec<u32> {
    thread::scope(|scope| {
        let started: Vec<_> = calls
            .iter()
            .map(|(symbol, arguments)| {
                scope.spawn(move || {
                    common::set_device(0);
                    call_entry(symbol, arguments)
                })
            })
            .collect();
        common::eventually("all wait, or one does not", || {
            Memory::get().status().waiting_threads == calls.len() || started.iter().any(thread::ScopedJoinHandle::is_finished)
        });
        let passed: Vec<_> = calls.iter().zip(&started).filter(|(_, call)| call.is_finished()).map(|((symbol, _), _)| symbol).collect();
        resume(&[]).unwrap();
        let answers = started.into_iter().map(|call| call.join().unwrap()).collect();
        assert!(passed.is_empty(), "{passed:?} did not wait");
        answers
    })
}

/// What loads code lazily, uploads a graph, or queues work on the host is work, whatever its name suggests.
#[test]
fn calls_that_load_or_start_work_in_passing_wait_while_held() {
    extern "C" fn count(_stream: *mut c_void, _code: u32, counter: &AtomicUsize) {
        counter.fetch_add(1, Ordering::SeqCst);
    }
    let _gpu = Gpu::take();
    malloc_tagged("one", None, 2 * MIB).unwrap();
    let (stream, graph, called) = (Stream::create(), EmptyGraph::create(), AtomicUsize::new(0));
    let (mut module, mut function, mut executable, mut executable_per_thread) = (0_usize, 0_usize, 0_usize, 0_usize);
    let code = c".version 7.0\n.target sm_70\n.entry nothing() { ret; }";
    assert_eq!(unsafe { launch::cuModuleLoadData((&raw mut module) as usize, code.as_ptr() as usize) }, 0);
    // `CUDA_GRAPH_INSTANTIATE_PARAMS`, with the flag for an upload.
    let mut params = [[2_usize, stream.0 as usize, 0, 9]; 2];
    let [plain, per_thread] = &mut params;
    let queue = vec![stream.0 as usize, count as *const () as usize, (&raw const called) as usize, 0];
    let calls = [
        (c"cuModuleGetFunction", vec![(&raw mut function) as usize, module, c"nothing".as_ptr() as usize]),
        (c"cuGraphInstantiateWithParams", vec![(&raw mut executable) as usize, graph.0 as usize, plain.as_mut_ptr() as usize]),
        (
            c"cuGraphInstantiateWithParams_ptsz",
            vec![(&raw mut executable_per_thread) as usize, graph.0 as usize, per_thread.as_mut_ptr() as usize],
        ),
        (c"cuStreamAddCallback", queue.clone()),
        (c"cuStreamAddCallback_ptsz", queue),
        // The simulated driver lacks these.
        (c"cuMemMapArrayAsync", Vec::new()),
        (c"cuMemMapArrayAsync_ptsz", Vec::new()),
    ];
    pause_held(&[], LONG).unwrap();
    assert_eq!(answers_after_the_resume(&calls), [0, 0, 0, 0, 0, 500, 500]);
    assert_eq!((stream.synchronize(), called.load(Ordering::SeqCst)), (0, 2));
}

/// An engine warms up: it builds graphs, for which the driver looks whether their memory is there.
#[test]
fn graphs_are_built_while_held() {
    let _gpu = Gpu::take();
    let (address, stream, built) = (malloc_tagged("one", None, 2 * MIB).unwrap(), Stream::create(), EmptyGraph::create());
    let (mut captured, mut executables, mut node, from) = (std::ptr::null_mut(), [0_usize; 2], 0_usize, [9_u8; 16]);
    unsafe {
        assert_eq!(entries::cuStreamBeginCapture_v2(stream.handle(), 2), 0);
        assert_eq!(launch::cuMemsetD8Async(address as usize + 16, 7, 16, stream.0 as usize), 0);
        assert_eq!(entries::cuStreamEndCapture(stream.handle(), &raw mut captured), 0);
    }
    let captured = EmptyGraph(captured);
    let [first, second] = &mut executables;
    let copy = CopyBetween::linear(CopySide::of_device(address), CopySide::of_host(from.as_ptr() as u64), from.len());
    let context = Current::of_thread().unwrap().unwrap().context().handle().address() as usize;
    let calls = [
        (c"cuGraphInstantiateWithFlags", vec![ptr::from_mut(first) as usize, captured.0 as usize, 0]),
        (c"cuGraphInstantiate_v2", vec![ptr::from_mut(second) as usize, captured.0 as usize, 0, 0, 0]),
        (c"cuGraphAddMemcpyNode", vec![(&raw mut node) as usize, built.0 as usize, 0, 0, (&raw const copy) as usize, context]),
    ];
    pause_held(&[], LONG).unwrap();
    assert_eq!(answers_after_the_resume(&calls), [0, 0, 0]);
    let mut with_copy = 0_usize;
    let instantiate = [(&raw mut with_copy) as usize, built.0 as usize, 0];
    assert_eq!(call_entry(c"cuGraphInstantiateWithFlags", &instantiate), 0);
    for executable in [executables[0], with_copy] {
        assert_eq!(unsafe { launch::cuGraphLaunch(executable, stream.0 as usize) }, 0);
    }
    assert_eq!(stream.synchronize(), 0);
    assert_eq!(read(address, 32).unwrap(), [[9; 16], [7; 16]].concat());
}

/// A library registers memory, or asks what only the driver knows. What the library knows itself, it answers at once.
#[test]
fn memory_is_registered_while_held() {
    let _gpu = Gpu::take();
    let address = malloc_tagged("one", None, 2 * MIB).unwrap();
    let (at, on, mut file) = (address as usize, 1_u32, -1_i32);
    let (mut number, mut together, mut kind) = ([0_u64; 2], [0_u64; 2], 0_u32);
    let [first, second] = &mut together;
    let (asked, mut places) = ([2_u32, 7], [ptr::from_mut(first), ptr::from_mut(second)]);
    let calls = [
        (c"cuPointerSetAttribute", vec![(&raw const on) as usize, 6, at]),
        (c"cuMemGetHandleForAddressRange", vec![(&raw mut file) as usize, at, 2 * MIB, 1, 0]),
        (c"cuPointerGetAttribute", vec![number.as_mut_ptr() as usize, 7, at]),
        (c"cuPointerGetAttributes", vec![2, asked.as_ptr() as usize, places.as_mut_ptr() as usize, at]),
    ];
    pause_held(&[], LONG).unwrap();
    assert_eq!(call_entry(c"cuPointerGetAttribute", &[(&raw mut kind) as usize, 2, at]), 0);
    assert_eq!(answers_after_the_resume(&calls), [0, 0, 0, 0]);
    assert_eq!((kind, together[0], together[1]), (2, 2, number[0]));
    assert!(number[0] != 0 && file >= 0, "{number:?} {file}");
    assert!(matches!(pause_held(&[], LONG), Err(Error::Registered(_))), "it is registered now");
    unsafe { libc::close(file) };
}

/// Nobody resumes a program that has paused its memory itself but the program: its calls do not wait.
#[test]
fn nothing_waits_in_a_program_that_is_not_held() {
    let _gpu = Gpu::take();
    let address = malloc_tagged("one", None, 2 * MIB).unwrap();
    common::pause(&[]).unwrap();
    let (on, mut number) = (1_u32, 0_u64);
    assert_eq!(call_entry(c"cuPointerSetAttribute", &[(&raw const on) as usize, 6, address as usize]), 1);
    assert_eq!(call_entry(c"cuPointerGetAttribute", &[(&raw mut number) as usize, 7, address as usize]), 1);
    resume(&[]).unwrap();
}

/// Work that does not end: the program continues, nothing has changed, and the message says what is in the way.
#[test]
fn work_that_does_not_end_is_not_paused() {
    let _gpu = Gpu::take();
    let address = malloc_tagged("busy", None, 2 * MIB).unwrap();
    let (stream, blocked) = (Stream::create(), Gate::new());
    stream.wait_for(&blocked);
    assert_eq!(stream.fill(address, 7, MIB), 0);
    let error = pause_held(&["busy"], SHORT).unwrap_err();
    assert_eq!((error.kind(), state("busy")), (Kind::Busy, Some(TagState::Active)));
    let why = "the work on GPU-73696d75 has not ended: a kernel is still running, or waits for another process, as in a collective;";
    assert!(error.to_string().contains(why), "{error}");
    assert!(!error.to_string().contains("host function"), "no thread is held at the gate: {error}");
    assert!(!gate::is_held());
    assert_eq!(unsafe { launch::cuMemsetD8Async(address as usize, 8, 16, stream.0 as usize) }, 0, "it runs on");
    blocked.open();
    assert_eq!(stream.synchronize(), 0);
    pause_held(&["busy"], LONG).unwrap();
    resume(&["busy"]).unwrap();
    assert_eq!(read(address, 17).unwrap(), [&[8; 16][..], &[7]].concat());
}

/// Two devices, one of them busy, and a thread that its work may wait for.
#[test]
fn the_message_names_the_device_whose_work_does_not_end() {
    let _gpu = Gpu::take();
    malloc_tagged("idle", None, 2 * MIB).unwrap();
    common::set_device(1);
    let (busy, stream, blocked) = (malloc_tagged("busy", None, 2 * MIB).unwrap(), Stream::create(), Gate::new());
    stream.wait_in_a_function_for(&blocked);
    let holding = Memory::get().hold().unwrap();
    thread::scope(|scope| {
        let waits = scope.spawn(move || {
            common::set_device(1);
            unsafe { launch::cuMemsetD8_v2(busy as usize, 1, 16) }
        });
        common::eventually("it waits", || Memory::get().status().waiting_threads == 1);
        let error = holding.drain(SHORT, &mut ()).unwrap_err().to_string();
        drop(holding);
        blocked.open();
        assert_eq!(waits.join().unwrap(), 0);
        assert!(error.contains("the work on GPU-73696d76 has not ended: "), "{error}");
        assert!(error.contains("or a host function waits for the thread that is held at the gate;"), "{error}");
    });
    assert_eq!((stream.synchronize(), common::free(busy)), (0, 0));
    common::set_device(0);
}

/// A thread does not return from the driver, because it waits for another thread that is held at the gate.
#[test]
fn a_call_that_does_not_end_is_named() {
    let _gpu = Gpu::take();
    let (paused, held) = beside_a_call_that_does_not_end(|_| (pause_held(&["busy"], SHORT), gate::is_held()));
    let error = paused.unwrap_err();
    assert_eq!(error.kind(), Kind::Busy, "{error}");
    let text = error.to_string();
    let thread = text.split_once("1 in cuMemcpyDtoHAsync_v2 (").and_then(|(_, rest)| rest.split_once(" a-thread)")).map(|(id, _)| id);
    assert!(thread.is_some_and(|id| id.parse::<u32>().is_ok_and(|id| id != std::process::id())), "{text}");
    assert!(!held);
}

/// A call that ends before the limit does not prevent the pause, however often the client has been asked meanwhile.
#[test]
fn a_call_that_takes_long_is_waited_for() {
    let _gpu = Gpu::take();
    let paused = beside_a_call_that_does_not_end(|blocked| {
        thread::scope(|scope| {
            let pausing = scope.spawn(|| pause_held(&["busy"], LONG));
            thread::sleep(SHORT);
            blocked.open();
            let paused = pausing.join().unwrap();
            resume(&[]).unwrap();
            paused
        })
    });
    paused.unwrap();
}

/// Does `work` while a thread is in a copy of memory with the tag `busy`, which ends when the gate is opened, at the latest afterwards.
fn beside_a_call_that_does_not_end<R>(work: impl FnOnce(&Gate) -> R) -> R {
    const CALL: &str = "cuMemcpyDtoHAsync_v2";
    let address = malloc_tagged("busy", None, 2 * MIB).unwrap();
    let (stream, blocked) = (Stream::create(), Gate::new());
    stream.wait_in_a_function_for(&blocked);
    let mut host = [0_u8; 16];
    let (to, from, stream_handle) = (host.as_mut_ptr() as usize, address as usize, stream.0 as usize);
    let before = common::calls(CALL);
    let done = thread::scope(|scope| {
        let copying = move || unsafe {
            common::set_device(0);
            // In stream order behind the function, and pageable: the call returns when it is done.
            let queued = launch::cuMemcpyDtoHAsync_v2(to, from, 16, stream_handle);
            (queued, launch::cuMemcpyDtoH_v2(to, from, 16))
        };
        let copy = thread::Builder::new().name("a-thread".into()).spawn_scoped(scope, copying).unwrap();
        while common::calls(CALL) == before {
            thread::yield_now();
        }
        let done = work(&blocked);
        blocked.open();
        assert_eq!(copy.join().unwrap(), (0, 0));
        done
    });
    assert_eq!(stream.synchronize(), 0);
    assert_eq!(common::free(address), 0);
    done
}

/// A resume, or a free, that comes while the gate is being closed must not open it: the pause would run beside the program's work.
#[test]
fn a_gate_that_is_being_closed_is_not_opened() {
    let _gpu = Gpu::take();
    let address = malloc_tagged("busy", None, 2 * MIB).unwrap();
    let (stream, blocked) = (Stream::create(), Gate::new());
    stream.wait_for(&blocked);
    thread::scope(|scope| {
        let pausing = scope.spawn(|| pause_held(&["busy"], LONG));
        while !gate::is_held() {
            thread::yield_now();
        }
        resume(&[]).unwrap();
        assert!(gate::is_held(), "nothing is paused yet, and still it stays closed");
        blocked.open();
        pausing.join().unwrap().unwrap();
    });
    assert!(gate::is_held());
    resume(&[]).unwrap();
    assert!(!gate::is_held());
    assert_eq!((stream.synchronize(), common::free(address)), (0, 0));
}

/// A failure in the middle of a pause lets the program continue.
#[test]
fn a_failed_pause_lets_the_program_go() {
    let gpu = Gpu::take();
    let address = malloc_tagged("busy", None, 2 * MIB).unwrap();
    let bytes = pattern(4, MIB);
    assert_eq!(write(address, &bytes), 0);
    for call in ["cuMemUnmap", "cuMemcpyDtoHAsync_v2"] {
        gpu.fail(call, 1, 999, u64::MAX);
        assert!(pause_held(&["busy"], LONG).is_err(), "{call}");
        gpu.clear_faults();
        assert!(!gate::is_held(), "{call}");
        assert_eq!(read(address, MIB).as_ref(), Ok(&bytes), "{call}");
    }
    // A failed resume keeps it held.
    pause_held(&["busy"], LONG).unwrap();
    gpu.fail("cuMemCreate", 1, 2, 1);
    assert_eq!(resume(&["busy"]).unwrap_err().kind(), Kind::DeviceMemory);
    assert!(gate::is_held());
    // Another process may have taken the memory after the check and give it back.
    gpu.fail("cuMemCreate", 1, 2, 1);
    Memory::get().resume(&common::resuming_with(&["busy"], |request| request.timeout = Some(LONG)), &mut ()).unwrap();
    assert_eq!((gate::is_held(), read(address, MIB).as_ref()), (false, Ok(&bytes)));
}

/// Undoes what is prepared. Returns why it was not committed, and the device memory in use when everything was prepared.
fn refuse(gpu: &Gpu, prepared: Preparation<'_>) -> (Error, u64) {
    let mut used = 0;
    let refused = common::decide(prepared, |_| {
        used = gpu.footprint().used()[0];
        Err(Error::Aborted("a test".into()))
    });
    (refused.unwrap_err(), used)
}

fn prepare_held(tags: &[&str]) -> Preparation<'static> {
    Memory::get().hold().unwrap().prepare_pause(&common::pausing(tags), &mut ())
}

/// Nothing is given up before the consent: without it, a pause and a resume leave everything as it was.
#[test]
fn without_consent_everything_is_undone() {
    let gpu = Gpu::take();
    let address = malloc_tagged("job", None, 2 * MIB).unwrap();
    let bytes = pattern(9, MIB);
    assert_eq!(write(address, &bytes), 0);
    let active = gpu.footprint();
    let (error, prepared) = refuse(&gpu, prepare_held(&["job"]));
    assert_eq!((error.kind(), error.to_string().as_str()), (Kind::Aborted, "undone: a test; nothing has changed"));
    assert_eq!(prepared, active.used()[0], "the memory is still there when consent is asked for");
    assert_eq!((state("job"), gate::is_held()), (Some(TagState::Active), false));
    assert_eq!((read(address, MIB).as_ref(), gpu.footprint().used()), (Ok(&bytes), active.used()));

    pause_held(&["job"], LONG).unwrap();
    let paused = gpu.footprint();
    let (error, prepared) = refuse(&gpu, Memory::get().prepare_resume(&common::resuming(&["job"]), &mut ()));
    assert_eq!((error.kind(), prepared), (Kind::Aborted, active.used()[0]), "the new memory is there when consent is asked for");
    assert_eq!((state("job"), gate::is_held(), gpu.footprint().used()), (Some(TagState::Paused), true, paused.used()));
    resume(&["job"]).unwrap();
    assert_eq!((read(address, MIB).as_ref(), gate::is_held()), (Ok(&bytes), false));
}

/// Refuses as soon as something has been copied.
#[derive(Default)]
struct RefusesEarly {
    copied: Vec<Progress>,
}

impl Observer for RefusesEarly {
    fn progress(&mut self, now: Progress) -> Result<(), Error> {
        self.copied.push(now);
        Err(Error::Aborted("a test".into()))
    }
}

/// The rest is not copied for nothing, and the status does not say meanwhile that it is being paused.
#[test]
fn a_pause_and_a_resume_that_nobody_wants_any_more_end_at_once() {
    let gpu = Gpu::take();
    let bytes = 4 * HOST_PIECE;
    let address = malloc_tagged("job", None, bytes).unwrap();
    let contents = pattern(11, MIB);
    assert_eq!(write(address, &contents), 0);
    let active = gpu.footprint();
    for backup in [Policy::Host, Policy::Disk] {
        let wanted = common::pausing_with(&["job"], |request| request.options.backup = Some(backup));
        let mut refuses = RefusesEarly::default();
        let failed = Memory::get().hold().unwrap().prepare_pause(&wanted, &mut refuses).err().expect("the answer is known");
        let error = failed.undo();
        assert_eq!((error.kind(), state("job"), gate::is_held()), (Kind::Aborted, Some(TagState::Active), false), "{backup:?}: {error}");
        assert_eq!((read(address, MIB).as_ref(), gpu.footprint().used()), (Ok(&contents), active.used()), "{backup:?}");
        // From the disk, one piece after the other: the first was the last.
        assert!(backup == Policy::Host || refuses.copied.len() == 1, "{:?}", refuses.copied);

        Memory::get().pause(&wanted, &mut ()).unwrap();
        let mut refuses = RefusesEarly::default();
        assert_eq!(Memory::get().resume(&common::resuming(&["job"]), &mut refuses).unwrap_err().kind(), Kind::Aborted, "{backup:?}");
        assert_eq!(state("job"), Some(TagState::Paused), "{backup:?}");
        assert!(backup == Policy::Host || refuses.copied.len() == 1, "{:?}", refuses.copied);
        resume(&["job"]).unwrap();
        assert_eq!(read(address, MIB).as_ref(), Ok(&contents), "{backup:?}");
    }
}

/// Nobody takes it for a pause or a resume that will succeed.
#[test]
fn what_is_undone_shows_as_such() {
    let gpu = Gpu::take();
    malloc_tagged("job", None, 2 * MIB).unwrap();
    let undone = |slow: &str, prepare: &(dyn Fn() -> Preparation<'static> + Sync)| {
        gpu.slow_down(slow, 600_000);
        thread::scope(|scope| {
            let refused = scope.spawn(|| {
                common::set_device(0);
                refuse(&gpu, prepare()).0.kind()
            });
            common::eventually("undoing", || state("job") == Some(TagState::Undoing));
            gpu.slow_down(slow, 0);
            assert_eq!(refused.join().unwrap(), Kind::Aborted);
        });
    };
    undone("cuMemSetAccess", &|| prepare_held(&["job"]));
    assert_eq!(state("job"), Some(TagState::Active));
    pause_held(&["job"], LONG).unwrap();
    undone("cuMemUnmap", &|| Memory::get().prepare_resume(&common::resuming(&["job"]), &mut ()));
    assert_eq!(state("job"), Some(TagState::Paused));
    resume(&["job"]).unwrap();
}

/// What was paused before, without holding the program, is no reason to hold it after a failed attempt: it runs without that memory.
#[test]
fn a_failed_pause_does_not_hold_a_program_that_ran_without_its_paused_memory() {
    let gpu = Gpu::take();
    for tag in ["old", "job"] {
        malloc_tagged(tag, None, 2 * MIB).unwrap();
    }
    common::pause(&["old"]).unwrap();
    refuse(&gpu, prepare_held(&["job"]));
    assert_eq!((state("old"), state("job"), gate::is_held()), (Some(TagState::Paused), Some(TagState::Active), false));
}

/// The memory may be resumed while another client holds the program and then gives up: nobody else would let the program go.
#[test]
fn a_program_continues_when_a_client_gives_up_after_everything_is_resumed() {
    let _gpu = Gpu::take();
    let address = malloc_tagged("job", None, 2 * MIB).unwrap();
    pause_held(&["job"], LONG).unwrap();
    let held = Memory::get().hold().unwrap();
    resume(&["job"]).unwrap();
    assert!(gate::is_held());
    drop(held);
    assert_eq!((gate::is_held(), common::free(address)), (false, 0));
}

/// Memory that a failed pause cannot map again, at the second attempt either, stays paused. The program must not continue without it.
#[test]
fn memory_that_cannot_be_mapped_again_keeps_the_program_held() {
    let gpu = Gpu::take();
    let address = malloc_tagged("job", None, 2 * MIB).unwrap();
    let bytes = pattern(10, MIB);
    assert_eq!(write(address, &bytes), 0);
    for call in ["cuMemMap", "cuMemSetAccess"] {
        let refused = |times| {
            gpu.fail(call, 1, 999, times);
            refuse(&gpu, prepare_held(&["job"]));
            gpu.clear_faults();
            (state("job"), gate::is_held())
        };
        assert_eq!(refused(1), (Some(TagState::Active), false), "{call}");
        assert_eq!(refused(2), (Some(TagState::Paused), true), "{call}");
        resume(&["job"]).unwrap();
        assert_eq!((read(address, MIB).as_ref(), gate::is_held()), (Ok(&bytes), false), "{call}");
    }
}

/// Frees paused memory while the pause waits.
struct Frees(Option<u64>);

impl Observer for Frees {
    fn is_gone(&mut self) -> Option<bool> {
        if let Some(address) = self.0.take() {
            assert_eq!(common::free(address), 0);
        }
        Some(false)
    }
}

/// The same if the program frees as much paused memory meanwhile.
#[test]
fn memory_that_is_freed_meanwhile_does_not_hide_what_is_missing() {
    let gpu = Gpu::take();
    let (old, job) = (malloc_tagged("old", None, 2 * MIB).unwrap(), malloc_tagged("job", None, 2 * MIB).unwrap());
    let bytes = pattern(12, MIB);
    assert_eq!(write(job, &bytes), 0);
    common::pause(&["old"]).unwrap();
    assert!(!gate::is_held());
    gpu.fail("cuMemMap", 1, 999, 2);
    refuse(&gpu, Memory::get().hold().unwrap().prepare_pause(&common::pausing(&["job"]), &mut Frees(Some(old))));
    gpu.clear_faults();
    assert_eq!((state("old"), state("job"), gate::is_held()), (None, Some(TagState::Paused), true));
    resume(&["job"]).unwrap();
    assert_eq!((read(job, MIB).as_ref(), gate::is_held()), (Ok(&bytes), false));
}

/// A second operation may hold a program that another one has just paused, and take it for one that is behind.
#[test]
fn no_call_of_a_paused_program_passes_for_others_that_wait_for_it() {
    let _gpu = Gpu::take();
    let address = malloc_tagged("behind", None, 2 * MIB).unwrap();
    let bytes = pattern(5, MIB);
    assert_eq!(write(address, &bytes), 0);
    thread::scope(|scope| {
        let begin_call = || {
            scope.spawn(move || {
                common::set_device(0);
                unsafe { launch::cuMemsetD8_v2(address as usize, 1, MIB) }
            })
        };
        let wait_for_it = || {
            while gate::waiting() == 0 {
                thread::yield_now();
            }
        };
        pause_held(&[], LONG).unwrap();
        let call = begin_call();
        wait_for_it();
        let second = Memory::get().hold().unwrap();
        second.advance(8);
        thread::sleep(Duration::from_millis(20));
        assert!(!call.is_finished() && gate::waiting() == 1, "it has passed, to paused memory");
        drop(second);
        assert!(gate::is_held() && !call.is_finished());
        resume(&[]).unwrap();
        assert_eq!(call.join().unwrap(), 0);
        assert_eq!(read(address, MIB), Ok(vec![1; MIB]));

        let holding = Memory::get().hold().unwrap();
        let call = begin_call();
        wait_for_it();
        // A thread that gets no processor in time misses it.
        common::eventually("nothing is paused, so it passes", || {
            holding.advance(8);
            call.is_finished()
        });
        assert_eq!(call.join().unwrap(), 0);
    });
}

/// Two clients that hold a program do not wait for each other. The second one may retry.
#[test]
fn a_program_is_held_by_one_at_a_time() {
    let _gpu = Gpu::take();
    let first = Memory::get().hold().unwrap();
    let second = thread::spawn(|| Memory::get().hold().map(|_| ()).unwrap_err().kind()).join().unwrap();
    assert_eq!((second, gate::is_held()), (Kind::Leased, true));
    drop(first);
    assert!(!gate::is_held());
    drop(Memory::get().hold().unwrap());
}

/// However the last paused memory is freed, the program continues: nobody could resume it any more.
#[test]
fn a_program_continues_when_its_last_paused_memory_is_freed() {
    type End = fn(u64) -> u32;
    let ends: [(&str, End); 3] = [
        ("cudaFree", common::free),
        ("cudaFreeAsync", |address| unsafe { hooks::cudaFreeAsync(address as *mut _, Stream::create().handle()) }),
        ("cudaDeviceReset", |_| unsafe { hooks::cudaDeviceReset() }),
    ];
    let _gpu = Gpu::take();
    for (how, end) in ends {
        let address = malloc_tagged("last", None, 2 * MIB).unwrap();
        pause_held(&["last"], LONG).unwrap();
        assert!(gate::is_held(), "{how}");
        assert_eq!(end(address), 0, "{how}");
        assert!(!gate::is_held(), "{how}");
    }
}

/// A client that has disconnected.
struct Gone;

impl Observer for Gone {
    fn is_gone(&mut self) -> Option<bool> {
        Some(true)
    }
}

/// A call does not end and the client is gone: the program continues at once, not at the timeout.
#[test]
fn a_pause_ends_when_its_client_is_gone() {
    let _gpu = Gpu::take();
    let (paused, drained, took, held) = beside_a_call_that_does_not_end(|_| {
        let begun = Instant::now();
        let request = common::pausing_with(&["busy"], |request| request.hold = Some(LONG));
        let paused = Memory::get().pause(&request, &mut Gone).map_err(|error| error.kind());
        let drained = Memory::get().hold().unwrap().drain(LONG, &mut Gone).map_err(|error| error.kind());
        (paused, drained, begun.elapsed(), gate::is_held())
    });
    assert_eq!((paused.unwrap_err(), drained.unwrap_err()), (Kind::Busy, Kind::Busy));
    assert!(took < LONG && !held, "{took:?}");
}

/// Background work closes the gate for moments, which are no holds: nobody sees one, and whoever pauses or resumes meanwhile gets the answer
/// that there would be without it.
#[test]
fn moments_of_background_work_are_no_holds() {
    let _gpu = Gpu::take();
    let address = malloc_tagged("job", None, 2 * MIB).unwrap();
    let bytes = pattern(13, MIB);
    assert_eq!(write(address, &bytes), 0);
    let at_a_moment = |work: &dyn Fn()| common::eventually("a quiet moment", || quiet::now(work).is_ok());
    thread::scope(|scope| {
        let (goes_on, is_over) = mpsc::channel::<()>();
        let moments = scope.spawn(move || {
            while is_over.try_recv() == Err(mpsc::TryRecvError::Empty) {
                at_a_moment(&|| thread::sleep(Duration::from_micros(300)));
            }
        });
        for round in 0..50 {
            let status = Memory::get().status();
            assert_eq!((status.held, status.waiting_threads, gate::is_held()), (false, 0, false), "round {round}");
            let asked = common::pausing_with(&["job"], |request| request.hold = Some(Duration::ZERO));
            common::patiently(|| Memory::get().pause(&asked, &mut ()).map_err(|error| assert_eq!(error.kind(), Kind::Busy))).unwrap();
            assert!(gate::is_held() && Memory::get().status().held, "round {round}");
            resume(&["job"]).unwrap();
            assert!(!gate::is_held(), "round {round}");
            assert!(!moments.is_finished());
        }
        drop(goes_on);
    });
    at_a_moment(&|| {
        let status = Memory::get().status();
        assert_eq!((status.held, status.waiting_threads, gate::is_held()), (false, 0, false));
    });
    pause_held(&["job"], LONG).unwrap();
    at_a_moment(&|| {
        assert!(gate::is_held());
        resume(&["job"]).unwrap();
        assert!(!gate::is_held(), "it goes on when the moment is over");
    });
    assert_eq!((read(address, MIB).as_ref(), common::free(address)), (Ok(&bytes), 0));
}

/// A moment that comes between two launches would make the second one wait for as long as unregistering a piece takes. The program is left
/// alone until it rests.
#[test]
fn a_program_that_makes_calls_all_the_time_is_left_alone() {
    let _gpu = Gpu::take();
    let address = malloc_tagged("t", None, 2 * MIB).unwrap();
    vramctl_backup::settle();
    let launch = || assert_eq!(unsafe { launch::cuMemsetD8_v2(address as usize, 1, 16) }, 0);
    for round in 0..50 {
        launch();
        assert_eq!(quiet::now(|| ()), Err(Activity::Busy), "round {round}: it was idle, but not at rest");
    }
    common::eventually("it rests", || quiet::now(|| ()).is_ok());
    launch();
    assert_eq!(quiet::now(|| ()), Err(Activity::Busy));
}

/// Drivers before CUDA 12.5 cannot tell whether a program is at work. Nobody waits for them to, and a pause is a quiet moment for what it has
/// waited for itself.
#[test]
fn with_an_old_driver_a_held_pause_is_the_quiet_moment() {
    let gpu = Gpu::take();
    // The pause waits for every device whose memory it has.
    let others = [0, 1].map(|device| {
        common::set_device(device);
        malloc_tagged(common::DISCARDED_TAG, None, 2 * MIB).unwrap()
    });
    common::set_device(0);
    let address = malloc_tagged("t", None, 2 * MIB).unwrap();
    vramctl_backup::settle();
    gpu.fail("cuCtxRecordEvent", 1, code::NOT_FOUND, u64::MAX);
    // Long enough for a look at what is pinned, before it could go.
    vramctl_backup::set_host_keep(Some(Duration::from_secs(1)), Some(u64::MAX));
    pause_held(&["t"], LONG).unwrap();
    resume(&["t"]).unwrap();
    let host = || Memory::get().status().host;
    assert!(host().pinned_bytes > 0, "only what is pinned waits for a quiet moment: {:?}", host());
    gpu.reset_counts();
    vramctl_backup::set_retain(Some("new".into()), Some(true));
    let context = OwnContext::create(0);
    let new = malloc_tagged("new", None, 2 * MIB).unwrap();
    common::set_device(0);
    vramctl_backup::settle();
    assert!(host().ready_bytes > 0, "it went without a quiet moment: {:?}", host());
    assert_eq!((gpu.calls("cuLinkComplete"), gpu.calls("cuModuleLoadData")), (1, 0));
    let held = common::pausing_with(&[common::DISCARDED_TAG], |request| request.hold = Some(LONG));
    // All background work that waits for a quiet moment is done before the commit.
    let paused = common::decide(Memory::get().prepare_pause(&held, &mut ()), |_| {
        common::eventually("unpinned", || Memory::get().status().host.ready_bytes == 0);
        common::eventually("loaded", || gpu.calls("cuModuleLoadData") > 0);
        Ok(())
    });
    paused.unwrap();
    resume(&[]).unwrap();
    gpu.clear_faults();
    vramctl_backup::set_retain(Some("new".into()), None);
    vramctl_backup::set_host_keep(None, None);
    assert_eq!(common::free(new), 0);
    drop(context);
    common::set_device(0);
    assert_eq!((others.map(common::free), common::free(address)), ([0; 2], 0));
}

/// An operator who looks at the program's log sees why it stands still, and that it continues: one line each.
#[test]
fn a_held_program_says_in_its_log_who_holds_it() {
    let machine = common::machine::Machine::new();
    let log = machine.folder.path().join("log");
    let rank = machine.engine_with("engine", |command| _ = command.env_remove("VRAMCTL_LOG").stderr(std::fs::File::create(&log).unwrap()));
    let lines = || {
        let text = std::fs::read_to_string(&log).unwrap();
        text.lines().filter(|line| line.contains("held")).map(str::to_owned).collect::<Vec<_>>()
    };
    machine.vramctl("pause engine").expect(0, "", "");
    machine.vramctl("pause engine").expect(0, "", "");
    let held = lines();
    assert_eq!(held.len(), 1, "{}", std::fs::read_to_string(&log).unwrap());
    let user = unsafe { libc::getuid() };
    assert!(held[0].contains("held by process ") && held[0].contains(&format!("(vramctl, user {user})")), "{held:?}");
    assert!(held[0].contains(&format!("vramctl resume --pid {}", rank.pid())), "{held:?}");
    machine.vramctl("resume engine").expect(0, "", "");
    let all = lines();
    assert!(all.len() == 2 && all[1].contains("no longer held, after "), "{all:?}");
    // A pause without hold is none.
    machine.vramctl("pause engine --no-hold").expect(0, "", "");
    machine.vramctl("resume engine").expect(0, "", "");
    assert_eq!(lines().len(), 2);
}

/// Work in flight, and the launch that it waits for, as between the stages of a pipeline.
struct Pipeline {
    gate: Gate,
    waits: Stream,
    goes: Stream,
}

impl Pipeline {
    fn start(address: u64) -> Self {
        let pipeline = Self { gate: Gate::new(), waits: Stream::create(), goes: Stream::create() };
        pipeline.waits.wait_for(&pipeline.gate);
        assert_eq!(pipeline.waits.fill(address, 0x5A, 2 * MIB), 0);
        pipeline
    }

    /// Makes the launch. Whether it was not held up.
    fn goes_on(&self) -> bool {
        without_waiting(&self.gate, || self.goes.open(&self.gate))
    }
}

/// What the pause was waiting for may need the program's next launch in order to end.
#[test]
fn a_pause_that_gives_up_holds_up_no_launch() {
    let gpu = Gpu::take();
    let address = malloc_tagged("t", None, 2 * MIB).unwrap();
    for mode in [None, Some(0), Some(1), Some(2)] {
        let (captured, pipeline) = (Stream::create(), Pipeline::start(address));
        mode.inspect(|mode| captured.begin_capture(*mode));
        pause_held(&["t"], SHORT).unwrap_err();
        assert!(!gate::is_held());
        assert!(pipeline.goes_on(), "in a capture of the mode {mode:?}");
        pause_held(&["t"], LONG).unwrap();
        resume(&["t"]).unwrap();
        mode.inspect(|_| drop(captured.end_capture().unwrap()));
        assert_eq!((pipeline.waits.synchronize(), pipeline.goes.synchronize()), (0, 0));
    }
    // With a driver before CUDA 12.5, too.
    gpu.fail("cuCtxRecordEvent", 1, code::NOT_FOUND, u64::MAX);
    let pipeline = Pipeline::start(address);
    pause_held(&["t"], SHORT).unwrap_err();
    assert!(pipeline.goes_on(), "without events of contexts");
    pause_held(&["t"], LONG).unwrap();
    resume(&["t"]).unwrap();
    gpu.clear_faults();
}

/// A driver that fails at one question is asked in another way, and none of these ways invalidates a capture that has begun meanwhile.
#[test]
fn a_capture_survives_a_question_that_the_driver_does_not_answer() {
    let gpu = Gpu::take();
    // Only the pause asks: unpinning in the background would ask, too, and get the answer that is meant for the pause.
    vramctl_backup::set_host_keep(Some(LONG), None);
    vramctl_backup::settle();
    let address = malloc_tagged("t", None, 2 * MIB).unwrap();
    for (call, code) in [("cuEventQuery", code::NOT_SUPPORTED), ("cuEventQuery", 999), ("cuStreamGetCtx_v2", 999), ("cuCtxGetId", 999)] {
        // The pause itself may get the answer that is meant for the capture, and fails then: a round that shows nothing.
        while !capture_while_a_pause_is_refused(&gpu, address, call, code) {}
    }
}

/// Begins a capture, of which the driver does not tell the context if `call` is not the pause's question, and refuses one question of the
/// pause. Returns whether the pause went on.
fn capture_while_a_pause_is_refused(gpu: &Gpu, address: u64, call: &str, code: u32) -> bool {
    let (captured, pipeline) = (Stream::create(), Pipeline::start(address));
    let (graph, paused) = thread::scope(|scope| {
        let opens = Opens(&pipeline.gate);
        gpu.reset_counts();
        let request = common::pausing_with(&["t"], |request| request.timeout = Some(LONG));
        let pause = scope.spawn(move || Memory::get().pause(&request, &mut ()));
        common::eventually("the pause asks", || gpu.calls("cuEventQuery") > 2);
        if call != "cuEventQuery" {
            gpu.fail(call, 1, code, u64::MAX);
        }
        captured.begin_capture(1);
        gpu.clear_faults();
        let others = || ["cuStreamQuery", "cuCtxSynchronize"].map(|call| gpu.calls(call)).iter().sum::<u64>();
        let before = others();
        gpu.fail("cuEventQuery", 1, code, 1);
        common::eventually("the pause asks in another way", || others() > before || pause.is_finished());
        let graph = captured.end_capture();
        drop(opens);
        (graph, pause.join().unwrap())
    });
    gpu.clear_faults();
    drop(graph.unwrap_or_else(|answer| panic!("{call}, {code}: the capture ended with {answer}")));
    match paused {
        Ok(_) => resume(&["t"]).map(|_| true).unwrap(),
        Err(Error::Driver(failure)) if call != "cuEventQuery" && (failure.call, failure.code) == (call, code) => false,
        Err(error) => panic!("{call}, {code}: {error}"),
    }
}

/// What a stream had to do before it was captured is work in flight, although the stream can no longer be asked.
#[test]
fn a_pause_waits_for_the_work_before_a_capture() {
    let _gpu = Gpu::take();
    let address = malloc_tagged("t", None, 2 * MIB).unwrap();
    let pipeline = Pipeline::start(address);
    pipeline.waits.begin_capture(1);
    pause_held(&["t"], SHORT).unwrap_err();
    assert!(without_waiting(&pipeline.gate, || pipeline.goes.open(&pipeline.gate)));
    pause_held(&["t"], LONG).unwrap();
    resume(&["t"]).unwrap();
    drop(pipeline.waits.end_capture().unwrap());
    assert_eq!((read(address, 1), common::free(address)), (Ok(vec![0x5A]), 0));
}

/// Opens a gate at the end.
struct Opens<'a>(&'a Gate);

impl Drop for Opens<'_> {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// A launch that waits for room in its stream's queue holds up the library's calls in that context, too, but through them nobody else: what
/// other devices' streams do goes on.
#[test]
fn a_pause_beside_a_full_stream_holds_up_no_other_device() {
    let gpu = Gpu::take();
    let address = malloc_tagged("t", None, 2 * MIB).unwrap();
    let (mut module, mut function) = (0_usize, 0_usize);
    let code = c".version 7.0\n.target sm_70\n.entry nothing() { ret; }";
    assert_eq!(unsafe { launch::cuModuleLoadData((&raw mut module) as usize, code.as_ptr() as usize) }, 0);
    let get = [(&raw mut function) as usize, module, c"nothing".as_ptr() as usize, 0];
    assert_eq!(call_entry(c"cuModuleGetFunction", &get), 0);
    let (full, beside, gate, launched) = (Stream::create(), Stream::create(), Gate::new(), AtomicUsize::new(0));
    full.wait_for(&gate);
    let goes_on_elsewhere = || {
        common::set_device(1);
        let stream = Stream::create();
        stream.begin_capture(0);
        drop(stream.end_capture().unwrap());
        assert_eq!(unsafe { entries::cuStreamDestroy_v2(stream.handle()) }, 0);
        common::set_device(0);
    };
    // A context of the other device.
    goes_on_elsewhere();
    gpu.reset_counts();
    let calls = |names: &[&str]| names.iter().map(|name| gpu.calls(name)).sum::<u64>();
    let (first, second) = thread::scope(|scope| {
        // A failure ends the scope's threads.
        let _opens = Opens(&gate);
        let (queue, beside, launched) = (full.0 as usize, beside.handle(), &launched);
        scope.spawn(move || {
            common::set_device(0);
            for _ in 0..1021 {
                assert_eq!(unsafe { launch::cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, queue, 0, 0) }, 0);
                launched.fetch_add(1, Ordering::SeqCst);
            }
        });
        common::eventually("the stream is full", || launched.load(Ordering::SeqCst) == 1020 && calls(&["cuLaunchKernel"]) == 1021);
        let before = calls(&["cuEventCreate"]);
        scope.spawn(|| Memory::get().pause(&common::pausing_with(&["t"], |request| request.timeout = Some(LONG)), &mut ()).unwrap());
        common::eventually("the pause asks the driver", || calls(&["cuEventCreate"]) > before);
        let first = without_waiting(&gate, goes_on_elsewhere);
        let begins = ["cuStreamBeginCapture_v2", "cuEventCreate"];
        let before = calls(&begins);
        scope.spawn(move || {
            common::set_device(0);
            let mut graph = std::ptr::null_mut();
            assert_eq!(unsafe { entries::cuStreamBeginCapture_v2(beside, 1) }, 0);
            assert_eq!(unsafe { entries::cuStreamEndCapture(beside, &raw mut graph) }, 0);
        });
        common::eventually("a capture is to begin", || calls(&begins) > before);
        (first, without_waiting(&gate, goes_on_elsewhere))
    });
    assert_eq!((first, second), (true, true));
    resume(&["t"]).unwrap();
    assert_eq!((full.synchronize(), common::free(address)), (0, 0));
}

/// The library's kernels are loaded, and its host memory is unpinned, once the program has no work in flight.
#[test]
fn background_work_holds_up_no_launch() {
    let gpu = Gpu::take();
    let (_, other) = (malloc_tagged("t", None, 2 * MIB).unwrap(), malloc_tagged("other", None, 2 * MIB).unwrap());
    vramctl_backup::set_host_keep(Some(Duration::from_millis(1)), Some(u64::MAX));
    pause_held(&["t"], LONG).unwrap();
    let pipeline = Pipeline::start(other);
    gpu.reset_counts();
    resume(&["t"]).unwrap();
    let is_tried = || gpu.calls("cuCtxRecordEvent") > 5;
    common::eventually("unpinning is tried", is_tried);
    assert!(pipeline.goes_on(), "while host memory is to be unpinned");
    vramctl_backup::settle();
    common::eventually("unpinned at last", || Memory::get().status().host.ready_bytes == 0);

    let pipeline = Pipeline::start(other);
    gpu.reset_counts();
    vramctl_backup::set_retain(Some("new".into()), Some(true));
    // In a context of its own, where no other test has had it loaded.
    let context = OwnContext::create(0);
    let new = malloc_tagged("new", None, 2 * MIB).unwrap();
    common::eventually("loading is tried", is_tried);
    assert_eq!((gpu.calls("cuLinkComplete"), gpu.calls("cuModuleLoadData")), (1, 0));
    assert!(pipeline.goes_on(), "while a kernel is to be loaded");
    vramctl_backup::settle();
    assert_eq!(gpu.calls("cuModuleLoadData"), 1);
    vramctl_backup::set_retain(Some("new".into()), None);
    vramctl_backup::set_host_keep(None, None);
    assert_eq!(common::free(new), 0);
    drop(context);
    common::set_device(0);
}
