//! Words of other programs and figures, as messages have them.

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

/// The beginning of a text, if it is longer than this many characters.
pub fn cut(text: &str, most: usize) -> String {
    if text.chars().count() <= most { text.into() } else { text.chars().take(most.saturating_sub(1)).chain(['…']).collect() }
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
}
