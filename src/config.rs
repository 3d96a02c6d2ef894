//! Every environment variable that the library reads, each read once, in one table.
//!
//! | variable | meaning | default |
//! | --- | --- | --- |
//! | `VRAMCTL_TAG` | the tag of every allocation outside a region; unset or empty: those are left to CUDA | unset; `vramctl run` sets `default` |
//! | `VRAMCTL_BACKUP` | `TAG=POLICY,…` with the policies `host`, `disk` and `discard`: what a pause does with the contents of a tag | every tag `host` |
//! | `VRAMCTL_RETAIN` | `TAG,…` or `*`: the tags whose saved contents stay in host memory after a resume, for the next pause | none |
//! | `VRAMCTL_UNCHANGED` | `hash`: of retained contents, copy what has changed; `off`: copy everything; `verify`: hash, and compare | `hash` |
//! | `VRAMCTL_DISK_DIR` | where the policy `disk` keeps contents | `$TMPDIR`, else `/tmp` |
//! | `VRAMCTL_HOST_CAP` | the most host memory for backups, in bytes, with `K`, `M` or `G` | what the host has |
//! | `VRAMCTL_PREWARM` | so much host memory is prepared in the background when the program first allocates, and kept ready | 0 |
//! | `VRAMCTL_MIN_BYTES` | smaller requests are left to CUDA; a number of bytes, with `K`, `M` or `G` for the powers of 1024 | `1M` |
//! | `VRAMCTL_NAME` | the name by which the command line finds the process | the program's own |
//! | `VRAMCTL_DIR` | where the control sockets are | `$XDG_RUNTIME_DIR/vramctl`, else `/tmp/vramctl-<uid>` |
//! | `VRAMCTL_LOG` | `off`, `error`, `warn`, `info` or `debug`: what is written to stderr | `warn` |
//!
//! `vramctl` itself also reads `VRAMCTL_LIB`, the path of the library that `vramctl run` preloads, and `VRAMCTL_PYTHON`, that
//! of the Python package that it makes findable.

use crate::memory::{Backup, region::checked_tag};
use crate::process::PerProcess;
use crate::units::parse_bytes;
use std::path::PathBuf;
use std::sync::Arc;

/// How a pause treats retained contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unchanged {
    /// Hashes the device memory and copies the pieces that have changed.
    Hash,
    /// Copies everything.
    Off,
    /// Hashes, and compares the pieces that are said not to have changed.
    Verify,
}

/// The variables, as read at the first use in this process.
#[derive(Debug, Clone)]
pub struct Config {
    /// `VRAMCTL_TAG`.
    pub tag: Option<Arc<str>>,
    /// `VRAMCTL_BACKUP`, in the order given.
    pub backup: Vec<(Arc<str>, Backup)>,
    /// `VRAMCTL_RETAIN`; `*` stands for every tag.
    pub retain: Vec<String>,
    /// `VRAMCTL_UNCHANGED`.
    pub unchanged: Unchanged,
    /// `VRAMCTL_HOST_CAP`.
    pub host_cap: u64,
    /// `VRAMCTL_PREWARM`.
    pub prewarm: u64,
    /// `VRAMCTL_MIN_BYTES`.
    pub min_bytes: usize,
    /// `VRAMCTL_NAME`.
    pub name: Option<String>,
    /// What was wrong with the variables, to be logged once.
    pub complaints: Vec<String>,
}

/// The least size of a managed allocation where `VRAMCTL_MIN_BYTES` does not say. Smaller requests would waste most of
/// a 2 MiB page each, and torch's own small blocks come in segments of 2 MiB.
const DEFAULT_MIN_BYTES: usize = 1 << 20;

static CONFIG: PerProcess<Config> =
    PerProcess::new(|| Config::from_variables(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())));

impl Config {
    /// This process's configuration.
    pub fn get() -> &'static Self {
        CONFIG.get()
    }

    /// Reads the table above through `variable`; what cannot be understood is left at its default and complained of.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let mut complaints = Vec::new();
        let backup = set("VRAMCTL_BACKUP").map_or_else(Vec::new, |list| parse_backup(&list, &mut complaints));
        let retain = set("VRAMCTL_RETAIN").unwrap_or_default();
        let retain = retain.split(',').map(|tag| tag.trim().to_owned()).filter(|tag| !tag.is_empty()).collect();
        let unchanged = match set("VRAMCTL_UNCHANGED").as_deref() {
            None | Some("hash") => Unchanged::Hash,
            Some("off") => Unchanged::Off,
            Some("verify") => Unchanged::Verify,
            Some(other) => {
                complaints.push(format!("VRAMCTL_UNCHANGED={other} is not hash, off or verify; using hash"));
                Unchanged::Hash
            }
        };
        let mut bytes = |name: &str, default: usize| {
            let Some(text) = set(name) else { return default };
            parse_bytes(&text).unwrap_or_else(|| {
                complaints.push(format!("{name}={text} is not a number of bytes such as 1048576 or 1M; ignored"));
                default
            })
        };
        let min_bytes = bytes("VRAMCTL_MIN_BYTES", DEFAULT_MIN_BYTES);
        let host_cap = bytes("VRAMCTL_HOST_CAP", usize::MAX) as u64;
        let prewarm = bytes("VRAMCTL_PREWARM", 0) as u64;
        let tag = set("VRAMCTL_TAG").map(|tag| checked_tag(&tag));
        let tag = tag.and_then(|tag| tag.map_err(|error| complaints.push(format!("VRAMCTL_TAG: {error}; ignored"))).ok());
        let name = set("VRAMCTL_NAME");
        Self { tag, backup, retain, unchanged, host_cap, prewarm, min_bytes, name, complaints }
    }

    /// Whether `VRAMCTL_RETAIN` names a tag.
    pub fn retains(&self, tag: &str) -> bool {
        self.retains_every_tag() || self.retain.iter().any(|known| known == tag)
    }

    /// Whether `VRAMCTL_RETAIN` names all of them.
    pub fn retains_every_tag(&self) -> bool {
        self.retain.iter().any(|known| known == "*")
    }

    /// The policy that `VRAMCTL_BACKUP` gives a tag. The last mention of a tag counts.
    pub fn backup_of(&self, tag: &str) -> Option<Backup> {
        self.backup.iter().rev().find(|(known, _)| &**known == tag).map(|(_, policy)| *policy)
    }
}

fn parse_backup(list: &str, complaints: &mut Vec<String>) -> Vec<(Arc<str>, Backup)> {
    let entry = |item: &str| {
        let (tag, policy) = item.trim().split_once('=')?;
        Some((checked_tag(tag.trim()).ok()?, policy.trim().parse().ok()?))
    };
    list.split(',')
        .filter(|item| !item.trim().is_empty())
        .filter_map(|item| {
            let parsed = entry(item);
            if parsed.is_none() {
                complaints.push(format!("VRAMCTL_BACKUP: '{item}' is not TAG=host, TAG=disk or TAG=discard; ignored"));
            }
            parsed
        })
        .collect()
}

/// Where the control sockets are: one place for the library and the command line.
pub fn socket_directory() -> PathBuf {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("VRAMCTL_DIR").or_else(|| variable("XDG_RUNTIME_DIR").map(|base| base.join("vramctl"))).unwrap_or_else(|| {
        // SAFETY: `geteuid` cannot fail and touches no memory.
        PathBuf::from(format!("/tmp/vramctl-{}", unsafe { libc::geteuid() }))
    })
}

/// `VRAMCTL_DISK_DIR`: where the policy `disk` keeps contents.
pub fn disk_directory() -> PathBuf {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("VRAMCTL_DISK_DIR").or_else(|| variable("TMPDIR")).unwrap_or_else(|| PathBuf::from("/tmp"))
}

/// `VRAMCTL_LOG`, read by the logger when it is set up.
pub fn log_level() -> Option<String> {
    std::env::var("VRAMCTL_LOG").ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(pairs: &[(&str, &str)]) -> Config {
        Config::from_variables(|name| pairs.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn an_empty_environment_manages_nothing() {
        let config = config(&[]);
        assert_eq!((config.tag, config.min_bytes, config.complaints.len()), (None, 1 << 20, 0));
    }

    #[test]
    fn policies_are_read_per_tag_and_nonsense_is_named() {
        let config = config(&[("VRAMCTL_BACKUP", "kv_cache=discard, weights=host,,x=tape,kv_cache"), ("VRAMCTL_MIN_BYTES", "lots")]);
        assert_eq!(config.backup_of("kv_cache"), Some(Backup::Discard));
        assert_eq!(config.backup_of("weights"), Some(Backup::Host));
        assert_eq!(config.backup_of("x"), None);
        assert_eq!(config.min_bytes, 1 << 20);
        assert_eq!(config.complaints.len(), 3, "{:?}", config.complaints);
    }
}
