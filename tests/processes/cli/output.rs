//! What goes to stdout and stderr, and how a command ends.

use super::*;

#[test]
fn colours_are_for_those_who_want_them() {
    let machine = Machine::without_gpus();
    let _engine = Fake::new(&machine, "engine", &["weights"]);
    let run = |variables: &[(&str, &str)], words: &[&str]| {
        let mut command = machine.cli(words);
        command.env_remove("NO_COLOR").env_remove("CLICOLOR_FORCE").envs(variables.iter().copied());
        Ran::of(&mut command)
    };
    let forced = ("CLICOLOR_FORCE", "1");
    for words in [&["ps"][..], &["status"]] {
        assert!(run(&[forced], words).out.contains("\u{1b}[38;5;10mactive"), "{words:?}");
        assert!(!run(&[], words).out.contains('\u{1b}') && !run(&[forced, ("NO_COLOR", "1")], words).out.contains('\u{1b}'));
    }
    assert!(run(&[forced], &["pause", "nobody"]).err.starts_with("\u{1b}[1m\u{1b}[31merror:\u{1b}[0m nobody"));
    assert!(run(&[], &["pause", "nobody"]).err.starts_with("error: nobody"));
}

#[test]
fn the_short_help_is_short_and_the_long_help_has_the_rest() {
    let machine = Machine::without_gpus();
    for command in ["pause", "resume", "suspend", "move", "ps", "run"] {
        let (short, long) = (machine.vramctl(&format!("{command} -h")), machine.vramctl(&format!("{command} --help")));
        assert!(!short.out.contains("Examples:") && short.out.contains("--help"), "{short:?}");
        assert!(long.out.contains("Examples:") && long.out.lines().count() > short.out.lines().count(), "{long:?}");
    }
}

#[test]
fn a_message_in_json_has_no_table_in_it() {
    let machine = Machine::without_gpus();
    let _processes = [Fake::new(&machine, "engine", &["weights"]), Fake::new(&machine, "trainer", &["weights"])];
    for line in ["pause --json", "pause --name nobody --json", "status --name nobody --json"] {
        let answer = machine.vramctl(line).only_json();
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(!message.contains('\n') && !message.contains("PID") && !message.ends_with(':'), "{line}: {message}");
    }
    machine.vramctl("pause").expect(2, "", "PID");
}

#[test]
fn a_closed_output_pipe_is_no_error() {
    let machine = Machine::without_gpus();
    let _engine = Fake::new(&machine, "engine", &["weights"]);
    for arguments in [&["ps"][..], &["status", "--json"], &["completions", "bash"], &["pause"]] {
        let (reader, writer) = UnixStream::pair().unwrap();
        drop(reader);
        let output = machine.cli(arguments).stdout(OwnedFd::from(writer)).output().unwrap();
        assert_eq!((output.status.code(), output.status.signal()), (Some(0), None), "{arguments:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    }
}

#[test]
fn pause_and_resume_have_help_of_their_own_for_json() {
    let machine = Machine::new();
    let help = |command: &str| machine.vramctl(&format!("{command} --help")).out;
    assert!(!help("pause").contains("\"restored\"") && help("resume").contains("\"restored\""));
}

/// What was done is done, and what is wrong is told.
#[test]
fn a_full_stdout_hides_nothing() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["weights"]);
    let full = |words: &str| {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        Ran::end_of(machine.cli(words).stdout(full).stderr(Stdio::piped()).spawn().unwrap())
    };
    for words in ["pause", "resume --json", "pause --json", "resume"] {
        full(words).expect(1, "", "stdout: No space left on device (os error 28); what was asked for is done all the same");
    }
    assert_eq!(engine.asked().len(), 4);
    full("pause nobody").expect(6, "", "nobody is neither a tag nor a process");
    full("pause nobody --json").expect(6, "", "nobody is neither a tag nor a process");
    let refusing = Fake::reacting(&machine, "refusing", &["weights"], |request| {
        is_transition(request).then(|| Reaction::Answer(Reply::Error(Refusal::from(&Error::Capturing))))
    });
    full("pause --all").expect(5, "", "a CUDA stream is being captured");
    drop(refusing);
}

/// Of two jobs, each is paused as a whole or not at all.
#[test]
fn a_pause_of_which_a_part_is_done_is_neither_done_nor_undone() {
    let machine = Machine::without_gpus();
    let _done = Fake::new(&machine, "done", &["weights"]);
    let _refuses = Fake::reacting(&machine, "refuses", &["weights"], |request| {
        matches!(request, Request::Pause(_)).then(|| Reaction::Answer(Reply::Error(Refusal::from(&Error::Capturing))))
    });
    let outcome = operate(&machine, &request("pause", &json!({ "target": "all" })));
    assert_eq!((&outcome["committed"], &outcome["error"]["code"]), (&json!(null), &json!("capturing")), "{outcome}");
}

/// All interfaces have the same codes.
#[test]
fn the_same_failure_has_the_same_code_as_json() {
    let machine = Machine::without_gpus();
    let [one, two] = ["one", "two"].map(|name| Fake::new(&machine, name, &["weights"]));
    let pids = json!([one.pid().min(two.pid()), one.pid().max(two.pid())]);
    let of_command = machine.vramctl("pause --json").expect(2, "", "").only_json()["error"].clone();
    let of_operation = operate(&machine, &request("pause", &json!({})))["error"].clone();
    for error in [of_command, of_operation] {
        assert_eq!((&error["code"], &error["pids"]), (&json!("several_processes"), &pids), "{error}");
    }
}
