//! `vramctl doctor`.

use super::*;

#[test]
fn the_doctor_reports_what_would_fail() {
    let machine = Machine::without_gpus();
    let doctor = |change: &dyn Fn(&mut Command)| {
        let mut command = machine.cli("doctor");
        // No driver here: checks of GPUs are tested with the simulated one.
        change(command.env("LD_LIBRARY_PATH", "/nowhere").env("VRAMCTL_HOST_CAP", "64M"));
        Ran::of(&mut command)
    };
    let line = |ran: &Ran, check: &str| {
        let line = ran.out.lines().find(|line| line[9..].starts_with(check));
        line.unwrap_or_else(|| panic!("{check} is not in {ran:?}")).to_owned()
    };
    let missing = doctor(&|command| _ = command.env("VRAMCTL_LIB", "/nowhere/libvramctl.so"));
    assert_eq!(missing.code, Some(1), "{missing:?}");
    assert!(line(&missing, "library").starts_with("failed") && line(&missing, "library").contains("/nowhere/libvramctl.so"));

    let driver = line(&missing, "driver");
    assert!(driver.starts_with("failed") && driver.contains("there is no NVIDIA driver here (libcuda.so.1)"), "{driver}");
    let foreign = doctor(&|command| _ = command.env("VRAMCTL_LIB", harmless_library()));
    assert!(line(&foreign, "library").contains("it has no vramctl_version"), "{foreign:?}");
    let damaged = machine.folder.path().join("damaged.so");
    fs::write(&damaged, "\x7fELF and then nothing").unwrap();
    let damaged = doctor(&|command| _ = command.env("VRAMCTL_LIB", &damaged));
    assert!(line(&damaged, "library").starts_with("failed") && line(&damaged, "library").contains("damaged.so: "), "{damaged:?}");

    fs::set_permissions(machine.sockets(), Permissions::from_mode(0o755)).unwrap();
    let open = doctor(&|_| ());
    assert!(line(&open, "sockets").starts_with("failed") && line(&open, "sockets").contains("chmod 700"), "{open:?}");
    fs::set_permissions(machine.sockets(), Permissions::from_mode(0o700)).unwrap();
    let sockets = line(&doctor(&|_| ()), "sockets");
    assert!(sockets.starts_with("ok") && sockets.contains(machine.sockets().to_str().unwrap()), "{sockets}");
    let sockets = line(&doctor(&|command| _ = command.env("VRAMCTL_DIR", "/nowhere/sockets")), "sockets");
    assert!(sockets.starts_with("failed") && sockets.contains("VRAMCTL_DIR"), "{sockets}");

    let host = line(&doctor(&|command| _ = command.env("VRAMCTL_HOST_CAP", "3G")), "host memory");
    assert!(host.contains("3.00 GiB for backups") && host.contains(" GB/s "), "{host}");
}

#[test]
fn the_doctor_knows_the_limits_that_matter() {
    let machine = Machine::without_gpus();
    let doctor = |limits: &str| {
        let script = format!("{limits}; exec \"$0\" doctor --json");
        let mut command = machine.command("sh", &["-c", &script, command_line()]);
        let checks = Ran::of(command.env("VRAMCTL_HOST_CAP", "64M")).only_json()["checks"].as_array().unwrap().clone();
        checks.into_iter().find(|check| check["check"] == "limits").unwrap()
    };
    let free = doctor("true");
    assert_eq!((&free["verdict"], &free["data"]["address_bytes"]), (&json!("ok"), &Value::Null));
    let tight = doctor("ulimit -v 8388608; ulimit -l 64");
    assert_eq!(tight["verdict"], "warning");
    assert_eq!((&tight["data"]["address_bytes"], &tight["data"]["locked_bytes"]), (&json!(8 * GIB), &json!(64 << 10)));
    assert!(tight["message"].as_str().unwrap().contains("8.00 GiB (ulimit -v)"), "{tight}");
}

#[test]
fn the_doctor_knows_the_engines_of_the_python_on_the_path() {
    let machine = Machine::without_gpus();
    let Some(_) = installed("python3") else { return eprintln!("skipped: no python3 here") };
    let site = machine.folder.path().join("site");
    for (engine, version) in [("vllm", "0.26.0"), ("sglang", "0.1.2")] {
        let folder = site.join(format!("{engine}-{version}.dist-info"));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("METADATA"), format!("Metadata-Version: 2.1\nName: {engine}\nVersion: {version}\n")).unwrap();
    }
    let mut command = machine.cli("doctor");
    let ran = Ran::of(command.env("PYTHONPATH", &site).env("VRAMCTL_HOST_CAP", "64M"));
    assert!(ran.out.lines().any(|line| line.starts_with("ok ") && line.ends_with(" vllm 0.26.0")), "{ran:?}");
    assert!(ran.out.lines().any(|line| line.starts_with("warning ") && line.contains("sglang 0.1.2 is not a known version")), "{ran:?}");
}

/// The library would ignore them, and say so in the program's log at most.
#[test]
fn the_doctor_checks_variables_and_directories() {
    let machine = Machine::without_gpus();
    let doctor = |name: &str, value: &str, check: &str| {
        let mut command = machine.cli("doctor");
        let ran = Ran::of(command.env("LD_LIBRARY_PATH", "/nowhere").env("VRAMCTL_HOST_CAP", "64MB").env(name, value));
        let line = ran.out.lines().find(|line| line[9..].starts_with(check)).map(str::to_owned);
        line.unwrap_or_else(|| panic!("{check} is not in {ran:?}"))
    };
    assert!(doctor("NOTHING", "", "variables").starts_with("ok "), "MB is a unit, too");
    for (name, value, verdict, said) in [
        ("VRAMCTL_RETIAN", "weights", "failed", "VRAMCTL_RETIAN is not read; is VRAMCTL_RETAIN meant?"),
        ("VRAMCTL_OF_SOMEBODY_ELSE", "1", "warning", "not read: VRAMCTL_OF_SOMEBODY_ELSE"),
        ("VRAMCTL_PREWARM", "1TB", "failed", "VRAMCTL_PREWARM=1TB is not a size such as 1048576 or 1M; ignored"),
        ("VRAMCTL_BACKUP", "kv=tape", "failed", "VRAMCTL_BACKUP: 'kv=tape' is not TAG=host, TAG=disk or TAG=discard"),
        ("VRAMCTL_LOG", "loud", "failed", "VRAMCTL_LOG=loud is none of off, "),
    ] {
        let line = doctor(name, value, "variables");
        assert!(line.starts_with(verdict) && line.contains(said), "{line}");
    }
    let (file, folder) = (machine.folder.path().join("file"), machine.folder.path().join("read-only"));
    fs::write(&file, "").unwrap();
    fs::create_dir(&folder).unwrap();
    for (name, check) in [("VRAMCTL_DISK_DIR", "disk"), ("VRAMCTL_REPORT_DIR", "reports")] {
        for (path, why) in [("/nowhere/at-all", "no such directory"), (file.to_str().unwrap(), "not a directory")] {
            let line = doctor(name, path, check);
            assert!(line.starts_with("failed") && line.contains(why) && line.contains(name), "{line}");
        }
        let line = doctor(name, folder.to_str().unwrap(), check);
        assert!(line.starts_with("ok ") || check == "disk" && line.contains("a tmpfs"), "{line}");
    }
    if fs::read_to_string("/proc/self/mounts").is_ok_and(|mounts| mounts.lines().any(|line| line.contains(" /dev/shm tmpfs rw"))) {
        let line = doctor("VRAMCTL_DISK_DIR", "/dev/shm", "disk");
        assert!(line.starts_with("warning") && line.contains("a tmpfs, so what the policy disk keeps stays in host memory"), "{line}");
    }
    assert!(doctor("TMPDIR", "/nowhere/at-all", "disk").starts_with("warning"), "only one policy needs it");

    fs::set_permissions(&folder, Permissions::from_mode(0o500)).unwrap();
    // Root may write there; for it, only a read-only file system will do.
    let is_root = fs::write(folder.join("file"), "").is_ok();
    let refusing = if is_root { Path::new("/sys/kernel").to_owned() } else { folder };
    if is_root && fs::read_to_string("/proc/self/mounts").is_ok_and(|mounts| !mounts.lines().any(|line| line.contains(" /sys sysfs ro"))) {
        println!("not run: no read-only file system");
        return;
    }
    for (name, check) in [("VRAMCTL_DISK_DIR", "disk"), ("VRAMCTL_REPORT_DIR", "reports")] {
        assert!(doctor(name, refusing.to_str().unwrap(), check).starts_with("failed"));
    }
    let line = doctor("VRAMCTL_DIR", refusing.join("sockets").to_str().unwrap(), "sockets");
    assert!(line.starts_with("failed") && line.contains("cannot be created") && line.contains("VRAMCTL_DIR"), "{line}");
}

/// The library, which does nothing in programs without CUDA.
/// Another library: the C library.
fn harmless_library() -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let path = maps.split_whitespace().find(|word| word.contains("/libc.so") || word.contains("/libc-2")).expect("a libc");
    PathBuf::from(path)
}
