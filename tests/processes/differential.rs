//! What plain CUDA answers, a program gets under the library, errors included. `tests/apps/differ.c` makes random calls and prints each answer;
//! here it runs alone, under the library, and under the library while somebody pauses and resumes it all the time. All must print the same.
//!
//! A seed chooses the calls, the number of devices and the driver's age. `DIFFERENTIAL_SEED` repeats one, `DIFFERENTIAL_SECONDS` goes on with
//! new ones for so long: an hour is `DIFFERENTIAL_SECONDS=3600 cargo test --test processes -- --nocapture differential`.

use crate::common::machine::{Machine, Ran};
use crate::common::{SHARED, artifacts, cases, compile, library, own_folder, simulated_libraries};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::OnceLock;
use std::time::{Duration, Instant, UNIX_EPOCH};

/// How many calls, about, and how long a program that is to be paused rests between two.
const STEPS: &str = "2500";
const REST: &str = "150";

/// The folder with the program, and with two CUDA runtimes that it calls through a library each: the simulated one, and a copy of it with
/// another name.
fn programs() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let folder = own_folder().join("differ");
        fs::create_dir_all(&folder).unwrap();
        compile(&folder.join("differ"), &["differ.c"], &["-ldl", "-lpthread"]);
        for (name, end) in [("libcudart.so.13", b'3'), ("libcudart.so.12", b'2')] {
            let mut runtime = fs::read(artifacts().join("libsimcudart.so")).unwrap();
            let at = runtime.windows(name.len()).position(|window| window == b"libcudart.so.13").expect("its name");
            runtime[at + name.len() - 1] = end;
            fs::write(folder.join(name), runtime).unwrap();
            let link = format!("-l:{name}");
            compile(&folder.join(format!("{name}.calls")), &["differ_runtime.c"], &[&SHARED[..], &[&link]].concat());
        }
        folder
    })
}

/// A machine, and the functions that an older driver does not have: they answer 500 (`CUDA_ERROR_NOT_FOUND`).
struct Case {
    seed: u64,
    devices: u32,
    /// `SIMGPU_FAIL`.
    without: &'static str,
    runtimes: &'static [&'static str],
}

impl Case {
    fn of(seed: u64) -> Self {
        const BEFORE_12_5: &str = "cuCtxRecordEvent:1:500:*";
        const RUNTIMES: [&str; 2] = ["libcudart.so.13.calls", "libcudart.so.12.calls"];
        let without = ["", BEFORE_12_5][(seed / 2 % 2) as usize];
        Self { seed, devices: 1 + (seed % 2) as u32, without, runtimes: &RUNTIMES[..=(seed / 6 % 2) as usize] }
    }

    /// What the program prints. `meanwhile` gets the machine until the program has ended.
    fn answers(&self, preloaded: &[&Path], rest: &str, meanwhile: impl Fn(&Machine)) -> Vec<String> {
        let machine = Machine::with(self.devices, "2G");
        let (folder, seed) = (programs(), self.seed.to_string());
        let runtimes: Vec<_> = self.runtimes.iter().map(|name| folder.join(name).to_str().unwrap().to_owned()).collect();
        let arguments: Vec<_> = [&seed, STEPS, rest].into_iter().chain(runtimes.iter().map(String::as_str)).collect();
        let mut command = machine.preloaded(preloaded, folder.join("differ"), &arguments);
        command.env("LD_LIBRARY_PATH", format!("{}:{}", folder.display(), simulated_libraries().display()));
        command.env("SIMGPU_FAIL", self.without).env("VRAMCTL_TAG", "default").env("VRAMCTL_LOG", "error");
        let program = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let waits = std::thread::spawn(move || Ran::end_of(program));
        while !waits.is_finished() {
            meanwhile(&machine);
        }
        let ran = waits.join().unwrap();
        assert_eq!(ran.code, Some(0), "seed {}: {}\n{}", self.seed, ran.err, last_lines(&ran.out));
        ran.out.lines().map(str::to_owned).collect()
    }
}

fn last_lines(text: &str) -> String {
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(3)..].join("\n")
}

#[track_caller]
fn compare(case: &Case, plain: &[String], managed: &[String], how: &str) {
    let differs = plain.iter().zip(managed).position(|(plain, managed)| plain != managed);
    if let Some(at) = differs.or_else(|| (plain.len() != managed.len()).then(|| plain.len().min(managed.len()) - 1)) {
        let before = plain[at.saturating_sub(12)..at].join("\n");
        panic!(
            "DIFFERENTIAL_SEED={}, {} devices, without {:?}, {:?}, {how}:\n{before}\n  alone:        {}\n  with the library: {}",
            case.seed, case.devices, case.without, case.runtimes, plain[at], managed[at]
        );
    }
}

/// These seeds, or new ones until the time is over.
fn seeds(usual: u32) -> Box<dyn Iterator<Item = u64>> {
    let number = |name| std::env::var(name).ok().map(|text: String| text.parse::<u64>().expect("a number"));
    if let Some(seed) = number("DIFFERENTIAL_SEED") {
        return Box::new(std::iter::once(seed));
    }
    let first = UNIX_EPOCH.elapsed().map_or(0, |since| since.as_millis() as u64) % 1_000_000_000;
    if let Some(seconds) = number("DIFFERENTIAL_SECONDS") {
        let end = Instant::now() + Duration::from_secs(seconds);
        return Box::new((first..).take_while(move |_| Instant::now() < end));
    }
    Box::new(first..first + u64::from(cases(usual)))
}

#[test]
fn a_program_gets_what_plain_cuda_answers_also_while_it_is_paused() {
    let mut done = 0;
    for seed in seeds(6) {
        let case = Case::of(seed);
        let wait = |_: &Machine| std::thread::sleep(Duration::from_millis(2));
        let plain = case.answers(&[], "0", wait);
        compare(&case, &plain, &case.answers(&[&library()], "0", wait), "managed");
        let pauses = |machine: &Machine| {
            // A program that has no memory yet, or has just ended, cannot be paused.
            machine.vramctl("pause --all");
            machine.vramctl("resume --all");
        };
        compare(&case, &plain, &case.answers(&[&library()], REST, pauses), "paused and resumed");
        done += 1;
    }
    println!("{done} seeds");
}
