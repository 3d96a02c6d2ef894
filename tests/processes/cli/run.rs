//! `vramctl run`.

use super::*;

/// They would see each other's processes, and a memory that is not that of the machine would be believed.
#[test]
fn simulated_machines_have_sockets_and_a_size_of_their_own() {
    let machine = Machine::new();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/simgpu");
    let run = |words: &[&str]| {
        let mut command = machine.command(script, words);
        command.env_remove("VRAMCTL_DIR").current_dir(machine.folder.path());
        for name in ["SIMGPU_DIR", "SIMGPU_MEMORY", "SIMGPU_DEVICES"] {
            command.env_remove(name);
        }
        Ran::of(&mut command)
    };
    for wrong in ["4X", "lots", "-1G"] {
        run(&["--memory", wrong, "true"]).has(2, "", &format!("--memory {wrong} is not a size"));
    }
    let sockets = |name: &str| machine.folder.path().join(name).join("sockets").to_str().unwrap().to_owned();
    let first = run(&["--dir", "one", "--memory", "64M", "sh", "-c", "simgpu-smi >&2 && echo $VRAMCTL_DIR"]);
    first.has(0, &sockets("one"), "64 MiB");
    let nested = run(&["--dir", "one", script, "--dir", "two", "printenv", "VRAMCTL_DIR"]);
    nested.has(0, &sockets("two"), "");
    run(&["--dir", "one", "--memory", "32M", "true"]).has(2, "", "has 1 GPUs of 64 MiB each. To join it, leave out");
    run(&["--dir", "one", "--devices", "2", "true"]).has(2, "", "leave out --devices and --memory");
    run(&["--dir", "one", "--memory", "64M", "true"]).has(0, "", "");
}

#[test]
fn run_sets_the_environment() {
    let machine = Machine::without_gpus();
    let library = library();
    let arguments =
        ["--name", "my engine", "--backup", "kv=discard", "--backup", "w=host", "--min-bytes", "64K", "--log", "off", "--", "env"];
    let ran = run(&machine, &arguments, &[("LD_PRELOAD", "")]);
    assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""));
    let library = library.to_str().unwrap();
    for (name, value) in [
        ("LD_PRELOAD", library),
        ("VRAMCTL_TAG", "default"),
        ("VRAMCTL_NAME", "my engine"),
        ("VRAMCTL_BACKUP", "kv=discard,w=host"),
        ("VRAMCTL_MIN_BYTES", "64K"),
        ("VRAMCTL_LOG", "off"),
    ] {
        assert!(ran.out.lines().any(|line| line == format!("{name}={value}")), "{name}={value} is not in {}", ran.out);
    }
    let ran = run(&machine, &["--no-tag", "env"], &[("LD_PRELOAD", library), ("VRAMCTL_TAG", "x")]);
    assert!(ran.out.lines().any(|line| line == format!("LD_PRELOAD={library}")), "not twice: {}", ran.out);
    assert!(!ran.out.contains("VRAMCTL_TAG"));
    let ran = run(&machine, &["env"], &[("VRAMCTL_TAG", "")]);
    assert!(ran.out.lines().any(|line| line == "VRAMCTL_TAG="), "an empty one is not replaced: {}", ran.out);
}

#[test]
fn a_number_for_a_name_is_ignored_with_a_warning_and_the_program_runs() {
    let machine = Machine::new();
    let mut command = machine.cli(&["run", "--no-python", "--"]);
    command.arg(common::programs().join("engine")).args(["--weights-mib", "4", "--kv-mib", "4"]).env("VRAMCTL_NAME", "123");
    let mut engine = common::machine::Program::ready(command.stderr(Stdio::piped()));
    machine.vramctl("ps --output name").expect(0, "engine\n", "");
    let list = machine.done("ps --json");
    assert!(list.contains("\"index\":0") && list.contains("\"uuid\":\"GPU-73696d75-"), "{list}");
    let mut warning = engine.child.stderr.take().unwrap();
    drop(engine);
    let mut text = String::new();
    std::io::Read::read_to_string(&mut warning, &mut text).unwrap();
    assert_eq!(text.matches("VRAMCTL_NAME=123: commands would take a number for a process id").count(), 1, "{text}");
}

#[test]
fn a_policy_for_a_tag_is_not_one_for_a_pause() {
    let ran = Machine::without_gpus().vramctl("pause --backup weigths=disk");
    ran.has(2, "", "a pause has one policy for all that it pauses: to pause the tag weigths alone, `vramctl pause weigths --backup disk`");
}

#[test]
fn run_is_replaced_by_the_command() {
    let machine = Machine::without_gpus();
    run(&machine, &["--", "sh", "-c", "echo out; echo err >&2; exit 7"], &[]).expect(7, "out\n", "err\n");
    run(&machine, &["sh", "-c", "exit $#", "sh", "--name", "x"], &[]).expect(2, "", "");

    let child = machine
        .command(command_line(), &["run", "--", "sh", "-c", "echo $$; kill -TERM $$"])
        .env("VRAMCTL_LIB", library())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), pid.to_string(), "the command has the id of `vramctl run`");
    assert_eq!(output.status.signal(), Some(libc::SIGTERM));
}

#[test]
fn a_command_that_cannot_start_ends_as_in_a_shell() {
    let machine = Machine::without_gpus();
    let missing = |command: &str| run(&machine, &["--", command], &[]);
    missing("no-such-command-here").expect(
        127,
        "",
        "cannot start no-such-command-here: No such file or directory (os error 2); is it on PATH?",
    );
    assert!(!missing("/no/such/command").err.contains("PATH"));
    let file = machine.folder.path().join("file");
    fs::write(&file, "").unwrap();
    run(&machine, &["--", file.to_str().unwrap()], &[]).expect(126, "", "denied");
    // It is there; what it needs is not.
    common::write_executable(&file, "#!/no/such/interpreter -x\n");
    run(&machine, &["--", file.to_str().unwrap()], &[]).expect(126, "", "the file is there, and /no/such/interpreter that it names");
    run(&machine, &[], &[]).expect(2, "", "COMMAND");
    run(&machine, &["--backup", "kv=tape", "--", "true"], &[]).expect(2, "", "host, disk or discard");
    run(&machine, &["--", "true"], &[("VRAMCTL_TAG", "a,b")]).expect(2, "", "VRAMCTL_TAG: the tag 'a,b' contains a comma");
    run(&machine, &["--tag", "a", "--", "true"], &[("VRAMCTL_TAG", "a,b")]).expect(0, "", "");
}

#[test]
fn a_missing_library_is_explained() {
    let machine = Machine::without_gpus();
    run(&machine, &["--", "true"], &[("VRAMCTL_LIB", "/nowhere/libvramctl.so")]).expect(1, "", "/nowhere/libvramctl.so");
    let spaced = machine.folder.path().join("with space.so");
    symlink(library(), &spaced).unwrap();
    run(&machine, &["--", "true"], &[("VRAMCTL_LIB", spaced.to_str().unwrap())]).expect(1, "", "symbolic link");

    // A copy of the binary finds the library in ../lib.
    let (bin, lib) = (machine.folder.path().join("bin"), machine.folder.path().join("lib"));
    fs::create_dir(&bin).unwrap();
    copy_command(&bin.join("vramctl"));
    let run = || Ran::of(&mut machine.command(bin.join("vramctl"), &["run", "--", "env"]));
    run().expect(1, "", "set VRAMCTL_LIB");
    fs::create_dir(&lib).unwrap();
    symlink(library(), lib.join("libvramctl.so")).unwrap();
    run().expect(0, &format!("LD_PRELOAD={}", lib.join("libvramctl.so").display()), "");
}

/// A directory that looks like the Python package.
fn package(machine: &Machine) -> PathBuf {
    let package = machine.folder.path().join("vramctl");
    for folder in ["site", "dropin"] {
        fs::create_dir_all(package.join(folder)).unwrap();
    }
    fs::write(package.join("__init__.py"), "").unwrap();
    package
}

#[test]
fn python_programs_find_the_package() {
    let machine = Machine::without_gpus();
    let package = package(&machine);
    let (site, dropin) = (package.join("site"), package.join("dropin"));
    let ours = format!("{}:{}", site.display(), dropin.display());
    let chosen = ("VRAMCTL_PYTHON", package.to_str().unwrap());
    let path = |arguments: &[&str], present: &str| {
        let ran = run(&machine, arguments, &[chosen, ("PYTHONPATH", present)]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        ran.out.lines().find_map(|line| line.strip_prefix("PYTHONPATH=")).unwrap_or_default().to_owned()
    };
    assert_eq!(path(&["env"], ""), ours);
    assert_eq!(path(&["env"], "/mine"), format!("{ours}:/mine"));
    assert_eq!(path(&["--no-python", "env"], "/mine"), "/mine");
    assert_eq!(path(&["--", command_line(), "run", "--", "env"], "/mine"), format!("{ours}:/mine"), "once");

    let printed = |value: &str| Ran::of(machine.cli("python-path").env(chosen.0, value));
    assert_eq!(printed(chosen.1).out, format!("{ours}\n"));
    fs::remove_dir(&dropin).unwrap();
    assert_eq!(printed(chosen.1).out, format!("{}\n", site.display()), "what is not there is not named");
    printed("/nowhere").expect(1, "", "set VRAMCTL_PYTHON");
    run(&machine, &["env"], &[("VRAMCTL_PYTHON", "/nowhere")]).expect(1, "", "/nowhere");
}

/// As pip installs a wheel: into a Python prefix, or into a separate directory.
#[test]
fn a_pip_installation_is_found() {
    let machine = Machine::without_gpus();
    for site in ["venv/lib/python3.12/site-packages", "target"] {
        let site = machine.folder.path().join(site);
        let prefix = machine.folder.path().join(site.strip_prefix(machine.folder.path()).unwrap().iter().next().unwrap());
        fs::create_dir_all(prefix.join("bin")).unwrap();
        copy_command(&prefix.join("bin/vramctl"));
        fs::create_dir_all(site.join("vramctl/site")).unwrap();
        fs::write(site.join("vramctl/__init__.py"), "").unwrap();
        symlink(library(), site.join("vramctl/libvramctl.so")).unwrap();
        let ran = Ran::of(&mut machine.command(prefix.join("bin/vramctl"), &["run", "env"]));
        ran.has(0, &format!("LD_PRELOAD={}", site.join("vramctl/libvramctl.so").display()), "");
        ran.has(0, &format!("PYTHONPATH={}", site.join("vramctl/site").display()), "");
    }
}
