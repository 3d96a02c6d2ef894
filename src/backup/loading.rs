//! Loads a kernel once into each context that needs it, on a background thread.
//!
//! The driver takes 80 to 90 ms to compile one, needs a large stack for it, and may wait for the program's work, so this must not
//! happen inside one of the program's calls. A failed load is not retried.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;
use vramctl_driver::{Context, Current, RelaxedCapture};
use vramctl_host::{Unpoison, worker};
use vramctl_model::Failure;

/// State of a context's kernel.
pub enum Availability<K> {
    /// Loading.
    Coming,
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
    pub fn begin(&'static self, context: Context, load: fn(&Current) -> Result<K, Failure>, failed: fn(Failure)) {
        {
            let mut kernels = self.lock();
            let Entry::Vacant(place) = kernels.entry(context) else { return };
            place.insert(Availability::Coming);
        }
        let place = Unsettled { kernels: self, context };
        let load = move || {
            let _relaxed = RelaxedCapture::enter();
            match Current::push(place.context).and_then(|current| load(&current)) {
                Ok(kernel) => place.settle(Availability::Loaded(kernel)),
                Err(failure) => failed(failure),
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
            kernels.iter().any(|(place, kernel)| matches!(kernel, Availability::Coming) && context.is_none_or(|context| context == *place))
        };
        self.changed.wait_timeout_while(self.lock(), LONGEST, is_coming).unpoisoned().0
    }

    /// Drops the kernel of a context that is being destroyed or already is.
    pub fn forget(&self, context: Context) {
        // Nothing may be loading into a context while it is destroyed.
        let kernel = self.wait(Some(context)).remove(&context);
        drop(kernel);
    }
}

/// A kernel being loaded. Dropping it unsettled records a failure.
struct Unsettled<K: Send + 'static> {
    kernels: &'static Kernels<K>,
    context: Context,
}

impl<K: Send> Unsettled<K> {
    /// No-op if the context was forgotten meanwhile.
    fn settle(&self, kernel: Availability<K>) {
        if let Some(place @ Availability::Coming) = self.kernels.lock().get_mut(&self.context) {
            *place = kernel;
        }
        self.kernels.changed.notify_all();
    }
}

impl<K: Send> Drop for Unsettled<K> {
    fn drop(&mut self) {
        self.settle(Availability::Failed);
    }
}
