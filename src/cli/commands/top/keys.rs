//! What a key does.

use super::model::{Curves, Model, Needs, Overlay, Subject, TableRow, View};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use std::collections::BTreeMap;
use std::env;
use std::time::{Duration, Instant};
use vramctl_model::Bytes;

/// An action outside the model.
#[derive(Debug, PartialEq, Eq)]
pub enum Wish {
    Nothing,
    Quit,
    /// Run `vramctl` with these arguments.
    Run(Vec<String>),
    /// Interrupt what runs.
    Cancel,
}

/// The keys, and what they do, for the help.
pub const KEYS: [(&str, &str); 16] = [
    ("up, down, j, k", "select; PgUp, PgDn, Home and End too"),
    ("p", "pause what is selected: a tag, a process or all with a name"),
    ("r", "resume it"),
    ("s", "suspend it: it leaves the GPU entirely (never only a tag)"),
    ("m", "move it to another GPU, which you type"),
    ("w", "swap it with another program, whose name or pid you type"),
    ("f", "have torch return what it has cached (`trim`; never only a tag)"),
    ("x", "cancel the command that is running"),
    ("o", "order by name, size or state"),
    ("t", "tags or processes below each name"),
    ("/", "show only names and tags that contain what you type; esc shows all"),
    ("c", "curves of the last five minutes, or none"),
    ("+, -", "refresh more or less often"),
    ("?, h", "this help"),
    ("esc", "close this help, or a question; show all"),
    ("q", "quit; a running command continues"),
];

const SHORTEST: Duration = Duration::from_millis(100);
/// A process disconnects clients that are silent for longer than 30 s.
const LONGEST: Duration = Duration::from_secs(20);

/// Checks that this is a valid interval.
pub fn checked(interval: Duration) -> Result<Duration, String> {
    let is_one = (SHORTEST..=LONGEST).contains(&interval);
    is_one.then_some(interval).ok_or_else(|| format!("from {} to {} seconds", SHORTEST.as_secs_f64(), LONGEST.as_secs()))
}

/// A key is pressed.
pub fn press(model: &mut Model, key: KeyEvent, now: Instant) -> Wish {
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return if matches!(key.code, KeyCode::Char('c')) { Wish::Quit } else { Wish::Nothing };
    }
    match std::mem::replace(&mut model.overlay, Overlay::Nothing) {
        Overlay::Question { words, .. } => {
            return if matches!(key.code, KeyCode::Char('y' | 'Y') | KeyCode::Enter) { Wish::Run(words) } else { Wish::Nothing };
        }
        Overlay::Filter => {
            type_filter(model, key.code);
            return Wish::Nothing;
        }
        Overlay::Asking { needs, of, typed } => {
            type_answer(model, needs, of, typed, key.code);
            return Wish::Nothing;
        }
        Overlay::Help if !matches!(key.code, KeyCode::Char('q')) => return Wish::Nothing,
        Overlay::Help | Overlay::Nothing => (),
    }
    match key.code {
        KeyCode::Char('q') => return Wish::Quit,
        KeyCode::Char('?' | 'h') => model.overlay = Overlay::Help,
        KeyCode::Char('/') => model.overlay = Overlay::Filter,
        KeyCode::Esc => model.filter.clear(),
        KeyCode::Char('o') => model.order = model.order.next(),
        KeyCode::Char('t') => model.view = if model.view == View::Tags { View::Processes } else { View::Tags },
        KeyCode::Char('+' | '=') => model.interval = (model.interval / 2).max(SHORTEST),
        KeyCode::Char('-') => model.interval = (model.interval * 2).min(LONGEST),
        KeyCode::Down | KeyCode::Char('j') => model.select(1, now),
        KeyCode::Up | KeyCode::Char('k') => model.select(-1, now),
        KeyCode::PageDown => model.select(10, now),
        KeyCode::PageUp => model.select(-10, now),
        KeyCode::Home => model.select(isize::MIN, now),
        KeyCode::End => model.select(isize::MAX, now),
        KeyCode::Char('x') if model.command.is_some() => return Wish::Cancel,
        KeyCode::Char('p') => ask(model, "pause", now),
        KeyCode::Char('r') => ask(model, "resume", now),
        KeyCode::Char('s') => ask(model, "suspend", now),
        KeyCode::Char('f') => ask(model, "trim", now),
        KeyCode::Char('m') => begin_to_ask(model, Needs::Gpu, now),
        KeyCode::Char('w') => begin_to_ask(model, Needs::Partner, now),
        KeyCode::Char('c') => {
            model.curves = if model.curves.is_some() { None } else { Some(Curves::of_terminal(|name| env::var(name).ok())) };
        }
        _ => (),
    }
    Wish::Nothing
}

/// A key while the filter is typed. It applies at once.
fn type_filter(model: &mut Model, key: KeyCode) {
    match key {
        KeyCode::Enter => return,
        KeyCode::Esc => return model.filter.clear(),
        KeyCode::Backspace => _ = model.filter.pop(),
        KeyCode::Char(letter) => model.filter.push(letter),
        _ => (),
    }
    model.overlay = Overlay::Filter;
}

/// What a command needs besides the selection, as a question.
pub fn question(model: &Model, needs: Needs, of: &Subject) -> String {
    let name = written(of);
    match needs {
        Needs::Gpu => format!("move {name} to GPU"),
        Needs::Partner if model.is_away(of) => format!("{name} comes back, who leaves"),
        Needs::Partner => format!("{name} leaves, who comes back"),
    }
}

/// As commands take it.
fn written(of: &Subject) -> String {
    of.pid.map_or_else(|| of.name.clone().unwrap_or_default(), |pid| pid.to_string())
}

/// Asks for what a command needs besides the selection.
fn begin_to_ask(model: &mut Model, needs: Needs, now: Instant) {
    if refuse_while_busy(model, now) {
        return;
    }
    let rows = model.rows(now);
    let Some(row) = model.selection(&rows).map(|at| &rows[at]) else { return };
    // These apply to the whole process, not to a tag.
    model.overlay = Overlay::Asking { needs, of: Subject { tag: None, ..row.key.clone() }, typed: String::new() };
}

/// A key while that is typed.
fn type_answer(model: &mut Model, needs: Needs, of: Subject, mut typed: String, key: KeyCode) {
    match key {
        KeyCode::Esc => return,
        KeyCode::Enter if typed.trim().is_empty() => return,
        KeyCode::Enter => {
            let (words, what) = answered(model, needs, &of, typed.trim());
            model.overlay = Overlay::Question { words, what, lost: String::new() };
            return;
        }
        KeyCode::Backspace => _ = typed.pop(),
        KeyCode::Char(letter) => typed.push(letter),
        _ => (),
    }
    model.overlay = Overlay::Asking { needs, of, typed };
}

/// The command line, and what it does.
fn answered(model: &Model, needs: Needs, of: &Subject, typed: &str) -> (Vec<String>, String) {
    let (its, other) = (written(of), typed.to_owned());
    match needs {
        Needs::Gpu => {
            let what = format!("{its}: it leaves its GPU, and comes back there");
            (words("move", of).into_iter().chain([format!("--to={other}")]).collect(), what)
        }
        Needs::Partner => {
            let (out, back) = if model.is_away(of) { (other, its) } else { (its, other) };
            let what = format!("{out} leaves, {back} comes back");
            let dashes = [&out, &back].iter().any(|name| name.starts_with('-')).then(|| "--".to_owned());
            (["swap".to_owned()].into_iter().chain(dashes).chain([out, back]).collect(), what)
        }
    }
}

/// Says which command runs, if one does, and returns whether that is so.
fn refuse_while_busy(model: &mut Model, now: Instant) -> bool {
    let Some((words, _)) = &model.command else { return false };
    let text = format!("vramctl {} is still running; x cancels it", words.join(" "));
    model.say(text, now);
    true
}

/// Asks for confirmation to apply this to the selection.
fn ask(model: &mut Model, verb: &str, now: Instant) {
    if refuse_while_busy(model, now) {
        return;
    }
    let rows = model.rows(now);
    let Some(row) = model.selection(&rows).map(|at| &rows[at]) else { return };
    // These apply to the whole process, not to a tag.
    let key = Subject { tag: row.key.tag.clone().filter(|_| !["suspend", "trim"].contains(&verb)), ..row.key.clone() };
    let row = rows.iter().find(|row| row.key == key).unwrap_or(row);
    let what = match (verb, &key.tag) {
        ("resume", _) => format!("{}: {} of GPU memory", of(row), Bytes(row.coming)),
        ("trim", _) => format!("{}: what torch has cached", of(row)),
        _ => format!("{}: {} of GPU memory", of(row), Bytes(row.active)),
    };
    let lost = if ["resume", "trim"].contains(&verb) { String::new() } else { loss(&row.discarded) };
    model.overlay = Overlay::Question { words: words(verb, &key), what, lost };
}

/// What will be lost; empty if nothing is.
fn loss(discarded: &BTreeMap<String, u64>) -> String {
    if discarded.is_empty() {
        return String::new();
    }
    let tags: Vec<_> = discarded.iter().map(|(tag, bytes)| format!("{tag} ({})", Bytes(*bytes))).collect();
    format!("LOST: the contents of {}. Their policy is discard: no backup is made", tags.join(", "))
}

fn of(row: &TableRow) -> String {
    match (&row.key.tag, &row.key.name, row.key.pid) {
        (Some(tag), Some(name), _) => format!("{tag} of {name}"),
        (None, Some(name), Some(pid)) => format!("{name} (pid {pid})"),
        _ => row.title.clone(),
    }
}

/// The command line.
fn words(verb: &str, key: &Subject) -> Vec<String> {
    let target = match (&key.name, key.pid) {
        (_, Some(pid)) => ["--pid".to_owned(), pid.to_string()],
        (name, None) => ["--name".to_owned(), name.clone().unwrap_or_default()],
    };
    // A name or a tag may begin with a dash.
    let [option, value] = target;
    let mut words = vec![verb.to_owned(), format!("{option}={value}")];
    if let Some(tag) = &key.tag {
        words.extend(tag.starts_with('-').then(|| "--".to_owned()));
        words.push(tag.clone());
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: Option<&str>, pid: Option<u32>, tag: Option<&str>) -> Subject {
        Subject { name: name.map(Into::into), pid, tag: tag.map(Into::into) }
    }

    #[test]
    fn a_question_shows_the_command_that_does_it() {
        let line = |verb, key: &Subject| words(verb, key).join(" ");
        assert_eq!(line("pause", &key(Some("engine"), None, Some("kv_cache"))), "pause --name=engine kv_cache");
        assert_eq!(line("resume", &key(Some("engine"), Some(7), None)), "resume --pid=7");
        assert_eq!(line("suspend", &key(None, Some(7), None)), "suspend --pid=7");
        assert_eq!(line("pause", &key(Some("-x"), None, Some("-y"))), "pause --name=-x -- -y");
    }
}
