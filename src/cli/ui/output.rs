//! Output: results on stdout, errors and hints on stderr, JSON on one line.

use super::colours;
use comfy_table::{Attribute, Cell, ColumnConstraint, ContentArrangement, Table, Width, presets};
use crossterm::terminal;
use serde::Serialize;
use serde_json::{Value, json};
use std::io::{self, ErrorKind, IsTerminal, Write, stdout};
use vramctl_coordinator::failure::{Choice, CommandError, Exit};
use vramctl_coordinator::gpus;
use vramctl_coordinator::text::{self, one_line, plain};

/// Writes to stdout. A closed pipe (`vramctl ps | head -1`) is not an error.
pub fn print(text: &str) -> Result<(), CommandError> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(CommandError::new(Exit::Failed, format!("stdout: {error}"))),
        _ => Ok(()),
    }
}

/// Writes lines to stdout, without control characters.
pub fn say(text: &str) -> Result<(), CommandError> {
    print(&format!("{}\n", plain(text)))
}

/// Writes text with tables in it, whose other lines have been made [`plain`].
pub fn show(text: &str) -> Result<(), CommandError> {
    print(&format!("{text}\n"))
}

/// The answer of a command with `--json`: an object with its processes.
pub fn json(processes: &[impl Serialize]) -> Result<(), CommandError> {
    answer(json!({ "processes": processes }))
}

/// The same with more in it. Each GPU has its index in `nvidia-smi` beside its UUID.
pub fn answer(mut answer: Value) -> Result<(), CommandError> {
    gpus::add_indices(&mut answer);
    print(&format!("{answer}\n"))
}

/// The exit code of a command whose answer was written, or was not. An answer that nobody gets is a failure; what was done stays done.
pub fn told(written: Result<(), CommandError>, exit: Exit) -> Result<Exit, CommandError> {
    match written {
        Err(failure) if exit == Exit::Done => Err(failure.adding("; what was asked for is done all the same")),
        Err(failure) => {
            complain("error", &failure.to_string());
            Ok(exit)
        }
        Ok(()) => Ok(exit),
    }
}

/// Reports that a command failed as a whole.
pub fn fail(failure: &CommandError, json: bool) {
    let is_told = json && answer(json!({ "processes": [], "error": failure })).is_ok();
    if !is_told {
        let rows = failure.choices().iter().map(|Choice { pid, name, state, bytes, command }| {
            vec![pid.to_string(), name.clone(), state.clone(), bytes.clone(), command.clone()]
        });
        let table = with_commands(&["PID", "NAME", "STATE", "BYTES", "COMMAND"], rows.collect(), width(), false);
        let choices = if failure.choices().is_empty() { String::new() } else { format!(":\n{table}") };
        complain("error", &format!("{failure}{choices}"));
    }
}

/// Writes a line to stderr. Best effort.
pub fn complain(what: &str, text: &str) {
    let _ = writeln!(io::stderr(), "{} {}", colours::label(what), plain(&gpus::with_indices(text)));
}

/// Whether a person can answer a question.
pub fn is_answered() -> bool {
    io::stdin().is_terminal() && io::stderr().is_terminal()
}

/// Asks a question of yes or no, on stderr. Anything but yes is no.
pub fn ask(question: &str) -> bool {
    let _ = write!(io::stderr(), "{} [y/N] ", plain(question));
    let mut answer = String::new();
    let _ = io::stdin().read_line(&mut answer);
    matches!(answer.trim().to_lowercase().as_str(), "y" | "yes")
}

/// How wide the terminal is, if stdout is one and reports it.
pub fn width() -> Option<u16> {
    terminal::size().ok().map(|(width, _)| width).filter(|width| *width > 0 && stdout().is_terminal())
}

/// A line that begins with `head`, and continues below its text where the terminal ends. No word is broken.
pub fn hanging(head: &str, text: &str, width: Option<u16>) -> String {
    /// Less would be a column of words.
    const LEAST: usize = 30;
    let indent = head.chars().count();
    let Some(room) = width.map(|width| usize::from(width).saturating_sub(indent).max(LEAST)) else { return format!("{head}{text}") };
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.last_mut().filter(|last| last.is_empty() || last.chars().count() + 1 + word.chars().count() <= room);
        match last {
            Some(last) if last.is_empty() => last.push_str(word),
            Some(last) => *last = format!("{last} {word}"),
            None => lines.push(word.to_owned()),
        }
    }
    head.to_owned() + &lines.join(&format!("\n{}", " ".repeat(indent)))
}

/// A table without lines, as `ps` prints it.
pub fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    arranged(header, rows, width(), colours::wanted(&stdout()))
}

/// The same; where the terminal is too narrow for a row in a line, each row is a block, with a line for each column that has something in it.
pub fn wide_table(header: &[&str], rows: Vec<Vec<String>>) -> String {
    arranged_or_blocks(header, rows, width(), colours::wanted(&stdout()))
}

fn arranged_or_blocks(header: &[&str], rows: Vec<Vec<String>>, width: Option<u16>, in_colour: bool) -> String {
    let whole = arranged(header, rows.clone(), None, false);
    let widest = whole.lines().map(|line| line.chars().count()).max().unwrap_or(0);
    if width.is_none_or(|width| widest <= usize::from(width)) {
        return arranged(header, rows, None, in_colour);
    }
    let head = header.iter().map(|title| title.chars().count()).max().unwrap_or(0) + 2;
    let line = |(title, cell): (&&str, &String)| (!cell.is_empty()).then(|| hanging(&format!("{title:head$}"), &one_line(cell), width));
    let block = |row: Vec<String>| header.iter().zip(&row).filter_map(line).collect::<Vec<_>>().join("\n");
    rows.into_iter().map(block).collect::<Vec<_>>().join("\n\n")
}

/// The same, of which the last column is of command lines: as much of them as there is room for, and none if that is little.
pub fn table_with_commands(header: &[&str], rows: Vec<Vec<String>>) -> String {
    with_commands(header, rows, width(), colours::wanted(&stdout()))
}

fn with_commands(header: &[&str], mut rows: Vec<Vec<String>>, width: Option<u16>, in_colour: bool) -> String {
    /// Less of a command line says little.
    const LEAST: usize = 16;
    let Some(width) = width else { return arranged(header, rows, None, in_colour) };
    let last = header.len() - 1;
    let widest = |column: usize| rows.iter().map(|row| row[column].chars().count()).chain([header[column].len()]).max().unwrap_or(0);
    let room = usize::from(width).saturating_sub((0..last).map(|column| widest(column) + 2).sum());
    if room < LEAST {
        for row in &mut rows {
            row.truncate(last);
        }
        return arranged(&header[..last], rows, Some(width), in_colour);
    }
    for row in &mut rows {
        row[last] = text::cut(&row[last], room);
    }
    arranged(header, rows, Some(width), in_colour)
}

/// A table for a terminal of this width.
fn arranged(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>, width: Option<u16>, in_colour: bool) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).force_no_tty().style_text_only();
    if in_colour {
        table.enforce_styling();
    }
    table.set_header(header.iter().map(|title| Cell::new(title).add_attribute(Attribute::Bold)));
    for row in rows {
        table.add_row(row.iter().zip(header).map(|(text, title)| cell(title, text)));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    if let Some(width) = width {
        narrow(&mut table, width);
    }
    table.trim_fmt()
}

fn cell(title: &str, text: &str) -> Cell {
    let cell = Cell::new(one_line(text));
    let colour = colours::of_state(text).filter(|_| title == "STATE");
    colour.map_or(cell.clone(), |colour| cell.fg(colour))
}

/// Breaks long cells, between words, if the table is wider than this.
fn narrow(table: &mut Table, width: u16) {
    /// Shorter cells stay in one line: figures with their units.
    const SHORT: usize = 16;
    let widths = table.column_max_content_widths();
    if widths.iter().map(|width| width + 2).sum::<u16>() <= width + 2 {
        return;
    }
    let unbroken = |text: String| if text.chars().count() <= SHORT { text.chars().count() } else { longest_word(&text) };
    let mut least = vec![0; widths.len()];
    for row in table.header().into_iter().chain(table.row_iter()) {
        for (least, cell) in least.iter_mut().zip(row.cell_iter()) {
            *least = unbroken(cell.content()).max(*least);
        }
    }
    table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width + 2);
    for ((column, least), natural) in table.column_iter_mut().zip(least).zip(widths) {
        let is_fixed = least >= usize::from(natural);
        let bound = Width::Fixed(least as u16 + column.padding_width());
        column.set_constraint(if is_fixed { ColumnConstraint::ContentWidth } else { ColumnConstraint::LowerBoundary(bound) });
    }
}

fn longest_word(text: &str) -> usize {
    text.split(' ').map(|word| word.chars().count()).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_plain_columns() {
        assert_eq!(arranged(&["A", "LONG"], [vec!["xyz".into(), "1".into()]], None, false), "A    LONG\nxyz  1");
    }

    #[test]
    fn a_long_line_continues_below_its_text() {
        let text = "/usr/lib/libvramctl.so, version 0.1.0; it can be preloaded by all";
        assert_eq!(hanging("ok  ", text, None), format!("ok  {text}"));
        let narrow = hanging("ok  ", text, Some(40));
        assert_eq!(narrow, "ok  /usr/lib/libvramctl.so, version\n    0.1.0; it can be preloaded by all");
        assert_eq!(narrow.split_whitespace().collect::<Vec<_>>().join(" "), hanging("ok ", text, None));
        let long = "x".repeat(60);
        assert_eq!(hanging("ok  ", &format!("a {long} b"), Some(40)), format!("ok  a\n    {long}\n    b"));
    }

    #[test]
    fn a_narrow_table_breaks_between_words_only() {
        let row = || {
            vec!["4711".to_owned(), "kv_cache paused; weights partly paused".into(), "40.00 GiB".into(), "/usr/bin/a-long-program".into()]
        };
        let at = |width| arranged(&["PID", "STATE", "BYTES", "PROGRAM"], [row()], Some(width), false);
        let whole = at(200);
        assert_eq!(whole.lines().count(), 2, "{whole}");
        let widest = |text: &str| text.lines().map(|line| line.chars().count()).max().unwrap();
        assert_eq!(at(widest(&whole) as u16), whole);
        for width in [1, 20, 60, 70, 79] {
            let text = at(width);
            for word in ["4711", "kv_cache", "partly", "40.00 GiB", "/usr/bin/a-long-program"] {
                assert!(text.contains(word), "{width}: {word} is broken in\n{text}");
            }
            assert!(width < 60 || widest(&text) <= width.into(), "{width}:\n{text}");
        }
    }

    #[test]
    fn a_row_that_is_too_wide_is_a_block() {
        let rows = || vec![vec!["4711".to_owned(), String::new(), "a b c d e f g h i j k l m n o p q".into()]; 2];
        let at = |width| arranged_or_blocks(&["PID", "NAME", "TAGS"], rows(), width, false);
        assert_eq!(at(None).lines().count(), 3);
        assert_eq!(at(Some(100)), at(None));
        let block = "PID   4711\nTAGS  a b c d e f g h i j k l m n o\n      p q";
        assert_eq!(at(Some(36)), format!("{block}\n\n{block}"));
    }

    #[test]
    fn states_have_colours_where_they_are_wanted() {
        let at = |state: &str, in_colour| arranged(&["STATE"], [vec![state.to_owned()]], None, in_colour);
        assert!(at("active", true).contains("\u{1b}[38;5;10mactive"), "{:?}", at("active", true));
        assert!(!at("active", false).contains('\u{1b}'));
        assert!(at("a\u{1b}[1mb", false).contains("a\u{fffd}[1mb"), "nobody else's");
    }
}
