//! Several CUDA runtimes in one process: each library's calls go to the runtime that it is linked with. The programs are in
//! `tests/apps/runtimes`; they tell what each call answers, and that is the same with and without the library.

use crate::common::machine::{Machine, Ran};
use crate::common::{SHARED, compile, own_folder};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The folder with the program, the libraries and their runtimes.
fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let folder = own_folder().join("runtimes");
        fs::create_dir(&folder).unwrap();
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/apps/runtimes");
        let compile = |name: &str, source: &str, options: &[&str]| {
            compile(&folder.join(name), &[&format!("runtimes/{source}")], options);
        };
        let built = |name: &str, version: &str, number: &str, options: &[&str]| {
            let script = format!("-Wl,--version-script={}/{version}.map", sources.display());
            let (number, soname) = (format!("-DVERSION={number}"), format!("-Wl,-soname,{name}"));
            // Like the real one, it calls its own functions, not a preloaded library's.
            compile(name, "runtime.c", &[&SHARED[..], &["-Wl,-Bsymbolic", &number, &soname, &script], options].concat());
        };
        let runtime = |name, version, number| built(name, version, number, &["-Wl,-z,nodelete"]);
        runtime("libcudart-5ac09b38.so.12", "12", "12040");
        runtime("libcudart-d0da41ae.so.11.0", "11.0", "11080");
        runtime("libmine.so", "12", "12090");
        built("libgoes.so", "12", "12060", &[]);
        let plugin = |name: &str, runtime: &str| {
            compile(name, "plugin.c", &[&SHARED[..], &[&format!("-l:{runtime}"), "-l:libcuda.so.1", "-Wl,-rpath,$ORIGIN"]].concat());
        };
        plugin("liba.so", "libcudart-d0da41ae.so.11.0");
        plugin("libb.so", "libcudart-5ac09b38.so.12");
        plugin("libc.so", "libmine.so");
        plugin("libd.so", "libgoes.so");
        compile("main", "main.c", &[]);
        folder
    })
}

/// The program does the same with the library, whether it manages the memory or not. `here`: libraries that the process has from its start.
#[track_caller]
fn is_the_same(here: &[&str], steps: &[&str]) {
    let machine = Machine::with(2, "256M");
    let steps: Vec<_> = steps.iter().map(|step| step.replace("=/", &format!("={}/", built().display()))).collect();
    let program = built().join("main");
    let preload = here.iter().map(|name| built().join(name).display().to_string()).collect::<Vec<_>>().join(":");
    let run = |command: &mut Command| Ran::of(command.args(&steps).env("LD_PRELOAD", &preload)).expect(0, "last error", "").out;
    let plain = run(&mut machine.command(&program, &[]));
    for how in ["", "--no-tag "] {
        let ours = run(&mut machine.cli(&format!("run {how}-- {}", program.display())));
        assert_eq!(ours, plain, "{here:?} {how}{steps:?}");
    }
}

const TWO: [&str; 2] = ["old=/liba.so", "new=/libb.so"];

#[test]
fn each_library_calls_its_own_runtime() {
    let devices = ["old:set_device=1", "new:set_device=0", "old:allocate", "new:allocate", "new:set_device=1", "old:set_device=0"];
    let then = ["new:allocate", "old:allocate", "old:reset", "new:allocate", "old:allocate"];
    is_the_same(&[], &[&TWO[..], &devices, &then].concat());
}

#[test]
fn an_error_is_the_last_one_of_the_callers_runtime_alone() {
    for (one, other) in [("old", "new"), ("new", "old")] {
        let steps = [format!("{one}:fail"), format!("{other}:look"), format!("{other}:allocate"), format!("{one}:look")];
        is_the_same(&[], &[&TWO[..], &steps.each_ref().map(String::as_str)].concat());
    }
}

/// Its functions have the version that the library was linked with, so the one that is there for all is not meant.
#[test]
fn a_runtime_that_is_there_for_all_is_not_everybodys() {
    is_the_same(
        &["libcudart-5ac09b38.so.12"],
        &[&TWO[..], &["old:set_device=1", "new:set_device=0", "old:allocate", "new:fail", "old:look"]].concat(),
    );
}

#[test]
fn a_runtime_is_found_whatever_its_file_is_called() {
    is_the_same(&[], &["own=/libc.so", "own:set_device=1", "own:allocate", "own:fail"]);
    is_the_same(&[], &["new=/libb.so", "own=/libc.so", "new:allocate", "own:set_device=1", "own:allocate", "new:fail", "own:look"]);
}

/// The second comes to lie where the first was, and its calls come from the same addresses.
#[test]
fn a_library_in_anothers_place_is_not_taken_for_it() {
    let first = ["old=/liba.so", "old:set_device=1", "old:allocate", "old:close"];
    is_the_same(&[], &[&first[..], &["new=/libb.so", "new:set_device=0", "new:allocate", "new:fail"]].concat());
}

/// It is unloaded with the library, and comes again, to another place or to the same.
#[test]
fn a_runtime_goes_with_its_library_and_comes_again() {
    let first = ["one=/libd.so", "one:set_device=1", "one:allocate", "one:close"];
    let last = ["two=/libd.so", "two:set_device=1", "two:allocate", "two:fail", "two:look"];
    is_the_same(&[], &[&first[..], &last].concat());
    is_the_same(&[], &[&first[..], &["old=/liba.so", "old:allocate", "old:fail"], &last, &["old:look"]].concat());
}
