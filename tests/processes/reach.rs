//! Every way for a program to reach the driver goes through the preloaded library, and functions of others are left alone. The programs are
//! in `tests/apps/reach`; they print whose functions they got.

use crate::common::machine::{Machine, Ran};
use crate::common::{c_compiler, compile, library, own_folder, simulated_libraries};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The folder with the programs, built once.
fn programs() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let folder = own_folder().join("reach");
        fs::create_dir_all(&folder).unwrap();
        let compile = |name: &str, source: &str, options: &[&str]| {
            compile(&folder.join(name), &[&format!("reach/{source}")], &[&["-fno-builtin"], options].concat());
        };
        let library = ["-shared", "-fPIC", "-Wl,-z,now"];
        compile("reach", "reach.c", &[]);
        compile("linked", "linked.c", &["-Wl,--no-as-needed", "-l:libcuda.so.1", "-l:libcudart.so.13"]);
        compile("static_runtime", "static_runtime.c", &[]);
        compile("libown_names.so", "own_names.c", &library);
        compile("libneeds_driver.so", "needs_driver.c", &[&library[..], &["-Wl,--no-as-needed", "-l:libcuda.so.1"]].concat());
        compile("libinterposer.so", "interposer.c", &library);
        compile("libbehind.so", "behind.c", &library);
        compile("libbehind_by_proc_address.so", "behind.c", &[&library[..], &["-DBY_PROC_ADDRESS"]].concat());
        let names: Vec<_> = of_driver().iter().map(|name| format!("WHOLE({name})")).collect();
        fs::create_dir_all(folder.join("stand_in")).unwrap();
        fs::write(folder.join("stand_in/driver_names.h"), names.join("\n")).unwrap();
        let include = format!("-I{}", folder.join("stand_in").display());
        let stand_in = ["-DSTANDS_IN", "-Wl,-soname,libcuda.so.1", &include];
        compile("stand_in/libcuda.so.1", "behind.c", &[&library[..], &stand_in].concat());
        compile("libabsent.so", "absent.c", &[&library[..], &["-DLIBRARY"]].concat());
        // In a program that is linked so, the loader protects what it has written.
        compile("absent", "absent.c", &["-Wl,-z,now", "-Wl,-z,relro"]);
        compile("absent_lazy", "absent.c", &["-Wl,-z,lazy"]);
        compile("absent_linked", "absent.c", &["-Wl,--no-as-needed", "-l:libcuda.so.1", "-l:libcudart.so.13"]);
        compile("libsecond.so", "next.c", &[&library[..], &["-DSECOND"]].concat());
        compile("libfirst.so", "next.c", &[&library[..], &["-DFIRST"]].concat());
        compile("next", "next.c", &["-Wl,--no-as-needed", "-l:libfirst.so", "-l:libsecond.so"]);
        folder
    })
}

/// Runs a program on its own machine, under these preloaded libraries.
fn run(preloaded: &[&Path], program: &str, arguments: &[&str]) -> Ran {
    run_with(simulated_libraries(), preloaded, program, arguments)
}

/// The same with the driver in this folder.
fn run_with(driver: &Path, preloaded: &[&Path], program: &str, arguments: &[&str]) -> Ran {
    let machine = Machine::with(1, "256M");
    let mut command = machine.preloaded(preloaded, programs().join(program), arguments);
    command
        .env("ASAN_OPTIONS", "verify_asan_link_order=0:detect_leaks=0")
        .env("LD_LIBRARY_PATH", format!("{}:{}:{}", driver.display(), simulated_libraries().display(), programs().display()))
        .env("REAL_DRIVER", simulated_libraries().join("libcuda.so.1"));
    Ran::of(&mut command)
}

/// The output of a program that succeeds.
#[track_caller]
fn said(ran: Ran) -> String {
    ran.expect(0, "", "").out
}

fn reach(arguments: &[&str]) -> String {
    said(run(&[&library()], "reach", arguments))
}

/// The simulated driver's functions.
fn of_driver() -> Vec<String> {
    let symbols = Command::new("nm").args(["-D", "--defined-only"]).arg(simulated_libraries().join("libcuda.so.1")).output().unwrap();
    let simulated = String::from_utf8(symbols.stdout).unwrap();
    let names = simulated.lines().filter_map(|line| line.split_whitespace().nth(2));
    names.filter(|name| name.starts_with("cu")).map(str::to_owned).collect()
}

/// The names of the table that the simulated driver has too, as its symbols.
fn symbols() -> Vec<&'static str> {
    let simulated = of_driver();
    let table = vramctl_intercept::entries::all().map(|function| function.symbol.to_str().unwrap());
    table.filter(|name| simulated.iter().any(|one| one == name)).collect()
}

#[test]
fn through_dlsym_on_the_drivers_handle() {
    let ours = symbols();
    let others = ["cuDeviceGet", "cuDeviceGetCount", "cuStreamIsCapturing", "cuGetExportTable", "cuNoSuchThing"];
    let text = reach(&[&["dlsym"], &ours[..], &others[..]].concat());
    for name in &ours {
        assert!(text.contains(&format!("{name} libvramctl.so\n")), "{name}: {text}");
    }
    for name in &others[..4] {
        assert!(text.contains(&format!("{name} libcuda.so.1\n")), "{name}: {text}");
    }
    assert!(text.contains("cuNoSuchThing null\n") && text.ends_with("use 0\n"), "{text}");
    assert!(ours.len() > 25, "{ours:?}");
}

/// Both versions of the function, and the version and flags that are asked for.
#[test]
fn through_cu_get_proc_address() {
    let names = ["cuMemAlloc", "cuMemAllocAsync", "cuMemCreate", "cuDeviceGetCount", "cuGetProcAddress", "cuNoSuchThing"];
    let ask = |version: &str, flags: &str| reach(&[&["proc", version, flags], &names[..]].concat());
    for (version, flags) in [("13000", "0"), ("13000", "1"), ("13000", "2"), ("13000", "3"), ("12000", "0"), ("11020", "2"), ("-1", "0")] {
        let text = ask(version, flags);
        for name in ["cuMemAlloc", "cuMemAllocAsync", "cuMemCreate"] {
            assert!(text.contains(&format!("{name} 0 libvramctl.so, 0 libvramctl.so status 0\n")), "{version} {flags} {name}: {text}");
        }
        assert!(text.contains("cuDeviceGetCount 0 libcuda.so.1, 0 libcuda.so.1 status 0\n"), "{text}");
        assert!(text.contains("cuNoSuchThing 500 null, 0 null status 1\n"), "{text}");
        assert!(text.ends_with("use 0\n"), "{text}");
    }
    assert!(ask("13000", "0").contains("cuGetProcAddress 0 libvramctl.so, 0 libvramctl.so status 0\n"));
    // A function that came later is not returned, and an older variant is not ours.
    let text = ask("11010", "0");
    assert!(text.contains("cuMemAllocAsync 500 null, 0 null status 2\n"), "{text}");
    assert!(text.contains("cuMemCreate 0 libvramctl.so, 0 libvramctl.so status 0\n"), "{text}");
    let range = |version| reach(&["proc", version, "0", "cuMemGetAddressRange"]);
    assert!(range("3010").starts_with("cuMemGetAddressRange 0 libcuda.so.1, 0 libcuda.so.1 status 0\n"));
    assert!(range("3020").starts_with("cuMemGetAddressRange 0 libvramctl.so, 0 libvramctl.so status 0\n"));
    // Flags and versions that the driver rejects.
    for (version, flags) in [("13000", "4"), ("99000", "0")] {
        assert!(ask(version, flags).contains("cuMemAlloc 1 null, 1 null status -1\n"));
    }
}

/// The variant for per-thread default streams is returned on request, otherwise the plain one.
#[test]
fn each_variant_has_its_own_entry() {
    use vramctl_intercept::entries::FUNCTIONS;
    use vramctl_intercept::table::Flavour;
    for function in FUNCTIONS.iter().filter(|function| function.flavour == Flavour::PerThread) {
        let symbol = function.symbol.to_str().unwrap().trim_end_matches("_ptsz");
        let plain = FUNCTIONS.iter().find(|other| other.flavour == Flavour::Plain && other.symbol.to_str() == Ok(symbol)).unwrap();
        assert_eq!((plain.name, plain.arguments), (function.name, function.arguments));
        // Functions that are older than these variants, which came with CUDA 7.0, have two versions.
        assert_eq!(plain.version.max(7000), function.version);
        assert_ne!(plain.entry, function.entry);
    }
    let mut entries: Vec<_> = FUNCTIONS.iter().map(|function| function.entry).collect();
    entries.sort_unstable();
    entries.dedup();
    assert_eq!(entries.len(), FUNCTIONS.len());
}

#[test]
fn by_linking_the_driver_and_through_the_runtimes_entry_points() {
    let text = said(run(&[&library()], "linked", &[]));
    assert!(text.contains("linked libvramctl.so libcuda.so.1\n") && text.matches("use 0\n").count() == 2, "{text}");
    // The runtime's own lookup, which asks the driver: a process may have several runtimes, each with its own versions.
    assert!(text.contains("runtime libcudart.so.13 libcudart.so.13\n"), "{text}");
    for name in ["cuMemAlloc", "cuMemAllocAsync", "cuGetProcAddress"] {
        for flags in [0, 2] {
            let line = format!("entry point {name} {flags}: 0 libvramctl.so 0, 0 libvramctl.so 0\n");
            assert!(text.contains(&line), "{line}{text}");
        }
    }
    assert!(text.contains("entry point cuDeviceGetCount 0: 0 libcuda.so.1 0, 0 libcuda.so.1 0\n"), "{text}");
    assert!(text.contains("entry point cuNoSuchThing 0: 0 null 1, 0 null 1\n"), "{text}");
}

#[test]
fn from_a_static_runtime() {
    let text = said(run(&[&library()], "static_runtime", &[]));
    assert_eq!(text, "runtime static_runtime\ndriver libvramctl.so libvramctl.so\nuse 0 0\n");
}

/// As `ctypes` does: the driver's own handle, opened by its path.
#[test]
fn from_python() {
    let program = r#"
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
runtime = ctypes.CDLL("libcudart.so.13")
context, pointer, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
assert driver.cuInit(0) == 0 and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 and driver.cuCtxSetCurrent(context) == 0
assert driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(4 << 20)) == 0 and driver.cuMemFree_v2(pointer) == 0
ours = ctypes.cast(driver.cuMemAlloc_v2, ctypes.c_void_p).value
assert runtime.cudaGetDriverEntryPoint(b"cuMemAlloc", ctypes.byref(function), ctypes.c_uint64(0), None) == 0
maps = [line.split() for line in open("/proc/self/maps")]
def owner(address):
    return [line[-1].split("/")[-1] for line in maps if int(line[0].split("-")[0], 16) <= address < int(line[0].split("-")[1], 16)][0]
maps = [line.split() for line in open("/proc/self/maps")]
print(owner(ours), owner(function.value), owner(ctypes.cast(driver.cuDeviceGet, ctypes.c_void_p).value))
"#;
    let ran = Ran::of(&mut Machine::new().preloaded(&[&library()], "python3", &["-c", program]));
    assert_eq!(said(ran), "libvramctl.so libvramctl.so libsimgpu.so\n");
}

/// A library's own function is never replaced, whatever its name; a library's dependencies are found through its handle.
#[test]
fn through_another_librarys_handle() {
    let path = |name: &str| programs().join(name).display().to_string();
    let text = reach(&["library", &path("libown_names.so"), "cudnnCreate", "cuMemAlloc_v2", "cuMemFree_v2"]);
    assert_eq!(text, "cudnnCreate libown_names.so\ncuMemAlloc_v2 libown_names.so\ncuMemFree_v2 null\n");
    let text = reach(&["library", &path("libneeds_driver.so"), "cuMemAlloc_v2", "cuDeviceGet", "needs_driver"]);
    assert_eq!(text, "cuMemAlloc_v2 libvramctl.so\ncuDeviceGet libcuda.so.1\nneeds_driver libneeds_driver.so\n");
    assert_eq!(reach(&["library", "libc.so.6", "cuMemAlloc_v2", "malloc"]), "cuMemAlloc_v2 null\nmalloc libc.so.6\n");
}

/// A program that looks for CUDA in the default scope finds none if there is none, although the library exports the names.
#[test]
fn no_driver_is_found_if_none_is_loaded() {
    let text = reach(&["scope"]);
    let (before, after) =
        (["default null, error", "program null, error"], ["default libvramctl.so, no error", "program libvramctl.so, no error"]);
    assert_eq!(text.lines().collect::<Vec<_>>(), [before, after].concat());
}

/// In whatever way a program asks whether the process has CUDA, it gets the answer that it would get without the library.
#[test]
fn what_is_not_there_is_not_found() {
    for program in ["absent", "absent_lazy", "absent_linked"] {
        for loaded in [&["libcuda.so.1", "libcudart.so.13"][..], &["libcudart.so.13"], &[]] {
            let [with, without] = [&[&*library()][..], &[]].map(|preloaded| said(run(preloaded, program, loaded)));
            assert!(without.contains("at first: program cudaMalloc 0: ") && without.contains("declared 5: "), "{without}");
            for (with, without) in with.lines().zip(without.lines()) {
                assert_eq!(with, without, "{program} {loaded:?}");
            }
            assert_eq!(with.lines().count(), without.lines().count());
        }
    }
}

/// `RTLD_NEXT` keeps its meaning for the calling library.
#[test]
fn the_caller_of_a_lookup_stays_the_caller() {
    let (with, without) = (run(&[&library()], "next", &[]), run(&[], "next", &[]));
    assert_eq!([said(with), said(without)], ["12 0 1 libfirst.so\n"; 2]);
}

#[test]
fn failures_and_their_errors_are_the_real_ones() {
    let (with, without) = (reach(&["errors"]), said(run(&[], "reach", &["errors"])));
    assert_eq!(with, without);
    assert!(with.contains("undefined symbol: cuMemAlloc_v2") && with.ends_with("after a success: null, no error\n"), "{with}");
}

#[test]
fn invalid_arguments_get_the_drivers_answers() {
    let (with, without) = (reach(&["garbage"]), said(run(&[], "reach", &["garbage"])));
    assert!(with.lines().count() > 5_000 && with.contains(": 0 0, 0 0 0\n"));
    for (with, without) in with.lines().zip(without.lines()) {
        assert_eq!(with, without);
    }
}

#[test]
fn threads_and_forked_children_look_up_at_once() {
    for _ in 0..5 {
        assert_eq!(reach(&["threads"]), "0 0\n");
    }
}

/// Another library that also interposes `dlsym`, before and after this one: both see the lookups, and the functions of both run.
#[test]
fn with_another_library_that_answers_dlsym() {
    let (ours, other) = (library(), programs().join("libinterposer.so"));
    for (order, freed_by) in [([&*other, &*ours], "libinterposer.so"), ([&*ours, &*other], "libvramctl.so")] {
        let output = run(&order, "reach", &["dlsym", "cuMemAlloc_v2", "cuMemFree_v2", "cuDeviceGet"]);
        assert_eq!(output.err, "interposer: lookups, frees\n", "{order:?}");
        let text = said(output);
        assert_eq!(text, format!("cuMemAlloc_v2 libvramctl.so\ncuMemFree_v2 {freed_by}\ncuDeviceGet libcuda.so.1\nuse 0\n"));
        for program in ["static_runtime", "linked", "next"] {
            said(run(&order, program, &[]));
        }
        assert_eq!(said(run(&order, "reach", &["threads"])), "0 0\n");
    }
}

/// A library with its own versions of driver functions that looks up the real ones. After this library, it gets the real ones: with the
/// entries it would call itself. Before this library, it gets the entries, like a program.
#[test]
fn with_another_library_that_has_the_drivers_functions() {
    let ours = library();
    for other in ["libbehind.so", "libbehind_by_proc_address.so"].map(|name| programs().join(name)) {
        for order in [[&*ours, &*other], [&*other, &*ours]] {
            let text = said(run(&order, "reach", &["both"]));
            assert_eq!(text, "libvramctl.so libvramctl.so libvramctl.so: 0 0 0\n".repeat(4), "{order:?}");
            for program in ["static_runtime", "linked"] {
                said(run(&order, program, &[]));
            }
        }
        assert_eq!(run(&[&ours, &other], "reach", &["both"]).err, "behind: called\n");
    }
}

/// A library that is `libcuda.so.1` to programs, and opens the real one by its path.
#[test]
fn with_a_library_that_stands_in_for_the_driver() {
    let folder = programs().join("stand_in");
    for program in ["static_runtime", "linked"] {
        said(run_with(&folder, &[&library()], program, &[]));
    }
    let output = run_with(&folder, &[&library()], "reach", &["both"]);
    assert_eq!(output.err, "behind: called\n");
    assert_eq!(said(output), "libvramctl.so libvramctl.so libvramctl.so: 0 0 0\n".repeat(4));
}

/// A second copy of the library, under another name, changes nothing.
#[test]
fn with_a_second_copy() {
    let copy = own_folder().join("libsecondcopy.so");
    fs::copy(library(), &copy).unwrap();
    let text = said(run(&[&library(), &copy], "reach", &["dlsym", "cuMemAlloc_v2", "cuMemFree_v2", "cuDeviceGet"]));
    assert_eq!(text, "cuMemAlloc_v2 libvramctl.so\ncuMemFree_v2 libvramctl.so\ncuDeviceGet libcuda.so.1\nuse 0\n");
    let text = said(run(&[&copy, &library()], "reach", &["proc", "13000", "0", "cuMemAlloc"]));
    assert_eq!(text, "cuMemAlloc 0 libsecondcopy.so, 0 libsecondcopy.so status 0\nuse 0\n");
}

/// Allocators and sanitizers look functions up before anything else runs.
#[test]
fn with_libraries_that_replace_the_allocator() {
    let find = |name: &str| {
        let output = c_compiler().arg(format!("-print-file-name={name}")).output();
        let asked = output.ok().map(|output| PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()));
        let folders = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];
        asked.into_iter().chain(folders.map(|folder| Path::new(folder).join(name))).find(|path| path.is_absolute() && path.exists())
    };
    for name in ["libjemalloc.so.2", "libtcmalloc.so.4", "libtcmalloc_minimal.so.4", "libmimalloc.so.2", "libasan.so", "libtsan.so"] {
        let Some(other) = find(name) else {
            println!("not run: no {name}");
            continue;
        };
        // Some sanitizers do not run everywhere, such as where addresses are randomised too much.
        if run(&[&other], "reach", &["dlsym"]).code != Some(0) {
            println!("not run: {name} does not run here");
            continue;
        }
        for order in [[&*library(), &*other], [&*other, &*library()]] {
            let text = said(run(&order, "reach", &["dlsym", "cuMemAlloc_v2"]));
            assert_eq!(text, "cuMemAlloc_v2 libvramctl.so\nuse 0\n", "{name}");
        }
    }
}
