//! The name of a process by its program.

use crate::system::{folder_of, own_folder};
use std::fs;
use std::path::{Path, PathBuf};

/// How many generations of children may have no name but their parent's.
const GENERATIONS: usize = 8;

/// The name of a process's program, or of the script or module that a Python runs; `None` if the process has ended. A process of
/// `multiprocessing` has its parent's.
pub fn program_of(pid: u32) -> Option<String> {
    program_in(PathBuf::from(format!("/proc/{pid}")), folder_of(pid))
}

/// That of this process.
pub fn own_program() -> Option<String> {
    program_in("/proc/self".into(), own_folder().into())
}

/// The name that a program will have which these words start; `None` if it is nothing that a file or a process could be called.
pub fn program_of_words(words: &[&str]) -> Option<String> {
    let program = Path::new(words.first()?).file_name()?.to_str()?;
    let of_python = is_python(program).then(|| script_or_module(words)).flatten();
    Some(of_python.unwrap_or_else(|| program.to_owned())).filter(|name| is_name(name))
}

/// `process`: its folder in `/proc`. `living`: that of a thread which lives.
fn program_in(process: PathBuf, living: PathBuf) -> Option<String> {
    let own = name_in(&process)?;
    if !is_python(&own) {
        return Some(own);
    }
    let (mut process, mut living) = (process, living);
    for _ in 0..GENERATIONS {
        let command = fs::read(living.join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command);
        let words: Vec<_> = command.split_terminator('\0').collect();
        if !words.contains(&"--multiprocessing-fork") {
            return Some(script_or_module(&words).filter(|name| is_name(name)).unwrap_or(own));
        }
        let Some(parent) = parent_in(&process) else { break };
        (process, living) = (PathBuf::from(format!("/proc/{parent}")), folder_of(parent));
        if !name_in(&process).is_some_and(|name| is_python(&name)) {
            break;
        }
    }
    Some(own)
}

/// What the kernel calls it: the main thread's name.
fn name_in(process: &Path) -> Option<String> {
    let name = fs::read(process.join("comm")).ok()?;
    Some(String::from_utf8_lossy(&name).trim().to_owned())
}

fn parent_in(process: &Path) -> Option<u32> {
    let status = fs::read_to_string(process.join("status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}

/// `python`, `python3.12`, `pypy3`, and so on.
fn is_python(program: &str) -> bool {
    let version = ["python", "pypy"].iter().find_map(|name| program.strip_prefix(name));
    version.is_some_and(|version| version.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.' || byte == b't'))
}

/// Whether commands can take it for a name.
fn is_name(name: &str) -> bool {
    !name.is_empty() && name.parse::<u32>().is_err() && !name.contains(char::is_control)
}

/// What a command line of Python runs: `serve` of `python -u serve.py --port 1`, `api_server` of `python -m vllm.entrypoints.api_server`.
/// `None` without either, as of `python -c`.
fn script_or_module(words: &[&str]) -> Option<String> {
    let mut words = words.iter().skip(1).copied();
    while let Some(word) = words.next() {
        let Some(option) = word.strip_prefix('-').filter(|option| !option.is_empty()) else {
            let is_script = word != "-";
            return is_script.then(|| of_script(Path::new(word))).flatten();
        };
        if option == "-check-hash-based-pycs" {
            words.next();
        } else if !option.starts_with('-') {
            // Flags may stand together, and the last may have its value with it: `-um serve`, `-Xutf8`.
            match option.char_indices().find(|(_, flag)| "cmWXQ".contains(*flag)) {
                Some((_, 'c')) => return None,
                Some((at, 'm')) => return of_module(Some(&option[at + 1..]).filter(|glued| !glued.is_empty()).or_else(|| words.next())?),
                Some((at, _)) if at + 1 == option.len() => _ = words.next(),
                _ => (),
            }
        }
    }
    None
}

fn of_script(script: &Path) -> Option<String> {
    let name = script.file_stem()?.to_str()?;
    if name == "__main__" { of_script(script.parent()?) } else { Some(name.to_owned()) }
}

/// The last part that is not the same in every package.
fn of_module(module: &str) -> Option<String> {
    const USUAL: [&str; 7] = ["__main__", "main", "cli", "run", "launch", "app", "entrypoints"];
    let part = module.split('.').rev().find(|part| !USUAL.contains(part)).or_else(|| module.split('.').next())?;
    Some(part.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_python_program_has_the_name_of_its_script_or_module() {
        for (line, name) in [
            ("python serve.py", Some("serve")),
            ("/usr/bin/python3 -u -X faulthandler /srv/train.py --epochs 3", Some("train")),
            ("python3 -Wignore -OO pkg/__main__.py", Some("pkg")),
            ("python3 -um vllm.entrypoints.openai.api_server --port 1", Some("api_server")),
            ("python -msglang.launch_server", Some("launch_server")),
            ("python -m vllm.entrypoints.cli.main serve", Some("vllm")),
            ("python -m torch.distributed.run train.py", Some("distributed")),
            ("python -m main", Some("main")),
            ("python3 --check-hash-based-pycs never a.py", Some("a")),
            ("python3 -c print() a.py", None),
            ("python3 -", None),
            ("python3", None),
        ] {
            let words: Vec<_> = line.split(' ').collect();
            assert_eq!(script_or_module(&words).as_deref(), name, "{line}");
        }
        for (line, name) in [
            ("/opt/engine --port 1", Some("engine")),
            ("python3 -u /srv/serve.py", Some("serve")),
            ("python -c x", Some("python")),
            ("7", None),
        ] {
            let words: Vec<_> = line.split(' ').collect();
            assert_eq!(program_of_words(&words).as_deref(), name, "{line}");
        }
        for (program, is) in [("python", true), ("python3.13t", true), ("pypy3", true), ("python3-config", false), ("serve", false)] {
            assert_eq!(is_python(program), is, "{program}");
        }
        assert!(!is_name("7") && !is_name("") && is_name("7b"));
    }
}
