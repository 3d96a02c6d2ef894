//! Which processes a caller means: by name, by id, by the words of a command.

use crate::text;
use std::collections::BTreeSet;

/// Which processes to act on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// The only managed process, or the processes of the only job.
    Only,
    /// The process with this id.
    Pid(u32),
    /// All with this name, or with a name that it matches: `*` stands for any characters, `?` for one.
    Name(String),
    /// All of these, each a [`Target::Pid`] or a [`Target::Name`]. Each must match a process.
    Several(Vec<Self>),
    /// All managed processes.
    All,
}

impl Target {
    /// A number is a process id, anything else a name. A numeric name needs `--name`.
    pub fn parse(text: String) -> Self {
        text.parse().map_or_else(|_| Self::Name(text), Self::Pid)
    }

    /// All of these. `None` if there are none.
    pub fn of(mut targets: Vec<Self>) -> Option<Self> {
        if targets.len() < 2 { targets.pop() } else { Some(Self::Several(targets)) }
    }

    /// All, if none were chosen.
    #[must_use]
    pub fn or_all(self) -> Self {
        if self == Self::Only { Self::All } else { self }
    }

    /// The targets that it consists of.
    pub fn parts(&self) -> &[Self] {
        if let Self::Several(parts) = self { parts } else { std::slice::from_ref(self) }
    }

    /// Whether it chooses processes by their ids, and not whole jobs.
    pub fn is_by_id(&self) -> bool {
        self.parts().iter().any(|part| matches!(part, Self::Pid(_)))
    }

    /// A command for these processes, to suggest in a message.
    pub fn command(&self, command: &str) -> String {
        let option = |part: &Self| match part {
            Self::Pid(pid) => format!(" --pid={pid}"),
            Self::Name(name) => format!(" --name={}", text::quoted(name)),
            Self::All => " --all".into(),
            Self::Only | Self::Several(_) => String::new(),
        };
        format!("vramctl {command}{}", self.parts().iter().map(option).collect::<String>())
    }
}

/// Whether the name is meant by what a user has written.
pub fn matches_name(written: &str, name: &str) -> bool {
    written == name || (is_pattern(written) && matches_pattern(written, name))
}

/// Whether it may stand for several names.
fn is_pattern(written: &str) -> bool {
    written.contains(['*', '?'])
}

fn matches_pattern(pattern: &str, name: &str) -> bool {
    let (mut characters, mut rest) = (pattern.chars(), name.chars());
    match characters.next() {
        None => name.is_empty(),
        Some('*') => name.char_indices().map(|(at, _)| at).chain([name.len()]).any(|at| matches_pattern(characters.as_str(), &name[at..])),
        Some(one) => rest.next().is_some_and(|first| (one == '?' || one == first) && matches_pattern(characters.as_str(), rest.as_str())),
    }
}

/// Why none of the processes has this name, with what may have been meant.
pub fn no_such_name(written: &str, names: &BTreeSet<String>) -> String {
    if is_pattern(written) {
        return format!("no managed process has a name like {written}{}", listed("; the processes are", names));
    }
    let hint = nearest(written, names.iter().cloned()).map_or_else(|| listed("; the processes are", names), |name| did_you_mean(&name));
    format!("no managed process is named {}{hint}", text::one_line(written))
}

/// A list for a message. Nothing if it is empty.
pub fn listed(what: &str, names: &BTreeSet<String>) -> String {
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    if names.is_empty() { String::new() } else { format!("{what} {}", names.join(", ")) }
}

/// A suggestion, for the end of a message.
pub fn did_you_mean(name: &str) -> String {
    format!("; did you mean {name}?")
}

/// The name that a mistyped one is likely to mean.
pub fn nearest(written: &str, names: impl IntoIterator<Item = String>) -> Option<String> {
    /// As clap suggests options.
    const ALIKE: f64 = 0.7;
    let alike = |name: String| (strsim::jaro(&written.to_lowercase(), &name.to_lowercase()), name);
    let all = names.into_iter().map(alike).filter(|(likeness, _)| *likeness > ALIKE);
    all.max_by(|(one, _), (other, _)| one.total_cmp(other)).map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_a_process() {
        assert_eq!(Target::parse("12".into()), Target::Pid(12));
        assert_eq!(Target::parse("engine".into()), Target::Name("engine".into()));
    }

    #[test]
    fn a_pattern_stands_for_several_names() {
        for (pattern, name) in [("eng*", "engine"), ("*", ""), ("*", "a"), ("e?gine", "engine"), ("*-*-1", "a-b-c-1"), ("ü?", "üß")] {
            assert!(matches_name(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("eng*", "trainer"), ("eng?", "engine"), ("eng", "engine"), ("?", ""), ("*x", "xy")] {
            assert!(!matches_name(pattern, name), "{pattern} {name}");
        }
        assert!(matches_name("a[1]", "a[1]"), "only these two characters are special");
    }

    #[test]
    fn a_mistyped_name_is_recognised() {
        let names = || ["engine", "trainer", "kv_cache"].map(str::to_owned);
        for (written, meant) in [("engin", "engine"), ("Engine", "engine"), ("kv_cach", "kv_cache"), ("tariner", "trainer")] {
            assert_eq!(nearest(written, names()).as_deref(), Some(meant));
        }
        assert_eq!(nearest("something", names()), None);
    }

    #[test]
    fn a_suggested_command_names_all() {
        let both = Target::of(vec![Target::Name("a b".into()), Target::Pid(7)]).unwrap();
        assert_eq!(both.command("resume"), "vramctl resume --name='a b' --pid=7");
        assert_eq!(Target::Only.command("resume"), "vramctl resume");
        assert_eq!(Target::of(vec![Target::Pid(7)]), Some(Target::Pid(7)));
        assert!(both.is_by_id() && !Target::All.is_by_id());
    }
}
