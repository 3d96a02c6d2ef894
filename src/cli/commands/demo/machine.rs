//! The simulated machine of a demo: a folder with its GPU, its control sockets and the libraries by which programs find it.

use super::{failed, said, typed};
use crate::installation;
use std::env;
use std::fs::{self, DirBuilder};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{self, Child, ChildStdin, ChildStdout, Command, Stdio};
use vramctl_coordinator::failure::CommandError;

/// The library that stands in for the driver and for NVML. It lies beside the one that is preloaded.
const SIMULATED: &str = "libsimgpu.so";

/// The machine, which ends when it is dropped.
pub struct Machine {
    folder: PathBuf,
    binary: PathBuf,
}

impl Machine {
    pub fn create() -> Result<Self, CommandError> {
        let io = |error: io::Error| failed(&error.to_string());
        let simulated = installation::library()?.with_file_name(SIMULATED);
        if !simulated.is_file() {
            let text = format!(
                "{} is missing; it is in the wheel and the archive, and in a checkout after `cargo build --workspace`",
                simulated.display()
            );
            return Err(failed(&text));
        }
        let folder = env::temp_dir().join(format!("vramctl-demo-{}", process::id()));
        let make = |path: &Path| DirBuilder::new().mode(0o700).create(path);
        make(&folder).map_err(|error| failed(&format!("{}: {error}", folder.display())))?;
        let machine = Self { folder, binary: env::current_exe().map_err(io)? };
        for part in ["gpu", "sockets", "lib"] {
            make(&machine.folder.join(part)).map_err(io)?;
        }
        for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
            symlink(&simulated, machine.folder.join("lib").join(name)).map_err(io)?;
        }
        Ok(machine)
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A command there, with nothing of the user's settings.
    pub fn command(&self, mut command: Command) -> Command {
        let is_setting = |name: &str| ["VRAMCTL_", "SIMGPU_", "TMS_"].iter().any(|prefix| name.starts_with(prefix));
        for name in env::vars_os().filter_map(|(name, _)| name.into_string().ok()) {
            // Where CRIU is says nothing of programs.
            if is_setting(&name) && name != "VRAMCTL_CRIU" || ["LD_PRELOAD", "CUDA_VISIBLE_DEVICES"].contains(&name.as_str()) {
                command.env_remove(name);
            }
        }
        let before = |first: &Path, rest: &str| {
            let rest = env::var_os(rest).filter(|rest| !rest.is_empty());
            let all = [first.to_owned()].into_iter().chain(rest.iter().flat_map(env::split_paths));
            env::join_paths(all).unwrap_or_else(|_| first.into())
        };
        let commands = self.binary.parent().unwrap_or(Path::new("/"));
        command
            .env("LD_LIBRARY_PATH", before(&self.folder.join("lib"), "LD_LIBRARY_PATH"))
            .env("PATH", before(commands, "PATH"))
            .env("SIMGPU_DIR", self.folder.join("gpu"))
            .env("SIMGPU_MEMORY", "256M")
            // As images need it, with room for a program and its copy.
            .env("SIMGPU_RESTORE_THREAD", "1")
            .env("SIMGPU_CONTEXT_BYTES", "2097152")
            .env("VRAMCTL_CONFIG", "")
            .env("VRAMCTL_DIR", self.folder.join("sockets"));
        if let Some(library) = env::var_os("VRAMCTL_LIB") {
            command.env("VRAMCTL_LIB", library);
        }
        command
    }

    /// Shows a command of the command line, with what it prints.
    pub fn show(&self, line: &str) -> Result<(), CommandError> {
        typed(&format!("vramctl {line}"))?;
        let mut command = self.command(Command::new(&self.binary));
        let output = command.args(line.split(' ')).stdin(Stdio::null()).output().map_err(|error| failed(&error.to_string()))?;
        let text = [output.stdout, output.stderr].concat();
        said(&String::from_utf8_lossy(&text))?;
        if output.status.success() { Ok(()) } else { Err(failed(&format!("`vramctl {line}` ended with {}", output.status))) }
    }

    /// Starts a program with this much GPU memory, under the library if it has a name.
    pub fn start(&self, name: Option<&str>, mib: u32) -> Result<Program, CommandError> {
        self.try_start(name, mib)?.map_err(|why| failed(&why))
    }

    /// The same; the inner error is what the program says instead of being ready.
    pub fn try_start(&self, name: Option<&str>, mib: u32) -> Result<Result<Program, String>, CommandError> {
        let mut command = Command::new(&self.binary);
        if let Some(name) = name {
            command.args(["run", "--no-python", "--log", "error", "--name", name, "--"]).arg(&self.binary);
        }
        command.args(["demo-program", "--mib", &mib.to_string()]);
        let mut command = self.command(command);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(|error| failed(&error.to_string()))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else { return Err(failed("no pipe")) };
        let mut program = Program { child, input: Some(input), output: BufReader::new(output) };
        let line = program.line()?;
        Ok(if line == "ready" { Ok(program) } else { Err(line) })
    }

    /// Ends all programs there that the library is in.
    pub fn end_all(&self) {
        let mut command = self.command(Command::new(&self.binary));
        let _ = command.args(["stop", "--all", "--quiet", "--timeout", "1"]).stdin(Stdio::null()).stderr(Stdio::null()).status();
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// A program of the demo.
pub struct Program {
    child: Child,
    /// Its end ends the program.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Program {
    pub fn ask(&mut self, question: &str) -> Result<String, CommandError> {
        let asked = self.input.as_mut().map(|input| writeln!(input, "{question}"));
        asked.transpose().map_err(|error| failed(&error.to_string()))?;
        self.line()
    }

    /// Waits for its end.
    pub fn end(mut self) -> Result<(), CommandError> {
        self.input = None;
        let status = self.child.wait().map_err(|error| failed(&error.to_string()))?;
        // In a shell, it may have been stopped.
        if status.code().is_none_or(|code| code == 0) { Ok(()) } else { Err(failed(&format!("the program ended with {status}"))) }
    }

    fn line(&mut self) -> Result<String, CommandError> {
        let mut line = String::new();
        match self.output.read_line(&mut line) {
            Ok(0) => Err(failed("a program has ended")),
            Ok(_) => Ok(line.trim_end().to_owned()),
            Err(error) => Err(failed(&error.to_string())),
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.input = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
