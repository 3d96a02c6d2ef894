//! Shows the device memory use of a simulated machine, like `nvidia-smi` for a real one.

use simgpu::machine::Machine;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const HELP: &str = "\
simgpu-smi: who uses the memory of the simulated GPUs

Usage: simgpu-smi           a table of devices and processes
       simgpu-smi --json    the same as one line of JSON, in bytes
       simgpu-smi used      the MiB in use on device 0, a number alone
       simgpu-smi check     nothing if the machine is as SIMGPU_DEVICES and
                            SIMGPU_MEMORY say, else what it is, and exit code 1

The machine is the one in SIMGPU_DIR, which scripts/simgpu sets.";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let show: fn(&Machine) -> String = match arguments[..] {
        [] => table,
        ["--json"] => json,
        ["check"] => |_| String::new(),
        ["used"] => |machine| format!("{}\n", mebibytes(machine.used(0))),
        ["--help" | "-h"] => {
            println!("{HELP}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprintln!("{HELP}");
            return ExitCode::from(2);
        }
    };
    let Some(directory) = std::env::var_os("SIMGPU_DIR").map(PathBuf::from) else {
        eprintln!("simgpu-smi: SIMGPU_DIR is not set: start it under scripts/simgpu");
        return ExitCode::FAILURE;
    };
    // A machine is created by the first program that uses it.
    let machine = if directory.join("machine").exists() { Machine::look(&directory) } else { Machine::open(simgpu::settings::get()) };
    match machine {
        Ok(machine) if arguments == ["check"] => check(&machine, &directory),
        Ok(machine) => {
            print!("{}", show(&machine));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("simgpu-smi: {}: {error}", directory.display());
            ExitCode::FAILURE
        }
    }
}

/// Whether the machine is what the environment asks for.
fn check(machine: &Machine, directory: &Path) -> ExitCode {
    let wanted = simgpu::settings::get();
    let is_given = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let differs = (is_given("SIMGPU_DEVICES") && wanted.devices != machine.devices())
        || (is_given("SIMGPU_MEMORY") && wanted.memory != machine.memory());
    if !differs {
        return ExitCode::SUCCESS;
    }
    eprintln!(
        "simgpu: the machine in {} has {} GPUs of {} MiB each. To join it, leave out --devices and --memory; for another one, choose another \
         --dir, or remove this one once its programs have ended",
        directory.display(),
        machine.devices(),
        mebibytes(machine.memory())
    );
    ExitCode::FAILURE
}

fn mebibytes(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

fn table(machine: &Machine) -> String {
    let mut text = String::from("device       total        used        free\n");
    let total = machine.memory();
    for device in 0..machine.devices() {
        let used = machine.used(device);
        let _ = writeln!(text, "{device:>6}  {:>6} MiB  {:>6} MiB  {:>6} MiB", mebibytes(total), mebibytes(used), (total - used) >> 20);
    }
    text.push_str("\ndevice      pid        used  command\n");
    for tenant in machine.tenants() {
        for device in (0..machine.devices()).filter(|&device| tenant.used[device] > 0) {
            let _ = writeln!(text, "{device:>6}  {:>7}  {:>6} MiB  {}", tenant.pid, mebibytes(tenant.used[device]), tenant.command);
        }
    }
    text
}

fn json(machine: &Machine) -> String {
    let total = machine.memory();
    let tenants = machine.tenants();
    let devices: Vec<String> = (0..machine.devices())
        .map(|device| {
            let used = machine.used(device);
            let processes: Vec<String> = tenants
                .iter()
                .filter(|tenant| tenant.used[device] > 0)
                .map(|tenant| {
                    format!(r#"{{"pid":{},"used":{},"command":"{}"}}"#, tenant.pid, tenant.used[device], escaped(&tenant.command))
                })
                .collect();
            format!(r#"{{"device":{device},"total":{total},"used":{used},"free":{},"processes":[{}]}}"#, total - used, processes.join(","))
        })
        .collect();
    format!("{{\"devices\":[{}]}}\n", devices.join(","))
}

fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for character in text.chars() {
        match character {
            '"' | '\\' => escaped.extend(['\\', character]),
            control if (control as u32) < 0x20 => {
                let _ = write!(escaped, "\\u{:04x}", control as u32);
            }
            other => escaped.push(other),
        }
    }
    escaped
}
