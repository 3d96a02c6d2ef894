//! The environment variables. Each is read once. `docs/settings.md` lists them, for people and for this crate.

use std::ffi::{CStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use vramctl_host::{PerProcess, logger, system};
use vramctl_model::{DEFAULT_TAG, Limit, Policy, SharePriority, checked_name, checked_tag, parse_bytes};

/// The page that lists the variables.
const SETTINGS: &str = include_str!("../../docs/settings.md");

/// All variables that the project reads.
fn variables() -> impl Iterator<Item = &'static str> {
    SETTINGS.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`')).map(|(name, _)| name)
}

/// If a variable looks like one of the project's and is none: the one that may be meant, if any is near.
pub fn is_unknown(name: &str) -> Option<Option<&'static str>> {
    if !name.starts_with("VRAMCTL_") || variables().any(|known| known == name) {
        return None;
    }
    let near = variables().map(|known| (edits(name, known), known)).min();
    Some(near.filter(|(edits, _)| *edits <= 2).map(|(_, known)| known))
}

/// How many letters differ, are missing or too many (Levenshtein's distance).
fn edits(one: &str, other: &str) -> usize {
    let mut row: Vec<_> = (0..=other.len()).collect();
    for (at, letter) in one.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = at + 1;
        for (column, wanted) in other.bytes().enumerate() {
            let replaced = diagonal + usize::from(letter != wanted);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[other.len()]
}

/// `torch_memory_saver`'s kinds of host memory. Our host memory is always pinned while in use; the kind only says when it is freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CpuBackupBackend {
    /// `pinned`: some time after the resume.
    Pinned,
    /// `mmap`: before the resume returns.
    Mmap,
}

impl CpuBackupBackend {
    /// The name.
    pub fn name(self) -> &'static CStr {
        match self {
            Self::Pinned => c"pinned",
            Self::Mmap => c"mmap",
        }
    }

    /// Looks a kind up by name.
    pub fn of_name(name: &CStr) -> Option<Self> {
        [Self::Pinned, Self::Mmap].into_iter().find(|kind| kind.name() == name)
    }
}

/// The variables, read at the first use in this process.
#[derive(Debug, Clone)]
pub struct Config {
    /// `VRAMCTL_TAG`.
    pub tag: Option<Arc<str>>,
    /// The policy of allocations outside regions whose tag `VRAMCTL_BACKUP` does not mention, from the `TMS_INIT_` variables.
    pub thread_default_backup: Option<Policy>,
    /// `TMS_INIT_CPU_BACKUP_BACKEND`.
    pub cpu_backup_backend: CpuBackupBackend,
    /// `VRAMCTL_BACKUP`, in the order given.
    pub backup: Vec<(Arc<str>, Policy)>,
    /// `VRAMCTL_RETAIN`; `*` means every tag.
    pub retain: Vec<String>,
    /// Whether copies of what a scheduler takes are retained while they are right: in a program that shares its GPUs, unless `VRAMCTL_RETAIN` is set.
    pub retains_unchanged: bool,
    /// `VRAMCTL_HOST_CAP`.
    pub host_cap: u64,
    /// `VRAMCTL_HOST_KEEP`.
    pub host_keep: Duration,
    /// `VRAMCTL_PREWARM`.
    pub prewarm: u64,
    /// `VRAMCTL_LIMIT`.
    pub limit: Option<Limit>,
    /// `VRAMCTL_MIN_BYTES`.
    pub min_bytes: usize,
    /// `VRAMCTL_EXCLUDE`: libraries whose allocations are left to CUDA, by the beginning of their file names.
    pub exclude: Vec<String>,
    /// `VRAMCTL_GUARD`.
    pub guard: bool,
    /// `VRAMCTL_SHARE`: the program shares its GPUs.
    pub shares: bool,
    /// `VRAMCTL_PRIORITY`.
    pub priority: SharePriority,
    /// `VRAMCTL_IDLE`: idle for so long, the program gives its memory back even if nobody asks.
    pub gives_back_after: Option<Duration>,
    /// `VRAMCTL_WAIT`: how long a request waits for room while nobody can give way.
    pub waits_for: Option<Duration>,
    /// `VRAMCTL_SHARE`, `VRAMCTL_IMAGE` and `VRAMCTL_KEEP_CACHE`: what becomes of an idle inference engine's KV cache when a scheduler takes it or a save writes the program.
    pub idle_cache: IdleCache,
    /// `VRAMCTL_TRACE`: how many bytes of events are kept. 0: none are recorded, until somebody asks for it.
    pub trace: usize,
    /// `VRAMCTL_WATCH`.
    pub watch: Watch,
    /// `VRAMCTL_NAME`.
    pub name: Option<String>,
    /// The job that this process belongs to: its name, else `VRAMCTL_JOB`.
    pub job: Option<String>,
    /// `VRAMCTL_JOB`: the run that this process belongs to.
    pub run: Option<String>,
    /// `VRAMCTL_ON_PAUSE`: a command for whoever pauses the program. The library does not run it.
    pub on_pause: Option<String>,
    /// `VRAMCTL_ON_RESUME`: the same for whoever resumes it.
    pub on_resume: Option<String>,
    /// The directories of sockets and backups.
    pub directories: Directories,
    /// Errors in the variables, to be logged once.
    pub complaints: Vec<String>,
}

/// What becomes of an idle inference engine's KV cache when a scheduler takes it or a save writes the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdleCache {
    /// The engine resets its prefix cache, if it can, and the contents are not kept.
    Dropped,
    /// The contents are kept.
    Kept,
}

/// When a process logs who uses the memory of a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Watch {
    /// When fewer bytes are free. 0: never.
    pub below: u64,
    /// Whether the program's own allocator then returns what it has cached.
    pub trims: bool,
}

impl Watch {
    fn parse(text: &str) -> Option<Self> {
        let (size, trims) = text.strip_suffix(",trim").map_or((text, false), |size| (size, true));
        Some(Self { below: parse_bytes(size)? as u64, trims })
    }
}

/// The library's directories. They are read once, because another thread of the program may call `setenv` at any time, which
/// races with `getenv`. They are absolute, because the program may change its working directory.
#[derive(Debug, Clone)]
pub struct Directories {
    /// For the control sockets; the library and the command line share it.
    sockets: PathBuf,
    /// For the policy `disk`.
    disk: PathBuf,
    /// Whether to create `disk`, as users of `TMS_DISK_BACKUP_DIR` expect.
    makes_disk: bool,
    /// For reports of device memory that has run out.
    reports: Option<PathBuf>,
}

impl Directories {
    /// Those of a process of this user with these variables.
    fn of(user: u32, variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let set = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let sockets = set("VRAMCTL_DIR")
            .or_else(|| set("XDG_RUNTIME_DIR").map(|base| base.join("vramctl")))
            .unwrap_or_else(|| PathBuf::from(format!("/tmp/vramctl-{user}")));
        let (ours, of_memory_saver) = (set("VRAMCTL_DISK_DIR"), set("TMS_DISK_BACKUP_DIR"));
        let makes_disk = ours.is_none() && of_memory_saver.is_some();
        let disk = ours.or(of_memory_saver).or_else(|| set("TMPDIR")).unwrap_or_else(|| PathBuf::from("/tmp"));
        // Without a working directory the path stays relative, and its first use reports the error.
        let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
        let reports = set("VRAMCTL_REPORT_DIR").map(absolute);
        Self { sockets: absolute(sockets), disk: absolute(disk), makes_disk, reports }
    }
}

/// The default of `VRAMCTL_MIN_BYTES`. A smaller request would waste most of a 2 MiB page, and torch puts its own small blocks
/// into 2 MiB segments.
const DEFAULT_MIN_BYTES: usize = 1 << 20;

/// The default of `VRAMCTL_HOST_KEEP`, in seconds. Programs that take turns on a GPU pause again sooner.
const DEFAULT_HOST_KEEP: u32 = 60;

/// The most of `VRAMCTL_TRACE`, and what a trace has that is begun later.
pub const MOST_TRACE: usize = 16 << 20;
/// The least.
const LEAST_TRACE: usize = 64 << 10;

/// The name that this process has got since its start, as the process of an image.
static NAME: PerProcess<RwLock<Option<String>>> = PerProcess::new(RwLock::default);

/// The name that this process has got since its start, if it has.
pub fn new_name() -> Option<String> {
    NAME.existing()?.read().unwrap_or_else(PoisonError::into_inner).clone()
}

/// The name of this process: the one that it has got, else `VRAMCTL_NAME`.
pub fn own_name() -> Option<String> {
    new_name().or_else(|| Config::get().name.clone())
}

/// Gives this process a name.
pub fn set_own_name(name: &str) {
    *NAME.get().write().unwrap_or_else(PoisonError::into_inner) = Some(name.to_owned());
}

static CONFIG: PerProcess<Config> = PerProcess::new(|| Config::from_variables(|name| std::env::var_os(name)));

impl Config {
    /// This process's configuration.
    pub fn get() -> &'static Self {
        CONFIG.get()
    }

    /// Reads the variables through `variable`. An invalid value is replaced by its default and added to the complaints.
    pub fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let directories = Directories::of(system::user(), &variable);
        let mut variables = Variables { get: variable, complaints: Vec::new() };
        let manages_all = variables.switch("TMS_INIT_ENABLE") == Some(true);
        let retains_all = variables.switch("TMS_RETAIN_CPU_BACKUP") == Some(true);
        let name = variables.name();
        let shares = variables.switch("VRAMCTL_SHARE") == Some(true);
        let may_be_asked = variables.switch("VRAMCTL_IMAGE") == Some(true) || shares;
        let keeps_cache = variables.switch("VRAMCTL_KEEP_CACHE") == Some(true);
        Self {
            tag: variables.tag().or_else(|| manages_all.then(|| DEFAULT_TAG.into())),
            thread_default_backup: variables.thread_default_backup().or_else(|| manages_all.then_some(Policy::Discard)),
            cpu_backup_backend: variables
                .one_of("TMS_INIT_CPU_BACKUP_BACKEND", [("pinned", CpuBackupBackend::Pinned), ("mmap", CpuBackupBackend::Mmap)]),
            backup: variables.backup(),
            retain: variables.list("VRAMCTL_RETAIN").unwrap_or_else(|| if retains_all { vec!["*".into()] } else { Vec::new() }),
            retains_unchanged: shares && (variables.get)("VRAMCTL_RETAIN").is_none(),
            host_cap: variables.size("VRAMCTL_HOST_CAP", usize::MAX) as u64,
            host_keep: variables.host_keep(),
            prewarm: variables.size("VRAMCTL_PREWARM", 0) as u64,
            limit: variables.parsed(
                "VRAMCTL_LIMIT",
                |text| text.parse().ok(),
                "neither a size such as 20G nor a share such as 25%; ignored",
            ),
            min_bytes: variables.size("VRAMCTL_MIN_BYTES", DEFAULT_MIN_BYTES),
            exclude: variables.list("VRAMCTL_EXCLUDE").unwrap_or_default(),
            guard: variables.switch("VRAMCTL_GUARD") == Some(true),
            shares,
            priority: variables.one_of(
                "VRAMCTL_PRIORITY",
                [("normal", SharePriority::Normal), ("low", SharePriority::Low), ("high", SharePriority::High)],
            ),
            gives_back_after: variables.seconds("VRAMCTL_IDLE").filter(|time| !time.is_zero()),
            waits_for: variables.seconds("VRAMCTL_WAIT"),
            idle_cache: if may_be_asked && !keeps_cache { IdleCache::Dropped } else { IdleCache::Kept },
            trace: variables.trace(),
            watch: variables.parsed("VRAMCTL_WATCH", Watch::parse, "not a size such as 5G, nor 5G,trim; ignored").unwrap_or_default(),
            job: name.clone().or_else(|| variables.set("VRAMCTL_JOB")),
            run: variables.set("VRAMCTL_JOB"),
            on_pause: variables.set("VRAMCTL_ON_PAUSE"),
            on_resume: variables.set("VRAMCTL_ON_RESUME"),
            name,
            directories,
            complaints: variables.complaints,
        }
    }

    /// Whether `VRAMCTL_RETAIN` covers a tag.
    pub fn retains(&self, tag: &str) -> bool {
        self.retains_every_tag() || self.retain.iter().any(|known| known == tag)
    }

    /// Whether `VRAMCTL_RETAIN` covers every tag.
    pub fn retains_every_tag(&self) -> bool {
        self.retain.iter().any(|known| known == "*")
    }

    /// The policy that `VRAMCTL_BACKUP` gives a tag. The last mention wins.
    pub fn backup_of(&self, tag: &str) -> Option<Policy> {
        self.backup.iter().rev().find(|(known, _)| &**known == tag).map(|(_, policy)| *policy)
    }
}

/// Reads the variables, and keeps the complaints about them.
struct Variables<G> {
    get: G,
    complaints: Vec<String>,
}

impl<G: Fn(&str) -> Option<OsString>> Variables<G> {
    /// A variable that is not empty.
    fn set(&self, name: &str) -> Option<String> {
        (self.get)(name).map(|value| value.to_string_lossy().into_owned()).filter(|value| !value.is_empty())
    }

    /// Parses a variable. One that `parse` refuses counts as unset. `problem`: what is wrong then, and what happens instead.
    fn parsed<T>(&mut self, name: &str, parse: impl Fn(&str) -> Option<T>, problem: &str) -> Option<T> {
        let text = self.set(name)?;
        let value = parse(&text);
        if value.is_none() {
            self.complaints.push(format!("{name}={text} is {problem}"));
        }
        value
    }

    fn seconds(&mut self, name: &str) -> Option<Duration> {
        let seconds = self.parsed(name, |text| text.parse::<u32>().ok(), "not a number of seconds; ignored")?;
        Some(Duration::from_secs(seconds.into()))
    }

    fn switch(&mut self, name: &str) -> Option<bool> {
        self.parsed(name, switch, "not 1 or 0; ignored")
    }

    /// A number of bytes.
    fn size(&mut self, name: &str, default: usize) -> usize {
        self.parsed(name, parse_bytes, "not a size such as 1048576 or 1M; ignored").unwrap_or(default)
    }

    /// One of `words`; the first is the default.
    fn one_of<T: Copy, const N: usize>(&mut self, name: &str, words: [(&str, T); N]) -> T {
        let chosen = |text: &str| words.iter().find(|(word, _)| *word == text).map(|(_, meaning)| *meaning);
        let known = words.map(|(word, _)| word);
        self.parsed(name, chosen, &format!("none of {}; using {}", known.join(", "), known[0])).unwrap_or(words[0].1)
    }

    /// A list with commas.
    fn list(&self, name: &str) -> Option<Vec<String>> {
        Some(self.set(name)?.split(',').map(str::trim).filter(|item| !item.is_empty()).map(str::to_owned).collect())
    }

    fn name(&mut self) -> Option<String> {
        let name = self.set("VRAMCTL_NAME")?;
        checked_name(&name)
            .map(str::to_owned)
            .map_err(|error| self.complaints.push(format!("VRAMCTL_NAME={}: {error}; the program's own name counts", name.escape_debug())))
            .ok()
    }

    fn tag(&mut self) -> Option<Arc<str>> {
        let tag = checked_tag(&self.set("VRAMCTL_TAG")?);
        tag.map_err(|error| self.complaints.push(format!("VRAMCTL_TAG: {error}; ignored"))).ok()
    }

    fn backup(&mut self) -> Vec<(Arc<str>, Policy)> {
        let list = self.set("VRAMCTL_BACKUP").unwrap_or_default();
        let entry = |item: &str| {
            let (tag, policy) = item.trim().split_once('=')?;
            Some((checked_tag(tag.trim()).ok()?, policy.trim().parse().ok()?))
        };
        let mut policies = Vec::new();
        for item in list.split(',').filter(|item| !item.trim().is_empty()) {
            match entry(item) {
                Some(policy) => policies.push(policy),
                None => self.complaints.push(format!("VRAMCTL_BACKUP: '{item}' is not TAG=host, TAG=disk or TAG=discard; ignored")),
            }
        }
        policies
    }

    /// As the `TMS_INIT_` variables say.
    fn thread_default_backup(&mut self) -> Option<Policy> {
        match (self.switch("TMS_INIT_ENABLE_CPU_BACKUP"), self.switch("TMS_INIT_ENABLE_DISK_BACKUP")) {
            (Some(true), Some(true)) => {
                let both = "TMS_INIT_ENABLE_CPU_BACKUP and TMS_INIT_ENABLE_DISK_BACKUP are both 1; keeping contents on disk";
                self.complaints.push(both.into());
                Some(Policy::Disk)
            }
            (_, Some(true)) => Some(Policy::Disk),
            (Some(true), _) => Some(Policy::Host),
            _ => None,
        }
    }

    /// How many bytes of events to keep.
    fn trace(&mut self) -> usize {
        let Some(text) = self.set("VRAMCTL_TRACE") else { return 0 };
        let size = || parse_bytes(&text).filter(|bytes| (LEAST_TRACE..=MOST_TRACE).contains(bytes));
        switch(&text).map(|on| if on { MOST_TRACE } else { 0 }).or_else(size).unwrap_or_else(|| {
            self.complaints.push(format!("VRAMCTL_TRACE={text} is not 1, 0 or a size from 64K to 16M; ignored"));
            0
        })
    }

    fn host_keep(&mut self) -> Duration {
        let seconds = self.parsed("VRAMCTL_HOST_KEEP", |text| text.parse::<u32>().ok(), "not a number of seconds; ignored");
        Duration::from_secs(seconds.unwrap_or(DEFAULT_HOST_KEEP).into())
    }
}

/// Parses a switch, with the spellings that `torch_memory_saver` accepts.
fn switch(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" => Some(true),
        "0" | "false" | "no" => Some(false),
        _ => None,
    }
}

/// The directory of the control sockets.
pub fn socket_directory() -> &'static Path {
    &Config::get().directories.sockets
}

/// The directory of the control sockets of a process of this user that has these variables.
pub fn socket_directory_of(user: u32, variable: impl Fn(&str) -> Option<OsString>) -> PathBuf {
    Directories::of(user, variable).sockets
}

/// The directory from `VRAMCTL_REPORT_DIR`.
pub fn report_directory() -> Option<&'static Path> {
    Config::get().directories.reports.as_deref()
}

/// The directory of the policy `disk`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskDirectory {
    /// Path of the directory.
    pub path: PathBuf,
    /// Whether each paused allocation has a named file in it, which programs written for `torch_memory_saver` look for. Otherwise
    /// files are unlinked.
    pub named: bool,
}

/// The directory from `VRAMCTL_DISK_DIR` or its fallbacks.
pub fn disk_directory() -> DiskDirectory {
    let Directories { disk, makes_disk, .. } = &Config::get().directories;
    if *makes_disk {
        // If this fails, the first use of the directory reports it.
        let _ = std::fs::create_dir_all(disk);
    }
    DiskDirectory { path: disk.clone(), named: *makes_disk }
}

/// Sets up the logger from `VRAMCTL_LOG` and logs the errors in the environment. Only the first call has an effect.
pub fn set_up_logger() {
    if logger::set_up(std::env::var("VRAMCTL_LOG").ok().as_deref()) {
        for complaint in &Config::get().complaints {
            log::warn!("{complaint}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(pairs: &[(&str, &str)]) -> Config {
        Config::from_variables(|name| pairs.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into()))
    }

    #[test]
    fn directories_are_absolute_and_each_has_its_order() {
        let directories = |pairs: &[(&str, &str)]| {
            let Directories { sockets, disk, makes_disk, .. } = config(pairs).directories;
            (sockets.to_str().unwrap().to_owned(), disk.to_str().unwrap().to_owned(), makes_disk)
        };
        let (sockets, disk, makes_disk) = directories(&[]);
        assert!(sockets.starts_with("/tmp/vramctl-") && disk == "/tmp" && !makes_disk, "{sockets} {disk}");
        let runtime = ("XDG_RUNTIME_DIR", "/run/user/1");
        let temporary = ("TMPDIR", "/scratch");
        assert_eq!(directories(&[runtime, temporary]), ("/run/user/1/vramctl".into(), "/scratch".into(), false));
        let saver = ("TMS_DISK_BACKUP_DIR", "/saver");
        assert_eq!(directories(&[temporary, saver, ("VRAMCTL_DIR", "")]).1, "/saver");
        assert!(directories(&[saver]).2 && !directories(&[saver, ("VRAMCTL_DISK_DIR", "/ours")]).2);
        let here = std::env::current_dir().unwrap();
        let relative = directories(&[("VRAMCTL_DIR", "sockets"), ("VRAMCTL_DISK_DIR", "spill"), runtime]);
        assert_eq!(relative.0, here.join("sockets").to_str().unwrap());
        assert_eq!(relative.1, here.join("spill").to_str().unwrap());
        let reports = |pairs: &[(&str, &str)]| config(pairs).directories.reports;
        assert_eq!(reports(&[("VRAMCTL_REPORT_DIR", "reports")]), Some(here.join("reports")));
        assert_eq!(reports(&[("VRAMCTL_REPORT_DIR", "")]), None);
    }

    #[test]
    fn a_misspelled_variable_is_distinguished_from_a_foreign_one() {
        let unknown = |rest: &str| is_unknown(&format!("VRAMCTL_{rest}"));
        for (rest, meant) in [("RETIAN", "VRAMCTL_RETAIN"), ("HOSTCAP", "VRAMCTL_HOST_CAP"), ("DIRS", "VRAMCTL_DIR")] {
            assert_eq!(unknown(rest), Some(Some(meant)));
        }
        assert_eq!(unknown("SOMETHING_ELSE"), Some(None));
        assert_eq!((unknown("RETAIN"), is_unknown("PATH"), is_unknown("VRAM")), (None, None, None));
    }

    #[test]
    fn every_variable_that_is_read_is_listed() {
        let code = include_str!("lib.rs").split("mod tests").next().unwrap();
        let read: Vec<_> = code
            .split('"')
            .filter(|word: &&str| word.len() > "VRAMCTL_".len() && word.bytes().all(|letter| letter.is_ascii_uppercase() || letter == b'_'))
            .filter(|name| name.starts_with("VRAMCTL_") || name.starts_with("TMS_"))
            .collect();
        assert!(read.len() >= 24, "{read:?}");
        for name in read {
            assert!(variables().any(|known| known == name), "{name} is not in docs/settings.md");
        }
    }

    #[test]
    fn a_watch_may_trim() {
        let watch = |text: &str| {
            let config = config(&[("VRAMCTL_WATCH", text)]);
            (config.watch.below, config.watch.trims, config.complaints.len())
        };
        assert_eq!((watch(""), watch("0"), watch("5G")), ((0, false, 0), (0, false, 0), (5 << 30, false, 0)));
        assert_eq!((watch("64M,trim"), watch("trim"), watch("1G,tirm")), ((64 << 20, true, 0), (0, false, 1), (0, false, 1)));
    }

    #[test]
    fn an_empty_environment_manages_nothing() {
        let config = config(&[]);
        assert_eq!((config.tag, config.min_bytes, config.complaints.len()), (None, 1 << 20, 0));
    }

    #[test]
    fn the_variables_of_torch_memory_saver_are_fallbacks() {
        let all = config(&[("TMS_INIT_ENABLE", "1"), ("TMS_RETAIN_CPU_BACKUP", "TRUE"), ("TMS_INIT_CPU_BACKUP_BACKEND", "mmap")]);
        assert_eq!((all.tag.as_deref(), all.thread_default_backup), (Some("default"), Some(Policy::Discard)));
        assert!(all.retains("anything") && all.complaints.is_empty(), "{:?}", all.complaints);
        assert_eq!(all.cpu_backup_backend.name(), c"mmap");

        let ours = config(&[
            ("TMS_INIT_ENABLE", "1"),
            ("TMS_INIT_ENABLE_CPU_BACKUP", "1"),
            ("TMS_RETAIN_CPU_BACKUP", "1"),
            ("VRAMCTL_TAG", "mine"),
            ("VRAMCTL_RETAIN", "weights"),
        ]);
        assert_eq!((ours.tag.as_deref(), ours.thread_default_backup), (Some("mine"), Some(Policy::Host)));
        assert!(ours.retains("weights") && !ours.retains("mine"));

        let off = config(&[("TMS_INIT_ENABLE", "0"), ("TMS_INIT_ENABLE_CPU_BACKUP", "no"), ("TMS_RETAIN_CPU_BACKUP", "false")]);
        assert_eq!((off.tag, off.thread_default_backup, off.retain.len(), off.complaints.len()), (None, None, 0, 0));
        let both = config(&[("TMS_INIT_ENABLE_CPU_BACKUP", "1"), ("TMS_INIT_ENABLE_DISK_BACKUP", "1")]);
        assert_eq!((both.thread_default_backup, both.complaints.len()), (Some(Policy::Disk), 1));
        let nonsense = config(&[("TMS_INIT_ENABLE", "maybe"), ("TMS_INIT_CPU_BACKUP_BACKEND", "tape")]);
        assert_eq!((nonsense.tag, nonsense.complaints.len()), (None, 2), "{:?}", nonsense.complaints);
    }

    #[test]
    fn a_name_that_commands_would_take_for_a_process_id_is_none() {
        let named = |text: &str| {
            let config = config(&[("VRAMCTL_NAME", text), ("VRAMCTL_JOB", "run-1")]);
            (config.name, config.job.unwrap(), config.complaints.len())
        };
        assert_eq!(named("engine"), (Some("engine".into()), "engine".into(), 0));
        for wrong in ["123", "a\nb"] {
            assert_eq!(named(wrong), (None, "run-1".into(), 1), "{wrong}");
        }
    }

    #[test]
    fn a_trace_has_a_limit() {
        let trace = |text: &str| {
            let config = config(&[("VRAMCTL_TRACE", text)]);
            (config.trace, config.complaints.len())
        };
        assert_eq!((trace(""), trace("0"), trace("zz")), ((0, 0), (0, 0), (0, 1)));
        assert_eq!((trace("1"), trace("16M"), trace("64K")), ((16 << 20, 0), (16 << 20, 0), (64 << 10, 0)));
        assert_eq!((trace("1G"), trace("63K"), trace("-1")), ((0, 1), (0, 1), (0, 1)));
    }

    #[test]
    fn policies_are_read_per_tag_and_nonsense_is_named() {
        let config = config(&[
            ("VRAMCTL_BACKUP", "kv_cache=discard, weights=host,,x=tape,kv_cache"),
            ("VRAMCTL_MIN_BYTES", "lots"),
            ("VRAMCTL_HOST_KEEP", "1h"),
        ]);
        assert_eq!(config.backup_of("kv_cache"), Some(Policy::Discard));
        assert_eq!(config.backup_of("weights"), Some(Policy::Host));
        assert_eq!(config.backup_of("x"), None);
        assert_eq!(config.min_bytes, 1 << 20);
        assert_eq!(config.host_keep, Duration::from_secs(60));
        assert_eq!(config.complaints.len(), 4, "{:?}", config.complaints);
    }
}
