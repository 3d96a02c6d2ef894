//! Where contents go while their memory is paused, and how they are copied.

mod host;

use crate::driver::{self, Current};
use crate::error::Error;
use crate::memory::{Allocation, Progress, Stage};
use std::sync::Arc;

/// The contents of one allocation, kept outside the device.
#[derive(Debug)]
pub struct Saved(host::Buffer);

impl Saved {
    /// The contents in host memory, readable for as long as the value lives.
    pub fn as_slice(&self) -> &[u8] {
        self.0.as_slice()
    }
}

/// Copies the contents of active allocations to the host, in their order. All or nothing: after an error no host memory
/// is kept. Everything that works on the allocations has finished, and nothing new is started meanwhile.
pub fn save(allocations: &[Arc<Allocation>], progress: &mut dyn FnMut(Progress)) -> Result<Vec<Saved>, Error> {
    let sizes: Vec<_> = allocations.iter().map(|allocation| allocation.bytes()).collect();
    let mut pool = host::Pool::take(&sizes)?;
    let mut meter = Meter::new(Stage::Save, sizes.iter().sum(), progress);
    allocations
        .iter()
        .map(|allocation| {
            let current = Current::push(allocation.context())?;
            let mut buffer = pool.buffer(allocation.bytes(), &current)?;
            let mut tell = |bytes| meter.add(bytes);
            // SAFETY: the buffer is ours alone and as large as the allocation.
            unsafe { driver::copy_from_device(&current, buffer.as_mut_ptr(), allocation.address(), allocation.bytes(), &mut tell)? };
            Ok(Saved(buffer))
        })
        .collect()
}

/// Copies saved contents back to the addresses of their allocations, where memory has been mapped again.
pub fn restore(contents: &[(Arc<Allocation>, Arc<Saved>)], progress: &mut dyn FnMut(Progress)) -> Result<(), Error> {
    let mut meter = Meter::new(Stage::Restore, contents.iter().map(|(allocation, _)| allocation.bytes()).sum(), progress);
    for (allocation, saved) in contents {
        let current = Current::push(allocation.context())?;
        let bytes = saved.as_slice();
        // SAFETY: the slice is readable for its length and nobody changes it.
        unsafe { driver::copy_to_device(&current, allocation.address(), bytes.as_ptr(), bytes.len(), &mut |bytes| meter.add(bytes))? };
    }
    Ok(())
}

/// Keeps the host memory of contents that are back on the device, for the next pause.
pub fn recycle(saved: Arc<Saved>) {
    // A status that still looks at it keeps it alive for a moment; then it is not kept but freed.
    host::Pool::give_back(Arc::into_inner(saved).map(|Saved(buffer)| buffer));
}

/// Bytes of host memory kept for the next pause.
pub fn spare_bytes() -> u64 {
    host::Pool::spare_bytes()
}

/// Adds up what a copy reports.
struct Meter<'a> {
    now: Progress,
    tell: &'a mut dyn FnMut(Progress),
}

impl<'a> Meter<'a> {
    fn new(stage: Stage, total: usize, tell: &'a mut dyn FnMut(Progress)) -> Self {
        Self { now: Progress { stage, done: 0, total: total as u64 }, tell }
    }

    fn add(&mut self, bytes: u64) {
        self.now.done += bytes;
        (self.tell)(self.now);
    }
}
