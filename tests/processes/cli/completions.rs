//! What shells complete.

use super::*;

#[test]
fn help_and_completions_exist() {
    let machine = Machine::without_gpus();
    machine.vramctl("--help").expect(0, "Exit codes:", "");
    for command in ["run", "ps", "status", "gpus", "pause", "resume", "set-tag", "doctor", "python-path", "completions"] {
        machine.vramctl(&format!("{command} --help")).expect(0, "Examples:", "");
    }
    for shell in ["bash", "zsh", "fish"] {
        machine.vramctl(&format!("completions {shell}")).expect(0, "VRAMCTL_COMPLETE", "");
    }
    machine.vramctl("").expect(2, "", "Usage");
    machine.vramctl("explode").expect(2, "", "explode");
}

/// The shell passes the words typed so far; the last one is to be completed.
#[test]
fn shells_complete_tags_processes_and_gpus() {
    let machine = Machine::without_gpus();
    let complete = |words: &[&str]| {
        let arguments: Vec<_> = ["--", "vramctl"].iter().chain(words).copied().collect();
        let ran = Ran::of(machine.cli(&arguments).env("VRAMCTL_COMPLETE", "fish"));
        assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""), "{ran:?}");
        ran.out.lines().map(|line: &str| line.split('\t').next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(complete(&["set-t"]), ["set-tag"]);
    assert!(complete(&["pause", "w"]).is_empty(), "nobody is there, and nobody complains");
    let engine = Fake::new(&machine, "engine", &["kv_cache", "weights"]);
    let _trainer = Fake::new(&machine, "trainer", &["optimizer", "weights"]);
    assert_eq!(complete(&["pause", "w"]), ["weights"]);
    assert_eq!(complete(&["resume", "weights", "o"]), ["optimizer"]);
    assert_eq!(complete(&["set-tag", "k"]), ["kv_cache"]);
    assert_eq!(complete(&["pause", "--name", ""]), ["engine", "trainer"]);
    assert_eq!(complete(&["status", "tr"]), ["trainer"]);
    assert_eq!(complete(&["pause", "--pid", &engine.pid().to_string()]), [engine.pid().to_string()]);
    assert_eq!(complete(&["ps", "--gpu", "GPU"]), [GPU]);
}

#[test]
fn a_command_is_completed_from_the_path_and_its_arguments_as_paths() {
    let machine = Machine::new();
    let programs = machine.folder.path().join("programs");
    fs::create_dir(&programs).unwrap();
    for (name, mode) in [("serve-it", 0o755), ("serve.txt", 0o644)] {
        fs::write(programs.join(name), "").unwrap();
        fs::set_permissions(programs.join(name), Permissions::from_mode(mode)).unwrap();
    }
    let complete = |words: &[&str]| {
        let arguments: Vec<_> = ["--", "vramctl", "run", "--"].iter().chain(words).copied().collect();
        let mut command = machine.command(command_line(), &arguments);
        command.env("VRAMCTL_COMPLETE", "fish").env("PATH", &programs).current_dir(machine.folder.path());
        Ran::of(&mut command).out.lines().map(|line| line.split('\t').next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(complete(&["serv"]), ["serve-it"]);
    assert_eq!(complete(&["serve-it", "prog"]), ["programs/"]);
}

/// Where zsh is installed, it runs the script as it does at the first Tab; elsewhere, the script is read.
#[test]
fn zsh_completes_at_the_first_tab() {
    let machine = Machine::new();
    let script = machine.vramctl("completions zsh").out;
    assert!(
        script.trim_end().ends_with("if [ \"$funcstack[1]\" = \"_vramctl\" ]; then\n    _clap_dynamic_completer_vramctl \"$@\"\nfi"),
        "{script}"
    );
    let Some(zsh) = installed("zsh") else { return };
    fs::write(machine.folder.path().join("_vramctl"), script).unwrap();
    let program = "compdef() { :; }; _describe() { print -l \"${(P@)@[-1]}\"; }; fpath=($1 $fpath); autoload -U _vramctl; words=(vramctl set-t); \
                   CURRENT=2; _vramctl";
    let mut command = machine.command(zsh, &["-f", "-c", program, "zsh", machine.folder.path().to_str().unwrap()]);
    let path = format!("{}:{}", Path::new(command_line()).parent().unwrap().display(), std::env::var("PATH").unwrap());
    Ran::of(command.env("PATH", path)).has(0, "set-tag", "");
}
