//! A kernel in each context where it is wanted, loaded once by a thread that nobody has to wait for.
//!
//! The driver takes 80 ms to compile one, needs a large stack for that, and may wait for the program's work: nothing to be done
//! inside a call of the program's. Where it fails it is not tried again.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use vramctl_driver::{Context, Current, RelaxedCapture};
use vramctl_host::worker;
use vramctl_model::Failure;

/// What has become of a context's kernel.
pub enum Availability<K> {
    /// It is being loaded.
    Coming,
    /// It is there.
    Loaded(K),
    /// It cannot be had.
    Failed,
}

impl<K> Availability<K> {
    /// The kernel, if it is there.
    pub fn loaded(&mut self) -> Option<&mut K> {
        if let Self::Loaded(kernel) = self { Some(kernel) } else { None }
    }
}

/// One kind of kernel, in all contexts.
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
    /// Those that there are.
    pub fn lock(&self) -> MutexGuard<'_, BTreeMap<Context, Availability<K>>> {
        self.by_context.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a context's was wanted already.
    pub fn knows(&self, context: Context) -> bool {
        self.lock().contains_key(&context)
    }

    /// Has a context's loaded, unless that was done before.
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
        // Where no thread can be had, the place is dropped, and says so.
        if let Err(error) = worker::spawn_compiler("vramctl-kernel", load) {
            log::debug!("no thread could be started: {error}");
        }
    }

    /// Waits until none is being loaded, into this context or, without one, into any. Not for ever: the driver may be waiting for
    /// the program.
    pub fn wait(&self, context: Option<Context>) -> MutexGuard<'_, BTreeMap<Context, Availability<K>>> {
        const LONGEST: Duration = Duration::from_secs(5);
        let is_coming = |kernels: &mut BTreeMap<Context, Availability<K>>| {
            kernels.iter().any(|(place, kernel)| matches!(kernel, Availability::Coming) && context.is_none_or(|context| context == *place))
        };
        self.changed.wait_timeout_while(self.lock(), LONGEST, is_coming).unwrap_or_else(PoisonError::into_inner).0
    }

    /// The context is about to go, or gone, and its kernel with it.
    pub fn forget(&self, context: Context) {
        // Nothing is to be loaded into a context that is being destroyed.
        let kernel = self.wait(Some(context)).remove(&context);
        drop(kernel);
    }
}

/// The place of a kernel that is being loaded. Dropped before it is settled, the kernel cannot be had.
struct Unsettled<K: Send + 'static> {
    kernels: &'static Kernels<K>,
    context: Context,
}

impl<K: Send> Unsettled<K> {
    /// Not where it was forgotten meanwhile: the context is gone.
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
