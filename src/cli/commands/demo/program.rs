//! `vramctl demo-program`: the program of a demo. It has memory of a GPU, and knows nothing of the library: it finds the driver as any program does.

use crate::execute::Execute;
use crate::ui::output;
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::os::unix::fs::MetadataExt;
use std::time::Duration;
use std::{fs, io, mem, ptr, thread};
use vramctl_coordinator::failure::{CommandError, Exit};

/// The options of `vramctl demo-program`.
#[derive(clap::Args)]
pub struct Args {
    /// How much memory it takes
    #[arg(long, default_value = "64", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    mib: u32,
}

const MIB: usize = 1 << 20;
/// How often, in the background.
pub const CHECK_EVERY: Duration = Duration::from_secs(5);
/// `CUDA_ERROR_OUT_OF_MEMORY`
const OUT_OF_MEMORY: c_uint = 2;

impl Execute for Args {
    /// Fills its memory, and then checks it for each line that it reads, or now and then if its input is `/dev/null`.
    fn execute(&self) -> Result<Exit, CommandError> {
        let memory = match Memory::take(self.mib as usize) {
            Ok(memory) => memory,
            Err(OUT_OF_MEMORY) => {
                output::say(&format!("out of memory: there are less than {} MiB", self.mib))?;
                return Ok(Exit::NoMemory);
            }
            Err(code) => return Err(CommandError::new(Exit::Failed, format!("the driver answers {code}"))),
        };
        output::say("ready")?;
        for line in io::stdin().lines() {
            if line.is_err() {
                break;
            }
            memory.check()?;
        }
        // In the background, nobody writes lines.
        while is_null("/proc/self/fd/0") {
            thread::sleep(CHECK_EVERY);
            memory.check()?;
        }
        Ok(Exit::Done)
    }
}

fn is_null(path: &str) -> bool {
    let device = |path| fs::metadata(path).map(|found| found.rdev()).ok();
    device(path).is_some_and(|found| Some(found) == device("/dev/null"))
}

type Code = c_uint;

/// The functions of the driver that it uses.
struct Driver {
    copy_in: unsafe extern "C" fn(u64, *const c_void, usize) -> Code,
    copy_out: unsafe extern "C" fn(*mut c_void, u64, usize) -> Code,
    allocate: unsafe extern "C" fn(*mut u64, usize) -> Code,
}

/// Memory of the first GPU, filled with a pattern.
struct Memory {
    driver: Driver,
    address: u64,
    mib: usize,
}

impl Memory {
    fn take(mib: usize) -> Result<Self, Code> {
        let driver = Driver::start()?;
        let mut address = 0;
        // SAFETY: a writable address; the context is current.
        check(unsafe { (driver.allocate)(&raw mut address, mib * MIB) })?;
        let memory = Self { driver, address, mib };
        for place in 0..mib {
            let piece = pattern(place);
            // SAFETY: the piece is readable, and the memory has room for it there.
            check(unsafe { (memory.driver.copy_in)(memory.at(place), piece.as_ptr().cast(), MIB) })?;
        }
        Ok(memory)
    }

    fn check(&self) -> Result<(), CommandError> {
        match self.first_wrong() {
            Ok(None) => output::say(&format!("all {} MiB at {:#x} are as they were written", self.mib, self.address)),
            Ok(Some(mib)) => Err(CommandError::new(Exit::Failed, format!("MiB {mib} is not as it was written"))),
            Err(code) => Err(CommandError::new(Exit::Failed, format!("the driver answers {code}"))),
        }
    }

    /// The first MiB that is not as it was written.
    fn first_wrong(&self) -> Result<Option<usize>, Code> {
        let mut piece = vec![0_u32; MIB / 4];
        for place in 0..self.mib {
            // SAFETY: the piece has room, and the memory is as long.
            check(unsafe { (self.driver.copy_out)(piece.as_mut_ptr().cast(), self.at(place), MIB) })?;
            if piece != pattern(place) {
                return Ok(Some(place));
            }
        }
        Ok(None)
    }

    fn at(&self, place: usize) -> u64 {
        self.address + (place * MIB) as u64
    }
}

/// A MiB that no other is like.
fn pattern(place: usize) -> Vec<u32> {
    let first = (place as u32).wrapping_mul(0x9e37_79b9);
    (0..(MIB / 4) as u32).map(|word| first ^ word.wrapping_mul(0x85eb_ca6b)).collect()
}

fn check(code: Code) -> Result<(), Code> {
    if code == 0 { Ok(()) } else { Err(code) }
}

impl Driver {
    /// With the context of the first GPU.
    fn start() -> Result<Self, Code> {
        // SAFETY: the types are those of `cuda.h`, and the arguments are writable.
        unsafe {
            let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
            let init: unsafe extern "C" fn(c_uint) -> Code = function(library, c"cuInit")?;
            let retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> Code = function(library, c"cuDevicePrimaryCtxRetain")?;
            let set: unsafe extern "C" fn(*mut c_void) -> Code = function(library, c"cuCtxSetCurrent")?;
            let mut context = ptr::null_mut();
            check(init(0))?;
            check(retain(&raw mut context, 0))?;
            check(set(context))?;
            Ok(Self {
                copy_in: function(library, c"cuMemcpyHtoD_v2")?,
                copy_out: function(library, c"cuMemcpyDtoH_v2")?,
                allocate: function(library, c"cuMemAlloc_v2")?,
            })
        }
    }
}

/// # Safety
/// `F` must be the type of the function.
unsafe fn function<F: Copy>(library: *mut c_void, name: &CStr) -> Result<F, Code> {
    /// `CUDA_ERROR_NOT_FOUND`
    const NOT_FOUND: Code = 500;
    if library.is_null() {
        return Err(NOT_FOUND);
    }
    // SAFETY: an open library, and a name that ends with NUL.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    // SAFETY: the caller's promise; both are the size of a pointer.
    if found.is_null() { Err(NOT_FOUND) } else { Ok(unsafe { mem::transmute_copy(&found) }) }
}
