//! `vramctl run` with what cannot be preloaded, or not into this program: it refuses, or says in one line that the program is not managed.

use crate::common;
use crate::common::machine::{Machine, Ran};
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A program that says whether the library is in it, built with these options.
fn compile(folder: &Path, name: &str, compiler: &str, options: &[&str]) -> PathBuf {
    let (source, program) = (folder.join("says.c"), folder.join(name));
    let text = r#"
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int main(void) {
    char line[4096];
    int found = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps)) found |= strstr(line, "libvramctl") != NULL;
    fclose(maps);
    return puts(found ? "managed" : "alone") < 0;
}"#;
    fs::write(&source, text).unwrap();
    let done = Command::new(compiler).args(["-o", program.to_str().unwrap(), source.to_str().unwrap()]).args(options).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    program
}

struct Runs {
    machine: Machine,
}

impl Runs {
    fn new() -> Self {
        Self { machine: Machine::new() }
    }

    fn folder(&self) -> &Path {
        self.machine.folder.path()
    }

    fn run(&self, command: &[&str]) -> Ran {
        self.run_with(command, |_| ())
    }

    fn run_with(&self, command: &[&str], change: impl FnOnce(&mut Command)) -> Ran {
        let mut run = self.machine.cli(&[&["run", "--no-python", "--"], command].concat());
        change(&mut run);
        Ran::of(&mut run)
    }

    /// The program runs without the library, and one line says why.
    #[track_caller]
    fn is_not_managed(&self, command: &[&str], why: &str) {
        let ran = self.run(command).expect(0, "alone", why);
        assert!(ran.err.starts_with("warning: ") && ran.err.contains("not") && ran.err.lines().count() == 1, "{}", ran.err);
    }
}

#[test]
fn a_library_that_cannot_be_preloaded_is_refused() {
    let runs = Runs::new();
    let good = common::library();
    let bytes = fs::read(&good).unwrap();
    let mut foreign = bytes[..4096].to_vec();
    foreign[18] = 21; // PowerPC
    let mut narrow = bytes[..4096].to_vec();
    narrow[4] = 1;
    let shorter = &bytes[..64 << 10];
    for (name, contents, why) in [
        ("text.so", &b"x\n"[..], "it is not an ELF file"),
        ("empty.so", b"", "it is not an ELF file"),
        ("header.so", &bytes[..64], "it is damaged: 64 of "),
        ("shorter.so", shorter, "it is damaged: "),
        ("foreign.so", &foreign, "it is for another machine (ELF machine 21), not for this machine"),
        ("narrow.so", &narrow, "it is for 32-bit machines, not for this machine"),
    ] {
        let path = runs.folder().join(name);
        fs::write(&path, contents).unwrap();
        let ran = runs.run_with(&["echo", "started"], |command| _ = command.env("VRAMCTL_LIB", &path)).expect(1, "", why);
        assert!(ran.out.is_empty() && ran.err.lines().count() == 1 && ran.err.contains("VRAMCTL_LIB"), "{name}: {}{}", ran.out, ran.err);
    }
    let simulated = common::simulated_libraries().join("libcuda.so.1");
    let ran = runs.run_with(&["echo", "started"], |command| _ = command.env("VRAMCTL_LIB", &simulated));
    ran.expect(1, "", "it has no vramctl_version; it is not this project's library");
}

#[test]
fn a_library_that_this_user_cannot_read_is_refused() {
    let runs = Runs::new();
    let path = runs.folder().join("libvramctl.so");
    fs::copy(common::library(), &path).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o000)).unwrap();
    if fs::File::open(&path).is_ok() {
        println!("not run: root reads every file");
        return;
    }
    runs.run_with(&["true"], |command| _ = command.env("VRAMCTL_LIB", &path)).expect(1, "", "cannot be preloaded: Permission denied");
}

#[test]
fn a_static_program_is_not_managed_but_what_it_starts_is() {
    let runs = Runs::new();
    let program = compile(runs.folder(), "static", "cc", &["-static"]);
    runs.is_not_managed(
        &[program.to_str().unwrap()],
        "static is not managed: it is statically linked, so nothing can be preloaded into it",
    );
    let program = compile(runs.folder(), "dynamic", "cc", &[]);
    let ran = runs.run(&[program.to_str().unwrap()]).expect(0, "managed", "");
    assert!(ran.err.is_empty(), "{}", ran.err);
    // The loader itself can be run.
    let loader = loader_of(&program);
    let ran = runs.run(&[loader.to_str().unwrap(), program.to_str().unwrap()]).expect(0, "managed", "");
    assert!(ran.err.is_empty(), "{}", ran.err);
}

/// The loader that a program names.
fn loader_of(program: &Path) -> PathBuf {
    let shown = Command::new("readelf").args(["-l", program.to_str().unwrap()]).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    let line = shown.lines().find_map(|line| line.split("interpreter: ").nth(1)).expect("a loader");
    line.trim_end_matches(']').into()
}

#[test]
fn a_program_of_musl_runs_without_the_library() {
    let runs = Runs::new();
    // The C library's own loader under that name does for the command, which goes by the name.
    let loader = loader_of(&compile(runs.folder(), "dynamic", "cc", &[]));
    symlink(loader, runs.folder().join("ld-musl-x86_64.so.1")).unwrap();
    let option = format!("-Wl,--dynamic-linker={}/ld-musl-x86_64.so.1", runs.folder().display());
    let program = compile(runs.folder(), "musl", "cc", &[&option]);
    let (program, why) = (program.to_str().unwrap(), "musl is not managed: it is linked with musl, whose loader cannot load the library");
    runs.is_not_managed(&[program], why);
    // Other preloaded libraries stay.
    let others = format!("{}:/nowhere/other.so", common::library().display());
    let ran = runs.run_with(&[program], |command| _ = command.env("LD_PRELOAD", others)).expect(0, "alone", why);
    assert!(ran.err.contains("/nowhere/other.so") && !ran.err.contains("libvramctl.so"), "{}", ran.err);

    if Command::new("musl-gcc").arg("--version").output().is_err() {
        println!("not run with a real one: no musl-gcc");
        return;
    }
    let real = compile(runs.folder(), "real", "musl-gcc", &[]);
    let real = real.to_str().unwrap();
    runs.is_not_managed(&[real], "real is not managed: it is linked with musl");
    // As docs/limits.md says of programs that a managed program starts.
    let child = format!("{real}; echo $?; env -u LD_PRELOAD {real}; echo $?");
    runs.run(&["sh", "-c", &child]).expect(0, "127\nalone\n0\n", "Error");
}

#[test]
fn a_scripts_interpreter_counts() {
    let runs = Runs::new();
    let program = compile(runs.folder(), "static", "cc", &["-static"]);
    for (name, line) in [("direct", program.to_str().unwrap().to_owned()), ("by_env", "/usr/bin/env -S A=b static -x".to_owned())] {
        let script = runs.folder().join(name);
        common::write_executable(&script, format!("#!{line}\n"));
        let path = format!("{}:{}", runs.folder().display(), std::env::var("PATH").unwrap());
        let ran = runs.run_with(&[name], |command| _ = command.env("PATH", path)).expect(
            0,
            "alone",
            "static is not managed: it is statically linked",
        );
        assert_eq!(ran.err.lines().count(), 1, "{}", ran.err);
    }
}

#[test]
fn a_program_with_more_rights_is_not_managed() {
    let runs = Runs::new();
    if unsafe { libc::geteuid() } != 0 {
        let of_root = ["/bin/su", "/usr/bin/passwd"].into_iter().find(|path| Path::new(path).exists());
        let Some(program) = of_root else { return println!("not run: no set-uid program") };
        let ran = runs.run(&[program, "--help"]);
        assert!(
            ran.err.starts_with(&format!("warning: {program} is not managed: it is set-uid, so its loader preloads nothing")),
            "{}",
            ran.err
        );
        return;
    }
    let program = compile(runs.folder(), "other", "cc", &[]);
    for (mode, why) in [(0o4755, "set-uid"), (0o2755, "set-gid")] {
        std::os::unix::fs::chown(&program, Some(65534), Some(65534)).unwrap();
        fs::set_permissions(&program, Permissions::from_mode(mode)).unwrap();
        fs::set_permissions(runs.folder(), Permissions::from_mode(0o755)).unwrap();
        let ran = runs.run(&[program.to_str().unwrap()]);
        assert!(ran.err.contains(&format!("other is not managed: it is {why}, so its loader preloads nothing")), "{}", ran.err);
    }
}

/// A program for another kind of machine starts here only if the system is prepared for that.
#[test]
fn a_program_for_another_machine_is_named() {
    let runs = Runs::new();
    let program = compile(runs.folder(), "narrow", "cc", &[]);
    let mut bytes = fs::read(&program).unwrap();
    bytes[4] = 1;
    common::write_executable(&program, bytes);
    let ran = runs.run(&[program.to_str().unwrap()]);
    assert!(ran.err.contains("narrow is not managed: it is for 32-bit machines"), "{}", ran.err);
}

/// `AddressSanitizer` ends a program in which it does not come first.
#[test]
fn a_program_with_address_sanitizer_runs() {
    let runs = Runs::new();
    let compiler = common::c_compiler();
    let compiler = compiler.get_program().to_str().unwrap();
    fs::write(runs.folder().join("empty.c"), "int main(void) { return 0; }").unwrap();
    let empty = ["empty.c", "empty"].map(|name| runs.folder().join(name).display().to_string());
    let built = Command::new(compiler).args(["-fsanitize=address", "-o", &empty[1], &empty[0]]).output().unwrap();
    // Where addresses are randomised too much, it does not run.
    if !built.status.success() || !Command::new(&empty[1]).status().is_ok_and(|status| status.success()) {
        println!("not run: AddressSanitizer is not here, or does not run");
        return;
    }
    let program = compile(runs.folder(), "sanitized", compiler, &["-fsanitize=address"]);
    runs.run(&[program.to_str().unwrap()]).expect(0, "managed", "");
}
