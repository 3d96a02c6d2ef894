//! What the kernel says of other processes, in `/proc`.

use std::ffi::OsString;
use std::fmt::Display;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fs, io};
use vramctl_config::socket_directory_of;
use vramctl_host::system::{folder_of, user};

/// Whether there is such a process.
pub fn exists(pid: impl Display) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// All processes, in the order of their ids.
pub fn pids() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut pids: Vec<_> = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    pids
}

/// Its command line. Empty if that cannot be read.
pub fn command_line(pid: u32) -> String {
    let words = fs::read(folder_of(pid).join("cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&words).trim_end_matches('\0').replace('\0', " ")
}

/// Whose it is; `None` if it has ended.
pub fn owner(pid: u32) -> Option<u32> {
    fs::metadata(format!("/proc/{pid}")).ok().map(|folder| folder.uid())
}

/// Where it listens, or will, by its variables and its user.
pub fn socket_directory(pid: u32) -> PathBuf {
    const VARIABLES: [&str; 2] = ["VRAMCTL_DIR", "XDG_RUNTIME_DIR"];
    let values = variables(pid, VARIABLES);
    let value = |name: &str| VARIABLES.iter().position(|known| *known == name).and_then(|at| values[at].clone());
    socket_directory_of(owner(pid).unwrap_or_else(user), |name| value(name).map(OsString::from))
}

/// Whether this user may look into it.
pub fn is_visible(pid: u32) -> bool {
    fs::read(folder_of(pid).join("environ")).is_ok()
}

/// Whether it has the library loaded, under whatever name of the drop-in for `torch_memory_saver`, too.
pub fn has_library(pid: u32) -> bool {
    let maps = fs::read(folder_of(pid).join("maps")).unwrap_or_default();
    let names = ["libvramctl", "torch_memory_saver"];
    maps.split(|byte| *byte == b'\n')
        .any(|line| String::from_utf8_lossy(line).rsplit('/').next().is_some_and(|file| names.iter().any(|name| file.starts_with(name))))
}

/// A file that it has open whose path begins like one of these; the outer `None` if that cannot be seen.
#[allow(clippy::option_option)] // three answers
pub fn opened(pid: u32, beginnings: &[&str]) -> Option<Option<String>> {
    let files = fs::read_dir(folder_of(pid).join("fd")).ok()?;
    let path = |file: io::Result<fs::DirEntry>| Some(fs::read_link(file.ok()?.path()).ok()?.to_string_lossy().into_owned());
    Some(files.filter_map(path).find(|path| beginnings.iter().any(|beginning| path.starts_with(beginning))))
}

/// Whether it is stopped, as by ^Z or a debugger.
pub fn is_stopped(pid: impl Display) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The program's name comes before, and may have anything in it.
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    matches!(state, Some('T' | 't'))
}

/// Whether it has ended, perhaps without its parent's notice.
pub fn has_ended(pid: impl Display) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    matches!(state, None | Some('Z' | 'X'))
}

/// Whether it has a file of this name open, as far as can be seen.
pub fn has_open(pid: impl Display, name: &str) -> bool {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten();
    let mut paths = files.filter_map(|file| fs::read_link(file.ok()?.path()).ok());
    paths.any(|path| path.file_name().is_some_and(|its| its == name))
}

/// These figures of its status, in bytes.
pub fn bytes<const N: usize>(pid: u32, names: [&str; N]) -> [Option<u64>; N] {
    let status = fs::read_to_string(folder_of(pid).join("status")).unwrap_or_default();
    let figure = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    names.map(|name| Some(figure(name)?.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10))
}

/// These variables of its environment, unless they are empty. Some programs overwrite theirs.
pub fn variables<const N: usize>(pid: u32, names: [&str; N]) -> [Option<String>; N] {
    let environment = fs::read(folder_of(pid).join("environ")).unwrap_or_default();
    let value =
        |name: &str| environment.split(|byte| *byte == 0).find_map(|variable| variable.strip_prefix(name.as_bytes())?.strip_prefix(b"="));
    names.map(|name| Some(String::from_utf8_lossy(value(name).filter(|value| !value.is_empty())?).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_has_open_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("uverbs0");
        let open = || opened(std::process::id(), &["/nowhere/", path.to_str().unwrap()]);
        assert_eq!(open(), Some(None));
        let file = fs::File::create(&path).unwrap();
        assert_eq!(open(), Some(Some(path.to_string_lossy().into_owned())));
        drop(file);
        assert_eq!(opened(u32::MAX, &["/"]), None);
    }
}
