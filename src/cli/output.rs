//! Output: results on stdout, errors and hints on stderr, JSON on one line.

use crate::failure::{CommandError, Exit};
use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;
use std::io::{self, ErrorKind, Write};

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

/// The answer of a command with `--json`: an object with its processes.
pub fn json(processes: &[impl Serialize]) -> Result<(), CommandError> {
    print(&format!("{}\n", serde_json::json!({ "processes": processes })))
}

/// Reports that a command failed as a whole.
pub fn fail(failure: &CommandError, json: bool) {
    if json {
        // If stdout fails there is nowhere left to report it.
        let _ = print(&format!("{}\n", serde_json::json!({ "processes": [], "error": failure })));
    } else {
        complain("error", &failure.to_string());
    }
}

/// Writes a line to stderr. Best effort.
pub fn complain(what: &str, text: &str) {
    let _ = writeln!(io::stderr(), "{what}: {}", plain(text));
}

/// The text without control characters: names and command lines come from other programs.
pub fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { '\u{fffd}' } else { c }).collect()
}

/// A name or command line of another program in one line, which cannot pass for a message of ours.
pub fn one_line(text: &str) -> String {
    plain(&text.replace('\n', " "))
}

/// `1 process`, `2 processes`.
pub fn count(count: usize, one: &str, several: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { several })
}

/// How long something has been there: `42 s`, `3 min`, `5 h`, `2 days`.
pub fn age(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86400),
    }
}

/// A word as a shell takes it, for commands that the user may copy.
pub fn quoted(word: &str) -> String {
    let is_safe = |c: char| c.is_alphanumeric() || "-_./:@%+".contains(c);
    if !word.is_empty() && word.chars().all(is_safe) { word.to_owned() } else { format!("'{}'", word.replace('\'', "'\\''")) }
}

/// A table without lines, as `ps` prints it.
pub fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic).set_header(header);
    for row in rows {
        table.add_row(row.iter().map(|cell| one_line(cell)));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.trim_fmt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_other_programs_do_not_control_the_terminal() {
        assert_eq!(plain("a\u{1b}[31mb\rc\nd"), "a\u{fffd}[31mb\u{fffd}c\nd");
        assert_eq!(one_line("a\nerror: b\r"), "a error: b\u{fffd}");
    }

    #[test]
    fn a_word_may_be_copied_into_a_shell() {
        for (word, copied) in [("a/b-1", "a/b-1"), ("kü", "kü"), ("a b", "'a b'"), ("", "''"), ("it's", r"'it'\''s'"), ("$x", "'$x'")] {
            assert_eq!(quoted(word), copied);
        }
    }

    #[test]
    fn a_table_is_plain_columns() {
        assert_eq!(table(&["A", "LONG"], [vec!["xyz".into(), "1".into()]]), "A    LONG\nxyz  1");
    }
}
