//! `vramctl doctor`.

use crate::arguments::LEVELS;
use crate::execute::Execute;
use crate::installation;
use crate::preloading;
use crate::ui::output;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::env::consts;
use std::ffi::CString;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;
use std::{env, fmt, fs, io, ptr, thread};
use vramctl_config::{self as config, Config};
use vramctl_control::discovery::Directory;
use vramctl_coordinator::checkpoint::{self, Whereabouts};
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::parallel;
use vramctl_coordinator::processes::{Found, Target};
use vramctl_driver::{self as driver, Survey};
use vramctl_host::system::resource_limit;
use vramctl_host::{is_one_file, limits};
use vramctl_images::Criu;
use vramctl_model::support::{self, ENGINES, Engine, RUNS, Run};
use vramctl_model::{Bytes, code};

#[derive(clap::Args)]
#[command(after_long_help = "\
Checks this machine as a program started from this shell would see it, and changes nothing: the library and whether it can be \
preloaded, the driver and its GPUs, what it cannot do, whether vramctl was run with them, host memory for backups and its speed, process limits, the directories of sockets, \
backups and reports, the variables, and the inference engines of the Python on PATH. Exits with 1 if something would fail; warnings do not count.

Examples:
  vramctl doctor
  vramctl doctor --json | jq '.checks[] | select(.verdict != \"ok\")'")]
pub struct Args {
    /// Print JSON: {"checks": [{"check", "verdict": "ok", "warning" or "failed", "message", "data"}]}
    #[arg(long)]
    json: bool,
}

/// The result of one check.
#[derive(Debug, Serialize)]
struct Finding {
    check: &'static str,
    verdict: Verdict,
    message: String,
    /// The same as numbers, if any.
    #[serde(skip_serializing_if = "Value::is_null")]
    data: Value,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    /// Works, with limits.
    Warning,
    Failed,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failed => "failed",
        }
    }
}

impl Finding {
    fn new(check: &'static str, verdict: Verdict, message: impl Into<String>) -> Self {
        Self { check, verdict, message: message.into(), data: Value::Null }
    }

    fn with(self, data: Value) -> Self {
        Self { data, ..self }
    }
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let mut findings = vec![library(), python_package()];
        let packages = python_packages();
        match driver::survey() {
            Ok(survey) => {
                findings.extend(gpus(&survey));
                findings.extend(operations(&survey));
                findings.push(tried(&survey, packages.as_ref().unwrap_or(&BTreeMap::new())));
            }
            Err(failure) if failure.call.starts_with("dlopen") => {
                let why = "there is no NVIDIA driver here (libcuda.so.1): programs started from here find no GPU. Install the driver, or start \
                           the container with `--gpus all`";
                findings.push(Finding::new("driver", Verdict::Failed, why));
            }
            Err(failure) => {
                findings.push(Finding::new("driver", Verdict::Failed, format!("{failure}: programs started from here find no GPU")));
            }
        }
        findings.push(nvml());
        findings.extend(lost());
        findings.extend([shared_memory(), host_memory(), limits(), sockets(), disk(), criu()]);
        findings.extend(reports());
        findings.push(variables());
        findings.extend(engines(packages.as_ref()));
        if self.json {
            output::print(&format!("{}\n", json!({ "checks": findings })))?;
        } else {
            output::say(
                &findings
                    .iter()
                    .map(|finding: &Finding| {
                        let head = format!("{:<8} {:<15} ", finding.verdict.name(), finding.check);
                        output::hanging(&head, &finding.message, output::width())
                    })
                    .collect::<Vec<_>>()
                    .join("\n"),
            )?;
        }
        let failed = findings.iter().any(|finding| finding.verdict == Verdict::Failed);
        Ok(if failed { Exit::Failed } else { Exit::Done })
    }

    fn wants_json(&self) -> bool {
        self.json
    }
}

fn library() -> Finding {
    let finding = |verdict, message: String| Finding::new("library", verdict, message);
    let path = match installation::library() {
        Ok(path) => path,
        Err(failure) => return finding(Verdict::Failed, failure.to_string()),
    };
    let checked = preloading::preload(&path, None, None).map_err(|failure| failure.to_string()).and_then(|_| {
        let version = preloading::version_of(&path)?;
        try_preloading(&path)?;
        Ok(version)
    });
    match checked {
        Err(why) => finding(Verdict::Failed, format!("{}: {why}", path.display())),
        Ok(version) if version != env!("CARGO_PKG_VERSION") => {
            let own = env!("CARGO_PKG_VERSION");
            finding(Verdict::Warning, format!("{} is version {version}, this command is {own}; install them together", path.display()))
        }
        Ok(version) => finding(Verdict::Ok, format!("{}, version {version}; it can be preloaded", path.display())),
    }
}

/// Starts a program with the library preloaded, as `vramctl run` does.
fn try_preloading(path: &Path) -> Result<(), String> {
    let output = Command::new("cat").arg("/proc/self/maps").env("LD_PRELOAD", path).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("could not test preloading: cat: {error}"))?;
    let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let real = real.as_os_str().as_bytes();
    if output.stdout.windows(real.len()).any(|part| part == real) {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("it cannot be preloaded: {}", said.lines().next().unwrap_or("the loader says nothing")))
}

fn python_package() -> Finding {
    let finding = |verdict, message: String| Finding::new("Python package", verdict, message);
    match installation::python_path() {
        Err(failure) => finding(Verdict::Failed, failure.to_string()),
        Ok(folders) if folders.is_empty() => {
            finding(Verdict::Warning, "not found: all memory of inference engines gets the tag default".into())
        }
        Ok(folders) => finding(Verdict::Ok, folders[0].parent().unwrap_or(&folders[0]).display().to_string()),
    }
}

fn gpus(survey: &Survey) -> Vec<Finding> {
    let kernel = fs::read_to_string("/sys/module/nvidia/version").map_or_else(|_| String::new(), |text| format!("{}, ", text.trim()));
    let able = support::PAUSE.refusal(survey.cuda).map(|refused| format!(": {refused}; {}", support::PAUSE.otherwise));
    let verdict = if able.is_none() { Verdict::Ok } else { Verdict::Failed };
    let mut findings = vec![Finding::new("driver", verdict, format!("{kernel}CUDA {}{}", survey.cuda, able.unwrap_or_default()))];
    if survey.gpus.is_empty() {
        findings.push(Finding::new("GPU", Verdict::Failed, "the driver shows none to this process (CUDA_VISIBLE_DEVICES?)"));
    }
    findings.extend(survey.gpus.iter().enumerate().map(|(ordinal, gpu)| {
        let (verdict, more) = virtual_memory(ordinal, gpu);
        let uuid = gpu.uuid.as_deref().unwrap_or("no UUID");
        let message = format!("{ordinal}: {}, {}, {uuid}{more}", gpu.name, Bytes(gpu.total_bytes));
        Finding::new("GPU", verdict, message).with(json!(gpu))
    }));
    findings
}

/// Whether programs get memory that can be paused, and what this memory cannot do.
fn virtual_memory(ordinal: usize, gpu: &driver::Gpu) -> (Verdict, String) {
    const LEFT: &str = "what programs allocate is left to CUDA and cannot be paused";
    if !gpu.virtual_memory {
        return (Verdict::Failed, format!("; no virtual memory management: {LEFT}"));
    }
    match driver::try_memory(ordinal as driver::CUdevice) {
        Ok(None) => (Verdict::Ok, String::new()),
        Ok(Some((missing, failure))) => (Verdict::Warning, format!("; {missing}: the driver refuses it ({failure})")),
        Err(failure) if failure.code == code::OUT_OF_MEMORY => (Verdict::Warning, format!("; too full to try virtual memory ({failure})")),
        Err(failure) => (Verdict::Failed, format!("; the driver refuses virtual memory ({failure}): {LEFT}")),
    }
}

/// Whether programs can be suspended and moved. What only a program knows (`vramctl status`) may still be in the way.
fn operations(survey: &Survey) -> [Finding; 2] {
    let mig = driver::cards().unwrap_or_default().into_iter().filter(|card| card.mig).map(|card| support::in_mig_mode(card.index));
    let mps = survey.gpus.iter().any(|gpu| gpu.behind_mps).then(|| support::BEHIND_MPS.to_owned());
    let everywhere: Vec<_> = mig.chain(mps).collect();
    [&support::SUSPEND, &support::MOVE].map(|need| {
        let reasons: Vec<_> = need.refusal(survey.cuda).into_iter().chain(everywhere.iter().cloned()).collect();
        if reasons.is_empty() {
            return Finding::new(need.operation, Verdict::Ok, "the driver can");
        }
        Finding::new(need.operation, Verdict::Warning, format!("refused: {}", reasons.join("; ")))
    })
}

/// Whether this GPU, driver, torch and engine were run together, or are only expected to work (docs/support.md).
fn tried(survey: &Survey, packages: &BTreeMap<String, String>) -> Finding {
    let has = |run: &Run, name: &str, version: &str| {
        let (program, series) = if name == "torch" { (name, run.torch) } else { (run.program, run.version) };
        program.eq_ignore_ascii_case(name) && !series.is_empty() && is_within(version, series, series)
    };
    let on = |run: &Run, gpu: &driver::Gpu| gpu.name.split(' ').any(|word| word == run.gpu);
    let gpus = survey.gpus.iter().filter(|gpu| !RUNS.iter().any(|run| on(run, gpu))).map(|gpu| gpu.name.clone());
    let driver = (survey.cuda != support::DRIVER.1).then(|| format!("a driver of CUDA {}", survey.cuda));
    let machine = (consts::ARCH != support::ARCHITECTURE).then(|| consts::ARCH.to_owned());
    let others = packages
        .iter()
        .filter(|(name, version): &(&String, &String)| !RUNS.iter().any(|run| has(run, name, version)))
        .map(|(name, version)| format!("{name} {version}"));
    let mut new: Vec<_> = gpus.chain(driver).chain(machine).chain(others).collect();
    new.dedup();
    let together =
        |run: &&Run| survey.gpus.iter().all(|gpu| on(run, gpu)) && packages.iter().all(|(name, version)| has(run, name, version));
    let text = match (new.is_empty(), RUNS.iter().find(together)) {
        (true, Some(run)) => format!("run together on {} ({}: {})", run.when, [run.program, run.version].join(" ").trim_end(), run.what),
        (true, None) => "each part of this was run, but not all together".to_owned(),
        (false, _) => format!("expected to work, but not run with {}", new.join(", ")),
    };
    Finding::new("tried", Verdict::Ok, format!("{text} (docs/support.md)"))
}

/// NVML says which GPUs there are, and who uses them. Pausing and resuming work without it.
/// The programs that the driver has lost, which it alone knows.
fn lost() -> Option<Finding> {
    let found = Found::look(&Target::All).ok()?;
    let states = checkpoint::seen_by_driver(&found, &found.processes);
    let lost = found.processes.iter().filter(|process| states.get(&process.pid) == Some(&Whereabouts::Lost));
    let lost: Vec<_> = lost.map(ToString::to_string).collect();
    let message = format!("the driver reports as FAILED, so that they are lost: {}; end them and start them again", lost.join(", "));
    (!lost.is_empty()).then(|| Finding::new("programs", Verdict::Failed, message))
}

fn nvml() -> Finding {
    let finding = |verdict, message| Finding::new("NVML", verdict, message);
    match driver::cards() {
        Ok(cards) => finding(Verdict::Ok, format!("GPUs of this machine: {}", cards.len())),
        Err(none) => finding(Verdict::Warning, none.to_string()),
    }
}

/// Whether the owner of memory that comes by descriptor can be found, without which nobody could give it up and get it again.
fn shared_memory() -> Finding {
    let finding = |verdict, message: String| Finding::new("shared memory", verdict, message);
    let asked = fs::File::open("/dev/null").and_then(|file| is_one_file(file.as_fd(), file.try_clone()?.as_fd()));
    match asked {
        Ok(_) => finding(Verdict::Ok, "the owners of memory that comes by descriptor can be found (kcmp)".into()),
        Err(error) => finding(Verdict::Warning, format!("kcmp: {error}: {}", support::WITHOUT_KCMP)),
    }
}

fn host_memory() -> Finding {
    let available = limits::available_bytes().min(Config::get().host_cap);
    let largest = driver::survey().map_or(0, |survey| survey.gpus.iter().map(|gpu| gpu.total_bytes).max().unwrap_or(0));
    let (speed, threads) = match preparing_speed(available) {
        Ok(measured) => measured,
        Err(error) => return Finding::new("host memory", Verdict::Failed, format!("cannot allocate: {error}")),
    };
    let text = format!("{} for backups; the kernel provides fresh memory at {speed:.1} GB/s (threads: {threads})", Bytes(available));
    let data = json!({ "available_bytes": available, "bytes_per_second": (speed * 1e9) as u64, "threads": threads });
    if available < largest {
        let more = "less than a GPU has: a full GPU does not fit (discard contents, or keep them on disk)";
        return Finding::new("host memory", Verdict::Warning, format!("{text}; {more}")).with(data);
    }
    Finding::new("host memory", Verdict::Ok, text).with(data)
}

/// How fast the kernel provides fresh host memory, in GB/s, and to how many threads. It limits the first pause.
fn preparing_speed(available: u64) -> io::Result<(f64, usize)> {
    const PIECE: usize = 64 << 20;
    // Enough for a measurement, and a small part of what is available.
    let threads = thread::available_parallelism().map_or(1, usize::from).clamp(1, 16);
    let pieces = (available / 8 / PIECE as u64).clamp(1, 16) as usize;
    let threads = threads.min(pieces);
    let started = Instant::now();
    let touch = |first: usize| (first..pieces).step_by(threads).try_for_each(|_| touch(PIECE));
    parallel::each_well(0..threads, touch).into_iter().collect::<io::Result<()>>()?;
    Ok(((pieces * PIECE) as f64 / started.elapsed().as_secs_f64() / 1e9, threads))
}

/// Allocates and populates memory as a backup would, and frees it.
fn touch(bytes: usize) -> io::Result<()> {
    // SAFETY: a new mapping, which is written to inside its bounds and unmapped here.
    unsafe {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let memory = libc::mmap(ptr::null_mut(), bytes, access, kind, -1, 0);
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        libc::madvise(memory, bytes, libc::MADV_HUGEPAGE);
        // Unknown to older kernels; then writing populates it.
        if libc::madvise(memory, bytes, libc::MADV_POPULATE_WRITE) != 0 {
            ptr::write_bytes(memory.cast::<u8>(), 1, bytes);
        }
        libc::munmap(memory, bytes);
    }
    Ok(())
}

fn limits() -> Finding {
    let (locked, addresses, data) =
        (resource_limit(libc::RLIMIT_MEMLOCK), resource_limit(libc::RLIMIT_AS), resource_limit(libc::RLIMIT_DATA));
    let numbers = json!({ "locked_bytes": locked, "address_bytes": addresses, "data_bytes": data });
    let text = |limit: Option<u64>| limit.map_or_else(|| "unlimited".to_owned(), |bytes| Bytes(bytes).to_string());
    let locked = format!("locked memory {} (the driver's pinned memory does not count)", text(locked));
    if addresses.is_none() && data.is_none() {
        return Finding::new("limits", Verdict::Ok, format!("addresses and data unlimited; {locked}")).with(numbers);
    }
    let message = format!(
        "addresses {} (ulimit -v), data {} (ulimit -d): backups and the GPU's address space must fit, or programs fail to start and \
         pauses run out of host memory; {locked}",
        text(addresses),
        text(data)
    );
    Finding::new("limits", Verdict::Warning, message).with(numbers)
}

fn sockets() -> Finding {
    let path = config::socket_directory();
    let finding = |verdict, message: String| Finding::new("sockets", verdict, message);
    let parent = path.parent().is_none_or(|parent| parent.as_os_str().is_empty() || parent.is_dir());
    match Directory::open() {
        Err(error) => finding(Verdict::Failed, error.to_string()),
        Ok(Some(_)) => writable(path).map_or_else(
            |why| finding(Verdict::Failed, format!("{why}: programs cannot listen there; set VRAMCTL_DIR to a directory of yours")),
            |()| finding(Verdict::Ok, path.display().to_string()),
        ),
        Ok(None) if parent => match path.parent().map_or(Ok(()), writable) {
            Ok(()) => finding(Verdict::Ok, format!("{}, not created yet", path.display())),
            Err(why) => {
                let what = format!("{} cannot be created: {why}; set VRAMCTL_DIR to a directory of yours", path.display());
                finding(Verdict::Failed, what)
            }
        },
        Ok(None) => finding(
            Verdict::Failed,
            format!("{} cannot be created: its parent is missing; set VRAMCTL_DIR to a directory of yours", path.display()),
        ),
    }
}

/// Whether this user can create files in a directory. Nothing is created.
fn writable(directory: &Path) -> Result<(), String> {
    let wrong = |why: &dyn fmt::Display| format!("{}: {why}", directory.display());
    if !directory.is_dir() {
        return Err(wrong(&if directory.exists() { "not a directory" } else { "no such directory" }));
    }
    let name = CString::new(directory.as_os_str().as_bytes()).map_err(|error| wrong(&error))?;
    // SAFETY: a NUL-terminated path.
    let answer = unsafe { libc::faccessat(libc::AT_FDCWD, name.as_ptr(), libc::W_OK | libc::X_OK, libc::AT_EACCESS) };
    if answer == 0 { Ok(()) } else { Err(wrong(&io::Error::last_os_error())) }
}

/// Where the policy `disk` keeps contents. Only that needs it.
fn disk() -> Finding {
    let path = config::disk_directory().path;
    let is_chosen = env::var_os("VRAMCTL_DISK_DIR").is_some_and(|value| !value.is_empty());
    match writable(&path) {
        Ok(()) if rustix::fs::statfs(&path).is_ok_and(|system| system.f_type == libc::TMPFS_MAGIC) => {
            let why = "a tmpfs, so what the policy disk keeps stays in host memory; set VRAMCTL_DISK_DIR to a directory on a disk";
            Finding::new("disk", Verdict::Warning, format!("{}: {why}", path.display()))
        }
        Ok(()) => Finding::new("disk", Verdict::Ok, path.display().to_string()),
        Err(why) => {
            let verdict = if is_chosen { Verdict::Failed } else { Verdict::Warning };
            Finding::new("disk", verdict, format!("{why}: the policy disk cannot keep contents; set VRAMCTL_DISK_DIR"))
        }
    }
}

/// Only images need it.
fn criu() -> Finding {
    match Criu::find().and_then(|criu| criu.check().map(|()| criu)) {
        Ok(criu) => Finding::new("CRIU", Verdict::Ok, format!("{}, for images", criu.version())),
        Err(why) => Finding::new("CRIU", Verdict::Warning, why.to_string()),
    }
}

/// Where reports go, if anywhere.
fn reports() -> Option<Finding> {
    let path = config::report_directory()?;
    Some(match writable(path) {
        Ok(()) => Finding::new("reports", Verdict::Ok, path.display().to_string()),
        Err(why) => Finding::new("reports", Verdict::Failed, format!("{why}: no report is written; set VRAMCTL_REPORT_DIR")),
    })
}

/// The environment variables, as the library reads them.
fn variables() -> Finding {
    let mut wrong = Config::get().complaints.clone();
    if let Ok(level) = env::var("VRAMCTL_LOG")
        && !level.is_empty()
        && !LEVELS.contains(&level.to_ascii_lowercase().as_str())
    {
        wrong.push(format!("VRAMCTL_LOG={level} is none of {}; using warn", LEVELS.join(", ")));
    }
    let mut foreign = Vec::new();
    for name in env::vars_os().filter_map(|(name, _)| name.into_string().ok()) {
        match config::is_unknown(&name) {
            None => (),
            Some(Some(meant)) => wrong.push(format!("{name} is not read; is {meant} meant?")),
            Some(None) => foreign.push(name),
        }
    }
    if !wrong.is_empty() {
        return Finding::new("variables", Verdict::Failed, wrong.join("; "));
    }
    if !foreign.is_empty() {
        return Finding::new("variables", Verdict::Warning, format!("not read: {}", foreign.join(", ")));
    }
    Finding::new("variables", Verdict::Ok, "all that are set are known and valid")
}

/// The versions of torch and the engines in the Python on PATH. `None` without a working Python.
fn python_packages() -> Option<BTreeMap<String, String>> {
    const PROGRAM: &str = "\
import importlib.metadata as metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))";
    let names = ENGINES.iter().map(|engine| engine.package).chain(["torch"]);
    let ask = |python: &str| {
        let output = Command::new(python).args(["-c", PROGRAM]).args(names.clone()).stdin(Stdio::null()).output().ok()?;
        serde_json::from_slice(&output.stdout).ok()
    };
    ask("python3").or_else(|| ask("python"))
}

/// Whether what the library hooks in the installed engines is known to be there.
fn engines(packages: Option<&BTreeMap<String, String>>) -> Vec<Finding> {
    let Some(packages) = packages else { return vec![Finding::new("engines", Verdict::Ok, "no working Python on PATH")] };
    let installed: Vec<_> = ENGINES.iter().filter_map(|engine| Some((engine, packages.get(engine.package)?))).collect();
    if installed.is_empty() {
        return vec![Finding::new("engines", Verdict::Ok, "the Python on PATH has neither vllm nor sglang")];
    }
    let finding = |(engine, version): (&Engine, &String)| {
        let Engine { package, first, last } = engine;
        let data = json!({ "engine": package, "version": version });
        if is_within(version, first, last) {
            return Finding::new("engines", Verdict::Ok, format!("{package} {version}")).with(data);
        }
        let message = format!("{package} {version} is not a known version: all its memory may get the tag default (docs/engines.md)");
        Finding::new("engines", Verdict::Warning, message).with(data)
    };
    installed.into_iter().map(finding).collect()
}

/// Whether a version lies between `first` and the end of the series `last`.
fn is_within(version: &str, first: &str, last: &str) -> bool {
    let numbers = |text: &str| {
        text.split('.')
            .map_while(|part: &str| part.chars().take_while(char::is_ascii_digit).collect::<String>().parse::<u32>().ok())
            .collect::<Vec<_>>()
    };
    let (version, first, last) = (numbers(version), numbers(first), numbers(last));
    version >= first && version.iter().take(last.len()).le(last.iter())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_known_engines_match_the_documentation() {
        let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/engines.md")).unwrap().to_lowercase();
        for Engine { package, first, last } in ENGINES {
            let header = page.lines().find(|line| line.starts_with(&format!("| {package}: "))).expect("a table");
            for version in [first, last] {
                assert!(header.contains(&format!("| {version}")), "{package} {version} is not in docs/engines.md");
            }
        }
        for inside in ["0.26.0", "0.26", "0.30.1", "0.33.2", "0.33.0rc1"] {
            assert!(is_within(inside, "0.26", "0.33"), "{inside}");
        }
        for outside in ["0.25.9", "0.34.0", "1.0", "0.260"] {
            assert!(!is_within(outside, "0.26", "0.33"), "{outside}");
        }
        assert!(is_within("0.5.16.post1", "0.5.16", "0.5.23") && !is_within("0.5.160", "0.5.16", "0.5.23"));
    }
}
