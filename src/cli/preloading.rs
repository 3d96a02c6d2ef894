//! Whether the library can be preloaded, and whether a program's loader will do it. A loader that does not says so on stderr at most, and
//! starts the program without it.

use crate::installation::LIBRARY;
use std::env;
use std::ffi::{CStr, CString, OsStr, OsString};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_host::symbols;
use vramctl_host::system::user;

/// The version that a library reports, or why it cannot be preloaded.
pub fn version_of(path: &Path) -> Result<String, String> {
    const NEEDED: [&CStr; 5] = [c"vramctl_version", c"vramctl_pause", c"vramctl_resume", c"cudaMalloc", c"cudaFree"];
    // The loader does not notice a file that ends too early: its next access would end this process.
    match Elf::of(path).map_err(|error| error.to_string())? {
        None => return Err("it is not an ELF file".into()),
        Some(elf) if !elf.is_ours() => return Err(format!("it is for {}, not for this machine", elf.machine())),
        Some(elf) if elf.ends_at > elf.bytes => return Err(format!("it is damaged: {} of {} bytes are there", elf.bytes, elf.ends_at)),
        Some(_) => (),
    }
    let name = CString::new(path.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
    // SAFETY: a NUL-terminated name. The library does nothing when it is loaded, and is never unloaded.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        // SAFETY: after a failure it is a text, valid until the next call.
        return Err(unsafe { CStr::from_ptr(libc::dlerror()) }.to_string_lossy().into_owned());
    }
    // SAFETY: the library is open, and the names are NUL-terminated.
    let symbols = NEEDED.map(|name| unsafe { symbols::dlsym(library, name) });
    if let Some((name, _)) = NEEDED.iter().zip(symbols).find(|(_, symbol)| symbol.is_null()) {
        return Err(format!("it has no {}; it is not this project's library, or is damaged", name.to_string_lossy()));
    }
    // SAFETY: the function of this name takes nothing, and answers a string that lives as long as the library.
    let version = unsafe { CStr::from_ptr(std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> *const libc::c_char>(symbols[0])()) };
    Ok(version.to_string_lossy().into_owned())
}

/// Programs that have another process start the command: a daemon, or another machine's.
const STARTERS: [&str; 6] = ["docker", "docker-compose", "podman", "nerdctl", "kubectl", "ssh"];

/// Why a program is not managed.
#[derive(Debug, PartialEq, Eq)]
pub struct Unmanaged {
    /// The reason, and what that means for the programs that it starts.
    pub why: String,
    /// Whether it does not even start with the library: its loader does not ignore what it cannot load.
    pub is_ended_by_it: bool,
}

/// Whether the loader of a command's program will not preload the library, and why. Whatever is unknown is left to the loader.
pub fn unmanaged(program: &OsStr) -> Option<Unmanaged> {
    let mut program = on_path(program)?;
    if let Some(starter) = STARTERS.iter().find(|name| program.file_name() == Some(OsStr::new(name))) {
        let why = format!(
            "what {starter} starts is not managed: it runs elsewhere, without this environment. docs/deploy.md says how to set up containers"
        );
        return Some(Unmanaged { why, is_ended_by_it: false });
    }
    // The kernel follows as many.
    for _ in 0..5 {
        match interpreter_of_script(&program)? {
            Some(interpreter) => program = interpreter,
            None => return of_binary(&program),
        }
    }
    None
}

/// Whether a library is the address sanitizer's, which ends a program unless it comes first in it.
pub fn is_sanitizer(library: &OsStr) -> bool {
    let name = Path::new(library).file_name().unwrap_or_default().as_bytes();
    [&b"libasan.so"[..], b"libclang_rt.asan"].iter().any(|known| name.starts_with(known))
}

/// The address sanitizer's library, if a command's program is linked with it.
pub fn sanitizer(program: &OsStr) -> Option<OsString> {
    let program = on_path(program)?;
    let elf = Elf::of(&program).ok()??;
    elf.needed(&program).ok()?.into_iter().find(|name| is_sanitizer(name))
}

/// What a command's program needs to be executed, and is not there: the interpreter that a script's first line names, or a binary's loader.
pub fn missing_interpreter(program: &OsStr) -> Option<PathBuf> {
    let mut program = on_path(program)?;
    for _ in 0..5 {
        let next = match first_line(&program)? {
            Some(line) => words(&line).next().map(PathBuf::from)?,
            None => Elf::of(&program).ok()??.interpreter?,
        };
        if !next.exists() {
            return Some(next);
        }
        program = next;
    }
    None
}

/// The file that `exec` finds.
pub fn on_path(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Some(program.into());
    }
    let is_executable = |path: &PathBuf| fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0);
    let path = env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    env::split_paths(&path).map(|folder| folder.join(program)).find(is_executable)
}

/// What a script's first line names, also through `env`; `Some(None)` if the file is no script.
#[allow(clippy::option_option)] // An unreadable file is something else.
fn interpreter_of_script(path: &Path) -> Option<Option<PathBuf>> {
    let Some(line) = first_line(path)? else { return Some(None) };
    let mut words = words(&line);
    let interpreter = Path::new(words.next()?);
    if interpreter.file_name() != Some(OsStr::new("env")) {
        return Some(Some(interpreter.to_owned()));
    }
    let is_option = |word: &&OsStr| word.as_bytes().starts_with(b"-") || word.as_bytes().contains(&b'=');
    on_path(words.find(|word| !is_option(word))?).map(Some)
}

/// A script's first line, after `#!`; `Some(None)` if the file is no script.
#[allow(clippy::option_option)] // as above
fn first_line(path: &Path) -> Option<Option<Vec<u8>>> {
    let (file, mut start) = (File::open(path).ok()?, [0; 256]);
    let length = file.read_at(&mut start, 0).ok()?;
    let Some(line) = start[..length].strip_prefix(b"#!") else { return Some(None) };
    Some(Some(line.split(|byte| *byte == b'\n').next()?.to_owned()))
}

fn words(line: &[u8]) -> impl Iterator<Item = &OsStr> {
    line.split(|byte| matches!(byte, b' ' | b'\t')).filter(|word| !word.is_empty()).map(OsStr::from_bytes)
}

fn of_binary(path: &Path) -> Option<Unmanaged> {
    let unmanaged =
        |why: &str, is_ended_by_it| Some(Unmanaged { why: format!("{} is not managed: {why}", path.display()), is_ended_by_it });
    let elf = Elf::of(path).ok()??;
    if !elf.is_ours() {
        return unmanaged(&format!("it is for {}, and the library is not. Programs that it starts are managed", elf.machine()), false);
    }
    let loader = elf.interpreter.as_deref().and_then(Path::file_name).map(OsStr::as_bytes);
    match loader {
        // The loader itself can be run, with a program as its argument.
        None if path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"ld")) => None,
        None => unmanaged("it is statically linked, so nothing can be preloaded into it. Programs that it starts are managed", false),
        Some(loader) if loader.starts_with(b"ld-musl") => {
            unmanaged("it is linked with musl, whose loader cannot load the library. It is started without, and so is what it starts", true)
        }
        Some(_) => {
            let how = runs_as_another(path, &fs::metadata(path).ok()?)?;
            unmanaged(&format!("it {how}, so its loader preloads nothing, and what it starts is not managed, either"), false)
        }
    }
}

/// How the program gets more rights than this user has: then the loader ignores `LD_PRELOAD`.
fn runs_as_another(path: &Path, file: &Metadata) -> Option<&'static str> {
    // SAFETY: no arguments.
    let group = unsafe { libc::getgid() };
    let mode = file.permissions().mode();
    if mode & libc::S_ISUID != 0 && file.uid() != user() {
        Some("is set-uid")
    } else if mode & libc::S_ISGID != 0 && file.gid() != group {
        Some("is set-gid")
    } else {
        // They give root nothing.
        (user() != 0 && has_capabilities(path)).then_some("has file capabilities")
    }
}

fn has_capabilities(path: &Path) -> bool {
    let Ok(name) = CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: NUL-terminated names; without room, only the length is asked for.
    unsafe { libc::getxattr(name.as_ptr(), c"security.capability".as_ptr(), std::ptr::null_mut(), 0) > 0 }
}

/// The library first, then the other preloaded libraries, without other copies of this one. The address sanitizer's comes before all: the one
/// that is preloaded already, or else the one that the program is linked with.
pub fn preload(library: &Path, sanitizer: Option<&OsStr>, present: Option<&OsStr>) -> Result<OsString, CommandError> {
    if library.as_os_str().as_bytes().iter().any(|byte| is_separator(*byte)) {
        let why = "a path in LD_PRELOAD cannot contain a space or colon";
        let way_out = "move the library, or set VRAMCTL_LIB to a symbolic link to it";
        return Err(CommandError::new(Exit::Failed, format!("{}: {why}; {way_out}", library.display())));
    }
    let others = others(library, present).unwrap_or_default();
    let others = others.as_bytes().split(|byte| is_separator(*byte)).filter(|path| !path.is_empty()).map(OsStr::from_bytes);
    let (mut first, rest): (Vec<_>, Vec<_>) = others.partition(|path| is_sanitizer(path));
    if first.is_empty() {
        first.extend(sanitizer);
    }
    let list: Vec<_> = first.into_iter().chain([library.as_os_str()]).chain(rest).collect();
    Ok(list.join(OsStr::new(":")))
}

/// The other preloaded libraries, if any.
pub fn others(library: &Path, present: Option<&OsStr>) -> Option<OsString> {
    let ours = |path: &[u8]| {
        let path = Path::new(OsStr::from_bytes(path));
        // `dropin` has copies of it under the names that torch_memory_saver uses.
        path == library
            || path.file_name() == Some(OsStr::new(LIBRARY))
            || path.parent().is_some_and(|folder| folder.ends_with("vramctl/dropin"))
    };
    let all = present.unwrap_or_default().as_bytes().split(|byte| is_separator(*byte));
    let others: Vec<_> = all.filter(|path| !path.is_empty() && !ours(path)).collect();
    if others.is_empty() { None } else { Some(OsString::from_vec(others.join(&b':'))) }
}

/// The loader's separators. They cannot be quoted.
fn is_separator(byte: u8) -> bool {
    matches!(byte, b' ' | b':')
}

/// A number as it is in the file.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// What the loader reads first.
#[derive(Debug)]
struct Elf {
    /// `e_ident[EI_CLASS]`: 1 for 32 bits, 2 for 64.
    class: u8,
    machine: u16,
    /// `PT_INTERP`.
    interpreter: Option<PathBuf>,
    /// `PT_DYNAMIC`: where it is in the file, and its length.
    dynamic: Option<(u64, u64)>,
    /// `PT_LOAD`: address, where it is in the file, and its length there.
    segments: Vec<(u64, u64, u64)>,
    /// Where the last segment to be loaded ends in the file, and the file's length.
    ends_at: u64,
    bytes: u64,
}

impl Elf {
    /// `None`: the file is none.
    fn of(path: &Path) -> io::Result<Option<Self>> {
        const LOAD: u32 = 1;
        const DYNAMIC: u32 = 2;
        const INTERPRETER: u32 = 3;
        let file = File::open(path)?;
        let mut header = [0; 64];
        let read = file.read_at(&mut header, 0)?;
        if read < 20 || !header.starts_with(b"\x7fELF") {
            return Ok(None);
        }
        let bytes = file.metadata()?.len();
        let mut elf = Self {
            class: header[4],
            machine: number(&header[18..20]) as u16,
            interpreter: None,
            dynamic: None,
            segments: Vec::new(),
            ends_at: 64,
            bytes,
        };
        if !elf.is_ours() || read < header.len() {
            return Ok(Some(elf));
        }
        let (table, size, count) = (number(&header[32..40]), number(&header[54..56]), number(&header[56..58]));
        elf.ends_at = elf.ends_at.max(table.saturating_add(size * count));
        for index in 0..count {
            let mut entry = [0; 56];
            if file.read_at(&mut entry, table.saturating_add(index * size))? < entry.len() {
                break;
            }
            let (kind, offset, length) = (number(&entry[..4]) as u32, number(&entry[8..16]), number(&entry[32..40]));
            if kind == LOAD {
                elf.ends_at = elf.ends_at.max(offset.saturating_add(length));
                elf.segments.push((number(&entry[16..24]), offset, length));
            } else if kind == DYNAMIC {
                elf.dynamic = Some((offset, length));
            } else if kind == INTERPRETER {
                let mut name = vec![0; length.min(4096) as usize];
                let there = file.read_at(&mut name, offset)?;
                name.truncate(name[..there].iter().position(|byte| *byte == 0).unwrap_or(there));
                elf.interpreter = Some(OsString::from_vec(name).into());
            }
        }
        Ok(Some(elf))
    }

    /// The names of the libraries that it is linked with. `path`: the file.
    fn needed(&self, path: &Path) -> io::Result<Vec<OsString>> {
        const NEEDED: u64 = 1;
        const NAMES: u64 = 5;
        const NAMES_BYTES: u64 = 10;
        let file = File::open(path)?;
        // What is longer is damaged.
        let part = |offset, length: u64| {
            let mut part = vec![0; length.min(1 << 20) as usize];
            file.read_exact_at(&mut part, offset).map(|()| part)
        };
        let Some((offset, length)) = self.dynamic else { return Ok(Vec::new()) };
        let section = part(offset, length)?;
        let entries: Vec<_> = section.chunks_exact(16).map(|entry| (number(&entry[..8]), number(&entry[8..]))).collect();
        let value = |wanted| entries.iter().find(|(tag, _)| *tag == wanted).map_or(0, |(_, value)| *value);
        let address = value(NAMES);
        let Some((start, at, _)) = self.segments.iter().find(|(start, _, length)| address.wrapping_sub(*start) < *length) else {
            return Ok(Vec::new());
        };
        let names = part(at + (address - start), value(NAMES_BYTES))?;
        let name = |at: u64| names.get(at as usize..)?.split(|byte| *byte == 0).next().map(|name| OsStr::from_bytes(name).to_owned());
        Ok(entries.iter().filter(|(tag, _)| *tag == NEEDED).filter_map(|(_, at)| name(*at)).collect())
    }

    /// Whether it is for the kind of machine that this command is for.
    fn is_ours(&self) -> bool {
        const MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
        (self.class, self.machine) == (2, MACHINE)
    }

    fn machine(&self) -> String {
        match (self.class, self.machine) {
            (1, _) => "32-bit machines".into(),
            (_, 62) => "x86-64".into(),
            (_, 183) => "aarch64".into(),
            (_, other) => format!("another machine (ELF machine {other})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_runs_in_a_container_is_not_managed() {
        let folder = tempfile::tempdir().unwrap();
        let docker = folder.path().join("docker");
        fs::write(&docker, "#!/bin/sh\n").unwrap();
        let found = unmanaged(docker.as_os_str()).unwrap();
        assert!(found.why.starts_with("what docker starts is not managed") && found.why.contains("docs/deploy.md"), "{found:?}");
    }

    #[test]
    fn other_preloaded_libraries_stay_and_ours_is_there_once() {
        let with = |sanitizer: Option<&str>, present: &str| {
            let list = preload(Path::new("/l/libvramctl.so"), sanitizer.map(OsStr::new), Some(OsStr::new(present)));
            list.unwrap().into_string().unwrap()
        };
        let list = |present: &str| with(None, present);
        assert_eq!(list("/a.so /b.so"), "/l/libvramctl.so:/a.so:/b.so");
        assert_eq!(list("/a.so:/l/libvramctl.so"), "/l/libvramctl.so:/a.so");
        assert_eq!(list("/old/libvramctl.so::/a.so"), "/l/libvramctl.so:/a.so");
        assert_eq!(list("/p/vramctl/dropin/torch_memory_saver_hook_mode_preload.abi3.so"), "/l/libvramctl.so", "a copy of ours");
        assert_eq!(with(Some("libasan.so.8"), "/a.so"), "libasan.so.8:/l/libvramctl.so:/a.so", "what must come first");
        assert_eq!(with(Some("libasan.so.8"), "/a.so:/g/libasan.so"), "/g/libasan.so:/l/libvramctl.so:/a.so", "and once");
        for wrong in ["/with space/libvramctl.so", "/with:colon/libvramctl.so"] {
            assert!(preload(Path::new(wrong), None, None).is_err());
        }
    }
}
