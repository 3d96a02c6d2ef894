//! The next step for command lines that clap refuses: what people try, and what does that here.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use vramctl_coordinator::target;

/// Options and words that a command does not have, with what is meant. Without a command: whichever it is.
const UNKNOWN: [(&str, &str, &str); 34] = [
    ("", "--tag --tags", "a tag is a word, as in `vramctl pause kv_cache --name engine`"),
    ("", "-a", "all of them are chosen by --all"),
    ("", "-v --ver -version", "`vramctl --version` tells the version"),
    ("", "--format --output-format", "`--json` prints JSON"),
    ("", "-u --user --users", "root's `vramctl ps` and `gpus` show all users' programs; to act on one: `sudo -u USER vramctl …`"),
    ("ps", "--wide -w", "`vramctl ps -o wide` has all columns"),
    ("ps", "-q --quiet", "`vramctl ps -o name` prints the names alone"),
    ("status gpus ps", "--watch -w", "`vramctl top` shows it live"),
    ("resume", "--to", "`vramctl move NAME --to GPU` brings it back on another GPU"),
    ("resume", "--force -f", "nothing is in its way that could be forced; --timeout waits for memory"),
    ("move swap", "--gpu --gpus --device", "`vramctl move NAME --to GPU` chooses GPUs"),
    ("pause suspend", "--to --disk --dir", "`--backup disk` keeps the contents in files"),
    ("pause suspend swap", "--keep --save", "contents are kept, unless --discard or a policy says otherwise"),
    ("pause resume suspend swap move", "--wait -w -t", "`--timeout SECONDS` waits for what is in the way"),
    ("stop", "--force -f -9 --kill --now", "`vramctl stop --timeout 0 NAME` kills it at once"),
    ("stop", "--signal -s", "it sends SIGTERM, and SIGKILL after --timeout; `kill -SIGNAL PID` sends another"),
    ("logs", "--tail", "`vramctl logs -n 20 NAME` prints the last lines"),
    ("logs", "--since --until", "a log has no times; `vramctl logs -n 100 NAME` prints its end"),
    ("events", "--since --until", "it tells what happens from now on; `journalctl -t vramctl` has who did what before"),
    ("wait", "--until --state --is", "`--for idle` says what to wait for"),
    ("share", "--on --off --enable --disable", "`vramctl run --share -- COMMAND` starts a program that shares; `vramctl share` shows them"),
    ("metrics", "--port --address --bind serve", "`vramctl metrics --listen 9977` serves them"),
    ("config", "--list --show get set edit", "`vramctl config` prints the settings; they are written into ~/.config/vramctl.toml"),
    ("doctor", "--fix", "it changes nothing; each line says what to do"),
    ("trace", "--stop --end", "a trace goes on until its program ends; `-o FILE` writes what there is so far"),
    ("trace", "--duration --time", "`--seconds 60` records for a minute"),
    ("save load", "--name", "an image is named by its directory, as in `vramctl save engine /images/engine`"),
    ("images", "ls list show delete del remove", "`vramctl images /images` lists them; with rm, verify, gc or export after it"),
    ("run", "--gpu --gpus --device", "`CUDA_VISIBLE_DEVICES=0 vramctl run -- COMMAND` chooses GPUs"),
    ("run", "--memory --mem --max-memory", "`vramctl run --limit 20G -- COMMAND` gives a share of each GPU"),
    ("run", "--background --daemon --bg", "`vramctl run -d -- COMMAND` starts it in the background"),
    ("run", "--env -e", "variables are passed on, as in `NAME=value vramctl run -- COMMAND`"),
    ("run", "-it -i -t -ti --rm --tty --interactive", "the program has this terminal, and leaves nothing behind; no option is needed"),
    ("run", "--restart", "nothing starts a program again; that is for systemd or Kubernetes (docs/deploy.md)"),
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
pub fn of(error: &clap::Error, syntax: &clap::Command) -> Option<String> {
    let command = command(error);
    match (error.kind(), error.get(ContextKind::InvalidArg)?) {
        (ErrorKind::UnknownArgument, ContextValue::String(written)) => {
            unknown(&command, written).or_else(|| syntax.find_subcommand(&command).map(|found| other(found, written)))
        }
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
    let what = if written.starts_with('-') { "option" } else { "word" };
    UNKNOWN.iter().find(is_it).map(|(_, _, meant)| format!("{written} is no {what} here: {meant}"))
}

/// What the command has instead. Clap would advise to write the option as a value, or name one that is alike and does something else.
fn other(found: &clap::Command, written: &str) -> String {
    let command = found.get_name();
    if !written.starts_with('-') {
        let usage = found.clone().bin_name(format!("vramctl {command}")).render_usage().to_string();
        return format!("{written} is one word too many. {}", usage.trim());
    }
    let shown = found.get_arguments().filter(|option| !option.is_hide_set());
    let options: Vec<_> = shown.filter_map(clap::Arg::get_long).map(|option| format!("--{option}")).collect();
    let hint = target::nearest(written, options.iter().cloned()).map_or_else(String::new, |meant| target::did_you_mean(&meant));
    let has = if hint.is_empty() { format!("; it has {}", options.join(", ")) } else { hint };
    format!("`vramctl {command}` has no option {written}{has}")
}

/// The command that the error is of; empty: of none. Clap tells it in the usage alone.
pub fn command(error: &clap::Error) -> String {
    let Some(ContextValue::StyledStr(usage)) = error.get(ContextKind::Usage) else { return String::new() };
    usage.to_string().split_whitespace().skip_while(|word| *word != "vramctl").nth(1).unwrap_or_default().to_owned()
}
