//! Loads a kernel once into each context that needs it, on a background thread.
//!
//! The driver takes 80 to 90 ms to compile one, and needs a large stack for it. Then it waits for the program's work to load the code, and
//! holds up its launches meanwhile. So the thread compiles at once, and loads at a quiet moment. A failed load is not retried.

use super::quiet;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ffi::CStr;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use vramctl_driver::{Activity, Context, Current, Image, RelaxedCapture};
use vramctl_host::{Unpoison, exit, worker};
use vramctl_model::Failure;

/// State of a context's kernel.
pub enum Availability<K> {
    /// A thread is in the driver to compile or load it.
    Coming,
    /// Compiled, and waiting for a quiet moment: what was in the way last.
    Waiting(Activity),
    /// Loaded.
    Loaded(K),
    /// Could not be loaded.
    Failed,
}

impl<K> Availability<K> {
    /// The kernel, if loaded.
    pub fn loaded(&mut self) -> Option<&mut K> {
        if let Self::Loaded(kernel) = self { Some(kernel) } else { None }
    }
}

/// One kind of kernel in all contexts.
pub struct Kernels<K> {
    by_context: Mutex<BTreeMap<Context, Availability<K>>>,
    changed: Condvar,
}

impl<K> Default for Kernels<K> {
    fn default() -> Self {
        Self { by_context: Mutex::default(), changed: Condvar::new() }
    }
}

impl<K: Send> Kernels<K> {
    /// Waits until none is loading, unless only a pause can load it. For tests and measurements.
    pub fn settle(&self) {
        drop(self.wait(Duration::MAX));
    }

    /// The kernels by context.
    pub fn lock(&self) -> MutexGuard<'_, BTreeMap<Context, Availability<K>>> {
        self.by_context.lock().unpoisoned()
    }

    /// Whether loading was ever started for a context.
    pub fn knows(&self, context: Context) -> bool {
        self.lock().contains_key(&context)
    }

    /// Starts loading the kernel into a context. No-op if that has been done before.
    pub fn begin(&'static self, context: Context, ptx: &'static CStr, load: Load<K>, failed: fn(Failure)) {
        {
            let mut kernels = self.lock();
            let Entry::Vacant(place) = kernels.entry(context) else { return };
            place.insert(Availability::Coming);
        }
        let place = Unsettled { kernels: self, context };
        let load = move || {
            let _relaxed = RelaxedCapture::enter();
            let compiled = Current::push(place.context).and_then(|current| Image::compile(&current, ptx));
            if let Err(failure) = compiled.and_then(|image| place.load_when_quiet(&image, load)) {
                failed(failure);
            }
        };
        // If no thread starts, dropping `place` records the failure.
        if let Err(error) = worker::spawn_compiler("vramctl-kernel", load) {
            log::debug!("could not start a thread: {error}");
        }
    }

    /// Waits while a kernel is loading, at most 5 s, because the driver may be waiting for the program. If no pause grants a quiet moment, this
    /// waits for one only as long as `patience`.
    pub fn wait(&self, patience: Duration) -> MutexGuard<'_, BTreeMap<Context, Availability<K>>> {
        const LONGEST: Duration = Duration::from_secs(5);
        let begun = Instant::now();
        let is_coming = |kernel: &Availability<K>| match kernel {
            Availability::Coming => true,
            Availability::Waiting(seen) => quiet::is_granted() || *seen != Activity::Unknown && begun.elapsed() < patience,
            Availability::Loaded(_) | Availability::Failed => false,
        };
        self.changed.wait_timeout_while(self.lock(), LONGEST, |kernels| kernels.values().any(is_coming)).unpoisoned().0
    }

    /// Drops the kernel of a destroyed context. A thread that was in the driver to load it has come out before, because it had made the context
    /// current; it finds that the context is gone.
    pub fn forget(&self, context: Context) {
        let kernel = self.lock().remove(&context);
        drop(kernel);
    }
}

/// Loads a compiled kernel into the current context.
pub type Load<K> = fn(&Current, &Image) -> Result<K, Failure>;

/// A kernel being loaded. Dropping it unsettled records a failure.
struct Unsettled<K: Send + 'static> {
    kernels: &'static Kernels<K>,
    context: Context,
}

impl<K: Send> Unsettled<K> {
    /// Loads the kernel at the next quiet moment, unless the context is forgotten or the program ends before.
    fn load_when_quiet(&self, image: &Image, load: Load<K>) -> Result<(), Failure> {
        let (mut backoff, mut seen) = (quiet::Backoff::default(), Activity::Busy);
        while self.settle(Availability::Waiting(seen)) && !exit::is_ending() {
            match quiet::now(|| self.load(image, load)) {
                Ok(loaded) => return loaded,
                Err(in_the_way) => seen = in_the_way,
            }
            quiet::wait_for_next(&mut backoff);
        }
        Ok(())
    }

    fn load(&self, image: &Image, load: Load<K>) -> Result<(), Failure> {
        if self.settle(Availability::Coming) {
            let kernel = Current::push(self.context).and_then(|current| load(&current, image))?;
            self.settle(Availability::Loaded(kernel));
        }
        Ok(())
    }

    /// `false` if the context was forgotten meanwhile.
    fn settle(&self, kernel: Availability<K>) -> bool {
        let mut kernels = self.kernels.lock();
        let place = kernels.get_mut(&self.context).filter(|place| matches!(place, Availability::Coming | Availability::Waiting(_)));
        let is_known = place.map(|place| *place = kernel).is_some();
        drop(kernels);
        self.kernels.changed.notify_all();
        is_known
    }
}

impl<K: Send> Drop for Unsettled<K> {
    fn drop(&mut self) {
        self.settle(Availability::Failed);
    }
}
