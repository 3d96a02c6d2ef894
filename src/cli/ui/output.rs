//! Output: results on stdout, errors and hints on stderr, JSON on one line.

use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;
use std::io::{self, ErrorKind, Write};
use vramctl_coordinator::failure::{Choice, CommandError, Exit};
use vramctl_coordinator::text::{one_line, plain};

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
        let rows = failure
            .choices()
            .iter()
            .map(|Choice { pid, name, state, bytes }| vec![pid.to_string(), name.clone(), state.clone(), bytes.clone()]);
        let table = table(&["PID", "NAME", "STATE", "BYTES"], rows);
        let choices = if failure.choices().is_empty() { String::new() } else { format!(":\n{table}") };
        complain("error", &format!("{failure}{choices}"));
    }
}

/// Writes a line to stderr. Best effort.
pub fn complain(what: &str, text: &str) {
    let _ = writeln!(io::stderr(), "{what}: {}", plain(text));
}

/// Warns of an old spelling.
pub fn outdated(old: &str, new: &str) {
    complain("warning", &format!("`{old}` is `{new}` now; the next release refuses the old spelling"));
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
    fn a_table_is_plain_columns() {
        assert_eq!(table(&["A", "LONG"], [vec!["xyz".into(), "1".into()]]), "A    LONG\nxyz  1");
    }
}
