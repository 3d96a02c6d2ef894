//! What holds for this command: environment variables, and the files from which those come that are not set.
//!
//! A file has the variables' names without `VRAMCTL_`, in small letters. Only the command line reads files, before it does anything else: it sets
//! the variables that the environment lacks, and whatever reads variables need not know of files. The sections of a name hold for what
//! `vramctl run` starts under that name.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use toml::Spanned;
use toml::de::{DeTable, DeValue};
use vramctl_config::Config;
use vramctl_coordinator::target;
use vramctl_host::system::user;

/// The page that lists the variables.
const PAGE: &str = include_str!("../../docs/settings.md");
/// The file for all users.
const SYSTEM: &str = "/etc/vramctl.toml";
/// The longest file that is read.
const LONGEST: u64 = 1 << 20;

/// Variables that are no settings: who a program is, a secret, and where the settings are.
const NOT_IN_FILES: [(&str, &str); 4] = [
    ("VRAMCTL_NAME", "a name is that of one program: `vramctl run --name`"),
    ("VRAMCTL_JOB", "a job is one run: set VRAMCTL_JOB for its ranks"),
    ("VRAMCTL_ENGINE_KEY", "a key is kept out of files: set VRAMCTL_ENGINE_KEY"),
    ("VRAMCTL_CONFIG", "it says where the file is: set VRAMCTL_CONFIG"),
];
/// Variables with paths, which must not depend on where a command is started.
const PATHS: [&str; 6] = ["VRAMCTL_DIR", "VRAMCTL_DISK_DIR", "VRAMCTL_REPORT_DIR", "VRAMCTL_LIB", "VRAMCTL_PYTHON", "VRAMCTL_CRIU"];

static SETTINGS: OnceLock<Settings> = OnceLock::new();

/// All that was found when the command began.
#[derive(Default)]
pub struct Settings {
    /// The files that were looked for, in the order in which they hold, and whether they are there.
    pub files: Vec<(PathBuf, bool)>,
    /// The project's variables of the environment.
    environment: BTreeMap<String, OsString>,
    entries: Vec<Entry>,
    /// What is wrong in the files.
    pub mistakes: Vec<Mistake>,
}

/// A setting in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    variable: String,
    value: String,
    /// The section, if it holds for one name.
    name: Option<String>,
    place: Place,
}

/// A line of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    file: PathBuf,
    line: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}:{}", self.file.display(), self.line)
    }
}

/// What is wrong in a file, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    place: Place,
    text: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.place, self.text)
    }
}

/// A setting that holds.
#[derive(Debug, PartialEq, Eq)]
pub struct Holds {
    pub variable: String,
    pub value: OsString,
    /// `environment`, or the file with its line and section.
    pub from: String,
}

impl Settings {
    /// Those of this command, read at its start.
    pub fn get() -> &'static Self {
        SETTINGS.get_or_init(Self::read)
    }

    fn read() -> Self {
        let ours = env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
        let environment: BTreeMap<_, _> = ours.filter(|(name, _)| name.starts_with("VRAMCTL_")).collect();
        let mut settings = Self { environment, ..Self::default() };
        for path in paths() {
            let text = text_of(&path);
            settings.files.push((path.clone(), !matches!(&text, Ok(None))));
            match text {
                Ok(Some(text)) => settings.add(&path, &text),
                Ok(None) => (),
                Err(why) => settings.mistakes.push(Mistake { place: Place { file: path, line: 1 }, text: why }),
            }
        }
        settings
    }

    /// Adds a file, which holds where those before it say nothing.
    fn add(&mut self, path: &Path, text: &str) {
        let place = |at: usize| Place { file: path.to_owned(), line: 1 + text[..at.min(text.len())].matches('\n').count() };
        let table = match DeTable::parse(text) {
            Ok(table) => table.into_inner(),
            Err(error) => {
                let at = error.span().map_or(0, |span| span.start);
                return self.mistakes.push(Mistake { place: place(at), text: error.message().replace('\n', " ") });
            }
        };
        for (key, value) in &table {
            match (key.get_ref().as_ref(), value.get_ref()) {
                ("name", DeValue::Table(sections)) => {
                    for (name, section) in sections {
                        let at = place(name.span().start);
                        match section.get_ref() {
                            DeValue::Table(section) => {
                                section.iter().for_each(|(key, value)| self.add_entry(key, value, Some(name.get_ref()), &place));
                            }
                            _ => self.mistakes.push(Mistake {
                                place: at,
                                text: format!("name.{} is no section; write [name.{}]", name.get_ref(), name.get_ref()),
                            }),
                        }
                    }
                }
                _ => self.add_entry(key, value, None, &place),
            }
        }
    }

    fn add_entry(
        &mut self,
        key: &Spanned<std::borrow::Cow<'_, str>>,
        value: &Spanned<DeValue<'_>>,
        name: Option<&str>,
        place: &dyn Fn(usize) -> Place,
    ) {
        let (word, place) = (key.get_ref().as_ref(), place(key.span().start));
        let variable = format!("VRAMCTL_{}", word.to_uppercase());
        let read = match known().find(|known| *known == variable) {
            _ if word.to_lowercase() != word => Err(format!("{word}: keys are in small letters; {}", word.to_lowercase())),
            None => Err(unknown(word)),
            Some(_) => match NOT_IN_FILES.iter().find(|(name, _)| *name == variable) {
                Some((_, why)) => Err(format!("{word} cannot be set in a file: {why}")),
                None => value_of(value.get_ref())
                    .and_then(|value| check(&variable, &value).map(|()| value))
                    .map_err(|why| format!("{word}: {why}")),
            },
        };
        match read {
            Ok(value) => self.entries.push(Entry { variable, value, name: name.map(str::to_owned), place }),
            Err(text) => self.mistakes.push(Mistake { place, text }),
        }
    }

    /// What holds for programs of this name, and for commands: the environment, then the sections of the name, then the rest of the files.
    pub fn holding(&self, name: Option<&str>) -> Vec<Holds> {
        let from_environment = |(variable, value): (&String, &OsString)| {
            let from = "environment".into();
            (variable.clone(), Holds { variable: variable.clone(), value: value.clone(), from })
        };
        let mut all: BTreeMap<_, _> = self.environment.iter().map(from_environment).collect();
        let (sections, rest): (Vec<_>, Vec<_>) = self.entries.iter().partition(|entry| entry.name.is_some());
        for Entry { variable, value, name: section, place } in
            sections.into_iter().filter(|entry| entry.name.as_deref() == name && name.is_some()).chain(rest)
        {
            let from = section.as_ref().map_or_else(|| place.to_string(), |name| format!("{place} [name.{name}]"));
            all.entry(variable.clone()).or_insert_with(|| Holds { variable: variable.clone(), value: value.into(), from });
        }
        all.into_values().collect()
    }

    /// Sets the variables that the environment lacks.
    pub fn apply(&self, name: Option<&str>) {
        for Holds { variable, value, .. } in self.holding(name) {
            // SAFETY: called before there is another thread.
            unsafe { env::set_var(variable, value) };
        }
    }
}

/// The variables that can be settings.
fn known() -> impl Iterator<Item = &'static str> {
    PAGE.lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .map(|(name, _)| name)
        .filter(|name| name.starts_with("VRAMCTL_"))
}

/// The keys of files.
pub fn keys() -> impl Iterator<Item = String> {
    let is_key = |name: &&str| NOT_IN_FILES.iter().all(|(other, _)| other != name);
    known().filter(is_key).map(|name| name["VRAMCTL_".len()..].to_lowercase())
}

fn unknown(word: &str) -> String {
    let written = word.strip_prefix("VRAMCTL_").or_else(|| word.strip_prefix("vramctl_")).unwrap_or(word).to_lowercase();
    let meant = if keys().any(|key| key == written) { Some(written) } else { target::nearest(&written, keys()) };
    format!(
        "there is no setting {word}{}",
        meant.map_or_else(|| "; `vramctl config --all` lists them".into(), |meant| target::did_you_mean(&meant))
    )
}

/// A value as a variable has it.
fn value_of(value: &DeValue<'_>) -> Result<String, String> {
    Ok(match value {
        DeValue::String(text) => text.clone().into_owned(),
        DeValue::Integer(number) if number.radix() == 10 => number.as_str().replace('_', ""),
        DeValue::Boolean(on) => u8::from(*on).to_string(),
        DeValue::Array(values) => values.iter().map(|value| value_of(value.get_ref())).collect::<Result<Vec<_>, _>>()?.join(","),
        DeValue::Table(values) => {
            let pair = |(key, value): (&Spanned<std::borrow::Cow<'_, str>>, &Spanned<DeValue<'_>>)| {
                Ok::<_, String>(format!("{}={}", key.get_ref(), value_of(value.get_ref())?))
            };
            values.iter().map(pair).collect::<Result<Vec<_>, _>>()?.join(",")
        }
        _ => return Err("not a text, a whole number, true or false, a list or a table of such".into()),
    })
}

/// Whether the library would take it.
fn check(variable: &str, value: &str) -> Result<(), String> {
    if value.is_empty() || value.contains(char::is_control) {
        return Err("a value must not be empty, nor contain control characters".into());
    }
    if PATHS.contains(&variable) && !Path::new(value).is_absolute() {
        return Err(format!("{value} is no absolute path"));
    }
    let config = Config::from_variables(|name| (name == variable).then(|| value.into()));
    let why = |complaint: &String| complaint.trim_start_matches(variable).trim_start_matches([':', ' ', '=']).replace("; ignored", "");
    config.complaints.first().map_or(Ok(()), |complaint| Err(why(complaint)))
}

/// The files, the user's first.
fn paths() -> Vec<PathBuf> {
    let set = |name| env::var_os(name).map(PathBuf::from);
    match set("VRAMCTL_CONFIG") {
        Some(none) if none.as_os_str().is_empty() => Vec::new(),
        Some(one) => vec![one],
        None => {
            let filled = |name| set(name).filter(|path| path.is_absolute());
            let user = filled("XDG_CONFIG_HOME").or_else(|| Some(filled("HOME")?.join(".config")));
            user.map(|folder| folder.join("vramctl.toml")).into_iter().chain([SYSTEM.into()]).collect()
        }
    }
}

/// `None` if it is not there. What a file says is done with this user's rights, so nobody else may have written it.
fn text_of(path: &Path) -> Result<Option<String>, String> {
    let read = || -> io::Result<Result<String, String>> {
        let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        let found = file.metadata()?;
        if !found.is_file() {
            return Ok(Err("not a file".into()));
        }
        if ![user(), 0].contains(&found.uid()) || found.mode() & 0o022 != 0 {
            let (owner, mode) = (found.uid(), found.mode() & 0o777);
            return Ok(Err(format!("others may have written it (user {owner}, mode {mode:o}): chown and chmod go-w")));
        }
        let mut text = String::new();
        file.take(LONGEST).read_to_string(&mut text)?;
        Ok(Ok(text))
    };
    match read() {
        Ok(text) => text.map(Some),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    fn settings(environment: &[(&str, &str)], files: &[(&str, &str)]) -> Settings {
        let environment = environment.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        let mut settings = Settings { environment, ..Settings::default() };
        for (path, text) in files {
            settings.add(Path::new(path), text);
        }
        settings
    }

    fn mistakes(text: &str) -> Vec<String> {
        settings(&[], &[("f", text)]).mistakes.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_environment_holds_then_a_names_section_then_the_users_file() {
        let user = "host_keep = 1\nlimit = '10G'\n[name.engine]\nlimit = '25%'\n";
        let system = "host_keep = 2\nmin_bytes = '4M'\ntag = 'x'\n[name.engine]\nlimit = '50%'\nmin_bytes = '2M'\n";
        let settings = settings(&[("VRAMCTL_TAG", "own")], &[("user", user), ("system", system)]);
        assert_eq!(settings.mistakes, []);
        let holding = |name| {
            settings.holding(name).iter().map(|one| format!("{}={} {}", one.variable, one.value.display(), one.from)).collect::<Vec<_>>()
        };
        assert_eq!(
            holding(None),
            ["VRAMCTL_HOST_KEEP=1 user:1", "VRAMCTL_LIMIT=10G user:2", "VRAMCTL_MIN_BYTES=4M system:2", "VRAMCTL_TAG=own environment"]
        );
        assert_eq!(
            holding(Some("engine")),
            [
                "VRAMCTL_HOST_KEEP=1 user:1",
                "VRAMCTL_LIMIT=25% user:4 [name.engine]",
                "VRAMCTL_MIN_BYTES=2M system:6 [name.engine]",
                "VRAMCTL_TAG=own environment"
            ]
        );
        assert_eq!(holding(Some("other")), holding(None));
    }

    #[test]
    fn values_are_written_as_toml_has_them() {
        let text = "share = true\nguard = false\nidle = 1_000\nexclude = ['a', 'b']\nbackup = { kv_cache = 'discard', w = 'disk' }\nwatch = '5G,trim'";
        let settings = settings(&[], &[("f", text)]);
        assert_eq!(settings.mistakes, []);
        let values: Vec<_> = settings.holding(None).into_iter().map(|one| one.value.into_string().unwrap()).collect();
        assert_eq!(values, ["kv_cache=discard,w=disk", "a,b", "0", "1000", "1", "5G,trim"]);
    }

    #[test]
    fn a_mistake_names_its_file_line_and_key() {
        for (text, wanted) in [
            ("host_keep = 1\nhost_kep = 2", "f:2: there is no setting host_kep; did you mean host_keep?"),
            ("VRAMCTL_TAG = 'x'", "f:1: VRAMCTL_TAG: keys are in small letters; vramctl_tag"),
            ("vramctl_tag = 'x'", "f:1: there is no setting vramctl_tag; did you mean tag?"),
            ("zzzzzz = 1", "f:1: there is no setting zzzzzz; `vramctl config --all` lists them"),
            ("\n\nlimit = 'half'", "f:3: limit: half is neither a size such as 20G nor a share such as 25%"),
            ("host_keep = 1.5", "f:1: host_keep: not a text, a whole number, true or false, a list or a table of such"),
            ("tag = ''", "f:1: tag: a value must not be empty, nor contain control characters"),
            ("dir = 'sockets'", "f:1: dir: sockets is no absolute path"),
            ("job = 'x'", "f:1: job cannot be set in a file: a job is one run: set VRAMCTL_JOB for its ranks"),
            ("engine_key = 'x'", "f:1: engine_key cannot be set in a file: a key is kept out of files: set VRAMCTL_ENGINE_KEY"),
            ("[name]\nengine = 1", "f:2: name.engine is no section; write [name.engine]"),
            ("[name.engine]\nlimti = '1G'", "f:2: there is no setting limti; did you mean limit?"),
        ] {
            assert_eq!(mistakes(text), [wanted]);
        }
        assert!(mistakes("tag = 'a'\ntag = ")[0].starts_with("f:2: "), "{:?}", mistakes("tag = 'a'\ntag = "));
        assert!(keys().count() > 20 && keys().all(|key| !key.is_empty()));
    }

    /// It could name the library that root's programs load.
    #[test]
    fn a_file_that_others_may_have_written_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vramctl.toml");
        assert_eq!(text_of(&path), Ok(None));
        fs::write(&path, "tag = 'x'").unwrap();
        assert_eq!(text_of(&path).unwrap().as_deref(), Some("tag = 'x'"));
        fs::set_permissions(&path, Permissions::from_mode(0o664)).unwrap();
        assert!(text_of(&path).unwrap_err().contains("others may have written it"), "{:?}", text_of(&path));
        assert_eq!(text_of(folder.path()).unwrap_err(), "not a file");
    }
}
