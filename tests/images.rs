//! Images: real programs on a simulated machine, saved by the real CRIU, and started again.
//!
//! They need root and CRIU (`scripts/criu` brings it to `target/criu`). Without, each says that it did not run.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

mod common;

use common::images::{Images, OwnSharedMemory, in_own_session, without_inherited};
use common::machine::{Machine, Program, Ran};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::ptr;
use std::thread;
use std::time::Duration;

/// A load that leaves nothing of the program.
fn refuses_to_load(images: &Images, folder: &Path) -> Ran {
    let mut load = images.cli(&format!("load {} --name e --log /dev/null", folder.display()));
    let mut load = load.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Without input, the program would end by itself.
    let _input = load.stdin.take();
    let ran = Ran::end_of(load);
    images.vramctl("ps").expect(0, "", "no process is managed");
    ran
}

/// It works, and answers as one that nothing has happened to.
#[track_caller]
fn is_well(engine: &mut Program, plain: &mut Program, token: u32) {
    engine.verify();
    let request = format!("generate {token}");
    assert_eq!(engine.ask(&request), plain.ask(&request));
}

#[test]
fn a_saved_program_is_loaded_three_times_at_once_and_saved_again() {
    let Some(images) = Images::new() else { return };
    let [mut plain, mut engine] = ["plain", "engine"].map(|name| images.engine(name));
    is_well(&mut engine, &mut plain, 1);
    images.save("engine", "first").expect(0, "saved engine", "");
    engine.ended();
    let before = images.machine.used();
    let mut loaded = ["e1", "e2", "e3"].map(|name| images.load("first", name));
    let expected = plain.ask("generate 2");
    for engine in &mut loaded {
        engine.verify();
        assert_eq!(engine.ask("generate 2"), expected);
    }
    let listed = images.vramctl("ps").expect(0, "e1", "").out;
    let mut names: Vec<_> = listed.lines().skip(1).filter_map(|line| line.split_whitespace().nth(1)).collect();
    names.sort_unstable();
    assert_eq!(names, ["e1", "e2", "e3", "plain"], "{listed}");
    assert!(images.machine.used() > before + 3 * (24 << 20));

    // Each is a program of its own.
    images.vramctl("pause e2").expect(0, "paused", "");
    is_well(&mut loaded[0], &mut plain, 3);
    images.vramctl("resume e2").expect(0, "resumed", "");
    images.save("e1", "second").expect(0, "saved e1", "");
    loaded[0].ended();
    let mut again = images.load("second", "e4");
    is_well(&mut again, &mut plain, 4);

    // A signal to the command is the program's, and so is its end.
    let [_, second, third] = loaded;
    second.end();
    third.signal(libc::SIGTERM);
    let mut third = third;
    assert_eq!(third.ended().code(), Some(128 + libc::SIGTERM));
    images.vramctl("status e3").expect(3, "", "e3");
}

#[test]
fn a_program_that_is_kept_goes_on_beside_its_image() {
    let Some(images) = Images::new() else { return };
    let [mut plain, mut engine] = ["plain", "engine"].map(|name| images.engine(name));
    for round in 1..3 {
        let kept = images.vramctl(&format!("save engine {} --keep", images.image(&format!("image{round}"))));
        kept.expect(0, "saved engine", "");
        is_well(&mut engine, &mut plain, round);
    }
    let mut loaded = images.load("image2", "copy");
    engine.tell("generate 3");
    loaded.verify();
    engine.line();
    loaded.end();
    engine.end();
}

/// Somebody takes the room on the GPU while a program that is to be kept is away: the image is complete, and the next resume brings the program back.
#[test]
fn a_kept_program_whose_room_is_taken_stays_suspended() {
    const TAKES: &str = r#"
import ctypes, sys
pointer, rest = ctypes.c_void_p(), ctypes.c_size_t()
cuda = ctypes.CDLL("libcudart.so.13")
assert cuda.cudaMemGetInfo(ctypes.byref(rest), ctypes.byref(ctypes.c_size_t())) == 0
assert cuda.cudaMalloc(ctypes.byref(pointer), rest) == 0
print("ready", flush=True)
sys.stdin.read()
"#;
    let Some(images) = Images::new() else { return };
    let [mut plain, mut engine] = ["plain", "engine"].map(|name| images.engine(name));
    let mut save = images.cli(&format!("save engine {} --keep", images.image("image")));
    let (held, save) = images.holding("dump-after", &mut save);
    let save = save.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    held.is_reached();
    let other = Program::ready(&mut images.machine.command("python3", &["-c", TAKES]));
    held.go();
    let ran = Ran::end_of(save).expect(4, "", "the image is complete");
    assert!(ran.err.contains("vramctl resume"), "{ran:?}");
    assert!(images.has_image());
    other.end();
    images.vramctl("resume engine").expect(0, "resumed", "");
    is_well(&mut engine, &mut plain, 1);
    engine.end();
    let mut loaded = images.load("image", "copy");
    loaded.verify();
    loaded.end();
}

#[test]
fn what_is_damaged_or_incomplete_is_not_loaded() {
    let Some(images) = Images::new() else { return };
    let mut engine = images.engine("engine");
    images.save("engine", "image").expect(0, "saved", "");
    engine.ended();
    let folder = PathBuf::from(images.image("image"));
    let before = images.machine.gpus();
    let refused = |words: &str| {
        refuses_to_load(&images, &folder).expect(1, "", words);
        assert_eq!(images.machine.gpus(), before);
    };
    let files = |folder: &Path| fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect::<Vec<_>>();
    let mut all = files(&folder.join("criu"));
    all.extend(files(&folder.join("../.store/packs")));
    all.extend(["contents", "manifest.json"].map(|name| folder.join(name)));
    assert!(all.len() > 8, "{all:?}");
    for path in &all {
        let whole = fs::read(path).unwrap();
        let mut flipped = whole.clone();
        let place = flipped.len() / 2;
        flipped[place] ^= 1;
        for wrong in [flipped, whole[..whole.len() - 2].to_vec()] {
            fs::write(path, wrong).unwrap();
            refused("damaged");
        }
        fs::write(path, whole).unwrap();
    }
    let contents = fs::read(folder.join("contents")).unwrap();
    fs::remove_file(folder.join("contents")).unwrap();
    refused("damaged");
    fs::write(folder.join("contents"), contents).unwrap();
    let mut whole = images.load("image", "e");
    whole.verify();
    whole.end();
    fs::remove_file(folder.join("manifest.json")).unwrap();
    refused("there is no image");
}

/// What `run -d` starts has its log locked, and may have other files locked. Nobody waits for a lock that somebody else has: the load says who.
#[test]
fn a_program_in_the_background_is_saved_with_its_locks() {
    const PROGRAM: &str = r#"
import ctypes, fcntl, os, time
pointer = ctypes.c_void_p()
assert ctypes.CDLL("libcudart.so.13").cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(4 << 20)) == 0
files = [open(name, "a") for name in os.environ["LOCKED"].split()]
for file, lock in zip(files, [fcntl.flock, fcntl.lockf]):
    lock(file, fcntl.LOCK_EX)
while True:
    print("goes on", flush=True)
    time.sleep(0.02)
"#;
    let Some(images) = Images::new() else { return };
    let folder = images.machine.folder.path();
    let start = |name: &str, locked: &str| {
        let mut command = images.cli(&format!("run -d --name {name} --no-python -- python3 -c"));
        command.arg(PROGRAM).env("LOCKED", locked).env("SIMGPU_RESTORE_THREAD", "1");
        Ran::of(&mut command).expect(0, "runs in the background", "");
        common::eventually("it runs", || images.vramctl(&format!("status {name}")).code == Some(0));
    };
    let prints = |log: &Path| common::eventually("it goes on", || fs::read_to_string(log).is_ok_and(|text| text.contains("goes on")));
    let ends = |name: &str| {
        images.vramctl(&format!("stop {name}")).expect(0, "", "");
        common::eventually("it has ended", || images.vramctl(&format!("status {name}")).code == Some(3));
    };
    let load = |image: &str, name: &str, more: &str| {
        let mut command = images.cli(&format!("load {} --name {name} --detach{more}", images.image(image)));
        Ran::of(&mut command)
    };
    start("plain", "");
    images.save("plain", "plain").expect(0, "saved", "");
    // What takes the place of its log is not locked, so two may have it.
    let log = folder.join("log");
    let are_alone = ["one", "two"].map(|name| load("plain", name, "").expect(0, "", "loaded").err.contains("without a network"));
    assert_eq!(are_alone, [false, true]);
    load("plain", "three", &format!(" --log {}", log.display())).expect(0, "", "");
    prints(&log);
    ["one", "two", "three"].into_iter().for_each(ends);

    let [file, range] = ["file", "range"].map(|name| folder.join(name).display().to_string());
    start("locks", &format!("{file} {range}"));
    images.vramctl(&format!("save locks {} --keep", images.image("locks"))).expect(0, "saved", "");
    let refused = load("locks", "copy", "").expect(1, "", "are locked");
    assert!(refused.err.contains(&file) && refused.err.contains(&range) && refused.err.contains("Nothing was started"), "{refused:?}");
    ends("locks");
    load("locks", "copy", &format!(" --log {}", log.display())).expect(0, "", "");
    load("locks", "another", "").expect(1, "", "are locked");
    ends("copy");
    images.nothing_is_left("programs in the background");
}

/// A program writes a file by two names at its position, and another by a mapping. Each loaded program goes on with what they had at the save, in a copy of
/// its own.
#[test]
fn each_loaded_program_has_its_own_copy_of_what_it_writes() {
    const PROGRAM: &str = r#"
import ctypes, fcntl, mmap, os, sys
cuda, pointer = ctypes.CDLL("libcudart.so.13"), ctypes.c_void_p()
assert cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(4 << 20)) == 0
state, alias, mapped = (open(name, "r+b", buffering=0) for name in os.environ["WRITTEN"].split())
fcntl.flock(state, fcntl.LOCK_EX)
memory = mmap.mmap(mapped.fileno(), 0)
def contents(name):
    with open(name, "rb") as file:
        return file.read()[:40]
def seen():
    # Once it is back.
    assert cuda.cudaMemset(pointer, 1, ctypes.c_size_t(4096)) == 0
    return contents(state.name), contents(alias.name), contents(mapped.name)[:4], state.tell(), oct(os.fstat(state.fileno()).st_mode)
def write(text):
    memory[:4] = text[:4]
    return state.write(text)
print("ready", flush=True)
for line in sys.stdin:
    print(eval(line), flush=True)
"#;
    let Some(images) = Images::new() else { return };
    let folder = images.machine.folder.path();
    let [state, alias, mapped] = ["state", "alias of it", "mapped"].map(|name| folder.join(name.replace(' ', "-")));
    fs::write(&state, "").unwrap();
    fs::set_permissions(&state, fs::Permissions::from_mode(0o640)).unwrap();
    fs::hard_link(&state, &alias).unwrap();
    fs::write(&mapped, [b'.'; 4096]).unwrap();
    let written = [&state, &alias, &mapped].map(|path| path.display().to_string()).join(" ");
    let mut command = images.cli("run --name writer --no-python -- python3 -c");
    command.arg(PROGRAM).env("WRITTEN", written).env("SIMGPU_RESTORE_THREAD", "1");
    let mut program = Program::ready(in_own_session(&mut command));
    let sees = |program: &mut Program, text: &str| {
        let tail = &text[text.len() - 4..];
        let wanted = format!("(b'{text}', b'{text}', b'{tail}', {}, '0o100640')", text.len());
        assert_eq!(program.ask("seen()"), wanted);
    };
    let writes = |program: &mut Program, text: &str| assert_eq!(program.ask(&format!("write(b'{text}')")), text.len().to_string());
    writes(&mut program, "save");
    sees(&mut program, "save");
    let run = |words: &str| images.vramctl(&format!("images {} {words}", folder.join("images").display()));
    for (image, how) in [("without", ""), ("image", " --copy-files --verify")] {
        images.vramctl(&format!("save writer {} --keep{how}", images.image(image))).expect(0, "saved", "");
    }
    writes(&mut program, "kept");
    sees(&mut program, "savekept");
    refuses_to_be_loaded(&images, "without", "state (8 bytes instead of 4)");

    // The program that was kept has its file locked. Nobody has the copies.
    let [mut one, mut two] = ["one", "two"].map(|name| images.load("image", name));
    writes(&mut one, "of-1");
    writes(&mut two, "of-2");
    writes(&mut program, "more");
    sees(&mut one, "saveof-1");
    sees(&mut two, "saveof-2");
    sees(&mut program, "savekeptmore");
    assert_eq!(one.ask("os.path.exists('/dev/shm/.vramctl')"), "False");

    // A save of one that has copies has them, whether it is asked for or not. The file itself may be another, but there must be one.
    images.save("one", "again").expect(0, "saved one", "");
    one.ended();
    program.end();
    fs::remove_file(&state).unwrap();
    images.save("two", "removed").expect(7, "", "removed or replaced since its load");
    assert_eq!(two.ask("state.write(b'on')"), "2");
    two.end();
    refuses_to_be_loaded(&images, "again", "an empty file");
    fs::write(&state, "").unwrap();
    let mut again = images.load("again", "again");
    sees(&mut again, "saveof-1");
    writes(&mut again, "last");
    again.end();
    assert_eq!((fs::read(&state).unwrap(), fs::read(&alias).unwrap()), (vec![], b"savekeptmore".to_vec()));

    // They are carried with the image, and are as safe as all that is in it.
    let other = folder.join("other");
    run(&format!("export again {}", other.display())).expect(0, "exported again", "");
    run("rm again").expect(0, "removed again", "");
    run("verify image").expect(0, "image is whole", "");
    let copy = Path::new(&images.image("image")).join("files/own-0");
    fs::write(&copy, "xxxx").unwrap();
    refuses_to_be_loaded(&images, "image", "damaged");
    let mut carried = Program::spawn(&mut images.cli(&format!("load {}/again --name carried", other.display())));
    sees(&mut carried, "saveof-1");
    carried.end();
    images.nothing_is_left("own copies");
}

#[track_caller]
fn refuses_to_be_loaded(images: &Images, image: &str, words: &str) {
    images.vramctl(&format!("load {} --dry-run", images.image(image))).expect(1, "", words);
}

/// An image of a program on one GPU of two goes on on the other, and from there on it is at home there.
#[test]
fn a_program_is_loaded_on_the_gpu_that_is_named() {
    let Some(images) = Images::on(|| Machine { engine_mib: [16, 8], context_bytes: 1 << 20, ..Machine::with(2, "1G") }) else { return };
    let [mut plain, mut engine] = ["plain", "engine"].map(|name| {
        images.machine.engine_with(name, |command| {
            in_own_session(without_inherited(command.env("SIMGPU_RESTORE_THREAD", "1").env("CUDA_VISIBLE_DEVICES", "0")));
        })
    });
    images.save("engine", "image").expect(0, "saved engine", "");
    engine.ended();
    let image = images.image("image");
    let before = images.machine.gpus();
    let at = |gpus: &str| images.vramctl(&format!("load {image} --gpus {gpus} --dry-run"));
    let planned = at("1").expect(0, "can be loaded", "");
    assert!(planned.out.contains("GPU 1 (GPU-73696d76) in place of GPU-73696d75"), "{planned:?}");
    let unmoved = at("0").expect(0, "can be loaded", "");
    assert!(!unmoved.out.contains("in place of"), "{unmoved:?}");
    at("0,1").expect(2, "", "the program has 1 GPU, and --gpus names 2");
    at("7").expect(2, "", "no GPU 7");
    assert_eq!(images.machine.gpus(), before);

    // Only the GPU where it goes needs room.
    let hog = images.machine.hog(0, 960);
    images.vramctl(&format!("load {image} --dry-run")).expect(4, "", "too little memory on GPU 0");
    at("1").expect(0, "can be loaded", "");
    let mut loaded = Program::spawn(&mut images.cli(&format!("load {image} --gpus 1 --name e1")));
    is_well(&mut loaded, &mut plain, 1);
    assert_eq!((images.machine.gpus()[1].1, images.uuids("e1")), (1, vec!["GPU-73696d76".to_owned()]));
    // Commands find it there, and its memory comes back there.
    images.vramctl("pause --gpu 1").expect(0, "paused", "");
    images.vramctl("resume --gpu 1").expect(0, "resumed", "");
    images.vramctl("suspend e1").expect(0, "suspended", "");
    images.vramctl("resume e1").expect(0, "resumed", "");
    is_well(&mut loaded, &mut plain, 2);
    images.save("e1", "again").expect(0, "saved e1", "");
    loaded.ended();
    let mut again = images.load("again", "e2");
    is_well(&mut again, &mut plain, 3);
    assert_eq!(images.uuids("e2"), ["GPU-73696d76"]);
    again.end();
    drop(hog);
}

/// What `scripts/gpu-images` does on two real machines.
#[test]
fn an_image_is_carried_to_another_machine_in_an_archive() {
    let Some(mut images) = Images::new() else { return };
    let folder = images.machine.folder.path().to_owned();
    let part = |images: &Images, part: &str, directory: &str| {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/gpu-images");
        let mut command = images.machine.command("python3", &[script.to_str().unwrap(), "--only", part]);
        let bin = Path::new(common::command_line()).parent().unwrap();
        command.arg("--bin").arg(bin).arg("--images").arg(folder.join(directory)).arg("--tar").arg(folder.join("carried.tar.gz"));
        command.env("VRAMCTL_CRIU", images.criu).env("SIMGPU_RESTORE_THREAD", "1");
        let done = Ran::of(in_own_session(without_inherited(&mut command))).expect(0, "", "");
        let last = done.out.lines().last().unwrap();
        serde_json::from_str::<serde_json::Value>(last).unwrap()
    };
    let exported = part(&images, "export", "images/here");
    images.machine.becomes(1, 9, 0);
    fs::remove_dir_all(folder.join("images")).unwrap();
    let imported = part(&images, "import", "images/there");
    assert_eq!((&imported["equal"], &imported["answer"]), (&true.into(), &exported["answer"]), "{imported}");
    assert_eq!(imported["was"], exported["machine"]);
    assert_ne!(imported["here"]["gpus"], imported["was"]["gpus"]);
    common::eventually("no process is left", || images.processes().is_empty());
}

#[test]
fn copies_get_the_gpus_that_are_named_in_turn() {
    const PROGRAM: &str = r#"
import ctypes, signal
pointer = ctypes.c_void_p()
assert ctypes.CDLL("libcudart.so.13").cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(4 << 20)) == 0
signal.pause()
"#;
    let Some(images) = Images::on(|| Machine::with(2, "1G")) else { return };
    let mut command = images.cli("run -d --name one --no-python -- python3 -c");
    Ran::of(command.arg(PROGRAM).env("CUDA_VISIBLE_DEVICES", "0").env("SIMGPU_RESTORE_THREAD", "1")).expect(
        0,
        "runs in the background",
        "",
    );
    common::eventually("it runs", || images.vramctl("status one").code == Some(0));
    images.save("one", "image").expect(0, "saved one", "");
    let load = format!("load {} --copies 3 --gpus 0,1 --name c", images.image("image"));
    let planned = images.vramctl(&format!("{load} --dry-run")).expect(0, "can be loaded", "");
    assert!(planned.out.contains("GPU 1 (GPU-73696d76) in place of GPU-73696d75"), "{planned:?}");
    images.vramctl(&format!("{load} --detach")).expect(0, "", "loaded c-3");
    assert_eq!(["c-1", "c-2", "c-3"].map(|name| images.uuids(name)[0].clone()), ["GPU-73696d75", "GPU-73696d76", "GPU-73696d75"]);
    for name in ["c-1", "c-2", "c-3"] {
        images.vramctl(&format!("stop {name}")).expect(0, "", "");
    }
    images.nothing_is_left("copies");
}

/// Copies that are loaded together have the disk read each piece once, whoever of them reads it.
#[test]
fn copies_read_the_disk_once() {
    const BYTES: u64 = 96 << 20;
    const PROGRAM: &str = r#"
import ctypes, os, signal
cuda, pointer, contents = ctypes.CDLL("libcudart.so.13"), ctypes.c_void_p(), os.urandom(96 << 20)
assert cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(len(contents))) == 0
assert cuda.cudaMemcpy(pointer, contents, ctypes.c_size_t(len(contents)), 1) == 0
del contents
print("ready", flush=True)
signal.pause()
"#;
    let Some(images) = Images::new() else { return };
    let mut command = images.cli("run --name one --no-python -- python3 -c");
    let mut program = Program::ready(in_own_session(command.arg(PROGRAM).env("SIMGPU_RESTORE_THREAD", "1")));
    images.save("one", "image").expect(0, "saved one", "");
    program.ended();
    // From a cold cache.
    for pack in fs::read_dir(images.machine.folder.path().join("images/.store/packs")).unwrap() {
        let pack = fs::File::open(pack.unwrap().path()).unwrap();
        pack.sync_all().unwrap();
        assert_eq!(unsafe { libc::posix_fadvise(pack.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) }, 0);
    }
    let mut load = images.cli(&format!("load {} --copies 3 --name c --log /dev/null", images.image("image")));
    let load = load.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    common::eventually("all run", || ["c-1", "c-2", "c-3"].iter().all(|name| images.vramctl(&format!("status {name}")).code == Some(0)));
    let read = |pid: u32| {
        let counts = fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
        counts.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.parse::<u64>().ok()).unwrap_or(0)
    };
    let from_disk: u64 = images.processes().into_iter().map(read).sum();
    eprintln!("three copies of {BYTES} bytes: {from_disk} from the disk");
    assert!(from_disk < BYTES * 3 / 2, "{from_disk}");
    assert_eq!(unsafe { libc::kill(load.id() as i32, libc::SIGTERM) }, 0);
    Ran::end_of(load);
    images.nothing_is_left("copies");
}

/// Another machine has other UUIDs. A program gets what can only be meant there; else the message says what to choose from.
#[test]
fn a_program_is_loaded_on_another_machine() {
    let Some(mut images) = Images::new() else { return };
    let [works_in, away] = ["works in", "away"].map(|name| images.machine.folder.path().join(name));
    fs::create_dir(&works_in).unwrap();
    let mut engine = images.machine.engine_with("engine", |command| {
        in_own_session(without_inherited(command.env("SIMGPU_RESTORE_THREAD", "1").current_dir(&works_in)));
    });
    let answer = engine.ask("generate 1");
    images.save("engine", "image").expect(0, "saved engine", "");
    engine.ended();
    let image = images.image("image");
    images.machine.becomes(1, 5, 0);
    let mut loaded = images.load("image", "e1");
    loaded.verify();
    assert_eq!((loaded.ask("generate 1"), images.uuids("e1")), (answer.clone(), vec!["GPU-73697275".to_owned()]));
    loaded.end();
    common::eventually("it has ended", || images.machine.gpus() == [(0, 0)]);

    let folder = PathBuf::from(&image);
    fs::rename(&works_in, &away).unwrap();
    refuses_to_load(&images, &folder).expect(1, "", &format!("not here: {}; make them", works_in.display()));
    fs::rename(&away, &works_in).unwrap();
    images.machine.becomes(1, 5, 1);
    let refused = refuses_to_load(&images, &folder).expect(
        1,
        "",
        "GPU-73696d75 (Simulated GPU), which is not here, and there is no other of the model",
    );
    assert!(refused.err.contains("Nothing was started"), "{refused:?}");
    images.vramctl(&format!("load {image} --gpus 0 --dry-run")).expect(1, "", "GPU-73696d75 is a Simulated GPU, GPU 0 a Simulated GPU 1");

    images.machine.becomes(2, 6, 0);
    refuses_to_load(&images, &folder).expect(2, "", "of the model there are GPU 0, 1: choose with --gpus");
    let mut loaded = Program::spawn(&mut images.cli(&format!("load {image} --gpus 1 --name e2")));
    assert_eq!((loaded.ask("generate 1"), images.uuids("e2")), (answer, vec!["GPU-73697376".to_owned()]));
    loaded.end();

    // A driver restores what the same one has saved.
    let other = |more: &str| Ran::of(images.cli(&format!("load {image} --gpus 0 --dry-run{more}")).env("SIMGPU_CUDA", "13.2"));
    other("").expect(1, "", "made with a driver for CUDA 13.0, and here is one for 13.2");
    other(" --any-driver").expect(0, "can be loaded", "warning");
    // Before 580, none restores on another GPU.
    let mut load = images.cli(&format!("load {image} --gpus 0 --dry-run --any-driver"));
    Ran::of(load.env("SIMGPU_CUDA", "12.9")).expect(7, "", "cannot restore on another GPU");
}

/// A terminal, and a command that has it as its streams.
struct Terminal {
    keyboard: fs::File,
    lines: std::io::Lines<BufReader<fs::File>>,
    program: std::process::Child,
}

impl Terminal {
    fn start(command: &mut Command) -> Self {
        let (mut ours, mut its) = (0, 0);
        let opened = unsafe { libc::openpty(&raw mut ours, &raw mut its, ptr::null_mut(), ptr::null(), ptr::null()) };
        assert_eq!(opened, 0);
        let [ours, its] = [ours, its].map(|file| unsafe { fs::File::from_raw_fd(file) });
        let streams = [(); 3].map(|()| Stdio::from(its.try_clone().unwrap()));
        let [stdin, stdout, stderr] = streams;
        let program = in_own_session(without_inherited(command)).stdin(stdin).stdout(stdout).stderr(stderr).spawn().unwrap();
        Self { keyboard: ours.try_clone().unwrap(), lines: BufReader::new(ours).lines(), program }
    }

    fn shows(&mut self, what: &str) {
        assert!(self.lines.by_ref().map_while(Result::ok).any(|line| line.contains(what)), "it does not show {what}");
    }
}

#[test]
fn a_program_on_a_terminal_is_loaded_on_another() {
    let Some(images) = Images::new() else { return };
    let engine = common::programs().join("engine");
    let mut command = images.cli(&format!("run --name engine --no-python -- {} --weights-mib 16 --kv-mib 8", engine.display()));
    let mut before = Terminal::start(command.env("SIMGPU_RESTORE_THREAD", "1"));
    before.shows("ready");
    images.save("engine", "image").expect(0, "saved", "");
    before.program.wait().unwrap();
    for more in ["", " --dry-run", " --detach"] {
        let load = format!("load {} --name e{more}", images.image("image"));
        images.vramctl(&load).expect(1, "", "its streams were a terminal");
    }
    images.nothing_is_left("without a terminal");
    loads_on_a_terminal(&images);
}

/// The terminal is that of the user's shell, which leads its session and is not in the image.
#[test]
fn a_program_in_a_shell_is_loaded_on_another_terminal() {
    let Some(images) = Images::new() else { return };
    let engine = common::programs().join("engine");
    let run = images.cli(&format!("run --image --name engine --no-python -- {} --weights-mib 16 --kv-mib 8", engine.display()));
    // The leader of a session without a terminal gets that which it opens.
    let mut shell = Command::new("sh");
    shell.args(["-c", r#"exec <>/proc/self/fd/0; "$@"; true"#, "sh"]).arg(run.get_program()).args(run.get_args());
    shell.envs(run.get_envs().filter_map(|(name, value)| Some((name, value?)))).env("SIMGPU_RESTORE_THREAD", "1");
    let mut before = Terminal::start(&mut shell);
    before.shows("ready");
    images.save("engine", "image").expect(0, "saved", "");
    before.program.wait().unwrap();
    loads_on_a_terminal(&images);
}

fn loads_on_a_terminal(images: &Images) {
    let mut loaded = Terminal::start(&mut images.cli(&format!("load {} --name e", images.image("image"))));
    loaded.shows("loaded e");
    loaded.keyboard.write_all(b"verify\n").unwrap();
    loaded.shows("weights ok");
    loaded.keyboard.write_all(&[4]).unwrap();
    loaded.program.wait().unwrap();
    images.nothing_is_left("a terminal");
}

/// A dry run names all that is in the way at once, and starts nothing.
#[test]
fn a_dry_run_names_all_that_is_in_the_way() {
    let Some(images) = Images::new() else { return };
    let data = images.machine.folder.path().join("data");
    fs::write(&data, "before").unwrap();
    let name = std::ffi::CString::new(data.to_str().unwrap()).unwrap();
    let mut engine = images.machine.engine_with("engine", |command| {
        in_own_session(without_inherited(command.env("SIMGPU_RESTORE_THREAD", "1")));
        let open = move || {
            let file = unsafe { libc::open(name.as_ptr(), libc::O_RDONLY) };
            unsafe { libc::dup2(file, 50) };
            unsafe { libc::close(file) };
            Ok(())
        };
        unsafe { command.pre_exec(open) };
    });
    images.save("engine", "image").expect(0, "saved", "");
    engine.ended();
    let dry = |more: &str| images.cli(&format!("load {} --dry-run{more}", images.image("image")));
    Ran::of(&mut dry("")).expect(0, "engine can be loaded: 1 process, ", "");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    fs::write(&data, "longer than before").unwrap();
    let mut all = dry(&format!(" --copies 40 --port 8000={port}"));
    let elsewhere = images.machine.folder.path().join("elsewhere");
    let ran = Ran::of(all.env("VRAMCTL_CRIU", "/nowhere/criu").env("VRAMCTL_DIR", elsewhere)).expect(1, "", "images need CRIU");
    let wanted =
        ["data (18 bytes instead of 6)", "the program's control socket is in", "too little memory on GPU 0", "cannot listen at 127.0.0.1"];
    assert!(wanted.iter().all(|part| ran.err.contains(part)), "{ran:?}");
    images.vramctl(&format!("load {} --dry-run", images.image("none"))).expect(1, "", "there is no image");
    fs::remove_file(&data).unwrap();
    images.vramctl(&format!("load {} --dry-run", images.image("image"))).expect(1, "", "data (No such file");
    images.nothing_is_left("dry runs");
}

/// A disk that has gone bad since is named, with the file. Nothing is left of the program, and the image can be loaded once the disk is well.
#[test]
fn a_file_that_cannot_be_read_is_named() {
    let Some(images) = Images::new() else { return };
    let shim = common::built("read_fails.so", "read_fails.c", &common::SHARED);
    let is_bad = images.machine.folder.path().join("bad");
    let mut engine = images.machine.engine_with("engine", |command| {
        in_own_session(without_inherited(command.env("SIMGPU_RESTORE_THREAD", "1").env("LD_PRELOAD", &shim)));
        command.env("READ_FAILS", ".pack").env("READ_FAILS_WHILE", &is_bad);
    });
    images.save("engine", "image").expect(0, "saved", "");
    engine.ended();
    let folder = PathBuf::from(images.image("image"));
    let files = |folder: &Path| fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect::<Vec<_>>();
    let mut all = files(&folder.join("criu"));
    all.extend(files(&folder.join("../.store/packs")).into_iter().filter(|path| path.extension().is_some_and(|ending| ending == "index")));
    all.extend([folder.join("contents"), folder.join("manifest.json"), folder.join("../.store/format")]);
    assert!(all.len() > 8, "{all:?}");
    let is_named = |ran: &Ran, file: &str| ran.text().contains(file) && ran.text().contains("Input/output error");
    let store = folder.parent().unwrap().display().to_string();
    for path in &all {
        let file = path.file_name().unwrap().to_str().unwrap();
        for words in [format!("load {} --name e", folder.display()), format!("images {store} verify image")] {
            let mut command = images.cli(&words);
            let ran = Ran::of(command.env("LD_PRELOAD", &shim).env("READ_FAILS", format!("/{file}")));
            assert!(ran.code == Some(1) && is_named(&ran, file), "{ran:?}");
        }
    }
    // The contents are read by the program itself.
    fs::write(&is_bad, "").unwrap();
    let ran = refuses_to_load(&images, &folder);
    assert!(ran.code == Some(1) && is_named(&ran, "pack") && ran.err.contains("Nothing of the program is left"), "{ran:?}");
    fs::remove_file(&is_bad).unwrap();
    images.nothing_is_left("a read error");
    let mut whole = images.load("image", "e");
    whole.verify();
    whole.end();
}

/// Files that were whole when a load began, and are not any more when they are used.
#[test]
fn a_file_that_shrinks_in_a_load_ends_it() {
    let Some(images) = Images::new() else { return };
    let mut engine = images.engine("engine");
    images.save("engine", "image").expect(0, "saved", "");
    engine.ended();
    let folder = PathBuf::from(images.image("image"));
    let with_ending = |folder: PathBuf, ending: &str| {
        let mut files = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
        files.find(|path| path.to_str().unwrap().ends_with(ending)).unwrap()
    };
    let pack = with_ending(folder.join("../.store/packs"), ".pack");
    let files = folder.join("criu/files.img");
    let pages = with_ending(folder.join("criu"), "pages-1.img");
    let cases = [
        ("restore-before", files, "it has become shorter"),
        ("restore-before", pages, "it has become shorter"),
        ("restore-after", pack, "is damaged"),
    ];
    for (at, path, says) in cases {
        let whole = fs::read(&path).unwrap();
        let mut load = images.cli(&format!("load {} --name e --log /dev/null", folder.display()));
        let (held, load) = images.holding(at, &mut load);
        let mut load = load.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let _input = load.stdin.take();
        held.is_reached();
        fs::File::options().write(true).open(&path).unwrap().set_len(4096.min(whole.len() as u64 / 2)).unwrap();
        held.go();
        Ran::end_of(load).expect(1, "", says);
        images.nothing_is_left(&format!("{path:?}"));
        fs::write(&path, whole).unwrap();
    }
    let mut whole = images.load("image", "e");
    whole.verify();
    whole.end();
}

/// Each file is whole by itself, but it is another's.
#[test]
fn what_is_swapped_is_not_loaded() {
    let Some(images) = Images::new() else { return };
    let engine = images.engine("engine");
    let other = images.machine.start_with("other", "engine --weights-mib 16 --kv-mib 8 --seed 7", |command| {
        in_own_session(without_inherited(command.env("SIMGPU_RESTORE_THREAD", "1")));
    });
    for name in ["engine", "other"] {
        images.save(name, name).expect(0, "saved", "");
    }
    drop((engine, other));
    let [own, its] = ["engine", "other"].map(|name| PathBuf::from(images.image(name)));
    let swap = |one: &Path, two: &Path| {
        let aside = one.with_extension("aside");
        for (from, to) in [(one, aside.as_path()), (two, one), (&aside, two)] {
            fs::rename(from, to).unwrap();
        }
    };
    let packs = own.join("../.store/packs");
    let mut packs: Vec<_> = fs::read_dir(packs).unwrap().map(|file| file.unwrap().path()).collect();
    packs.retain(|path| path.extension().is_some_and(|ending| ending == "pack"));
    let [first, second] = packs.as_slice() else { panic!("{packs:?}") };
    let in_own = |name: &str| own.join("criu").join(name);
    let inside = [in_own("files.img"), in_own("inventory.img")];
    let pairs = [
        (own.join("contents"), its.join("contents")),
        (own.join("criu/files.img"), its.join("criu/files.img")),
        (inside[0].clone(), inside[1].clone()),
        (first.clone(), second.clone()),
        (first.with_extension("index"), second.with_extension("index")),
    ];
    for (one, two) in &pairs {
        swap(one, two);
        let ran = refuses_to_load(&images, &own);
        assert!(ran.code == Some(1) && ran.err.contains("damaged"), "{one:?} and {two:?}: {ran:?}");
        swap(one, two);
    }
    let mut whole = images.load("engine", "e");
    whole.verify();
    whole.end();
}

/// Of two saves of one program, one does it; two programs are saved at once; a `gc` beside all that takes nothing away.
#[test]
fn two_saves_at_once_and_a_gc_beside_them() {
    let Some(images) = Images::new() else { return };
    let [mut plain, mut one, mut two] = ["plain", "one", "two"].map(|name| images.engine(name));
    let begin = |command: &mut Command| command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut command = images.cli(&format!("save one {}", images.image("first")));
    let (held, command) = images.holding("dump-before", &mut command);
    let save = begin(command);
    held.is_reached();
    // The name is taken, and so is the program.
    images.save("two", "first").expect(5, "", "being saved");
    images.save("one", "second").expect(5, "", "being saved");
    assert!(!Path::new(&images.image("second")).exists());
    is_well(&mut two, &mut plain, 1);
    // Another program is saved meanwhile, beside whatever the first has written.
    images.vramctl(&format!("save two {} --keep --verify", images.image("third"))).expect(0, "verify", "");
    is_well(&mut two, &mut plain, 2);
    let folder = images.machine.folder.path().join("images");
    let cleans = begin(&mut images.cli(&format!("images {} gc", folder.display())));
    held.go();
    Ran::end_of(save).expect(0, "saved one", "");
    one.ended();
    // What both have written at once is there twice, until now.
    Ran::end_of(cleans).expect(0, "freed", "");
    for name in ["first", "third"] {
        let mut loaded = images.load(name, name);
        loaded.verify();
        loaded.end();
    }
}

/// What another user could have changed is not run.
#[test]
fn another_users_image_is_not_loaded() {
    const NOBODY: u32 = 65_534;
    let Some(images) = Images::new() else { return };
    let mut engine = images.engine("engine");
    images.save("engine", "image").expect(0, "saved", "");
    engine.ended();
    let image = PathBuf::from(images.image("image"));
    let load = format!("load {} --name e --log /dev/null", image.display());
    for path in [image.parent().unwrap(), &image, &image.join("criu"), &image.join("criu/inventory.img"), &image.join("manifest.json")] {
        std::os::unix::fs::chown(path, Some(NOBODY), None).unwrap();
        images.vramctl(&load).expect(1, "", "belongs to user 65534");
        std::os::unix::fs::chown(path, Some(0), None).unwrap();
        let mode = fs::metadata(path).unwrap().permissions().mode();
        fs::set_permissions(path, fs::Permissions::from_mode(mode | 0o020)).unwrap();
        images.vramctl(&load).expect(1, "", "others may write to it");
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let mut whole = images.load("image", "e");
    whole.verify();
    whole.end();
}

/// A program that was started for it has no `io_uring`, and is saved with its filter. What it appends to may have grown; what it has loaded must be as it
/// was.
#[test]
fn a_program_of_run_image_goes_on_with_the_files_of_before() {
    let Some(images) = Images::new() else { return };
    let asks =
        "import ctypes, errno; c = ctypes.CDLL(None, use_errno=True); print(c.syscall(425, 1, 0), errno.errorcode[ctypes.get_errno()])";
    images.machine.vramctl(&["run", "--image", "--no-python", "--", "python3", "-c", asks]).expect(0, "-1 ENOSYS", "");
    let mut plain = images.engine("plain");
    let [log, data] = ["log", "data"].map(|name| images.machine.folder.path().join(name));
    for path in [&log, &data] {
        fs::write(path, "before\n").unwrap();
    }
    let opened = [(&log, libc::O_WRONLY | libc::O_APPEND, 51), (&data, libc::O_RDONLY, 52)]
        .map(|(path, how, number)| (std::ffi::CString::new(path.to_str().unwrap()).unwrap(), how, number));
    let program = common::programs().join("engine");
    let words =
        ["run", "--image", "--name", "engine", "--no-python", "--", program.to_str().unwrap(), "--weights-mib", "16", "--kv-mib", "8"];
    let mut command = images.machine.cli(&words);
    in_own_session(without_inherited(command.env("SIMGPU_RESTORE_THREAD", "1")));
    unsafe {
        command.pre_exec(move || {
            for (path, how, number) in &opened {
                let file = libc::open(path.as_ptr(), *how);
                libc::dup2(file, *number);
                libc::close(file);
            }
            Ok(())
        })
    };
    let mut engine = Program::ready(&mut command);
    images.save("engine", "image").expect(0, "saved", "");
    engine.ended();
    fs::write(&log, "before\nand more\n").unwrap();
    let mut loaded = images.load("image", "e");
    is_well(&mut loaded, &mut plain, 1);
    let status = images.vramctl("status e --json").expect(0, "", "").json();
    let pid = status["processes"][0]["pid"].as_u64().unwrap();
    let info = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    assert!(info.lines().any(|line| line.split_whitespace().eq(["Seccomp:", "2"])), "{info}");
    loaded.end();
    // As large as before, so that CRIU would not notice.
    fs::write(&data, "BEFORE\n").unwrap();
    let refused = images.vramctl(&format!("load {} --name e --log /dev/null", images.image("image")));
    refused.expect(1, "", "data (written to since)");
}

/// The restored program runs before the driver has brought it back. What it asks of the device then waits.
#[test]
fn a_program_that_is_asked_while_it_is_being_loaded_answers() {
    let Some(images) = Images::new() else { return };
    let polls = common::built("polls", "polls.c", &["-l:libcuda.so.1"]);
    let mut command = images.machine.program("asked", &format!("{} ask_event asked", polls.display()));
    in_own_session(without_inherited(command.env("SIMGPU_RESTORE_THREAD", "1")));
    let mut program = Program::ready(&mut command);
    assert_eq!(program.ask(""), "10 0");
    images.save("asked", "image").expect(0, "saved", "");
    program.ended();
    let mut load = images.cli(&format!("load {} --name asked", images.image("image")));
    let (held, load) = images.holding("restore-after", &mut load);
    let mut loaded = Program::spawn(load);
    held.is_reached();
    // It is restored, and reads this before the driver is asked to bring it back.
    loaded.tell("");
    thread::sleep(Duration::from_millis(100));
    held.go();
    assert_eq!(loaded.line(), "20 0");
    assert_eq!(loaded.ask(""), "30 0");
}

#[test]
fn images_are_listed_verified_exported_and_removed() {
    let Some(images) = Images::new() else { return };
    let engine = images.engine("engine");
    for name in ["one", "two"] {
        images.vramctl(&format!("save engine {} --keep", images.image(name))).expect(0, "saved", "");
    }
    let folder = images.machine.folder.path().join("images");
    let run = |words: &str| images.vramctl(&format!("images {} {words}", folder.display()));
    let listed = run("--json").only_json();
    let bytes = |image: usize, of: &str| listed["images"][image]["bytes"][of].as_u64().unwrap();
    assert_eq!((bytes(0, "stored"), bytes(1, "stored")), (bytes(0, "shared"), bytes(1, "shared")), "{listed}");
    assert!(bytes(0, "contents") >= bytes(0, "stored") && bytes(0, "process") > 1 << 20, "{listed}");
    run("").expect(0, "two", "");
    run("verify one").expect(0, "one is whole", "");
    let other = images.machine.folder.path().join("other");
    run(&format!("export one {}", other.display())).expect(0, "exported one", "");
    run("rm one").expect(0, "removed one", "");
    run("rm one").expect(1, "", "there is no image");
    // What the other has is still needed.
    run("gc").expect(0, "freed 0 B", "");
    drop(engine);
    run("rm two").expect(0, "removed two", "");
    assert!(!run("gc").expect(0, "freed", "").out.contains("freed 0 B"));
    run("").expect(0, "no images", "");
    let exported = images.vramctl(&format!("images {}", other.display())).expect(0, "one", "");
    assert!(!exported.out.contains("two"));
    let mut loaded = Program::spawn(&mut images.cli(&format!("load {}/one --name e --quiet", other.display())));
    loaded.verify();
    loaded.end();
}

#[test]
fn a_program_that_cannot_be_saved_goes_on() {
    let Some(images) = Images::new() else { return };
    let [mut plain, mut engine] = ["plain", "engine"].map(|name| images.engine(name));
    fs::create_dir_all(images.image("taken")).unwrap();
    images.save("engine", "taken").expect(1, "", "exists already");
    is_well(&mut engine, &mut plain, 1);
    images.vramctl("suspend engine").expect(0, "suspended", "");
    images.save("engine", "image").expect(7, "", "resume it first");
    images.vramctl("resume engine").expect(0, "resumed", "");
    images.save("none", "image").expect(3, "", "none");
    let mut refused = images.cli(&format!("save engine {}", images.image("image")));
    Ran::of(refused.env("VRAMCTL_CRIU", "/bin/false")).expect(1, "", "does not say its version");
    is_well(&mut engine, &mut plain, 2);
    assert!(!Path::new(&images.image("image")).exists());
}

/// A save takes a while in which the program cannot be asked, and whoever saves may be killed. Commands say so, and wait for it.
#[test]
fn a_program_that_is_being_saved_is_known_and_waited_for() {
    let Some(images) = Images::new() else { return };
    let [mut plain, mut engine] = ["plain", "engine"].map(|name| images.engine(name));
    let mut save = images.cli(&format!("save engine {}", images.image("image")));
    let (held, save) = images.holding("dump-before", &mut save);
    let mut save = save.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    held.is_reached();
    let listed = images.vramctl("ps").expect(0, "being saved", "").out;
    assert!(!listed.contains("starting") && listed.contains(&engine.pid().to_string()), "{listed}");
    images.vramctl("status engine").expect(5, "", "being saved");
    images.vramctl("trim engine").expect(5, "", "being saved");
    let resumed = images.cli("resume engine").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    save.kill().unwrap();
    save.wait().unwrap();
    // CRIU goes on for a while.
    images.vramctl("ps").expect(0, "being saved", "");
    held.go();
    Ran::end_of(resumed).expect(0, "", "");
    is_well(&mut engine, &mut plain, 1);
    let left = fs::read_dir(images.machine.sockets()).unwrap().flatten();
    assert!(left.filter_map(|file| file.file_name().into_string().ok()).all(|name| !name.ends_with(".saving")));
}

#[test]
fn a_program_that_is_being_loaded_is_known_by_its_new_name() {
    let Some(images) = Images::new() else { return };
    let [mut plain, engine] = ["plain", "engine"].map(|name| images.engine(name));
    images.save("engine", "image").expect(0, "saved", "");
    drop(engine);
    let mut load = images.cli(&format!("load {} --name e1", images.image("image")));
    let (held, load) = images.holding("restore-before", &mut load);
    let mut loaded = Program::spawn(load);
    held.is_reached();
    let listed = images.vramctl("ps").expect(0, "being loaded", "").out;
    assert!(listed.contains("e1") && !listed.contains("starting"), "{listed}");
    let waits = images.cli("wait e1 --for active").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Others are not held up.
    images.vramctl("pause plain").expect(0, "paused", "");
    images.vramctl("resume plain").expect(0, "resumed", "");
    held.go();
    is_well(&mut loaded, &mut plain, 1);
    Ran::end_of(waits).expect(0, "e1", "");
    loaded.end();
}

/// A load that is killed leaves neither a half program nor anything that is in the way of the next one.
#[test]
fn a_load_may_be_killed_at_any_step() {
    let Some(images) = Images::new() else { return };
    let mut engine = images.engine("engine");
    images.save("engine", "image").expect(0, "saved", "");
    engine.ended();
    let load = || images.cli(&format!("load {} --name e --log /dev/null", images.image("image")));
    let begin = |command: &mut Command| {
        let mut load = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        // Without input, the program would end by itself.
        (load.stdin.take(), load)
    };
    for (at, signal) in [("restore-before", libc::SIGKILL), ("restore-after", libc::SIGKILL), ("restore-after", libc::SIGINT)] {
        let mut command = load();
        let (held, command) = images.holding(at, &mut command);
        let (_input, mut load) = begin(command);
        held.is_reached();
        assert_eq!(unsafe { libc::kill(load.id() as i32, signal) }, 0);
        let code = load.wait().unwrap().code();
        assert_eq!(code, (signal != libc::SIGKILL).then_some(128 + signal));
        images.nothing_is_left(at);
    }
    for call in ["Restore", "Unlock"] {
        for moment in ["before", "after"] {
            let fault = format!("cuCheckpointProcess{call}:1:kill-{moment}");
            let (_input, mut load) = begin(load().env("SIMGPU_FAIL", &fault));
            assert_eq!(load.wait().unwrap().code(), None, "{fault}: the command was not killed");
            images.nothing_is_left(&fault);
        }
    }
    for round in 1..10 {
        let (_input, mut load) = begin(&mut load());
        thread::sleep(Duration::from_millis(round * 30));
        load.kill().unwrap();
        load.wait().unwrap();
        if images.vramctl("status e").code == Some(0) {
            // It runs, or is about to end.
            images.vramctl("stop e");
        }
        images.nothing_is_left(&format!("{} ms", round * 30));
    }
    let mut whole = images.load("image", "e");
    whole.verify();
    whole.end();
}

#[test]
fn a_command_may_be_killed_at_any_step() {
    let Some(images) = Images::new() else { return };
    let [mut plain, mut engine] = ["plain", "engine"].map(|name| images.engine(name));
    let mut token = 0;
    let mut comes_back = |saved: &Ran, about: &str| {
        assert_eq!(saved.code, None, "{about}: the command was not killed: {saved:?}");
        assert!(!images.has_image(), "{about}");
        images.vramctl("resume engine").expect(0, "", "");
        token += 1;
        is_well(&mut engine, &mut plain, token);
    };
    for call in ["Lock", "Checkpoint"] {
        for moment in ["before", "after"] {
            let fault = format!("cuCheckpointProcess{call}:1:kill-{moment}");
            let mut command = images.cli(&format!("save engine {}", images.image("image")));
            comes_back(&Ran::of(command.env("SIMGPU_FAIL", &fault)), &fault);
        }
    }
    for moment in ["before", "after"] {
        let mut save = images.cli(&format!("save engine {}", images.image("image")));
        comes_back(&Ran::of(images.killing(&format!("dump-{moment}"), "command", &mut save)), moment);
    }
    // What has been left is in nobody's way.
    images.save("engine", "image").expect(0, "saved", "");
    engine.ended();
    let mut loaded = images.load("image", "loaded");
    is_well(&mut loaded, &mut plain, 7);
}

#[test]
fn a_command_may_be_killed_at_any_time() {
    let Some(images) = Images::new() else { return };
    let [mut plain, mut engine] = ["plain", "engine"].map(|name| images.engine(name));
    for round in 1..16_u32 {
        let mut save =
            images.cli(&format!("save engine {}", images.image("image"))).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        thread::sleep(Duration::from_millis(u64::from(round) * 20));
        let _ = save.kill();
        save.wait().unwrap();
        if images.has_image() {
            // It may have been killed before the program was.
            engine.kill();
            let mut loaded = images.load("image", "loaded");
            is_well(&mut loaded, &mut plain, round);
            return loaded.end();
        }
        images.vramctl("resume engine").expect(0, "", "");
        is_well(&mut engine, &mut plain, round);
    }
}

#[test]
fn criu_may_fail_and_the_program_may_end_before_and_after_a_dump() {
    let Some(images) = Images::new() else { return };
    let [mut plain, mut engine] = ["plain", "engine"].map(|name| images.engine(name));
    let save = |moment: &str, victim: &str| {
        let mut save = images.cli(&format!("save engine {}", images.image("image")));
        Ran::of(images.killing(&format!("dump-{moment}"), victim, &mut save))
    };
    for (token, moment) in (1..).zip(["before", "after"]) {
        save(moment, "criu").expect(1, "", "The program goes on");
        assert!(!images.has_image());
        is_well(&mut engine, &mut plain, token);
    }
    for moment in ["before", "after"] {
        let saved = save(moment, &engine.pid().to_string());
        engine.ended();
        assert_eq!(saved.code == Some(0), images.has_image(), "{saved:?}");
        if images.has_image() {
            let mut loaded = images.load("image", "loaded");
            is_well(&mut loaded, &mut plain, 3);
            loaded.end();
            break;
        }
        engine = images.engine("engine");
        for token in 1..3 {
            engine.ask(&format!("generate {token}"));
        }
    }
}

#[test]
fn a_disk_without_room_is_no_harm() {
    let Some(images) = Images::new() else { return };
    let [mut plain, mut engine] = ["plain", "engine"].map(|name| images.engine(name));
    let folder = PathBuf::from(images.image("image")).parent().unwrap().to_owned();
    fs::create_dir(&folder).unwrap();
    let mount = |words: &[&str]| Command::new(words[0]).args(&words[1..]).arg(&folder).status().is_ok_and(|done| done.success());
    if !mount(&["mount", "-t", "tmpfs", "-o", "size=20m,mode=0700", "tmpfs"]) {
        return eprintln!("not run: nothing can be mounted here");
    }
    let saved = images.save("engine", "image");
    let left = images.has_image();
    assert!(mount(&["umount", "-l"]));
    saved.expect(1, "", "The program goes on");
    assert!(!left);
    is_well(&mut engine, &mut plain, 1);
}

#[test]
fn what_was_in_dev_shm_comes_with_the_program() {
    let Some(images) = Images::new() else { return };
    let path = format!("/dev/shm/vramctl-test-{}", std::process::id());
    fs::write(&path, "shared").unwrap();
    let name = std::ffi::CString::new(path.as_str()).unwrap();
    let mut engine = images.machine.engine_with("engine", |command| {
        in_own_session(without_inherited(command.env("SIMGPU_RESTORE_THREAD", "1")));
        // Descriptor 50, which nobody else has.
        let open = move || {
            let file = unsafe { libc::open(name.as_ptr(), libc::O_RDWR) };
            unsafe { libc::dup2(file, 50) };
            Ok(())
        };
        unsafe { command.pre_exec(open) };
    });
    images.save("engine", "image").expect(0, "saved", "");
    engine.ended();
    fs::remove_file(&path).unwrap();
    let mut loaded = images.load("image", "loaded");
    loaded.verify();
    let status = images.vramctl("status loaded --json").expect(0, "", "").json();
    let pid = status["processes"][0]["pid"].as_u64().unwrap();
    assert_eq!(fs::read_to_string(format!("/proc/{pid}/fd/50")).unwrap(), "shared");
    assert_eq!(fs::read_to_string(format!("/proc/{pid}/root{path}")).unwrap(), "shared");
    assert!(!Path::new(&path).exists(), "it is the program's own");
}

/// The `/dev/shm` that each loaded program gets is mounted over the image, the log, and whatever else is there.
#[test]
fn images_and_logs_may_be_in_dev_shm() {
    let Some(images) = Images::new() else { return };
    let shared_memory = OwnSharedMemory::mount();
    let file = shared_memory.folder().join("file");
    fs::write(&file, "shared").unwrap();
    let name = std::ffi::CString::new(file.to_str().unwrap()).unwrap();
    let mut plain = images.engine("plain");
    let mut engine = images.machine.engine_with("engine", |command| {
        in_own_session(without_inherited(command.env("SIMGPU_RESTORE_THREAD", "1")));
        let open = move || {
            unsafe { libc::dup2(libc::open(name.as_ptr(), libc::O_RDWR), 50) };
            Ok(())
        };
        unsafe { command.pre_exec(open) };
    });
    let save = |program: &str, image: &str| images.vramctl(&format!("save {program} /dev/shm/images/{image}"));
    let load = |image: &str, name: &str, more: &str| images.cli(&format!("load /dev/shm/images/{image} --name {name}{more}"));
    save("engine --keep", "first").expect(0, "saved engine", "");
    is_well(&mut engine, &mut plain, 1);
    save("engine", "again").expect(0, "saved engine", "");
    engine.ended();
    fs::remove_file(&file).unwrap();
    let mut loaded = Program::spawn(&mut load("again", "e1", ""));
    is_well(&mut loaded, &mut plain, 2);
    let status = images.vramctl("status e1 --json").expect(0, "", "").json();
    let own = format!("/proc/{}/root/dev/shm", status["processes"][0]["pid"]);
    let names: Vec<_> = fs::read_dir(own).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["file"]);
    save("e1 --keep", "second").expect(0, "saved e1", "");
    is_well(&mut loaded, &mut plain, 3);
    loaded.end();

    let log = shared_memory.folder().join("log");
    let mut with_log = load("second", "e2", &format!(" --log {}", log.display())).stdin(Stdio::piped()).spawn().unwrap();
    let mut input = with_log.stdin.take().unwrap();
    let mut answers = |count: usize| {
        input.write_all(b"verify\n").unwrap();
        common::eventually("it answers", || fs::read_to_string(&log).is_ok_and(|text| text.matches("weights ok").count() == count));
    };
    answers(1);
    save("e2 --keep", "third").expect(0, "saved e2", "");
    answers(2);
    drop(input);
    assert!(with_log.wait().unwrap().success());
    let mut loaded = Program::spawn(&mut load("third", "e3", ""));
    loaded.tell("verify");
    // Its two streams were one, so it may have said there how long it was held.
    while !loaded.line().contains("weights ok") {}
    loaded.end();

    // What CRIU reads is watched there, too.
    let mut shrinks = load("third", "e4", " --log /dev/null");
    let (held, command) = images.holding("restore-before", &mut shrinks);
    let load = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    held.is_reached();
    fs::File::options().write(true).open("/dev/shm/images/third/criu/files.img").unwrap().set_len(9).unwrap();
    held.go();
    Ran::end_of(load).expect(1, "", "/dev/shm/images/third/criu/files.img: it has become shorter");
    plain.end();
    common::eventually("no process is left", || images.processes().is_empty());
}

/// What a loaded program would not find in its own `/dev/shm` is refused before it is saved, or before anything of it is started.
#[test]
fn control_sockets_and_criu_in_dev_shm_are_refused() {
    let Some(images) = Images::new() else { return };
    let _shared_memory = OwnSharedMemory::mount();
    let with_sockets = |command: &mut Command| _ = command.env("VRAMCTL_DIR", "/dev/shm/sockets");
    let in_shared = images.machine.engine_with("in-shared", |command| {
        with_sockets(in_own_session(without_inherited(command.env("SIMGPU_RESTORE_THREAD", "1"))));
    });
    let engine = images.engine("engine");
    let mut save = images.cli(&format!("save in-shared {}", images.image("none")));
    with_sockets(&mut save);
    Ran::of(&mut save).expect(7, "", "VRAMCTL_DIR");
    images.save("engine", "image").expect(0, "saved", "");
    let refuses = |change: &dyn Fn(&mut Command), words: &str| {
        for more in ["", " --dry-run"] {
            let mut load = images.cli(&format!("load {} --name e --log /dev/null{more}", images.image("image")));
            change(&mut load);
            let ran = Ran::of(load.stdin(Stdio::null())).expect(1, "", words);
            assert!(ran.err.contains("/dev/shm of its own") && ran.err.contains("Nothing was started"), "{ran:?}");
        }
    };
    refuses(&with_sockets, "control sockets are in /dev/shm/sockets");
    fs::write("/dev/shm/criu", format!("#!/bin/sh\nexec {} \"$@\"\n", images.criu.display())).unwrap();
    fs::set_permissions("/dev/shm/criu", fs::Permissions::from_mode(0o700)).unwrap();
    refuses(&|command| _ = command.env("VRAMCTL_CRIU", "/dev/shm/criu"), "CRIU is /dev/shm/criu");
    drop((in_shared, engine));
}

/// Zeros are not in the files. The device sets them, each run at once, and copies of the rest alone are made: new memory may hold anything.
#[test]
fn zeros_are_set_by_the_device_and_not_copied() {
    /// Allocations, piece by piece: zeros, or with something in the last byte. The last piece is as long as it says.
    const PROGRAM: &str = r#"
import ctypes, sys
cuda, runtime = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libcudart.so.13")
cuda.simgpu_calls.restype = ctypes.c_uint64
PIECE, FAILS = 2 << 20, [b"cuMemsetD8Async", ctypes.c_uint64(1), 2, ctypes.c_uint64(1)]
wanted, places, marks = [], [], iter(range(1, 99))
for pieces, last in [("0x00x0", 4608), ("000", PIECE), ("x", PIECE), ("xx00", 1536), ("0", PIECE + 512), ("x0x", PIECE)]:
    lengths = [PIECE] * (len(pieces) - 1) + [last]
    wanted.append(b"".join(bytes(length - 1) + bytes([next(marks) if piece == "x" else 0]) for piece, length in zip(pieces, lengths)))
    places.append(ctypes.c_void_p())
    assert runtime.cudaMalloc(ctypes.byref(places[-1]), ctypes.c_size_t(len(wanted[-1]))) == 0
    if pieces == "x":
        fresh = ctypes.create_string_buffer(PIECE)
        assert runtime.cudaMemcpy(fresh, places[-1], ctypes.c_size_t(PIECE), 2) == 0
        assert fresh.raw == b"\xd7" * PIECE, "new memory is to be dirty"
    assert runtime.cudaMemcpy(places[-1], wanted[-1], ctypes.c_size_t(len(wanted[-1])), 1) == 0
cuda.simgpu_reset_counts()
print("ready", flush=True)
for line in sys.stdin:
    if line == "fail\n":
        print(cuda.simgpu_fail(*FAILS), flush=True)
        continue
    equal = []
    for contents, place in zip(wanted, places):
        found = ctypes.create_string_buffer(len(contents))
        assert runtime.cudaMemcpy(found, place, ctypes.c_size_t(len(contents)), 2) == 0
        equal.append(found.raw == contents)
    # Only now: the copies have waited for the end of a load.
    counts = [cuda.simgpu_calls(name) for name in (b"cuMemcpyHtoDAsync_v2", b"cuMemsetD8Async")]
    cuda.simgpu_reset_counts()
    print(all(equal), *counts, flush=True)
"#;
    let Some(images) = Images::new() else { return };
    let mut command = images.cli("run --name zeros --no-python -- python3 -c");
    command.arg(PROGRAM).envs([("SIMGPU_RESTORE_THREAD", "1"), ("SIMGPU_DIRTY", "1")]);
    let mut program = Program::ready(in_own_session(&mut command));
    let save = |words: &str, name: &str| images.vramctl(&format!("save {words} {}", images.image(name)));
    // Copies, and runs of zeros. The library keeps all of an allocation's last 2 MiB, of which the rest is still dirty.
    let back = "True 10 6";
    save("zeros --keep", "kept").expect(0, "saved", "");
    assert_eq!(program.ask("check"), back);
    assert_eq!(program.ask("fail"), "0");
    let refused = save("zeros --keep", "refused");
    assert!(refused.code != Some(0) && refused.err.contains("cuMemsetD8Async"), "{refused:?}");
    images.vramctl("resume zeros").expect(0, "", "");
    assert_eq!(program.ask("check"), "True 10 7", "one was refused");
    save("zeros", "image").expect(0, "saved", "");
    program.ended();

    let mut loaded = images.load("image", "loaded");
    assert_eq!(loaded.ask("check"), back);
    assert_eq!(loaded.ask("fail"), "0");
    save("loaded", "fails").expect(0, "saved", "");
    loaded.ended();
    refuses_to_load(&images, Path::new(&images.image("fails"))).expect(1, "", "cuMemsetD8Async");
    images.nothing_is_left("a load whose zeros were refused");
}

/// A program that ends by itself before all of it is back has been loaded, and its exit code is the command's.
#[test]
fn a_program_may_end_while_it_is_being_loaded() {
    const PROGRAM: &str = r#"
import ctypes, os, sys
pointer = ctypes.c_void_p()
assert ctypes.CDLL("libcudart.so.13").cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(4 << 20)) == 0
print("ready", flush=True)
sys.stdin.read()
os._exit(7)
"#;
    let Some(images) = Images::new() else { return };
    let mut command = images.cli("run --name engine --no-python -- python3 -c");
    let mut engine = Program::ready(in_own_session(command.arg(PROGRAM).env("SIMGPU_RESTORE_THREAD", "1")));
    images.save("engine", "image").expect(0, "saved", "");
    engine.ended();
    // At once, at some moment, and before the command has looked for it.
    for more in ["", " --detach", " --log /dev/null"] {
        let mut load = images.cli(&format!("load {} --name e{more}", images.image("image")));
        Ran::of(load.stdin(Stdio::null())).expect(7, "", "loaded e (");
        let (held, load) = images.holding("restore-after", &mut load);
        let load = load.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        held.is_reached();
        let is_program = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|text| text.contains("stdin.read"));
        common::eventually("it has ended", || !images.processes().iter().any(is_program));
        held.go();
        Ran::end_of(load).expect(7, "", "loaded e (has ended)");
        images.nothing_is_left("a program that has ended");
    }
}

/// An idle engine's KV cache is not in the image, and that of one with a request is. Each answers right afterwards, and goes on with what it has begun.
#[test]
fn an_idle_engines_cache_is_not_saved() {
    /// The stand-in's engine, with weights of 4 MiB and a cache of 8.
    const PROGRAM: &str = r#"
import os, sys, threading
sys.path[:0] = [sys.argv[1]]
import server
from vllm.v1.engine.core import EngineCoreProc, EngineCoreRequestType, Request, after, first
engine = EngineCoreProc(server.weights("engine", 4), 8 << 20)

def ask(prompt, count):
    request = Request(prompt, count)
    engine.input_queue.put((EngineCoreRequestType.ADD, (request, 0)))
    return request

def serve():
    print("ready", flush=True)
    for line in sys.stdin:
        if line == "short\n":
            request = ask("Hello", 3)
            made = [request.outputs.get() for _ in range(4)]
            print(made == [*server.tokens("engine", 4, "Hello", 3), None], engine.scheduler.hits, flush=True)
        elif line == "begin\n":
            endless, state = ask("endless", 1 << 30), first(server.weights("engine", 4), "endless")
        if line in ("begin\n", "more\n"):
            is_right = True
            for _ in range(20):
                state = after(state)
                is_right &= endless.outputs.get() == int.from_bytes(state, "little")
            print(is_right, flush=True)
    os._exit(0)

threading.Thread(target=serve).start()
engine.run_busy_loop()
"#;
    /// What torch allocates for each.
    const SEGMENT: u64 = 20 << 20;
    let Some(images) = Images::new() else { return };
    let stand_in = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/tests/fake_vllm");
    let mut command = images.cli("run --image --name engine -- python3 -c");
    let mut engine = Program::ready(in_own_session(command.arg(PROGRAM).arg(stand_in).env("SIMGPU_RESTORE_THREAD", "1")));
    let save = |words: &str, name: &str| {
        let saved = images.vramctl(&format!("save {words} {} --json", images.image(name))).expect(0, "", "").json();
        saved["bytes"]["contents"].as_u64().unwrap()
    };
    assert_eq!(engine.ask("short"), "True 0");
    assert_eq!(engine.ask("short"), "True 1");
    assert!(save("engine --keep --keep-cache", "with") > SEGMENT);
    assert_eq!(engine.ask("short"), "True 2", "what is in its cache serves on");
    // Unless its loop does not answer in time, on a busy machine.
    let mut tries = 0;
    common::eventually("it is dropped", || {
        tries += 1;
        let is_dropped = save("engine --keep", &format!("without{tries}")) <= SEGMENT;
        let hits = if is_dropped { 2 } else { 2 + tries };
        assert_eq!(engine.ask("short"), format!("True {hits}"));
        is_dropped
    });
    engine.end();
    let mut loaded = images.load(&format!("without{tries}"), "loaded");
    assert_eq!(loaded.ask("short"), format!("True {}", 1 + tries), "nothing of it is used");
    assert_eq!(loaded.ask("short"), format!("True {}", 2 + tries));

    assert_eq!(loaded.ask("begin"), "True");
    assert!(save("loaded", "busy") > SEGMENT);
    loaded.ended();
    let mut busy = images.load("busy", "busy");
    assert_eq!(busy.ask("more"), "True");
    assert_eq!(busy.ask("short"), format!("True {}", 3 + tries), "its cache is there");
    busy.end();
    images.nothing_is_left("an engine");
}
