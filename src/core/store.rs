//! Puts the contents of paused memory into an image.

use crate::memory::Memory;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use vramctl_backup as backup;
use vramctl_host::Held;
use vramctl_model::Error;

impl Memory {
    /// Writes what is kept of paused memory to a file, from which the resume reads it back by its name. The host memory goes back to the system. All
    /// or nothing. Returns the bytes of contents, and how many of them are written.
    pub fn store(&self, file: &Held, path: &Path) -> Result<(u64, u64), Error> {
        let _exclusive = self.exclude_unless_quiesced()?;
        let all = self.registry.all();
        if all.iter().any(|allocation| allocation.contents().state.is_active()) {
            return Err(Error::Invalid("not all memory is paused, so its contents cannot be stored".into()));
        }
        let kept: Vec<_> = all.iter().filter_map(|allocation| Some((allocation, allocation.contents().state.saved().cloned()?))).collect();
        let saved: Vec<_> = kept.iter().map(|(_, saved)| Arc::clone(saved)).collect();
        let file = file.as_type::<File>().map_err(|error| Error::Disk(error.to_string()))?;
        let (stored, written) = backup::store(&saved, &file)?;
        backup::set_source(path);
        let bytes = stored.iter().map(|stored| stored.kept_bytes()).sum();
        // An image has all of the process's memory in it, so what is not needed must be gone.
        let _unpooled = backup::stop_pooling()?;
        for ((allocation, _), now) in kept.iter().zip(stored) {
            // Freed with the last of these.
            let _before = allocation.contents().state.replace_saved(now);
        }
        drop((saved, kept));
        Ok((bytes, written))
    }
}
