//! What a program has been running in and goes on with, beside its own memory: files, packages and the processor. CRIU looks at files that are open, and
//! at those by their size alone.

use crate::content;
use crate::details::Lock;
use crate::tree::named;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use vramctl_store::{Cpu, FilePolicy, OpenFile, Versions};

/// The processor, as `/proc/cpuinfo` has it.
pub fn processor() -> Cpu {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let of = |names: [&str; 2]| {
        let mut fields = text.lines().filter_map(|line| line.split_once(':'));
        fields.find(|(name, _)| names.contains(&name.trim())).map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
    };
    let mut features: Vec<_> = of(["flags", "Features"]).split_whitespace().map(str::to_owned).collect();
    features.sort();
    Cpu { architecture: std::env::consts::ARCH.into(), model: of(["model name", "CPU part"]), features }
}

/// How the names of what programs use begin, on x86. The rest of the list is the kernel's business, and differs between kernels.
const USED: [&str; 34] = [
    "3dnow",
    "abm",
    "adx",
    "aes",
    "amx",
    "avx",
    "bmi",
    "cl",
    "cx16",
    "enqcmd",
    "erms",
    "f16c",
    "fma",
    "fsgsbase",
    "fsrm",
    "gfni",
    "lahf_lm",
    "mmx",
    "mov",
    "pclmulqdq",
    "pku",
    "popcnt",
    "rdpid",
    "rdrand",
    "rdseed",
    "rdtscp",
    "rtm",
    "serialize",
    "sha",
    "sse",
    "ssse3",
    "vaes",
    "vpclmulqdq",
    "xsave",
];

fn is_used(feature: &str) -> bool {
    cfg!(not(target_arch = "x86_64")) || USED.iter().any(|beginning| feature.starts_with(beginning))
}

/// Why a program that ran there cannot go on here: its libraries have chosen their code by what that processor had.
pub fn lacks_of(saved: &Cpu, here: &Cpu) -> Option<String> {
    if saved.architecture != here.architecture {
        return Some(format!("it was saved on a processor of another kind: {}, and this is {}", saved.architecture, here.architecture));
    }
    let own: BTreeSet<_> = here.features.iter().collect();
    let missing: Vec<_> = saved.features.iter().filter(|feature| is_used(feature) && !own.contains(feature)).map(String::as_str).collect();
    let model = &saved.model;
    (!missing.is_empty()).then(|| format!("it was saved on a processor ({model}) that has what this one has not: {}", missing.join(", ")))
}

/// The kernel and NVIDIA's driver, where there is one.
pub fn versions() -> Versions {
    let of = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    Versions { kernel: of("/proc/sys/kernel/osrelease"), driver: of("/sys/module/nvidia/version"), ..Versions::default() }
}

fn differ(one: &str, other: &str) -> bool {
    !one.is_empty() && !other.is_empty() && one != other
}

/// Where the kernel is another one than that of the save, for people. Its fixes change nothing for an image.
pub fn other_kernel(saved: &Versions, here: &Versions) -> Option<String> {
    let main_part = |kernel: &str| kernel.split('.').take(2).map(str::to_owned).collect::<Vec<_>>();
    let is_other = differ(&saved.kernel, &here.kernel) && main_part(&saved.kernel) != main_part(&here.kernel);
    is_other.then(|| format!("the image was made on kernel {}, and here is {}", saved.kernel, here.kernel))
}

/// Where the driver is another one. Each with the newest CUDA version that it supports, which is known where its own version is not.
pub fn other_driver((saved, saved_cuda): (&Versions, &str), (here, cuda): (&Versions, &str)) -> Option<String> {
    let other = |what: &str, one: &str, other: &str| format!("the image was made with {what} {one}, and here is {other}");
    if differ(&saved.driver, &here.driver) {
        return Some(other("driver", &saved.driver, &here.driver));
    }
    differ(saved_cuda, cuda).then(|| other("a driver for CUDA", saved_cuda, &format!("one for {cuda}")))
}

/// The files that a process has `opened` or mapped and that outlive it, and what says which Python packages there are beside those.
pub fn files(pid: u32, opened: impl Iterator<Item = (PathBuf, fs::Metadata, FilePolicy)>) -> io::Result<Vec<OpenFile>> {
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    let opened = opened.filter(|(_, metadata, _)| metadata.is_file() && metadata.nlink() > 0);
    let mut found: BTreeMap<_, _> = opened.map(|(path, metadata, policy)| (path, (policy, metadata))).collect();
    let mapped = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    // A library is in several lines, and many are beside the same packages.
    let mut seen = BTreeSet::new();
    for line in mapped.lines() {
        let Some(path) = line.find('/').map(|at| Path::new(&line[at..])).filter(|path| seen.insert(*path)) else { continue };
        let policy = if is_written(line) { FilePolicy::Refuse } else { FilePolicy::Read };
        let packages = path.ancestors().skip(1).find(|folder| folder.ends_with("site-packages") || folder.ends_with("dist-packages"));
        let packages = packages.filter(|folder| seen.insert(*folder));
        let records = packages.into_iter().flat_map(|folder| records_in(&root, folder));
        for (path, policy) in records.map(|path| (path, FilePolicy::Read)).chain([(path.to_owned(), policy)]) {
            if let Ok(metadata) = fs::symlink_metadata(root.join(path.strip_prefix("/").unwrap_or(&path)))
                && metadata.is_file()
            {
                found.entry(path).or_insert((policy, metadata));
            }
        }
    }
    // These come with the image, or are each process's own.
    let is_elsewhere = |path: &Path| ["/dev", "/proc", "/sys"].iter().any(|folder| path.starts_with(folder));
    let listed = found.into_iter().filter(|(path, _)| !is_elsewhere(path)).map(|(path, (policy, metadata))| OpenFile {
        path: path.to_string_lossy().into_owned(),
        bytes: metadata.len(),
        modified: modified(&metadata),
        content: None,
        policy,
    });
    Ok(listed.collect())
}

/// The files that a process has mapped, shared with whoever has them, to write.
pub fn mapped_to_write(pid: u32) -> io::Result<Vec<PathBuf>> {
    let mapped = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let written = mapped.lines().filter(|line| is_written(line));
    Ok(written.filter_map(|line| line.find('/').map(|at| PathBuf::from(&line[at..]))).collect())
}

/// Whether a line of `/proc/PID/maps` is of such a file.
fn is_written(line: &str) -> bool {
    line.split_whitespace().nth(1).is_some_and(|rights| rights.starts_with("rw") && rights.ends_with('s'))
}

/// The files that an installer writes anew with each package.
fn records_in(root: &Path, folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(root.join(folder.strip_prefix("/").unwrap_or(folder))).into_iter().flatten().flatten();
    let packages = entries.filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| name.ends_with(".dist-info"));
    packages.map(|name| folder.join(name).join("RECORD")).collect()
}

fn modified(metadata: &fs::Metadata) -> i64 {
    metadata.mtime() * 1_000_000_000 + metadata.mtime_nsec()
}

/// Those of these folders that are not here.
pub fn missing(folders: &[PathBuf]) -> Vec<String> {
    // These are each process's own.
    let is_elsewhere = |path: &Path| ["/dev", "/proc", "/sys"].iter().any(|folder| path.starts_with(folder));
    let missing = folders.iter().filter(|folder| !is_elsewhere(folder) && !folder.is_dir());
    missing.map(|folder| folder.display().to_string()).collect()
}

/// What has changed of these files since.
pub fn changes(files: &[OpenFile]) -> Vec<String> {
    let change = |file: &OpenFile| {
        let path = &file.path;
        let metadata = match fs::symlink_metadata(path) {
            Ok(metadata) => metadata,
            Err(error) if file.policy == FilePolicy::Copy && error.kind() == io::ErrorKind::NotFound => {
                return Some(format!("{path} ({error}; the program gets its own copy, in place of an empty file of this name, too)"));
            }
            Err(error) => return Some(format!("{path} ({error})")),
        };
        let is_as_long = metadata.len() == file.bytes;
        // It may have been installed at another time, and some set one time for all versions. Opening a pipe would wait.
        let is_same = metadata.is_file()
            && match (file.policy, &file.content) {
                (FilePolicy::Append | FilePolicy::Copy, _) => true,
                (FilePolicy::Read, Some(content)) => is_as_long && content::of(Path::new(path)).as_ref() == Some(content),
                (FilePolicy::Read, None) => is_as_long && modified(&metadata) == file.modified,
                (FilePolicy::Refuse, _) => is_as_long,
            };
        let what = if !metadata.is_file() {
            "no plain file now".to_owned()
        } else if is_as_long {
            "written to since".to_owned()
        } else {
            format!("{} bytes instead of {}", metadata.len(), file.bytes)
        };
        (!is_same).then(|| format!("{path} ({what})"))
    };
    files.iter().filter_map(change).collect()
}

/// Why a program with this process id cannot have it here.
pub fn no_such_id(most: u32) -> Option<String> {
    let text = fs::read_to_string("/proc/sys/kernel/pid_max").unwrap_or_default();
    beyond(most, text.trim().parse().ok()?)
}

fn beyond(most: u32, end: u32) -> Option<String> {
    (most >= end).then(|| format!("it has a process {most}, and ids end at {end} here (sysctl kernel.pid_max); set that higher"))
}

/// Which of these locks somebody else has, so that the program would wait for it.
pub fn taken(locks: &[Lock]) -> Vec<String> {
    let is_taken = |lock: &&Lock| fs::File::open(&lock.path).is_ok_and(|file| conflicts(&file, lock));
    locks.iter().filter(is_taken).map(|lock| format!("{} ({})", lock.path.display(), holder(&lock.path))).collect()
}

fn conflicts(file: &fs::File, lock: &Lock) -> bool {
    let number = file.as_raw_fd();
    if lock.is_of_file {
        let wanted = if lock.is_exclusive { libc::LOCK_EX } else { libc::LOCK_SH };
        // SAFETY: touches no memory. The lock goes with the file.
        return unsafe { libc::flock(number, wanted | libc::LOCK_NB) } != 0
            && io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock;
    }
    let kind = if lock.is_exclusive { libc::F_WRLCK } else { libc::F_RDLCK };
    let (start, bytes) = (lock.start, lock.bytes);
    let mut wanted =
        libc::flock { l_type: kind as libc::c_short, l_whence: libc::SEEK_SET as libc::c_short, l_start: start, l_len: bytes, l_pid: 0 };
    // SAFETY: an open file, and a writable structure.
    let asked = unsafe { libc::fcntl(number, libc::F_OFD_GETLK, &raw mut wanted) };
    asked == 0 && libc::c_int::from(wanted.l_type) != libc::F_UNLCK
}

/// Who has a lock on this file.
fn holder(path: &Path) -> String {
    let inode = fs::metadata(path).map(|found| format!(":{}", found.ino())).unwrap_or_default();
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    let of_it = locks
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .find(|words| words.get(5).is_some_and(|file| file.ends_with(&inode)));
    let pid = of_it.and_then(|words| words.get(4)?.parse::<u32>().ok()).filter(|pid| *pid > 0);
    pid.map_or_else(|| "by another process".into(), |pid| format!("by {}", named(pid)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::io::Write;
    use std::time::{Duration, SystemTime, UNIX_EPOCH};

    #[test]
    fn a_processor_without_a_feature_is_refused_and_one_with_more_is_not() {
        let cpu = |architecture: &str, features: &[&str]| Cpu {
            architecture: architecture.into(),
            features: features.iter().map(|name| (*name).to_owned()).collect(),
            ..Cpu::default()
        };
        let saved = cpu("x86_64", &["avx2", "avx512f"]);
        assert_eq!(lacks_of(&saved, &cpu("x86_64", &["avx2", "avx512f", "amx_bf16"])), None);
        assert!(lacks_of(&saved, &cpu("x86_64", &["avx2"])).unwrap().contains("has not: avx512f"));
        let of_kernel = cpu("x86_64", &["avx2", "ibrs_enhanced"]);
        assert_eq!(lacks_of(&of_kernel, &cpu("x86_64", &["avx2"])).is_none(), cfg!(target_arch = "x86_64"));
        assert!(lacks_of(&saved, &cpu("aarch64", &["avx2", "avx512f"])).unwrap().contains("another kind"));
        let own = processor();
        assert!(!own.features.is_empty() && lacks_of(&own, &own).is_none());
    }

    #[test]
    fn ids_that_there_are_not_are_named() {
        assert!(beyond(32768, 32768).unwrap().contains("32768") && beyond(32767, 32768).is_none());
        assert!(no_such_id(std::process::id()).is_none() && no_such_id(u32::MAX).is_some());
    }

    #[test]
    fn another_kernel_and_another_driver_are_named() {
        let versions = |kernel: &str, driver: &str| Versions { kernel: kernel.into(), driver: driver.into(), ..Versions::default() };
        let saved = versions("6.18.3-generic", "580.159.04");
        let is_other = |kernel: &str| other_kernel(&saved, &versions(kernel, "")).is_some();
        assert_eq!(["6.18.9", "6.1.9", "7.18.3", ""].map(is_other), [false, true, true, false]);
        let named = |driver: &str, cuda: &str| other_driver((&saved, "13.0"), (&versions("", driver), cuda)).unwrap_or_default();
        assert!(named("610.57", "13.2").contains("driver 580.159.04, and here is 610.57"));
        assert!(named("", "13.2").contains("for CUDA 13.0, and here is one for 13.2"));
        assert_eq!([named("580.159.04", "13.0"), named("", "")], ["", ""]);
        assert!(other_kernel(&super::versions(), &super::versions()).is_none() && !super::versions().kernel.is_empty());
    }

    #[test]
    fn a_changed_file_is_named_and_one_that_is_appended_to_may_grow() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "before").unwrap();
        let listed = |policy| {
            let metadata = fs::symlink_metadata(&path).unwrap();
            let path = path.to_str().unwrap().into();
            [OpenFile { path, bytes: metadata.len(), modified: modified(&metadata), content: None, policy }]
        };
        let [read, append, copy, write] = [FilePolicy::Read, FilePolicy::Append, FilePolicy::Copy, FilePolicy::Refuse].map(listed);
        let known = [OpenFile { content: content::of(&path), ..read[0].clone() }];
        assert!([&read, &append, &copy, &write, &known].iter().all(|files| changes(*files).is_empty()));
        // On another machine, it was installed at another time.
        let touched = fs::File::options().write(true).open(&path).unwrap();
        touched.set_modified(SystemTime::now() - Duration::from_secs(100)).unwrap();
        assert_eq!([&read, &known].map(|files| changes(files).len()), [1, 0]);
        // As large as before, as CRIU would not notice.
        let mut file = fs::File::options().write(true).open(&path).unwrap();
        file.write_all(b"after!").unwrap();
        file.set_modified(SystemTime::now() + Duration::from_secs(1)).unwrap();
        assert_eq!([&read, &append, &write, &known].map(|files| changes(files).len()), [1, 0, 0, 1]);
        // Nor does its time tell everywhere: reproducible builds have one for all.
        file.set_modified(UNIX_EPOCH + Duration::from_nanos(known[0].modified.cast_unsigned())).unwrap();
        assert_eq!([&read, &known].map(|files| changes(files).len()), [0, 1]);
        file.set_len(100).unwrap();
        assert_eq!([&read, &append, &copy, &write].map(|files| changes(files).len()), [1, 0, 0, 1]);
        fs::remove_file(&path).unwrap();
        assert_eq!([&read, &append, &copy, &write].map(|files| changes(files).len()), [1, 1, 1, 1]);
        assert!(changes(&copy)[0].contains("an empty file"));
        // Nothing is bound over what such a name leads to.
        std::os::unix::fs::symlink("/dev/null", &path).unwrap();
        assert_eq!([&append, &copy].map(|files| changes(files).len()), [1, 1]);
        fs::remove_file(&path).unwrap();
        // Nobody is waited for where it has become a pipe.
        let empty = [OpenFile { bytes: 0, content: Some("blake3".into()), ..read[0].clone() }];
        let name = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: a string, for the time of the call.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        assert_eq!(changes(&empty).len(), 1);
    }
}
