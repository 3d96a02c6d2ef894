//! The next step for command lines that clap refuses: what people try, and what does that here.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Options and words that a command does not have, with what is meant. Without a command: whichever it is.
const UNKNOWN: [(&str, &str, &str); 8] = [
    ("", "--tag --tags", "a tag is a word, as in `vramctl pause kv_cache --name engine`"),
    ("", "-a", "all of them are chosen by --all"),
    ("", "-v --ver -version", "`vramctl --version` tells the version"),
    ("ps", "--wide -w", "`vramctl ps -o wide` has all columns"),
    ("status gpus", "--watch -w", "`vramctl top` shows it live"),
    ("resume", "--to", "`vramctl move NAME --to GPU` brings it back on another GPU"),
    ("run", "--gpu --gpus --device", "`CUDA_VISIBLE_DEVICES=0 vramctl run -- COMMAND` chooses GPUs"),
    ("run", "--memory --mem --max-memory", "`vramctl run --limit 20G -- COMMAND` gives a share of each GPU"),
];

/// What a command cannot do without, as it is written.
const MISSING: [(&str, &str, &str); 8] = [
    ("move", "--to", "vramctl move engine --to 1"),
    ("run", "<COMMAND>", "vramctl run --name engine -- python serve.py"),
    ("run", "--share", "vramctl run --share --priority high -- python serve.py"),
    ("trace", "--output", "vramctl trace engine -o page.html"),
    ("save", "<DIR>", "vramctl save engine /data/engine"),
    ("load", "<DIR>", "vramctl load /data/engine"),
    ("swap", "<IN>", "vramctl swap trainer engine"),
    ("completions", "<SHELL>", "vramctl completions bash"),
];

/// What to do instead, if it is known.
pub fn of(error: &clap::Error) -> Option<String> {
    let command = command(error);
    match (error.kind(), error.get(ContextKind::InvalidArg)?) {
        (ErrorKind::UnknownArgument, ContextValue::String(written)) => unknown(&command, written),
        (ErrorKind::MissingRequiredArgument, ContextValue::Strings(missing)) => {
            let (_, _, example) = MISSING.iter().find(|(of, what, _)| *of == command && missing[0].starts_with(what))?;
            Some(format!("{} is missing, as in `{example}`", missing[0]))
        }
        _ => None,
    }
}

/// What is meant by an option or a word that the command does not have.
pub fn unknown(command: &str, written: &str) -> Option<String> {
    let is_among = |words: &str, word: &str| words.split(' ').any(|known| known == word);
    let is_it = |(of, words, _): &&(&str, &str, &str)| (of.is_empty() || is_among(of, command)) && is_among(words, written);
    UNKNOWN.iter().find(is_it).map(|(_, _, meant)| format!("{written} is no option here: {meant}"))
}

/// The command that the error is of; empty: of none. Clap tells it in the usage alone.
fn command(error: &clap::Error) -> String {
    let Some(ContextValue::StyledStr(usage)) = error.get(ContextKind::Usage) else { return String::new() };
    usage.to_string().split_whitespace().skip_while(|word| *word != "vramctl").nth(1).unwrap_or_default().to_owned()
}
