//! Images of programs on a simulated machine, by the real CRIU.

use super::machine::{Machine, Program, Ran};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;
use std::sync::OnceLock;

/// CRIU, where it works.
fn criu() -> Option<&'static Path> {
    static FOUND: OnceLock<Option<PathBuf>> = OnceLock::new();
    let find = || {
        let brought = super::artifacts().parent()?.join("criu/criu");
        let named = std::env::var_os("VRAMCTL_CRIU").map(PathBuf::from);
        let criu = named.unwrap_or(if brought.exists() { brought } else { "criu".into() });
        let works = unsafe { libc::geteuid() } == 0 && Command::new(&criu).arg("check").output().is_ok_and(|done| done.status.success());
        works.then_some(criu)
    };
    FOUND.get_or_init(find).as_deref()
}

/// A machine on which programs can be saved.
pub struct Images {
    pub machine: Machine,
    pub criu: &'static Path,
}

/// What a test that has failed leaves: programs outlive their commands, and servers need no input.
impl Drop for Images {
    fn drop(&mut self) {
        for pid in self.processes() {
            unsafe { libc::kill(pid.cast_signed(), libc::SIGKILL) };
        }
    }
}

/// Leaves a program none of the descriptors that this one has inherited from whatever started it.
pub fn without_inherited(command: &mut Command) -> &mut Command {
    let close = || {
        unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
        Ok(())
    };
    unsafe { command.pre_exec(close) }
}

/// The session of these tests may have been begun outside of their container, and CRIU saves no program of such a session.
pub fn in_own_session(command: &mut Command) -> &mut Command {
    let begin = || {
        unsafe { libc::setsid() };
        Ok(())
    };
    unsafe { command.pre_exec(begin) }
}

impl Images {
    /// `None`, and a message, where CRIU cannot work.
    pub fn new() -> Option<Self> {
        Self::on(|| Machine { engine_mib: [16, 8], context_bytes: 1 << 20, ..Machine::with(1, "1G") })
    }

    /// The same on another machine.
    pub fn on(machine: impl FnOnce() -> Machine) -> Option<Self> {
        let Some(criu) = criu() else {
            eprintln!("not run: no CRIU that works here, or not root (scripts/criu)");
            return None;
        };
        Some(Self { machine: machine(), criu })
    }

    pub fn cli(&self, words: &str) -> Command {
        let mut command = self.machine.cli(words);
        command.env("VRAMCTL_CRIU", self.criu);
        without_inherited(&mut command);
        command
    }

    pub fn vramctl(&self, words: &str) -> Ran {
        Ran::of(&mut self.cli(words))
    }

    pub fn engine(&self, name: &str) -> Program {
        self.machine.engine_with(name, |command| {
            in_own_session(without_inherited(command.env("SIMGPU_RESTORE_THREAD", "1")));
        })
    }

    /// The UUIDs of the GPUs of a process, as it tells them.
    #[track_caller]
    pub fn uuids(&self, name: &str) -> Vec<String> {
        let status = self.vramctl(&format!("status {name} --json")).expect(0, "", "").json();
        let devices = status["processes"].as_array().unwrap().iter().flat_map(|one| one["devices"].as_array().unwrap());
        devices.map(|device| device["uuid"].as_str().unwrap()[..12].to_owned()).collect()
    }

    pub fn image(&self, name: &str) -> String {
        self.machine.folder.path().join("images").join(name).to_str().unwrap().to_owned()
    }

    pub fn save(&self, program: &str, image: &str) -> Ran {
        self.vramctl(&format!("save {program} {}", self.image(image)))
    }

    /// Loads it, with this process's pipes as its streams: what they carry is the program's alone.
    pub fn load(&self, image: &str, name: &str) -> Program {
        Program::spawn(&mut self.cli(&format!("load {} --name {name}", self.image(image))))
    }
}

/// A `/dev/shm` of this thread's own, and of all that it starts. It goes with them.
pub struct OwnSharedMemory;

impl OwnSharedMemory {
    pub fn mount() -> Self {
        let mounted = unsafe {
            libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(ptr::null(), c"/".as_ptr(), ptr::null(), libc::MS_REC | libc::MS_PRIVATE, ptr::null()) == 0
                && libc::mount(c"tmpfs".as_ptr(), c"/dev/shm".as_ptr(), c"tmpfs".as_ptr(), 0, ptr::null()) == 0
        };
        assert!(mounted, "{}", std::io::Error::last_os_error());
        Self
    }

    pub fn folder(&self) -> &'static Path {
        Path::new("/dev/shm")
    }

    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(self.folder()).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// Where a CRIU is held.
pub struct Held {
    place: PathBuf,
}

impl Held {
    pub fn is_reached(&self) {
        super::eventually("CRIU runs", || self.place.with_extension("reached").exists());
    }

    pub fn go(&self) {
        fs::write(self.place.with_extension("go"), "").unwrap();
    }
}

impl Images {
    /// Has a command's CRIU wait: `dump-before`, `restore-after` and so on.
    pub fn holding<'a>(&self, at: &str, command: &'a mut Command) -> (Held, &'a mut Command) {
        let place = self.machine.folder.path().join(at);
        for ending in ["reached", "go"] {
            let _ = fs::remove_file(place.with_extension(ending));
        }
        self.between(command).env("HOLD", at).env("PLACE", &place);
        (Held { place }, command)
    }

    /// The processes that belong to this machine, beside this one.
    pub fn processes(&self) -> Vec<u32> {
        let folder = self.machine.folder.path().as_os_str().as_encoded_bytes();
        let entries = fs::read_dir("/proc").unwrap().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let belongs = |pid: &u32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.windows(folder.len()).any(|part| part == folder)
        };
        pids.filter(belongs).collect()
    }
}

impl Images {
    /// Has somebody be killed when a command runs CRIU: `command`, `criu`, or a process, at `dump-before`, `restore-after` and so on.
    pub fn killing<'a>(&self, at: &str, victim: &str, command: &'a mut Command) -> &'a mut Command {
        self.between(command).env("KILL", at).env("VICTIM", victim)
    }

    /// Has `tests/apps/criu_between.sh` stand between a command and CRIU.
    fn between<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/apps/criu_between.sh");
        command.env("VRAMCTL_CRIU", script).env("REAL", self.criu)
    }

    pub fn has_image(&self) -> bool {
        Path::new(&self.image("image")).join("manifest.json").exists()
    }

    /// Nothing is left of a program, and the next one is in nobody's way.
    #[track_caller]
    pub fn nothing_is_left(&self, about: &str) {
        super::eventually(&format!("{about}: no process is left"), || self.processes().is_empty());
        self.vramctl("ps").expect(0, "", "no process is managed");
        let files = fs::read_dir(self.machine.sockets()).unwrap().flatten();
        let files: Vec<_> = files.filter_map(|file| file.file_name().into_string().ok()).collect();
        let is_left = |name: &String| [".sock", ".loading", ".saving"].iter().any(|ending| name.ends_with(ending));
        assert!(!files.iter().any(is_left), "{about}: {files:?}");
        // Nobody has the store.
        let folder = self.machine.folder.path().join("images");
        self.vramctl(&format!("images {} gc", folder.display())).expect(0, "freed", "");
    }
}
