//! The command line's grammar, and what `vramctl --help` says after it.

use crate::{Cli, hints};
use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue};
use std::fmt::Write;
use vramctl_coordinator::failure::Exit;
use vramctl_coordinator::target;

/// The commands and their options. A negative number after an option is its value, so that the option can say what is wrong with it; clap
/// would take it for another option. One with a unit, such as `-5G`, is no number to clap, so all that follows such an option is its value.
pub fn syntax() -> clap::Command {
    let takes_value = |option: &clap::Arg| !option.is_positional() && option.get_action().takes_values();
    let takes_unit = |option: &clap::Arg| option.get_value_names().is_some_and(|names| names == ["SIZE"] || names == ["SECONDS"]);
    Cli::command().mut_subcommands(|command| {
        command.mut_args(|option: clap::Arg| match &option {
            measured if takes_unit(measured) => option.allow_hyphen_values(true),
            other if takes_value(other) => option.allow_negative_numbers(true),
            _ => option,
        })
    })
}

/// Commands, each with words that people try for it.
const SYNONYMS: [(&str, &str); 16] = [
    ("resume", "unpause unsuspend wake wakeup wake-up awake continue thaw unfreeze restore reload"),
    ("pause", "sleep freeze free release evict offload unload hold"),
    ("suspend", "checkpoint hibernate dump"),
    ("run", "start launch exec spawn"),
    ("ps", "ls jobs processes"),
    ("status", "info show inspect describe memory mem stat"),
    ("gpus", "gpu smi nvidia-smi devices who"),
    ("top", "monitor htop nvtop live"),
    ("move", "migrate relocate"),
    ("stop", "kill terminate rm end quit delete"),
    ("config", "settings configuration env variables"),
    ("demo", "try tutorial example"),
    ("doctor", "check diagnose diag test"),
    ("logs", "log output tail attach"),
    ("events", "event follow history"),
    ("metrics", "stats prometheus exporter"),
];

/// What is said of words that no command is for.
const OTHERS: [(&str, &str); 4] = [
    ("restart", "`vramctl stop NAME`, then `vramctl run -d --name NAME -- COMMAND`"),
    ("man manual", "`vramctl help COMMAND` explains one, with examples"),
    ("version", "`vramctl --version` tells the version"),
    ("upgrade update install", "install the new version over this one (docs/install.md); programs that run keep theirs"),
];

/// A refusal by clap, which compares letters, with what the word means.
pub fn explained(error: clap::Error) -> clap::Error {
    if let Some(hint) = hints::of(&error, &syntax()) {
        return clap::Error::raw(error.kind(), format!("{hint}\n")).with_cmd(&syntax());
    }
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand) else { return error };
    if hints::command(&error) == "images" {
        let text = format!("`vramctl images` has no command {word}; as in `vramctl images /images rm engine` (rm, verify, gc, export)\n");
        return clap::Error::raw(error.kind(), text).with_cmd(&syntax());
    }
    let has = |words: &str| words.split(' ').any(|known| known == word.to_lowercase());
    let hint = match (SYNONYMS.iter().find(|(_, words)| has(words)), OTHERS.iter().find(|(words, _)| has(words))) {
        (Some((command, _)), _) => {
            let syntax = syntax();
            let about = syntax.find_subcommand(command).and_then(clap::Command::get_about).map_or_else(String::new, ToString::to_string);
            format!("did you mean `vramctl {command}`? ({about})")
        }
        (None, Some((_, text))) => (*text).to_owned(),
        (None, None) => match nearest(word) {
            Some(command) => format!("did you mean `vramctl {command}`?"),
            None => format!("`vramctl --help` lists them. Of a program: `vramctl status {word}`, `vramctl run -- {word}`"),
        },
    };
    clap::Error::raw(error.kind(), format!("there is no command {word}; {hint}\n")).with_cmd(&syntax())
}

/// The command that a mistyped word is likely to mean, of those that people see.
fn nearest(word: &str) -> Option<String> {
    let syntax = syntax();
    target::nearest(word, syntax.get_subcommands().filter(|command| !command.is_hide_set()).map(|command| command.get_name().to_owned()))
}

/// The examples, variables and exit codes.
pub fn after_help() -> String {
    let mut text = String::from(
        "Examples:
  vramctl run --name engine -- python serve.py # start a program
  vramctl run -d --name engine -- python serve.py # in the background
  vramctl logs -f engine                       # what it prints
  vramctl status engine                        # show its memory, by tag
  vramctl gpus                                 # who uses the memory of each GPU
  vramctl top                                  # all of it, live
  vramctl pause kv_cache --discard             # free a tag, drop its contents
  vramctl pause engine 'other-*'               # all of several processes
  vramctl pause && vramctl resume              # all of the only managed process
  vramctl swap trainer engine                  # one leaves, the other comes
  vramctl suspend engine && vramctl resume     # leave the GPU, and come back
  vramctl trim engine                          # return what torch has cached
  vramctl watch engine --below 5G              # log who uses it if it runs low
  vramctl move engine --to 1                   # continue on another GPU
  vramctl trace engine -o page.html            # a timeline of its memory
  vramctl wait engine && vramctl stop engine   # once it has memory
  vramctl metrics --listen 9977                # serve metrics for Prometheus
  vramctl doctor                               # check this machine

Environment:
  VRAMCTL_DIR     directory of the control sockets [$XDG_RUNTIME_DIR/vramctl,
                  else /tmp/vramctl-<uid>]
  VRAMCTL_LIB     library that `run` preloads [libvramctl.so beside this binary,
                  in ../lib, or in the Python package that it came with]
  VRAMCTL_PYTHON  Python package that `run` puts on PYTHONPATH [the one that
                  this binary came with, or python/vramctl of the checkout]

Exit codes:",
    );
    for exit in Exit::ALL {
        let _ = write!(text, "\n  {:>3}  {}", exit as u8, exit.meaning().replace('\n', "\n       "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use std::{env, fs};

    /// Among other things: no duplicate option names, no conflict with an unknown option.
    #[test]
    fn the_options_are_sound() {
        syntax().debug_assert();
    }

    /// `MANUAL=DIR` writes them there, for a release.
    #[test]
    fn there_are_manual_pages() {
        let own = tempfile::tempdir().unwrap();
        let folder = env::var_os("MANUAL").map_or(own.path().to_owned(), PathBuf::from);
        clap_mangen::generate_to(
            syntax().mut_subcommands(|command: clap::Command| command.version(env!("CARGO_PKG_VERSION")).disable_version_flag(true)),
            &folder,
        )
        .unwrap();
        let page = |name: &str| fs::read_to_string(folder.join(name)).unwrap().replace("\\*(Aq", "'").replace('\\', "");
        let overview = page("vramctl.1");
        for command in syntax().get_subcommands().filter(|command| !command.is_hide_set()) {
            let name = command.get_name();
            assert!(overview.contains(&format!("vramctl-{name}(1)")), "{overview}");
            let page = page(&format!("vramctl-{name}.1"));
            for option in command.get_arguments().filter(|option| !option.is_hide_set()).filter_map(clap::Arg::get_long) {
                assert!(page.contains(&format!("--{option}")), "{page}");
            }
            // A line that begins with spaces stands by itself, and is not filled as prose.
            let help = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
            for example in help.lines().filter(|line| line.starts_with("  ")) {
                assert!(page.lines().any(|line| line == example.replace('\\', "")), "{example} is not in {page}");
            }
        }
    }

    /// What the help gives as an example of a size is one.
    #[test]
    fn the_sizes_of_the_help_are_read() {
        let options = |command: &clap::Command| command.get_arguments().cloned().collect::<Vec<_>>();
        let sized = |option: &clap::Arg| option.get_value_names().is_some_and(|names| names.iter().any(|name| name.contains("SIZE")));
        let mut seen = 0;
        for option in syntax().get_subcommands().flat_map(options).filter(sized) {
            let help = option.get_help().unwrap().to_string();
            for word in
                help.split([' ', ',', ':', ']']).filter(|word| word.starts_with(|c: char| c.is_ascii_digit()) && !word.ends_with('%'))
            {
                assert!(crate::arguments::size(word).is_ok(), "{word} in {help:?}");
                seen += 1;
            }
        }
        assert!(seen > 4, "{seen}");
    }

    /// What clap or an option says of a wrong command line.
    fn refusal(line: &str) -> String {
        syntax().try_get_matches_from(line.split(' ')).unwrap_err().to_string()
    }

    #[test]
    fn a_word_that_is_tried_for_a_command_is_answered_with_it() {
        let answer = |word: &str| explained(syntax().try_get_matches_from(["vramctl", word, "engine"]).unwrap_err()).to_string();
        for (word, wanted) in [
            ("unpause", "there is no command unpause; did you mean `vramctl resume`?"),
            ("free", "did you mean `vramctl pause`? (Return the GPU memory of processes to the driver)"),
            ("Checkpoint", "did you mean `vramctl suspend`?"),
            ("start", "did you mean `vramctl run`?"),
            ("ls", "did you mean `vramctl ps`?"),
            ("kill", "did you mean `vramctl stop`?"),
            ("log", "did you mean `vramctl logs`?"),
            ("pasue", "did you mean `vramctl pause`?"),
            ("upgrade", "install the new version"),
            ("my-engine", "`vramctl run -- my-engine`"),
        ] {
            assert!(answer(word).contains(wanted), "{}", answer(word));
        }
    }

    #[test]
    fn a_tag_is_no_option() {
        for line in ["vramctl pause x --tag y", "vramctl resume --tags=y"] {
            let answer = explained(syntax().try_get_matches_from(line.split(' ')).unwrap_err()).to_string();
            assert!(answer.contains("a tag is a word, as in `vramctl pause kv_cache --name engine`"), "{answer}");
        }
    }

    /// Otherwise, the word would never be explained.
    #[test]
    fn no_synonym_is_a_command_and_each_is_for_one() {
        let words = SYNONYMS.iter().map(|(_, words)| words).chain(OTHERS.iter().map(|(words, _)| words));
        let words: Vec<_> = words.flat_map(|words| words.split(' ')).collect();
        for (at, word) in words.iter().enumerate() {
            assert!(syntax().find_subcommand(word).is_none() && !words[..at].contains(word), "{word}");
        }
        for (command, _) in SYNONYMS {
            assert!(syntax().find_subcommand(command).is_some(), "{command}");
        }
    }

    #[test]
    fn a_negative_value_is_refused_by_its_option() {
        for (line, why) in [
            ("pause --timeout -1", "seconds must not be negative"),
            ("pause --timeout -5s", "seconds must not be negative"),
            ("suspend --hold-timeout -0.5", "seconds must not be negative"),
            ("trace -o a.json --seconds -1e3", "seconds must not be negative"),
            ("trace -o a.json --seconds -1m", "seconds must not be negative"),
            ("trim --timeout --json", "not a number of seconds"),
            ("watch engine --below -5G", "a size must not be negative"),
            ("watch engine --below -5", "a size must not be negative"),
            ("run --min-bytes -1.5M -- true", "a size must not be negative"),
            ("watch engine --below --trim", "not a size: give bytes"),
            ("watch engine --below 0", "the size must be more than 0"),
            ("watch engine --below 5 GB", "less than 1 MiB; give the unit with the number, as 5G"),
        ] {
            let text = refusal(&format!("vramctl {line}"));
            assert!(text.contains(why) && !text.contains("'-- -"), "{text}");
        }
    }

    /// It would be a prefix of every UUID.
    #[test]
    fn an_empty_gpu_is_refused() {
        for line in ["pause --all --gpu=", "ps --gpu -1", "move engine --to=", "move engine --to 0,"] {
            let text = refusal(&format!("vramctl {line}"));
            assert!(text.contains("not a GPU: give its index"), "{text}");
        }
    }

    #[test]
    fn a_wrong_choice_is_answered_with_the_choices() {
        for (line, choices) in [
            ("suspend --registered keep", "[possible values: refuse, take]"),
            ("pause --registered all", "[possible values: refuse, keep, take]"),
            ("pause --backup tape", "[possible values: host, disk]"),
            ("pause --backup discard", "`--discard` in place of `--backup`"),
        ] {
            let text = refusal(&format!("vramctl {line}"));
            assert!(text.contains(choices), "{text}");
        }
    }

    /// The text of help is a doc comment, in which nothing is escaped.
    #[test]
    fn help_has_no_escapes() {
        let mut whole = Cli::command();
        for command in whole.get_subcommands_mut() {
            let text = command.render_long_help().to_string();
            assert!(!text.contains('\\'), "{text}");
        }
    }

    /// A terminal of 80 columns would break these lines in the middle of a column, or of a command.
    #[test]
    fn columns_and_examples_fit_a_terminal() {
        let whole = Cli::command();
        let all: Vec<_> = std::iter::once(&whole)
            .chain(whole.get_subcommands())
            .map(|command: &clap::Command| command.get_after_long_help().map(ToString::to_string).unwrap_or_default())
            .collect();
        let long: Vec<_> =
            all.iter().flat_map(|text| text.lines()).filter(|line| line.starts_with("  ") && line.chars().count() > 80).collect();
        assert_eq!(long, [""; 0]);
    }
}
