//! An engine's KV cache is discarded by a scheduler's pause, or a save's, only if the engine has reset its prefix cache, and no call has passed since.

use crate::common::{self, Gpu, MIB, free, malloc_tagged, pattern, read, write};
use std::collections::BTreeMap;
use std::ptr;
use std::sync::{Mutex, Once, mpsc};
use std::thread;
use std::time::Duration;
use vramctl_core::memory::Memory;
use vramctl_core::transition::Pause;
use vramctl_core::{engine, gate, prefix_cache};
use vramctl_driver as driver;
use vramctl_intercept::abi::{VramctlResult, vramctl_prefix_cache_answer, vramctl_prefix_cache_idle, vramctl_prefix_cache_wait};
use vramctl_intercept::launch;
use vramctl_model::Class::{self, Discardable, Kept};
use vramctl_model::{Amount, Error, Kind, Report};

const LARGE: u64 = 4 * MIB as u64;

/// What the engine's loop does with the number of a request.
type Loop = Box<dyn FnMut(u64) + Send>;

static LOOP: Mutex<Option<Loop>> = Mutex::new(None);

/// An idle engine with contents in its KV cache.
struct Engine {
    cache: u64,
    weights: u64,
    _gpu: Gpu,
}

impl Engine {
    /// `work`: what its loop does with a request.
    fn new(work: impl FnMut(u64) + Send + 'static) -> Self {
        static PASSES_ON: Once = Once::new();
        let gpu = Gpu::take();
        let set_loop = |work: Loop| *LOOP.lock().unwrap() = Some(work);
        set_loop(Box::new(refuse));
        PASSES_ON.call_once(|| {
            _ = thread::spawn(|| {
                loop {
                    let number = prefix_cache::wait();
                    LOOP.lock().unwrap().as_mut().unwrap()(number);
                }
            });
        });
        common::eventually("requests are passed on", || {
            prefix_cache::set_idle(true);
            prefix_cache::reset().is_err()
        });
        set_loop(Box::new(work));
        engine::set(Some("vllm"));
        engine::set_tags_cache(true);
        let filled = |tag| {
            let address = malloc_tagged(tag, None, LARGE as usize).unwrap();
            assert_eq!(write(address, &contents()), 0);
            address
        };
        let engine = Self { cache: filled("kv_cache"), weights: filled("weights"), _gpu: gpu };
        work_on(engine.weights);
        prefix_cache::set_idle(true);
        engine
    }

    /// Whether the contents of the KV cache are still there; else it reads as zero. Those of the weights must be.
    fn has_kept(&self) -> bool {
        assert!(read(self.weights, LARGE as usize).unwrap() == contents());
        let cache = read(self.cache, LARGE as usize).unwrap();
        assert!(cache == contents() || cache.iter().all(|byte| *byte == 0));
        cache == contents()
    }

    fn end(self) {
        prefix_cache::set_idle(false);
        engine::set(None);
        engine::set_tags_cache(false);
        assert_eq!((free(self.cache), free(self.weights)), (0, 0));
    }
}

fn contents() -> Vec<u8> {
    pattern(1, LARGE as usize)
}

/// A call that starts device work, and changes nothing.
fn work_on(address: u64) {
    common::set_device(0);
    let byte = contents()[0];
    assert_eq!(unsafe { launch::cuMemsetD8_v2(address as usize, byte.into(), 1) }, 0);
}

fn refuse(number: u64) {
    prefix_cache::answer(number, false);
}

fn reset(number: u64) {
    prefix_cache::answer(number, true);
}

/// Until the loop answers in time, however busy the machine is.
fn ask() {
    common::eventually("it is reset", || {
        prefix_cache::set_idle(true);
        prefix_cache::reset().is_ok() && gate::is_still()
    });
}

/// As a scheduler takes one of a class.
fn take(class: Class) -> Result<Report, Error> {
    let pause = common::pausing_with(&[], |request| {
        request.scheduler = Some(1);
        request.hold = Some(Duration::from_secs(100));
        request.amounts = Some([(driver::uuid(0).unwrap(), vec![Amount { class, bytes: LARGE, count: 1 }])].into());
    });
    Memory::get().pause(&Pause { engine: engine::name(), ..pause }, &mut ())
}

fn bring_back() {
    Memory::get().resume(&common::resuming_with(&[], |request| request.scheduler = Some(1)), &mut ()).unwrap();
    assert!(!gate::is_held());
}

fn classes() -> Vec<(Class, u64)> {
    let amounts = Memory::get().holdings().here.into_values().flatten();
    amounts.map(|amount| (amount.class, amount.count)).collect::<BTreeMap<_, _>>().into_iter().collect()
}

#[test]
fn what_a_reset_prefix_cache_described_is_not_kept() {
    let engine = Engine::new(reset);
    assert_eq!(classes(), [(Discardable, 1), (Kept, 1)], "the engine is asked before");
    assert!(matches!(take(Discardable), Err(Error::Invalid(_))), "nobody has asked it");
    assert!(engine.has_kept());
    for _ in 0..2 {
        ask();
        assert!(engine.has_kept(), "nothing has happened yet");
        assert_eq!(take(Discardable).unwrap().discarded_bytes, LARGE);
        bring_back();
        assert!(!engine.has_kept());
        assert_eq!(write(engine.cache, &contents()), 0);
    }
    work_on(engine.cache);
    prefix_cache::set_idle(false);
    assert_eq!(classes(), [(Kept, 2)], "a request has come");
    engine.end();
}

/// A request was accepted after the reset.
#[test]
fn what_a_call_may_have_put_there_since_is_kept() {
    let engine = Engine::new(reset);
    ask();
    work_on(engine.cache);
    assert!(matches!(take(Discardable), Err(Error::Invalid(_))));
    assert!(!gate::is_held());
    for _ in 0..2 {
        assert_eq!(take(Kept).unwrap().discarded_bytes, 0);
    }
    bring_back();
    assert!(engine.has_kept());
    engine.end();
}

/// So a request that has just come is computed after the pause.
#[test]
fn the_loop_waits_until_the_gate_is_closed() {
    let (accepted, accepts) = mpsc::channel();
    let engine = Engine::new(move |number| {
        reset(number);
        accepted.send(gate::is_held()).unwrap();
    });
    // Unless that takes longer than anybody waits for.
    common::eventually("it is held in time", || {
        ask();
        take(Discardable).unwrap();
        let is_held = accepts.recv().unwrap();
        bring_back();
        is_held
    });
    engine.end();
}

#[test]
fn an_engine_with_requests_keeps_its_contents() {
    let engine = Engine::new(refuse);
    assert_eq!(prefix_cache::reset().unwrap_err().kind(), Kind::Busy);
    assert_eq!(classes(), [(Kept, 2)], "what it has said holds until it says something else");
    assert!(prefix_cache::reset().is_ok(), "nobody counts on it any more");
    assert!(matches!(take(Discardable), Err(Error::Invalid(_))));
    assert!(engine.has_kept());
    prefix_cache::set_idle(true);
    assert_eq!(classes(), [(Discardable, 1), (Kept, 1)]);
    engine.end();
}

#[test]
fn nobody_waits_for_a_loop_that_hangs() {
    let (goes_on, hangs) = mpsc::channel::<()>();
    let (answered, answers) = mpsc::channel();
    let engine = Engine::new(move |number| {
        hangs.recv().unwrap();
        reset(number);
        answered.send(()).unwrap();
    });
    for _ in 0..2 {
        prefix_cache::set_idle(true);
        assert_eq!(prefix_cache::reset().unwrap_err().kind(), Kind::Busy);
        assert_eq!(classes(), [(Kept, 2)]);
        assert!(matches!(take(Discardable), Err(Error::Invalid(_))));
        assert!(engine.has_kept());
    }
    // What it answers late is true all the same.
    goes_on.send(()).unwrap();
    answers.recv().unwrap();
    assert_eq!(classes(), [(Discardable, 1), (Kept, 1)]);
    (0..1000).for_each(|_| goes_on.send(()).unwrap());
    ask();
    take(Discardable).unwrap();
    bring_back();
    assert!(!engine.has_kept());
    engine.end();
}

/// Only a closed gate tells for sure that no call has passed.
#[test]
fn a_pause_that_does_not_hold_discards_nothing() {
    let engine = Engine::new(reset);
    ask();
    let pause = common::pausing_with(&[], |request| {
        request.scheduler = Some(1);
        request.amounts = Some([(driver::uuid(0).unwrap(), vec![Amount { class: Discardable, bytes: LARGE, count: 1 }])].into());
    });
    let pause = Pause { engine: engine::name(), ..pause };
    assert_eq!(Memory::get().pause(&pause, &mut ()).unwrap_err().kind(), Kind::PrefixCache);
    assert!(engine.has_kept());
    engine.end();
}

/// A person's pause neither asks the engine in this way, nor relies on it.
#[test]
fn others_pauses_keep_it() {
    let engine = Engine::new(reset);
    ask();
    common::pause(&["kv_cache"]).unwrap();
    common::resume(&["kv_cache"]).unwrap();
    assert!(engine.has_kept());
    engine.end();
}

/// A save takes all, and the weights are kept.
#[test]
fn a_save_discards_it_unless_a_call_has_passed() {
    let engine = Engine::new(reset);
    let save = || {
        let pause = common::pausing_with(&[], |request| {
            request.hold = Some(Duration::from_secs(100));
            request.options.forgets_cache = true;
        });
        Memory::get().pause(&Pause { engine: engine::name(), ..pause }, &mut ()).unwrap().discarded_bytes
    };
    let resume = || Memory::get().resume(&common::resuming(&[]), &mut ()).unwrap();
    ask();
    work_on(engine.cache);
    assert_eq!(save(), 0);
    resume();
    assert!(engine.has_kept());
    ask();
    assert_eq!(save(), LARGE);
    resume();
    assert!(!engine.has_kept());
    engine.end();
}

/// This program neither shares its GPUs nor was started for images.
#[test]
fn an_engine_hears_that_nobody_will_ask() {
    let mut number = 0;
    assert_eq!(vramctl_prefix_cache_idle(1), Kind::Invalid);
    assert_eq!(unsafe { vramctl_prefix_cache_wait(&raw mut number) }, Kind::Invalid);
    assert_eq!(unsafe { vramctl_prefix_cache_wait(ptr::null_mut()) }, Kind::Invalid);
    assert_eq!(vramctl_prefix_cache_answer(7, 2), Kind::Invalid);
    assert_eq!(vramctl_prefix_cache_answer(7, 0), VramctlResult::OK, "an answer that nobody waits for");
}
