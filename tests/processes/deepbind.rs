//! Plug-ins that are opened with `RTLD_DEEPBIND` or `dlmopen`, and so call the driver past a preloaded library: a pause that would hold
//! the program is refused and says why, and what the program has asked for stays as it is.

use crate::common;
use crate::common::machine::{Machine, Program};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The folder with the program and the plug-ins.
fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let folder = common::own_folder().join("deepbind");
        fs::create_dir(&folder).unwrap();
        let compile = |name: &str, source: &str, options: &[&str]| {
            common::compile(&folder.join(name), &[&format!("deepbind/{source}")], options);
        };
        let library = ["-shared", "-fPIC"];
        compile("main", "main.c", &["-rdynamic", "-l:libcudart.so.13", "-Wl,-rpath,$ORIGIN"]);
        compile("libplug.so", "plugin.c", &library);
        compile("libearly.so", "plugin.c", &[&library[..], &["-DEARLY"]].concat());
        compile("liblinked.so", "plugin.c", &[&library[..], &["-DLINKED", "-l:libcuda.so.1"]].concat());
        let next = format!("-DCHAIN=\"{}/libplug.so\"", folder.display());
        compile("libchain.so", "plugin.c", &[&library[..], &[&next]].concat());
        compile("libcopy.so", "copy.c", &library);
        compile("libown.so", "plugin.c", &[&library[..], &["-DOWN", "-l:libcopy.so", "-Wl,-rpath,$ORIGIN"]].concat());
        folder
    })
}

fn start(machine: &Machine, how: &str, plugin: &str) -> Program {
    let (main, plugin) = (built().join("main"), built().join(plugin));
    machine.start_with(how, main.to_str().unwrap(), |command| _ = command.arg(how).arg(&plugin))
}

/// A pause in the middle of its work holds it.
#[track_caller]
fn is_held(how: &str, plugin: &str, answer: &str) {
    let machine = Machine::new();
    let mut program = start(&machine, how, plugin);
    assert_eq!(program.ask("step"), answer);
    machine.vramctl("pause").expect(0, "", "");
    assert!(!machine.vramctl("status").out.contains("Cannot be held"));
    // It waits at the gate, if it uses the GPU.
    program.tell("step");
    machine.vramctl("resume").expect(0, "", "");
    assert_eq!(program.line(), answer);
}

/// A pause is refused, and its work goes on.
#[track_caller]
fn is_refused(how: &str, plugin: &str, why: &str) {
    let machine = Machine::new();
    let mut program = start(&machine, how, plugin);
    let refused = machine.vramctl("pause").expect(1, "", "the program cannot be held: ");
    assert!(refused.err.contains(why) && refused.err.contains("--no-hold"), "{}", refused.err);
    assert_eq!(program.ask("step"), "0 0");
    machine.vramctl("pause").expect(1, "", why);
    machine.vramctl("status").expect(0, &format!("Cannot be held: {why}"), "");
    machine.vramctl("suspend").expect(1, "", why);
    // The user can vouch for it.
    machine.vramctl("pause --no-hold").expect(0, "", "");
    machine.vramctl("resume").expect(0, "", "");
    assert_eq!(program.ask("step"), "0 0");
}

#[test]
fn plugins_of_the_usual_kind_are_held() {
    for plugin in ["libplug.so", "libearly.so", "liblinked.so"] {
        is_held("plain", plugin, "0 0");
    }
    is_held("again", "libplug.so", "0 0");
    // Where the loader looks depends on the caller.
    is_held("by-name", "libplug.so", "0 0");
}

#[test]
fn what_passes_by_the_gate_is_named_and_not_held() {
    for (how, plugin) in [("deep", "libplug.so"), ("deep-lazy", "libplug.so"), ("deep", "libearly.so"), ("deep", "liblinked.so")] {
        is_refused(how, plugin, &format!("{} was opened with RTLD_DEEPBIND", built().join(plugin).display()));
    }
}

/// The plug-in itself is opened as usual.
#[test]
fn what_a_plugin_opens_in_its_constructor_counts() {
    is_refused("plain", "libchain.so", &format!("{} was opened with RTLD_DEEPBIND", built().join("libplug.so").display()));
}

#[test]
fn a_second_driver_in_another_namespace_is_not_held() {
    let machine = Machine::new();
    let mut program = start(&machine, "elsewhere", "libplug.so");
    // It has not loaded the driver yet.
    machine.vramctl("pause").expect(0, "", "");
    machine.vramctl("resume").expect(0, "", "");
    program.ask("step");
    machine.vramctl("pause").expect(1, "", "the program cannot be held: libcuda.so.1 is there a second time, in a namespace of dlmopen");
}

/// A plug-in gets the copy of a function that it has asked for with `RTLD_DEEPBIND`, and the program's without. That is why the flag is not
/// taken away.
#[test]
fn plugins_keep_their_own_copies_and_are_held_if_they_do_not_use_the_driver() {
    is_held("plain", "libown.so", "the program's");
    is_held("deep", "libown.so", "its own");
}
