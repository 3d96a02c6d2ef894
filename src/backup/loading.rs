//! Loads a kernel once into each context that needs it, on a background thread.
//!
//! The driver takes 80 to 90 ms to compile one, and needs a large stack for it. Then it waits for the program's work to load the code, and
//! holds up its launches meanwhile. So the thread compiles at once, and loads at a quiet moment. A failed load is not retried.

use super::quiet;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ffi::CStr;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;
use vramctl_driver::{Context, Current, Image, RelaxedCapture};
use vramctl_host::{Unpoison, exit, worker};
use vramctl_model::Failure;

/// State of a context's kernel.
pub enum Availability<K> {
    /// A thread is in the driver to compile or load it.
    Coming,
    /// Compiled, and waiting for a quiet moment.
    Waiting,
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

    /// Waits while a kernel is loading into this context, or into any. Limited to 5 s, because the driver may be waiting for
    /// the program.
    pub fn wait(&self, context: Option<Context>) -> MutexGuard<'_, BTreeMap<Context, Availability<K>>> {
        const LONGEST: Duration = Duration::from_secs(5);
        let is_coming = |kernels: &mut BTreeMap<Context, Availability<K>>| {
            let is_coming = |kernel: &Availability<K>| matches!(kernel, Availability::Coming | Availability::Waiting);
            kernels.iter().any(|(place, kernel)| is_coming(kernel) && context.is_none_or(|context| context == *place))
        };
        self.changed.wait_timeout_while(self.lock(), LONGEST, is_coming).unpoisoned().0
    }

    /// Drops the kernel of a context that is being destroyed or already is.
    pub fn forget(&self, context: Context) {
        /// Far longer than the driver takes to compile or load one.
        const LONGEST: Duration = Duration::from_secs(5);
        // No thread may be in the driver with a context while it is destroyed.
        let is_inside = |kernels: &mut BTreeMap<Context, Availability<K>>| matches!(kernels.get(&context), Some(Availability::Coming));
        let kernel = self.changed.wait_timeout_while(self.lock(), LONGEST, is_inside).unpoisoned().0.remove(&context);
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
        let mut backoff = quiet::Backoff::default();
        while self.settle(Availability::Waiting) && !exit::is_ending() {
            if let Some(loaded) = quiet::now(|| self.load(image, load)) {
                return loaded;
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
        let place = kernels.get_mut(&self.context).filter(|place| matches!(place, Availability::Coming | Availability::Waiting));
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
