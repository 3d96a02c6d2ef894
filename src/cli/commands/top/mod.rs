//! `vramctl top`: the GPUs and the processes, live in the terminal.
//!
//! Polling ([`poll`]), the state ([`model`]), drawing ([`draw`]) and key handling ([`keys`]) are separate. Here, one loop receives input
//! from the processes, the keyboard and the commands that it started, and draws.

mod draw;
mod keys;
mod model;
mod poll;

use crate::arguments::{GpuArgs, seconds};
use crate::execute::Execute;
use crate::ui::{colours, interrupt, output};
use keys::Wish;
use model::{Curves, Model};
use poll::{Interval, Listener, News};
use ratatui::DefaultTerminal;
use ratatui::buffer::Buffer;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use ratatui::crossterm::execute;
use ratatui::layout::Rect;
use ratatui::style::Color;
use std::collections::BTreeSet;
use std::io::{self, IsTerminal, stdin, stdout};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{self, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use std::{env, panic};
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::parallel;
use vramctl_model::Verb;

#[derive(clap::Args)]
#[command(after_long_help = "\
A bar shows who uses the memory of each GPU: each tag has a letter, which the table on the screen explains. Keys pause, resume and \
suspend the selection, after showing the command and asking; ? lists them all. docs/monitoring.md has a picture.

It needs a terminal of at least 80 columns, respects NO_COLOR, and draws in ASCII; curves in block characters where the locale has UTF-8.

Examples:
  vramctl top
  vramctl top --interval 0.5
  vramctl top --gpu 0 --gpu 1
  vramctl top --once # one frame, as text; CLICOLOR_FORCE=1 adds colours")]
pub struct Args {
    /// Seconds between refreshes; fractions are allowed
    #[arg(long, short, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    interval: Duration,
    /// Print one frame and exit; needs no terminal
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    gpu: GpuArgs,
}

fn interval(text: &str) -> Result<Duration, String> {
    seconds(text).and_then(keys::checked)
}

/// What happens.
enum Incoming {
    News(News),
    Input(Event),
    /// The terminal is gone.
    NoInput(io::Error),
    /// A command has ended, with this output.
    Done(String),
    Signal(libc::c_int),
}

impl Listener for Sender<Incoming> {
    fn send_news(&self, news: News) -> bool {
        self.send(Incoming::News(news)).is_ok()
    }
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        if self.once {
            return once(self.model());
        }
        if !stdin().is_terminal() || !stdout().is_terminal() {
            let text = "stdin or stdout is not a terminal; `vramctl top --once` prints one frame, `vramctl status --json` is for programs";
            return Err(CommandError::new(Exit::Usage, text));
        }
        let (happen, incomings) = channel();
        let ends = happen.clone();
        interrupt::catch_end(move |signal| _ = ends.send(Incoming::Signal(signal)));
        let interval = Interval::new(self.interval);
        poll::start(&happen, &interval);
        let ended = Screen::take().and_then(|mut screen| {
            let inputs = happen.clone();
            parallel::spawn(move || while inputs.send(event::read().map_or_else(Incoming::NoInput, Incoming::Input)).is_ok() {})?;
            let mut model = self.model();
            model.curves = Some(Curves::of_terminal(|name| env::var(name).ok()));
            watch(&mut screen, model, &incomings, &happen, &interval)
        });
        match ended {
            Ok(None) => Ok(Exit::Done),
            Ok(Some(signal)) => interrupt::end_by(signal),
            Err(error) => Err(CommandError::new(Exit::Failed, format!("the terminal cannot be used: {error}"))),
        }
    }
}

impl Args {
    fn model(&self) -> Model {
        let mut model = Model::new(self.interval);
        model.only.clone_from(&self.gpu.gpu);
        model
    }
}

/// The terminal. Dropping this restores it, and so does a panic.
struct Screen(DefaultTerminal);

impl Screen {
    fn take() -> io::Result<Self> {
        // This makes a panic restore the terminal, too.
        let screen = Self(ratatui::try_init()?);
        let restore_and_report = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let _ = execute!(stdout(), Show);
            restore_and_report(info);
            // No other thread may continue drawing.
            process::exit(101);
        }));
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = execute!(stdout(), Show);
        ratatui::restore();
    }
}

/// Shows the display until the user quits (`None`) or a signal arrives.
fn watch(
    Screen(screen): &mut Screen,
    mut model: Model,
    incomings: &Receiver<Incoming>,
    happen: &Sender<Incoming>,
    interval: &Interval,
) -> io::Result<Option<libc::c_int>> {
    /// Ages are shown in seconds.
    const AGES: Duration = Duration::from_millis(500);
    let colours = colours::allowed();
    let mut command = None;
    loop {
        screen.draw(|frame| paint(frame.buffer_mut(), &model, true, colours))?;
        let mut next = match incomings.recv_timeout(AGES) {
            Ok(first) => Some(first),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
        };
        while let Some(incoming) = next {
            let now = Instant::now();
            match incoming {
                Incoming::Signal(signal) => return Ok(Some(signal)),
                Incoming::NoInput(error) => return Err(error),
                Incoming::News(news) => learn(&mut model, news, now),
                Incoming::Done(said) => {
                    (model.command, command) = (None, None);
                    model.say(said, now);
                }
                Incoming::Input(Event::Key(key)) if key.kind == KeyEventKind::Press => match keys::press(&mut model, key, now) {
                    Wish::Nothing => interval.set(model.interval),
                    Wish::Quit => return Ok(None),
                    Wish::Cancel => command.as_ref().into_iter().for_each(cancel),
                    Wish::Run(words) => match run(&words, happen) {
                        Ok(started) => (model.command, command) = (Some((words, now)), Some(started)),
                        Err(error) => model.say(format!("vramctl cannot be started: {error}"), now),
                    },
                },
                // Drawing asks for the new size.
                Incoming::Input(_) => (),
            }
            next = incomings.try_recv().ok();
        }
    }
}

fn learn(model: &mut Model, news: News, now: Instant) {
    match news {
        News::Process(sample) => model.put(*sample, now),
        News::Gone(pid) => model.remove(pid),
        News::Gpus(gpus) => model.put_gpus(gpus, now),
        News::Sharing(news) => model.sharing = news,
        News::Found(count) => (model.found, model.trouble) = (Some(count), None),
        News::Trouble(why) => model.trouble = Some(why),
    }
}

fn paint(buffer: &mut Buffer, model: &Model, is_live: bool, colours: bool) {
    draw::draw(buffer, model, Instant::now(), is_live);
    if !colours {
        buffer.content.iter_mut().for_each(|cell| cell.fg = Color::Reset);
    }
}

/// Runs a command in a new process of this program: it behaves as on the command line, and continues if the display ends.
fn run(words: &[String], happen: &Sender<Incoming>) -> io::Result<OwnedFd> {
    let mut command = Command::new("/proc/self/exe");
    command.args(words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // The terminal's hangup must not reach it.
    command.process_group(0);
    // SAFETY: one system call, which is async-signal-safe. `cancel` interrupts the command, even where this program was started with
    // SIGINT ignored, as in a background job.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            Ok(())
        });
    }
    let mut child = command.spawn()?;
    // SAFETY: touches no memory. The child has not been waited for, so the number is its own.
    let handle = unsafe { libc::syscall(libc::SYS_pidfd_open, child.id(), 0) };
    if handle < 0 {
        let error = io::Error::last_os_error();
        let _ = child.kill();
        let _ = child.wait();
        return Err(error);
    }
    // SAFETY: just opened, and nobody else's.
    let handle = unsafe { OwnedFd::from_raw_fd(handle as i32) };
    let (line, happen) = (format!("$ vramctl {}", words.join(" ")), happen.clone());
    let waiting = parallel::spawn(move || {
        let said = child.wait_with_output().map_or_else(
            |error| error.to_string(),
            // Notes come before the result.
            |done| format!("{}{}", String::from_utf8_lossy(&done.stderr), String::from_utf8_lossy(&done.stdout)),
        );
        let _ = happen.send(Incoming::Done(format!("{line}\n{said}")));
    });
    waiting.inspect_err(|_| cancel(&handle))?;
    Ok(handle)
}

/// Cancels a command as ^C does: it undoes what is not complete, and reports that.
fn cancel(command: &OwnedFd) {
    let (nothing, none) = (std::ptr::null::<libc::siginfo_t>(), 0);
    // SAFETY: a handle on a process, and no memory.
    unsafe { libc::syscall(libc::SYS_pidfd_send_signal, command.as_raw_fd(), libc::SIGINT, nothing, none) };
}

/// Prints one picture.
fn once(mut model: Model) -> Result<Exit, CommandError> {
    /// Longer than it takes to see that a process is stopped.
    const ANSWERS: Duration = Duration::from_secs(6);
    /// To measure the copy rate.
    const SPEED: Duration = Duration::from_secs(2);
    let (happen, incomings) = channel();
    poll::start(&happen, &Interval::new(model.interval));
    let mut deadline = Instant::now() + ANSWERS;
    let (mut found, mut answered, mut gpus, mut sharing, mut is_complete) = (None, BTreeSet::new(), false, false, false);
    while let Ok(incoming) = incomings.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        let Incoming::News(news) = incoming else { continue };
        match &news {
            News::Found(count) => found = Some(*count),
            News::Process(sample) => _ = answered.insert(sample.process.pid),
            News::Gone(pid) => _ = answered.insert(*pid),
            News::Gpus(_) => gpus = true,
            News::Sharing(_) => sharing = true,
            News::Trouble(why) => return Err(CommandError::new(Exit::Failed, why.clone())),
        }
        learn(&mut model, news, Instant::now());
        if !is_complete && gpus && sharing && found.is_some_and(|count| answered.len() >= count) {
            is_complete = true;
            deadline = Instant::now() + if model.is_under_way() { SPEED } else { Duration::ZERO };
        }
        let is_moving = |verb| model.rate(verb).is_some_and(|(_, is_now)| is_now);
        if is_complete && (is_moving(Verb::Pause) || is_moving(Verb::Resume)) {
            break;
        }
    }
    let width = output::width().or_else(|| env::var("COLUMNS").ok()?.parse().ok()).unwrap_or(80).clamp(40, 400);
    let mut buffer = Buffer::empty(Rect::new(0, 0, width, draw::height(&model, width, Instant::now())));
    paint(&mut buffer, &model, false, colours::allowed());
    output::print(&draw::text(&buffer, colours::wanted(&stdout()))).map(|()| Exit::Done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Read;

    /// Run by the next test, in a terminal.
    #[test]
    #[ignore = "needs a terminal"]
    fn a_panic_in_a_terminal() {
        let _screen = Screen::take().unwrap();
        std::thread::spawn(|| panic!("oh no")).join().unwrap_err();
        unreachable!("whoever panics ends it");
    }

    #[test]
    fn a_panic_gives_the_terminal_back() {
        let (mut ours, mut theirs) = (0, 0);
        let none = std::ptr::null_mut();
        // SAFETY: both are writable, and the rest is not wanted.
        assert_eq!(unsafe { libc::openpty(&raw mut ours, &raw mut theirs, none, none.cast(), none.cast()) }, 0);
        // SAFETY: just opened, and nobody else's.
        let (mut ours, theirs) = unsafe { (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) };
        let is_raw = |terminal: &OwnedFd| {
            // SAFETY: plain data, and writable.
            let mut modes: libc::termios = unsafe { std::mem::zeroed() };
            // SAFETY: as above.
            assert_eq!(unsafe { libc::tcgetattr(terminal.as_raw_fd(), &raw mut modes) }, 0);
            modes.c_lflag & (libc::ICANON | libc::ECHO) == 0
        };
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "commands::top::tests::a_panic_in_a_terminal", "--ignored", "--nocapture"]);
        command.stdin(theirs.try_clone().unwrap()).stdout(theirs.try_clone().unwrap()).stderr(theirs.try_clone().unwrap());
        // SAFETY: both are async-signal-safe. The terminal becomes the child's own.
        unsafe {
            command.pre_exec(|| {
                if libc::setsid() < 0 || libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
            })
        };
        let ended = command.spawn().unwrap().wait().unwrap();
        assert_eq!(ended.code(), Some(101));
        assert!(!is_raw(&theirs));
        drop((theirs, command));
        let mut drawn = Vec::new();
        // Ends with an error when the other side is closed.
        let _ = ours.read_to_end(&mut drawn);
        let drawn = String::from_utf8_lossy(&drawn);
        let (entered, left, message) = (drawn.find("\x1b[?1049h"), drawn.find("\x1b[?1049l"), drawn.find("oh no"));
        assert!(entered.is_some() && entered < left && left < message, "{drawn:?}");
        assert!(drawn.contains("\x1b[?25h"), "{drawn:?}");
    }
}
