//! Colours, on a terminal that wants them. Nothing is said in colour alone.

use clap::builder::styling::{AnsiColor, Style};
use comfy_table::Color;
use std::env;
use std::io::{IsTerminal, stderr};

/// Whether the user allows them (<https://no-color.org>).
pub fn allowed() -> bool {
    env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Whether to write them here.
pub fn wanted(here: &impl IsTerminal) -> bool {
    allowed() && (here.is_terminal() || env::var_os("CLICOLOR_FORCE").is_some_and(|value| !value.is_empty() && value != "0"))
}

/// The word with which a line on stderr begins, in clap's colours.
pub fn label(what: &str) -> String {
    let colour = match what {
        "error" | "interrupted" => AnsiColor::Red,
        "warning" => AnsiColor::Yellow,
        _ => AnsiColor::Cyan,
    };
    let style = if wanted(&stderr()) { colour.on_default().bold() } else { Style::new() };
    format!("{style}{what}:{style:#}")
}

/// The colour of a process's or tag's state in a table.
pub fn of_state(state: &str) -> Option<Color> {
    let begins = |words: &[&str]| words.iter().any(|word| state.starts_with(word));
    match state {
        _ if begins(&["lost", "no answer"]) => Some(Color::Red),
        _ if ["pausing", "resuming", "undoing"].iter().any(|word| state.contains(word)) => Some(Color::Cyan),
        _ if begins(&["active"]) => Some(Color::Green),
        _ if begins(&["empty"]) => None,
        _ => Some(Color::Yellow),
    }
}
