//! `vramctl top` in a pseudo-terminal with a terminal emulator, and with real programs on a simulated machine.

use crate::common;
use crate::common::machine::{Killed, Machine, Program};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus};
use std::sync::{Arc, Mutex};
use std::thread;

/// A terminal in which a command runs.
struct Terminal {
    ours: File,
    theirs: OwnedFd,
    modes: libc::termios,
    child: Killed,
    screen: Arc<Mutex<vt100::Parser>>,
    /// All that it was told.
    told: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    fn start(machine: &Machine, arguments: &[&str], (rows, columns): (u16, u16)) -> Self {
        Self::start_with(machine, arguments, (rows, columns), |_| ())
    }

    fn start_with(machine: &Machine, arguments: &[&str], (rows, columns): (u16, u16), change: impl Fn(&mut Command)) -> Self {
        let (mut ours, mut theirs) = (0, 0);
        let mut size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let none = std::ptr::null_mut();
        assert_eq!(unsafe { libc::openpty(&raw mut ours, &raw mut theirs, none, none.cast(), &raw mut size) }, 0);
        let (ours, theirs) = unsafe { (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) };
        let mut command = machine.cli(arguments);
        // Curves in ASCII: some tests count bytes.
        command.env("TERM", "xterm-256color").env("LC_ALL", "C").env_remove("NO_COLOR").env_remove("COLUMNS");
        command.stdin(theirs.try_clone().unwrap()).stdout(theirs.try_clone().unwrap()).stderr(theirs.try_clone().unwrap());
        let own = || {
            if unsafe { libc::setsid() < 0 || libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 } {
                Err(std::io::Error::last_os_error())
            } else {
                Ok(())
            }
        };
        unsafe { command.pre_exec(own) };
        change(&mut command);
        let modes = modes(&theirs);
        let mut parser = vt100::Parser::new(rows, columns, 0);
        parser.process(b"what was there before\r\n");
        let (screen, told) = (Arc::new(Mutex::new(parser)), Arc::new(Mutex::new(Vec::new())));
        let terminal = Self { ours, theirs, modes, child: Killed(command.spawn().unwrap()), screen, told };
        let (mut ours, screen, told) = (terminal.ours.try_clone().unwrap(), Arc::clone(&terminal.screen), Arc::clone(&terminal.told));
        thread::spawn(move || {
            let mut part = [0; 4096];
            while let Ok(count @ 1..) = ours.read(&mut part) {
                told.lock().unwrap().extend_from_slice(&part[..count]);
                screen.lock().unwrap().process(&part[..count]);
            }
        });
        terminal
    }

    fn screen(&self) -> String {
        self.screen.lock().unwrap().screen().contents()
    }

    /// Waits until the screen satisfies a condition.
    #[track_caller]
    fn expect(&self, what: &str, is_so: impl Fn(&str) -> bool) -> String {
        let shown = common::patiently(|| {
            let screen = self.screen();
            if is_so(&screen) { Ok(screen) } else { Err(screen) }
        });
        shown.unwrap_or_else(|screen| panic!("not on the screen: {what}\n{screen}"))
    }

    /// Waits until there is a line with all of these words.
    #[track_caller]
    fn shows(&self, words: &[&str]) -> String {
        let screen = self.expect(&words.join(" … "), |screen| line_with(screen, words).is_some());
        line_with(&screen, words).unwrap()
    }

    fn press(&mut self, keys: &str) {
        self.ours.write_all(keys.as_bytes()).unwrap();
    }

    fn resize(&mut self, rows: u16, columns: u16) {
        // What it had before does not get lost when it is too small for that.
        self.screen.lock().unwrap().screen_mut().set_size(rows.max(SMALL.0), columns.max(SMALL.1));
        let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        assert_eq!(unsafe { libc::ioctl(self.ours.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) }, 0);
    }

    fn signal(&self, signal: libc::c_int) {
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Waits for the end, and checks that the terminal is restored.
    #[track_caller]
    fn ended(&mut self) -> ExitStatus {
        let status =
            common::patiently(|| self.child.try_wait().unwrap().ok_or(())).unwrap_or_else(|()| panic!("it goes on:\n{}", self.screen()));
        self.expect("what was there before", |screen| screen.starts_with("what was there before"));
        let parser = self.screen.lock().unwrap();
        assert!(!parser.screen().alternate_screen() && !parser.screen().hide_cursor());
        let now = modes(&self.theirs);
        let flags = |modes: &libc::termios| (modes.c_iflag, modes.c_oflag, modes.c_cflag, modes.c_lflag);
        assert_eq!(flags(&now), flags(&self.modes));
        status
    }
}

fn modes(terminal: &OwnedFd) -> libc::termios {
    let mut modes: libc::termios = unsafe { std::mem::zeroed() };
    assert_eq!(unsafe { libc::tcgetattr(terminal.as_raw_fd(), &raw mut modes) }, 0);
    modes
}

fn line_with(screen: &str, words: &[&str]) -> Option<String> {
    screen.lines().find(|line| words.iter().all(|word| line.contains(word))).map(str::to_owned)
}

const SMALL: (u16, u16) = (24, 80);

#[test]
fn jobs_are_watched_paused_and_resumed_by_key() {
    let machine = Machine::new();
    let mut engine = machine.job::<2>("engine");
    let mut tuner = machine.start_with("tuner", "engine_regions", |command| _ = command.args(["--weights-mib", "100", "--kv-mib", "8"]));
    let mut top = Terminal::start(&machine, &["top", "--interval", "0.2"], SMALL);
    top.shows(&["vramctl top: 3 processes, every 0.2 s"]);
    top.shows(&["> ", "engine x2", "active"]);
    top.shows(&[&format!("tuner (pid {})", tuner.pid()), "active"]);
    top.shows(&["default", "active", "MiB"]);
    // The bar has the letters of the table.
    let letters = |screen: &str| {
        let letter = line_with(screen, &["weights", "active"])?.trim().chars().next()?;
        line_with(screen, &["GPU 0", &letter.to_string().repeat(3)])
    };
    top.expect("a bar with letters", |screen| letters(screen).is_some());
    // Each row fits.
    assert!(top.screen().lines().all(|line| line.len() <= 80));

    top.press("p");
    top.shows(&["$ vramctl pause --name=engine"]);
    top.press("n");
    top.expect("no question", |screen| !screen.contains("Really?"));
    assert_eq!(machine.settled(&engine.each_ref()), "active");
    top.press("py");
    top.shows(&["engine x2", "held, paused"]);
    top.shows(&["paused job engine: 2 processes"]);
    assert_eq!(machine.settled(&engine.each_ref()), "paused, held");
    top.shows(&["Link", "out", "last"]);
    top.press("r\r");
    top.shows(&["engine x2", "active"]);
    top.shows(&["resumed job engine: 2 processes"]);
    engine.iter_mut().for_each(common::machine::Program::verify);

    // Three rows below are those of the tuner, whose KV cache is not kept: the question says so.
    top.press("\x1b[Fkkkp");
    top.shows(&["$ vramctl pause --name=tuner"]);
    top.shows(&["LOST: the contents of kv_cache (8.00 MiB)"]);
    top.press("n");
    top.expect("no question", |screen| !screen.contains("Really?"));

    // A single tag, of which the last is its largest.
    top.press("\x1b[F");
    top.shows(&["> ", "weights"]);
    top.press("p");
    top.shows(&["$ vramctl pause --name=tuner weights"]);
    top.press("y");
    top.shows(&["tuner", "held, weights"]);
    top.shows(&["> ", "weights", "paused"]);
    // Until the command has ended, another is refused.
    top.shows(&["paused weights of tuner"]);
    top.press("ry");
    top.shows(&["resumed weights of tuner"]);
    tuner.verify();

    // By size: the tuner has most.
    let in_order = |screen: &str, names: [&str; 2]| {
        let places = names.map(|name| screen.lines().position(|line| line.contains(name)));
        places.iter().all(Option::is_some) && places.is_sorted()
    };
    top.expect("the engine first", |screen| in_order(screen, ["engine x2", "tuner (pid"]));
    top.press("o");
    top.shows(&["order: size"]);
    top.expect("the tuner first", |screen| in_order(screen, ["tuner (pid", "engine x2"]));
    top.press("t");
    top.shows(&["pid", &engine[1].pid().to_string(), "active"]);
    top.press("+");
    top.shows(&["every 0.1 s"]);
    top.press("?");
    top.shows(&["pause what is selected"]);
    top.press("\x1b");
    top.expect("no help", |screen| !screen.contains("pause what is selected"));
    // It goes, and others come.
    drop(tuner);
    // The last message, which names it, stays for a while.
    top.expect("no tuner", |screen| line_with(screen, &["tuner", "active"]).is_none());
    let _late = machine.engine("late");
    top.shows(&["late (pid", "active"]);
    top.press("q");
    assert_eq!(top.ended().code(), Some(0));
}

#[test]
fn a_job_leaves_the_gpu_and_comes_back() {
    let machine = Machine::new();
    let mut engine = machine.engine("engine");
    let mut top = Terminal::start(&machine, &["top", "-i", "0.2"], SMALL);
    top.shows(&["engine", "active"]);
    // Also if a tag is selected.
    top.press("jsy");
    top.shows(&["engine", "suspended"]);
    top.shows(&["suspended engine"]);
    top.press("kry");
    top.shows(&["engine", "active"]);
    top.shows(&["resumed default of engine"]);
    engine.verify();
    top.press("q");
    top.ended();
}

#[test]
fn what_is_typed_after_a_slash_filters() {
    let machine = Machine::new();
    let (_engine, _tuner) = (machine.engine("engine"), machine.engine("tuner"));
    let mut top = Terminal::start(&machine, &["top", "-i", "0.2"], SMALL);
    top.shows(&["engine (pid", "active"]);
    top.shows(&["tuner (pid", "active"]);
    let only_the_tuner = |screen: &str| !screen.contains("engine (pid") && screen.contains("tuner (pid");
    // Letters that are keys elsewhere are only letters here.
    top.press("/tunq");
    top.shows(&["filter: tunq_"]);
    top.shows(&["nothing contains"]);
    top.press("\x7f");
    top.expect("only the tuner", only_the_tuner);
    top.press("\r");
    top.expect("no question", |screen| !screen.contains("filter: tun_"));
    assert!(only_the_tuner(&top.screen()));
    // Keys apply to what is shown.
    top.press("p");
    top.shows(&["$ vramctl pause --name=tuner"]);
    top.press("n");
    top.expect("no question", |screen| !screen.contains("Really?"));
    top.press("\x1b");
    top.shows(&["engine (pid", "active"]);
    top.press("q");
    top.ended();
}

#[test]
fn a_bar_says_how_busy_its_gpu_is() {
    let machine = Machine::new();
    let mut engine = machine.engine("engine");
    let top = Terminal::start(&machine, &["top", "-i", "0.2"], SMALL);
    top.shows(&["GPU 0    0% ["]);
    // Until a sample says so.
    let is_busy = |screen: &str| line_with(screen, &["GPU 0 ", "%"]).is_some_and(|line| !line.contains("  0% "));
    let mut request = 0;
    while !is_busy(&top.screen()) {
        engine.ask(&format!("generate {request}"));
        request += 1;
    }
    top.shows(&["GPU 0    0% ["]);
}

#[test]
fn programs_are_moved_and_swapped_by_key_and_curves_tell_what_has_been() {
    let machine = Machine::with(2, "512M");
    let mut engine = machine.engine("engine");
    let other = machine.engine("other");
    let mut top = Terminal::start(&machine, &["top", "-i", "0.2"], (40, 80));
    top.shows(&["engine (pid", "active"]);
    top.shows(&["last 5 min", "31 C, 75 W"]);
    top.press("c");
    top.expect("no curve", |screen| !screen.contains("last 5 min"));
    top.press("c");
    top.shows(&["last 5 min out"]);

    // Also if a tag is selected. Letters that are keys elsewhere are only letters here.
    top.press("jm");
    top.shows(&["move engine to GPU: _"]);
    top.press("q\x7f1");
    top.shows(&["move engine to GPU: 1_"]);
    top.press("\r");
    top.shows(&["$ vramctl move --name=engine --to=1"]);
    top.press("y");
    top.shows(&["moved", "engine"]);
    engine.verify();

    // What is there leaves, and what is away comes back.
    machine.vramctl("pause other").expect(0, "", "");
    top.shows(&["other (pid", "held, paused"]);
    top.press("w");
    top.shows(&["engine leaves, who comes back: _"]);
    top.press("other\r");
    top.shows(&["$ vramctl swap engine other"]);
    top.press("n");
    top.press("\x1b[Fw");
    top.shows(&["other comes back, who leaves: _"]);
    top.press("engine\r");
    top.shows(&["$ vramctl swap engine other"]);
    top.press("n");
    top.expect("no question", |screen| !screen.contains("Really?"));
    top.press("m");
    top.shows(&["move other to GPU: _"]);
    top.press("\x1b");
    top.expect("no question", |screen| !screen.contains("to GPU"));
    top.press("q");
    assert_eq!(top.ended().code(), Some(0));
    drop(other);
}

#[test]
fn it_follows_the_size_of_the_terminal() {
    let machine = Machine::new();
    let _engine = machine.engine("engine");
    let mut top = Terminal::start(&machine, &["top", "-i", "0.2"], SMALL);
    top.shows(&["engine", "active"]);
    for (rows, columns) in [(40, 120), (10, 80), (3, 10), (1, 1), (60, 200), SMALL] {
        top.resize(rows, columns);
        let width = usize::from(columns);
        top.expect("a bar of that width, and the columns that fit", |screen| match columns {
            1..80 => true,
            _ => {
                screen.lines().any(|line| line.starts_with("GPU 0") && line.len() > width - 40 && line.len() <= width)
                    && screen.contains("engine")
                    && line_with(screen, &["ON DISK"]).is_some() == (columns >= 100)
            }
        });
    }
    top.press("q");
    assert_eq!(top.ended().code(), Some(0));
}

/// crossterm's usual event source forgets keys that come together with a new size, until the next key.
#[test]
fn a_key_during_a_resize_counts() {
    let machine = Machine::new();
    let mut top = Terminal::start(&machine, &["top"], SMALL);
    top.shows(&["no process is managed"]);
    for columns in [100, 90, 110, 80, 120, 95] {
        top.resize(30, columns);
        top.press("?");
        top.shows(&["close this help"]);
        top.resize(30, columns + 1);
        top.press("x");
        top.expect("no help", |screen| line_with(screen, &["close this help"]).is_none());
    }
    top.press("q");
    top.ended();
}

#[test]
fn the_terminal_is_restored_however_it_ends() {
    let machine = Machine::new();
    let start = || {
        let top = Terminal::start(&machine, &["top"], SMALL);
        top.shows(&["no process is managed"]);
        top
    };
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        let mut top = start();
        top.signal(signal);
        assert_eq!(top.ended().signal(), Some(signal));
    }
    // ^C is a key.
    let mut top = start();
    top.press("\x03");
    assert_eq!(top.ended().code(), Some(0));
}

#[test]
fn a_stopped_process_does_not_stop_the_display() {
    let machine = Machine::new();
    let (stopped, other) = (machine.engine("stuck"), machine.engine("other"));
    let mut top = Terminal::start(&machine, &["top", "-i", "0.2"], SMALL);
    top.shows(&["stuck", "active"]);
    stopped.stop();
    top.shows(&["stuck", "no answer for"]);
    // The rest goes on, and keys do.
    machine.vramctl("pause --pid ").expect(2, "", "");
    machine.vramctl(&format!("pause --pid {}", other.pid())).expect(0, "", "");
    top.shows(&["other", "held, paused"]);
    top.press("o");
    top.shows(&["order: size"]);
    stopped.go_on();
    top.shows(&["stuck", "active"]);
    top.press("q");
    top.ended();
}

#[test]
fn a_slow_pause_is_followed_and_may_be_cancelled() {
    let machine = Machine::new();
    let mut engine = machine.start_with("engine", "engine", |command| {
        command.args(["--weights-mib", "256", "--kv-mib", "8"]).env("SIMGPU_LINK", "15M");
    });
    // Commands can be cancelled even if whoever started this ignores ^C, as a background job does.
    let ignoring = || {
        unsafe { libc::signal(libc::SIGINT, libc::SIG_IGN) };
        Ok(())
    };
    let mut top = Terminal::start_with(&machine, &["top", "-i", "0.2"], SMALL, |command| _ = unsafe { command.pre_exec(ignoring) });
    top.shows(&["engine", "active"]);
    top.press("py");
    top.shows(&["$ vramctl pause --name=engine", "x cancels"]);
    top.shows(&["engine", "save [", "%"]);
    top.shows(&["Link", "now"]);
    // One at a time.
    top.press("r");
    top.shows(&["x cancels"]);
    top.press("x");
    top.shows(&["interrupted: engine"]);
    // What it says is what becomes of it.
    top.expect("an end", |screen| {
        line_with(screen, &["engine (pid", "active"]).is_some() || line_with(screen, &["engine (pid", "paused"]).is_some()
    });
    if machine.settled(&[&engine]) != "active" {
        machine.vramctl("resume").expect(0, "", "");
    }
    engine.verify();
    top.press("q");
    top.ended();
}

#[test]
fn colours_are_only_for_those_who_want_them() {
    let machine = Machine::new();
    let _engine = machine.engine("engine");
    let is_coloured = |told: &[u8]| {
        let text = String::from_utf8_lossy(told).into_owned();
        text.split("\x1b[").skip(1).filter_map(|rest| rest.split_once('m')).any(|(codes, _)| {
            let codes: Vec<_> = codes.split(';').collect();
            codes.iter().any(|code| matches!(code.parse(), Ok(30..=37 | 38 | 40..=47 | 48 | 90..=97_u32))) && codes.len() < 8
        })
    };
    for (value, wanted) in [("", true), ("1", false)] {
        let mut top = Terminal::start_with(&machine, &["top"], SMALL, |command| _ = command.env("NO_COLOR", value));
        top.shows(&["engine", "active"]);
        top.expect("a bar", |screen| line_with(screen, &["GPU 0", "a"]).is_some());
        assert_eq!(is_coloured(&top.told.lock().unwrap()), wanted, "NO_COLOR={value}");
        top.press("q");
        top.ended();
    }
}

#[test]
fn one_gpu_is_shown_with_the_programs_that_have_memory_there() {
    let machine = Machine::with(2, "64M");
    let start = |name: &str, gpu: &str| {
        let mut command = machine.program(name, "hog --mib 8 --seconds 600 --device");
        let mut program = Program::spawn(command.arg(gpu));
        program.expect("holding");
        program
    };
    let _running = [start("first", "0"), start("second", "1")];
    let frame = |line: &str| machine.vramctl(line).expect(0, "", "").out;
    let both = frame("top --once");
    assert!(["GPU 0", "GPU 1", "first (pid", "second (pid"].iter().all(|part| both.contains(part)), "{both}");
    let one = frame("top --once --gpu 1");
    assert!(one.contains("GPU 1") && one.contains("second (pid"), "{one}");
    assert!(!one.contains("GPU 0") && !one.contains("first (pid"), "{one}");
}

#[test]
fn without_a_terminal_it_prints_one_frame() {
    let machine = Machine::new();
    machine.vramctl("top").expect(2, "", "vramctl top --once");
    machine.vramctl("top --interval 0").expect(2, "", "from 0.1 to 20 seconds");
    machine.vramctl("top --once").expect(0, "no process is managed", "");
    let engine = machine.engine("engine");
    machine.vramctl("pause").expect(0, "", "");
    let picture = machine.vramctl("top --once").expect(0, "engine (pid", "").out;
    assert!(line_with(&picture, &["engine (pid", "held, paused"]).is_some() && line_with(&picture, &["GPU 0"]).is_some(), "{picture}");
    assert!(!picture.contains('\x1b') && picture.lines().all(|line| line.len() <= 80), "{picture}");
    let run = |variable: &str| {
        let mut command = machine.cli(&["top", "--once"]);
        command.env_remove("NO_COLOR").env("CLICOLOR_FORCE", "1").env("COLUMNS", "120");
        if !variable.is_empty() {
            command.env(variable, "1");
        }
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    };
    let coloured = run("");
    assert!(coloured.contains("\x1b[0;1m") && coloured.contains("ON DISK"), "{coloured}");
    assert!(!run("NO_COLOR").contains('\x1b'));
    engine.stop();
    machine.vramctl("top --once").expect(0, "engine (pid", "");
}
