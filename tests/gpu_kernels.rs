//! The kernels on a real GPU, run by `scripts/gpu-check-kernels`. On a simulated GPU these tests only show that the kernels
//! run.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

use std::ffi::c_void;
use std::time::{Duration, Instant};
use vramctl_backup::digest::{DIGEST_PIECE as PIECE, Digest, Hasher, Key};
use vramctl_backup::{CopyBy, copier, set_copy_by};
use vramctl_driver::{CUdeviceptr, Current, Driver, Lane, Pinned, RelaxedCapture};
use vramctl_model::code;

macro_rules! call {
    ($name:ident($($argument:expr),*) as $type:ty) => {{
        let function = symbol(concat!(stringify!($name), "\0"));
        let function = unsafe { std::mem::transmute::<*mut c_void, $type>(function) };
        assert_eq!(unsafe { function($($argument),*) }, 0, stringify!($name));
    }};
}

fn symbol(name: &str) -> *mut c_void {
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    assert!(!library.is_null(), "no libcuda.so.1");
    let symbol = unsafe { libc::dlsym(library, name.as_ptr().cast()) };
    assert!(!symbol.is_null(), "{name}");
    symbol
}

/// Makes the first device's primary context current.
fn context() -> Current {
    let mut context: *mut c_void = std::ptr::null_mut();
    call!(cuInit(0) as unsafe extern "C" fn(u32) -> u32);
    call!(cuDevicePrimaryCtxRetain(&raw mut context, 0) as unsafe extern "C" fn(*mut *mut c_void, i32) -> u32);
    call!(cuCtxSetCurrent(context) as unsafe extern "C" fn(*mut c_void) -> u32);
    Current::of_thread().unwrap().expect("a context")
}

/// Device memory with contents, freed when the process ends.
struct Contents {
    address: CUdeviceptr,
    bytes: usize,
}

impl Contents {
    /// Noise that repeats every 256 MiB.
    fn noise(random: &mut Random, bytes: usize) -> Self {
        let mut address = 0;
        unsafe { Driver::get().unwrap().cuMemAlloc_v2(&raw mut address, bytes).unwrap() };
        let contents = Self { address, bytes };
        let mut done = bytes.min(256 << 20);
        contents.write(0, &random.bytes(done));
        while done < bytes {
            let part = done.min(bytes - done);
            call!(cuMemcpyDtoD_v2(address + done as u64, address, part) as unsafe extern "C" fn(u64, u64, usize) -> u32);
            done += part;
        }
        call!(cuCtxSynchronize() as unsafe extern "C" fn() -> u32);
        contents
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.bytes);
        call!(cuMemcpyHtoD_v2(self.address + offset as u64, bytes.as_ptr().cast(), bytes.len())
            as unsafe extern "C" fn(u64, *const c_void, usize) -> u32);
        call!(cuCtxSynchronize() as unsafe extern "C" fn() -> u32);
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) {
        assert!(offset + bytes.len() <= self.bytes);
        call!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), self.address + offset as u64, bytes.len())
            as unsafe extern "C" fn(*mut c_void, u64, usize) -> u32);
    }

    fn digests(&self, current: &Current, hasher: &mut Hasher) -> Vec<Digest> {
        hasher.digests(current, &[(self.address, self.bytes)]).unwrap()
    }

    fn free(self) {
        unsafe { Driver::get().unwrap().cuMemFree_v2(self.address).unwrap() };
    }
}

/// xorshift64*, seeded from the clock or `DIGEST_SEED`.
struct Random(u64);

impl Random {
    fn new() -> Self {
        let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
        let seed = number("DIGEST_SEED", clock) | 1;
        println!("DIGEST_SEED={seed}");
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn bytes(&mut self, bytes: usize) -> Vec<u8> {
        (0..bytes / 8).flat_map(|_| self.next().to_le_bytes()).collect()
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn bytes_to_check() -> usize {
    (number("DIGEST_GIB", 24) as usize) << 30
}

fn compare_with_reference(pieces: usize) {
    let (current, mut random) = (context(), Random::new());
    let _relaxed = RelaxedCapture::enter();
    let mut hasher = Hasher::new(&current).unwrap();
    let key = Key::of_process().unwrap();
    let contents = Contents::noise(&mut random, pieces * PIECE);
    contents.write(0, &vec![0; PIECE]);
    contents.write(PIECE, &vec![0xFF; PIECE]);
    // Spans out of address order, one of them twice.
    let (middle, half) = (contents.address + (pieces / 2 * PIECE) as u64, pieces / 2 * PIECE);
    let spans = [(middle, contents.bytes - half), (contents.address, half), (middle, PIECE)];
    let found = hasher.digests(&current, &spans).unwrap();
    let order = (pieces / 2..pieces).chain(0..pieces / 2).chain([pieces / 2]);
    let mut piece = vec![0; PIECE];
    for (index, (at, found)) in order.zip(&found).enumerate() {
        contents.read(at * PIECE, &mut piece);
        assert_eq!(*found, key.digest(&piece), "piece {index}");
    }
    assert_eq!(found.len(), pieces + 1);
    println!("{} pieces have the reference's digests", found.len());
    contents.free();
}

#[test]
#[ignore = "needs a GPU"]
fn agrees_with_the_reference() {
    compare_with_reference(300);
}

/// Sized for `compute-sanitizer`.
#[test]
#[ignore = "needs a GPU"]
fn small() {
    compare_with_reference(4);
    copy_and_compare(&context(), &[16, 4096, (1 << 20) + 48]);
}

/// Copies noise of each size with the kernel. Checks that it arrived, and that nothing around it changed.
fn copy_and_compare(current: &Current, sizes: &[usize]) {
    const MARGIN: usize = 4096;
    let mut random = Random::new();
    let _relaxed = RelaxedCapture::enter();
    set_copy_by(CopyBy::Kernel, None);
    copier::get_ready(current.context(), 0);
    for &bytes in sizes {
        let wanted = random.bytes(bytes);
        let host = Registered::with(&wanted, current);
        let contents = Contents::noise(&mut random, bytes + 2 * MARGIN);
        let mut expected = vec![0; contents.bytes];
        contents.read(0, &mut expected);
        expected[MARGIN..MARGIN + bytes].copy_from_slice(&wanted);
        let to = contents.address + MARGIN as u64;
        let mut lane = Lane::default();
        assert!(
            unsafe { copier::queue(&mut lane, current.context(), to, host.address as *const u8, bytes) }.unwrap(),
            "the kernel cannot be had"
        );
        lane.finish().unwrap();
        let mut found = vec![0; contents.bytes];
        contents.read(0, &mut found);
        assert!(found == expected, "{bytes} bytes");
        // The kernel must not take unregistered memory: the access would end the context.
        assert!(
            !unsafe { copier::queue(&mut lane, current.context(), to, wanted.as_ptr(), bytes) }.unwrap(),
            "unregistered memory is taken"
        );
        contents.free();
    }
    println!("{} copies by the kernel are what they are to be", sizes.len());
}

/// Registered host memory.
struct Registered {
    address: usize,
    bytes: usize,
    pinned: Option<Pinned>,
}

impl Registered {
    fn with(contents: &[u8], current: &Current) -> Self {
        let bytes = contents.len().next_multiple_of(4096);
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let address = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, kind, -1, 0) }.cast::<u8>();
        assert_ne!(address.cast(), libc::MAP_FAILED);
        unsafe { std::ptr::copy_nonoverlapping(contents.as_ptr(), address, contents.len()) };
        let start = std::ptr::NonNull::new(address).unwrap();
        Self { address: address as usize, bytes, pinned: Some(unsafe { Pinned::register(start, bytes, current) }.unwrap()) }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        assert!(self.pinned.take().unwrap().unregister().is_ok());
        unsafe { libc::munmap(self.address as *mut c_void, self.bytes) };
    }
}

/// Sizes around those at which the kernel switches: a vector, one round of all threads, four rounds.
#[test]
#[ignore = "needs a GPU"]
fn copies_all_and_nothing_else() {
    const ROUND: usize = 16 * 512 * 16;
    let sizes: Vec<_> =
        [16, ROUND, 3 * ROUND, 4 * ROUND, 8 * ROUND].iter().flat_map(|&size| [size, size + 16, size.max(32) - 16]).collect();
    copy_and_compare(&context(), &sizes);
    copy_and_compare(&context(), &[64 << 20]);
}

#[test]
#[ignore = "needs a GPU"]
fn finds_every_flipped_bit() {
    let (current, mut random) = (context(), Random::new());
    let _relaxed = RelaxedCapture::enter();
    let mut hasher = Hasher::new(&current).unwrap();
    let contents = Contents::noise(&mut random, bytes_to_check());
    let flips = number("DIGEST_FLIPS", 1000);
    let mut before = contents.digests(&current, &mut hasher);
    for flip in 0..flips {
        let (offset, bit) = ((random.next() % contents.bytes as u64) as usize, random.next() % 8);
        let mut byte = [0];
        contents.read(offset, &mut byte);
        contents.write(offset, &[byte[0] ^ 1 << bit]);
        let after = contents.digests(&current, &mut hasher);
        let changed: Vec<_> = (0..after.len()).filter(|&piece| after[piece] != before[piece]).collect();
        assert_eq!(changed, [offset / PIECE], "flip {flip}: bit {bit} of byte {offset}");
        before = after;
    }
    println!("{flips} of {flips} flipped bits found in {} GiB, and nothing else", contents.bytes >> 30);
    contents.free();
}

#[test]
#[ignore = "needs a GPU"]
fn is_as_fast_as_memory() {
    let (current, mut random) = (context(), Random::new());
    let _relaxed = RelaxedCapture::enter();
    let started = Instant::now();
    let mut hasher = Hasher::new(&current).unwrap();
    println!("made ready in {:.1} ms", started.elapsed().as_secs_f64() * 1e3);
    let contents = Contents::noise(&mut random, bytes_to_check());
    for bytes in [PIECE, 256 << 20, contents.bytes] {
        let mut times: Vec<Duration> = (0..6)
            .map(|_| {
                let started = Instant::now();
                hasher.digests(&current, &[(contents.address, bytes)]).unwrap();
                started.elapsed()
            })
            .skip(1)
            .collect();
        times.sort_unstable();
        let rate = |time: Duration| bytes as f64 / time.as_secs_f64() / 1e9;
        println!(
            "{:>6} MiB: {:.3} ms (median of 5; {:.3} to {:.3}), {:.0} GB/s",
            bytes >> 20,
            times[2].as_secs_f64() * 1e3,
            times[0].as_secs_f64() * 1e3,
            times[4].as_secs_f64() * 1e3,
            rate(times[2])
        );
    }
    contents.free();
}

/// The reset destroyed everything the hasher owned, so it must not ask the driver to destroy it again.
#[test]
#[ignore = "needs a GPU"]
fn a_reset_is_noticed() {
    let (current, mut random) = (context(), Random::new());
    let _relaxed = RelaxedCapture::enter();
    let mut hasher = Hasher::new(&current).unwrap();
    call!(cuDevicePrimaryCtxReset_v2(0) as unsafe extern "C" fn(i32) -> u32);
    let current = context();
    let contents = Contents::noise(&mut random, 4 * PIECE);
    let failure = hasher.digests(&current, &[(contents.address, PIECE)]).unwrap_err();
    assert_eq!(failure.code, code::CONTEXT_IS_DESTROYED);
    // Its memory may belong to the new hasher by now, at the same address.
    let mut next = Hasher::new(&current).unwrap();
    hasher.digests(&current, &[(contents.address, PIECE)]).unwrap_err();
    drop(hasher);
    let digests = contents.digests(&current, &mut next);
    let mut piece = vec![0; PIECE];
    contents.read(PIECE, &mut piece);
    assert_eq!(digests[1], Key::of_process().unwrap().digest(&piece));
    println!("a reset is noticed");
}

/// A program that captures in global mode, which any unsafe call of another thread would invalidate.
#[test]
#[ignore = "needs a GPU"]
fn leaves_captures_alone() {
    let (current, mut random) = (context(), Random::new());
    let contents = Contents::noise(&mut random, 4 * PIECE);
    let wanted = random.bytes(4096);
    let host = Registered::with(&wanted, &current);
    let (mut stream, mut graph): (*mut c_void, *mut c_void) = (std::ptr::null_mut(), std::ptr::null_mut());
    call!(cuStreamCreate(&raw mut stream, 1) as unsafe extern "C" fn(*mut *mut c_void, u32) -> u32);
    call!(cuStreamBeginCapture_v2(stream, 0) as unsafe extern "C" fn(*mut c_void, u32) -> u32);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let current = Current::push(current.context()).unwrap();
            let _relaxed = RelaxedCapture::enter();
            let mut hasher = Hasher::new(&current).unwrap();
            assert_eq!(contents.digests(&current, &mut hasher).len(), 4);
            set_copy_by(CopyBy::Kernel, None);
            copier::get_ready(current.context(), 0);
            let mut lane = Lane::default();
            let (from, to) = (host.address as *const u8, contents.address);
            assert!(unsafe { copier::queue(&mut lane, current.context(), to, from, wanted.len()) }.unwrap());
            let (begin, end) = (lane.mark().unwrap(), lane.mark().unwrap());
            lane.finish().unwrap();
            assert!(end.since(&begin, current.context()).unwrap() >= 0.0);
        });
    });
    call!(cuStreamEndCapture(stream, &raw mut graph) as unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> u32);
    assert!(!graph.is_null());
    let mut found = vec![0; wanted.len()];
    contents.read(0, &mut found);
    assert!(found == wanted);
    println!("a capture in the global mode survives both kernels");
}
