//! `vramctl run`.

use crate::arguments::{LEVELS, checked_limit, checked_tag, size};
use crate::candidates;
use crate::execute::Execute;
use crate::hints;
use crate::installation;
use crate::logs::Log;
use crate::preloading::{self, Unmanaged};
use crate::ui::output;
use clap::Args as _;
use clap::builder::NonEmptyStringValueParser;
use clap_complete::engine::ArgValueCompleter;
use std::env;
use std::ffi::{OsStr, OsString};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, ErrorKind};
use std::os::unix::process::CommandExt;
use std::path::{self, Path, PathBuf};
use std::process::{self, Command};
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::processes::{Found, Target};
use vramctl_coordinator::{target, text};
use vramctl_host::program_of_words;
use vramctl_images::prepare;
use vramctl_model::{DEFAULT_TAG, Policy};

#[derive(clap::Args)]
#[command(after_long_help = "\
Replaces this process with the command (exec), so pid, signals and exit code are the command's, unless --detach says otherwise. The GPU memory of the command \
and of the programs it starts can be paused. Without --tag, the tag is $VRAMCTL_TAG (empty means --no-tag), or `default` if \
that is unset.

Examples:
  vramctl run -- python serve.py
  vramctl run -d --name engine -- python serve.py # in the background
  vramctl run --tag weights --backup kv_cache=discard -- ./engine --port 8000
  vramctl run --no-tag -- ./engine # manage only its own regions")]
#[allow(clippy::struct_excessive_bools)] // independent options
pub struct Args {
    /// The name by which other commands find it [default: the program's name, or that of a Python script or module]
    #[arg(long, short, value_parser = checked_name)]
    name: Option<String>,
    /// The tag for allocations outside regions
    #[arg(long, value_parser = checked_tag, conflicts_with = "no_tag")]
    tag: Option<String>,
    /// Leave allocations outside regions to CUDA
    #[arg(long)]
    no_tag: bool,
    /// Where a pause keeps the contents of a tag: host (default), disk or discard; may be repeated
    #[arg(long, value_name = "TAG=POLICY", value_parser = checked_backup)]
    backup: Vec<String>,
    /// The most memory that each process takes of each GPU, such as 20G or 25%: above it, allocations are out of memory
    #[arg(long, value_name = "SIZE|PERCENT", value_parser = checked_limit)]
    limit: Option<String>,
    /// Leave smaller allocations to CUDA: bytes, or a size such as 64K, 2M or 2MB [default: 1M]
    #[arg(long, value_name = "SIZE", value_parser = checked_size)]
    min_bytes: Option<String>,
    /// Leave PYTHONPATH alone: Python programs then do not find the `vramctl` package that came with this command
    #[arg(long)]
    no_python: bool,
    /// Record memory events, for `vramctl trace`
    #[arg(long)]
    trace: bool,
    /// Share the GPUs with other programs that do: who is idle gives way, who calls comes back
    #[arg(long, group = "idle_cache")]
    share: bool,
    /// With --share: low, normal or high. Low takes what is left, and gives way first [default: normal]
    #[arg(long, value_name = "PRIORITY", value_parser = ["low", "normal", "high"], requires = "share", hide_possible_values = true)]
    priority: Option<String>,
    /// With --share: idle for so many seconds, give the memory back even if nobody asks
    #[arg(long, value_name = "SECONDS", requires = "share")]
    idle: Option<u32>,
    /// With --share: an allocation fails after so many seconds in which nobody could give way [default: 30]
    #[arg(long, value_name = "SECONDS", requires = "share")]
    wait: Option<u32>,
    /// With --share or --image: keep the KV cache of an idle inference engine that gives way or is saved
    #[arg(long, requires = "idle_cache")]
    keep_cache: bool,
    /// Run it in the background, in a session of its own; `vramctl logs` shows what it prints
    #[arg(long, short)]
    detach: bool,
    /// A command (sh -c) to run before each pause: if it fails, nothing is paused
    #[arg(long, value_name = "COMMAND", value_parser = NonEmptyStringValueParser::new())]
    on_pause: Option<String>,
    /// A command (sh -c) to run after each resume, and after a pause that failed
    #[arg(long, value_name = "COMMAND", value_parser = NonEmptyStringValueParser::new())]
    on_resume: Option<String>,
    /// Prepare it for `vramctl save`: it gets no `io_uring`, and an idle engine can drop its KV cache
    #[arg(long, group = "idle_cache")]
    image: bool,
    /// The library's log level; it logs to stderr [default: warn]
    #[arg(long, value_name = "LEVEL", value_parser = LEVELS)]
    log: Option<String>,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, add = ArgValueCompleter::new(candidates::CommandLine))]
    command: Vec<OsString>,
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let python = if self.no_python { Vec::new() } else { installation::python_path()? };
        let library = installation::library()?;
        let (program, arguments) = self.command.split_first().ok_or_else(|| CommandError::new(Exit::Usage, "no command"))?;
        if let Some(text) = mistake(program, arguments) {
            return Err(CommandError::new(Exit::Usage, text));
        }
        let sanitizer = preloading::sanitizer(program);
        let mut variables = environment(self, &library, sanitizer.as_deref(), &python, |name| env::var_os(name))?;
        check(&library)?;
        self.backup.iter().filter_map(|backup| mistyped(backup, self.tag.as_deref())).for_each(|text| output::complain("warning", &text));
        if let Some(Unmanaged { why, is_ended_by_it }) = preloading::unmanaged(program) {
            output::complain("warning", &why);
            if is_ended_by_it {
                variables.push(("LD_PRELOAD", preloading::others(&library, env::var_os("LD_PRELOAD").as_deref())));
            }
        }
        let mut command = Command::new(program);
        command.args(arguments);
        if self.image {
            prepare(&mut command);
        }
        for (name, value) in variables {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        // Everything that the command starts belongs to one run. Commands that are given the same one are ranks of one job.
        let given = env::var_os("VRAMCTL_JOB").filter(|run| !run.is_empty());
        let is_given = given.is_some();
        let run = given.unwrap_or_else(|| format!("run-{:08x}", RandomState::new().build_hasher().finish() as u32).into());
        if !is_given {
            command.env("VRAMCTL_JOB", &run);
            self.name.clone().or_else(|| env::var("VRAMCTL_NAME").ok()).iter().for_each(|name| warn_of_others(name));
        }
        if self.detach {
            return self.start_in_background(command, &run, is_given);
        }
        if self.share {
            leave_keeper(&run, process::id());
        }
        let error = command.exec();
        Err(not_started(program, &error))
    }

    fn becomes_program(&self) -> bool {
        true
    }

    fn program_name(&self) -> Option<String> {
        let words: Vec<_> = self.command.iter().map(|word| word.to_string_lossy()).collect();
        let named = self.name.clone().or_else(|| env::var("VRAMCTL_NAME").ok().filter(|name| !name.is_empty()));
        named.or_else(|| program_of_words(&words.iter().map(AsRef::as_ref).collect::<Vec<_>>()))
    }
}

impl Args {
    /// The program's name is also that of its log.
    fn start_in_background(&self, mut command: Command, run: &OsStr, is_one_of_several: bool) -> Result<Exit, CommandError> {
        let name = self.program_name().ok_or_else(|| CommandError::new(Exit::Usage, "a program in the background needs a name: --name"))?;
        if is_one_of_several {
            return Err(CommandError::new(
                Exit::Usage,
                "VRAMCTL_JOB is set: a rank of a job stays with those who started it; leave out --detach",
            ));
        }
        let log = Log::create(&name)?;
        let program = command.get_program().to_owned();
        let child = log.start(command.env("VRAMCTL_NAME", &name)).map_err(|error| not_started(&program, &error))?;
        if self.share {
            leave_keeper(run, child);
        }
        output::say(&format!("{} (pid {child}) runs in the background: `vramctl logs {}`", text::one_line(&name), text::quoted(&name)))?;
        Ok(Exit::Done)
    }
}

/// What a word means that is no program, but something else of a command line. A program that is there may have any name.
fn mistake(program: &OsStr, arguments: &[OsString]) -> Option<String> {
    let word = program.to_str().filter(|word| preloading::on_path(program).is_none() && !word.contains('/'))?;
    if word.starts_with('-') {
        let options = Args::augment_args(clap::Command::new("run"));
        let known = options.get_arguments().filter_map(clap::Arg::get_long).map(|option| format!("--{option}"));
        let written = word.split_once('=').map_or(word, |(option, _)| option);
        if let Some(hint) = hints::unknown("run", written) {
            return Some(hint);
        }
        let hint = target::nearest(written, known).map_or_else(String::new, |meant| target::did_you_mean(&meant));
        return Some(format!("`vramctl run` has no option {written}{hint}"));
    }
    if let [dashes, rest @ ..] = arguments
        && dashes == "--"
        && !rest.is_empty()
    {
        if size(&format!("1{word}")).is_ok() {
            return Some(format!("there is no program {word}; a size is one word, as in --limit 20{word}"));
        }
        let rest: Vec<_> = rest.iter().map(|word| word.to_string_lossy()).collect();
        return Some(format!("there is no program {word}; for a name: vramctl run --name {word} -- {}", rest.join(" ")));
    }
    if let Some((name, _)) = word.split_once('=')
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    {
        return Some(format!("{word} is a variable, and no program; set it before the command: {word} vramctl run -- …"));
    }
    let first = word.split_whitespace().next().filter(|first| first.len() < word.len())?;
    preloading::on_path(OsStr::new(first))?;
    Some(format!("there is no program '{word}'; without the quotes, {first} is the program: vramctl run -- {word}"))
}

/// Without a keeper, the program runs as it would alone; another program's keeper may schedule it.
fn leave_keeper(run: &OsStr, pid: u32) {
    if let Err(error) = vramctl_keeper::leave(run, pid) {
        output::complain("warning", &format!("could not start the keeper of this run: {error}; it shares its GPUs only while others do"));
    }
}

/// As a shell has it: what is there and cannot be executed is something else than what is not there.
fn not_started(program: &OsStr, error: &io::Error) -> CommandError {
    let missing = preloading::missing_interpreter(program).filter(|_| error.kind() == ErrorKind::NotFound);
    let exit = if error.kind() == ErrorKind::NotFound && missing.is_none() { Exit::NotFound } else { Exit::NotExecutable };
    let program = Path::new(program);
    let hint = match missing {
        Some(missing) => format!("; the file is there, and {} that it names as its interpreter is not", missing.display()),
        None if exit == Exit::NotFound && program.components().count() == 1 => "; is it on PATH?".into(),
        None => String::new(),
    };
    CommandError::new(exit, format!("cannot start {}: {error}{hint}", program.display()))
}

/// A warning if a policy is for a tag that looks like a mistyped one. Programs have tags of their own, so only those that are usual are
/// known now; `status` shows policies without a tag once the program has allocated.
fn mistyped(backup: &str, own: Option<&str>) -> Option<String> {
    /// The tags of the package, of engines, and of the library.
    const USUAL: [&str; 6] = ["weights", "kv_cache", "cuda_graph", "optimizer", DEFAULT_TAG, "nccl"];
    let (tag, _) = backup.split_once('=')?;
    let known = || USUAL.into_iter().chain(own).map(str::to_owned);
    if known().any(|known| known == tag) {
        return None;
    }
    let meant = target::nearest(tag, known()).filter(|meant| meant.len().abs_diff(tag.len()) <= 1)?;
    Some(format!("--backup {backup}: no usual tag is {tag}{}", target::did_you_mean(&meant)))
}

/// Warns of another run that has this name: commands treat both as one job.
fn warn_of_others(name: &str) {
    // Whatever fails here does not concern the program.
    let Ok(found) = Found::look(&Target::Name(name.to_owned())) else { return };
    let others: Vec<_> = found.processes.iter().filter(|process| process.name() == Some(name)).collect();
    if !others.is_empty() {
        let text = format!(
            "the name {} is in use: {}. `--name` in other commands will mean all of them as one job. Choose another name, or end those first; \
             for ranks of one job, set the same VRAMCTL_JOB for all of them",
            text::one_line(name),
            others.iter().map(|process| process.in_words()).collect::<Vec<_>>().join("; ")
        );
        output::complain("warning", &text);
    }
}

/// Refuses a library that cannot be preloaded: the loader would start the program without it.
fn check(library: &Path) -> Result<(), CommandError> {
    let way_out = "`vramctl doctor` tests it; build or install it again, or set VRAMCTL_LIB to a good one";
    preloading::version_of(library)
        .map(drop)
        .map_err(|why| CommandError::new(Exit::Failed, format!("{} cannot be preloaded: {why}; {way_out}", library.display())))
}

/// The variables to set, or to remove if they have no value. `present` looks up the current ones.
fn environment(
    args: &Args,
    library: &Path,
    sanitizer: Option<&OsStr>,
    python: &[PathBuf],
    present: impl Fn(&str) -> Option<OsString>,
) -> Result<Vec<(&'static str, Option<OsString>)>, CommandError> {
    let filled = |name| present(name).filter(|value| !value.is_empty());
    let mut variables = vec![("LD_PRELOAD", Some(preloading::preload(library, sanitizer, filled("LD_PRELOAD").as_deref())?))];
    if !python.is_empty() {
        variables.push(("PYTHONPATH", Some(python_path(python, filled("PYTHONPATH").as_deref())?)));
    }
    if args.no_tag {
        variables.push(("VRAMCTL_TAG", None));
    } else if let Some(tag) = &args.tag {
        variables.push(("VRAMCTL_TAG", Some(tag.into())));
    } else if let Some(tag) = present("VRAMCTL_TAG") {
        // Left as it is. An empty one means --no-tag.
        if !tag.is_empty() {
            checked_tag(&tag.to_string_lossy()).map_err(|error| CommandError::new(Exit::Usage, format!("VRAMCTL_TAG: {error}")))?;
        }
    } else {
        variables.push(("VRAMCTL_TAG", Some("default".into())));
    }
    if !args.backup.is_empty() {
        // The last mention of a tag wins, so the options come after the environment.
        let mut list = filled("VRAMCTL_BACKUP").map_or_else(OsString::new, |list| [list, ",".into()].into_iter().collect());
        list.push(args.backup.join(","));
        variables.push(("VRAMCTL_BACKUP", Some(list)));
    }
    // A limit that the library ignores would be none.
    if let Some(limit) = filled("VRAMCTL_LIMIT").filter(|_| args.limit.is_none()) {
        checked_limit(&limit.to_string_lossy()).map_err(|error| CommandError::new(Exit::Usage, format!("VRAMCTL_LIMIT: {error}")))?;
    }
    let [idle, wait] = [args.idle, args.wait].map(|seconds| seconds.map(|seconds| seconds.to_string()));
    let given = [
        ("VRAMCTL_NAME", args.name.as_deref()),
        ("VRAMCTL_LIMIT", args.limit.as_deref()),
        ("VRAMCTL_MIN_BYTES", args.min_bytes.as_deref()),
        ("VRAMCTL_TRACE", args.trace.then_some("1")),
        ("VRAMCTL_LOG", args.log.as_deref()),
        ("VRAMCTL_SHARE", args.share.then_some("1")),
        ("VRAMCTL_PRIORITY", args.priority.as_deref()),
        ("VRAMCTL_IDLE", idle.as_deref()),
        ("VRAMCTL_WAIT", wait.as_deref()),
        ("VRAMCTL_IMAGE", args.image.then_some("1")),
        ("VRAMCTL_KEEP_CACHE", args.keep_cache.then_some("1")),
        ("VRAMCTL_ON_PAUSE", args.on_pause.as_deref()),
        ("VRAMCTL_ON_RESUME", args.on_resume.as_deref()),
    ];
    // The program may change its directory before the library reads these.
    for name in ["VRAMCTL_DIR", "VRAMCTL_DISK_DIR", "VRAMCTL_REPORT_DIR"] {
        if let Some(path) = filled(name).filter(|path| Path::new(path).is_relative())
            && let Ok(path) = path::absolute(path)
        {
            variables.push((name, Some(path.into())));
        }
    }
    variables.extend(given.into_iter().filter_map(|(name, value)| Some((name, Some(value?.into())))));
    Ok(variables)
}

/// The package's directories first, then the existing ones, without those of other installations of the package.
fn python_path(folders: &[PathBuf], present: Option<&OsStr>) -> Result<OsString, CommandError> {
    let ours = |path: &Path| {
        folders.iter().any(|folder| folder == path) || ["vramctl/site", "vramctl/dropin"].iter().any(|end| path.ends_with(end))
    };
    let others = present.into_iter().flat_map(env::split_paths).filter(|path| !ours(path));
    env::join_paths(folders.iter().cloned().chain(others)).map_err(|error| {
        let way_out = "move the package, or leave PYTHONPATH alone with --no-python";
        CommandError::new(Exit::Failed, format!("PYTHONPATH: {error}; {way_out}"))
    })
}

fn checked_name(text: &str) -> Result<String, String> {
    vramctl_model::checked_name(text).map(str::to_owned).map_err(|error| error.to_string())
}

fn checked_backup(text: &str) -> Result<String, String> {
    let (tag, policy) = text.split_once('=').ok_or("not TAG=POLICY, for example kv_cache=discard")?;
    let tag = checked_tag(tag)?;
    let policy: Policy = policy.parse().map_err(|error: vramctl_model::Error| error.to_string())?;
    Ok(format!("{tag}={policy}"))
}

fn checked_size(text: &str) -> Result<String, String> {
    size(text).map(|_| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    /// The variables that `vramctl run LINE -- x` sets in the environment `present`.
    fn variables(line: &[&str], present: &[(&str, &str)]) -> Vec<(&'static str, Option<String>)> {
        let args = Line::try_parse_from(["run"].iter().chain(line).chain(&["--", "x"])).unwrap().args;
        let lookup = |name: &str| present.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
        let set = environment(&args, Path::new("/l/libvramctl.so"), None, &[], lookup).unwrap();
        set.into_iter().map(|(name, value)| (name, value.map(|value| value.into_string().unwrap()))).collect()
    }

    fn value(variables: &[(&'static str, Option<String>)], name: &str) -> Option<String> {
        variables.iter().find(|(known, _)| *known == name).and_then(|(_, value)| value.clone())
    }

    #[test]
    fn a_word_that_is_no_program_is_explained() {
        let explained = |words: &[&str]| {
            let arguments: Vec<_> = words[1..].iter().map(OsString::from).collect();
            mistake(OsStr::new(words[0]), &arguments).unwrap_or_default()
        };
        for (words, wanted) in [
            (&["--nmae", "engine", "--", "true"][..], "`vramctl run` has no option --nmae; did you mean --name?"),
            (&["--nmae=engine", "--", "true"], "`vramctl run` has no option --nmae; did you mean --name?"),
            (&["--zzz"], "`vramctl run` has no option --zzz"),
            (&["no-engine", "--", "cat", "-v"], "there is no program no-engine; for a name: vramctl run --name no-engine -- cat -v"),
            (&["cat -v"], "there is no program 'cat -v'; without the quotes, cat is the program: vramctl run -- cat -v"),
            (
                &["CUDA_VISIBLE_DEVICES=0", "cat"],
                "CUDA_VISIBLE_DEVICES=0 is a variable, and no program; set it before the command: CUDA_VISIBLE_DEVICES=0 vramctl run -- …",
            ),
            (&["env", "--", "cat"], ""),
            (&["./a=b"], ""),
            (&["not-there"], ""),
        ] {
            assert_eq!(explained(words), wanted);
        }
    }

    #[test]
    fn without_options_everything_is_tagged_default() {
        let wanted = [("LD_PRELOAD", Some("/l/libvramctl.so".to_owned())), ("VRAMCTL_TAG", Some("default".to_owned()))];
        assert_eq!(variables(&[], &[]), wanted);
    }

    #[test]
    fn options_override_the_environment() {
        let present = [("VRAMCTL_TAG", "old"), ("VRAMCTL_BACKUP", "a=host")];
        assert_eq!(variables(&[], &present).len(), 1, "a tag in the environment stays");
        assert_eq!(variables(&[], &[("VRAMCTL_TAG", "")]).len(), 1, "and so does an empty one, which is no tag");
        let set = variables(&["--tag", "new", "--backup", "a=discard", "--backup", "b=host"], &present);
        assert_eq!(value(&set, "VRAMCTL_TAG").as_deref(), Some("new"));
        assert_eq!(value(&set, "VRAMCTL_BACKUP").as_deref(), Some("a=host,a=discard,b=host"));
        assert!(variables(&["--no-tag"], &present).contains(&("VRAMCTL_TAG", None)));
    }

    #[test]
    fn options_become_variables() {
        let set = variables(&["--name", "my engine", "--limit", "25%", "--min-bytes", "64K", "--log", "debug"], &[]);
        for (name, wanted) in
            [("VRAMCTL_NAME", "my engine"), ("VRAMCTL_LIMIT", "25%"), ("VRAMCTL_MIN_BYTES", "64K"), ("VRAMCTL_LOG", "debug")]
        {
            assert_eq!(value(&set, name).as_deref(), Some(wanted));
        }
    }

    #[test]
    fn a_limit_in_the_environment_is_checked_too() {
        let args = || Line::try_parse_from(["run", "--", "x"]).unwrap().args;
        let with = |limit: &str| {
            environment(&args(), Path::new("/l/libvramctl.so"), None, &[], |name| (name == "VRAMCTL_LIMIT").then(|| limit.into()))
        };
        assert!(with("20G").is_ok() && with("").is_ok());
        assert!(with("20").is_ok(), "bytes");
        assert!(with("lots").unwrap_err().to_string().starts_with("VRAMCTL_LIMIT: lots is neither a size"));
    }

    #[test]
    fn directories_are_those_of_the_command_wherever_the_program_goes() {
        let present = [("VRAMCTL_DIR", "sockets"), ("VRAMCTL_DISK_DIR", "/spill"), ("VRAMCTL_REPORT_DIR", "../reports")];
        let (set, here) = (variables(&[], &present), env::current_dir().unwrap());
        assert_eq!(value(&set, "VRAMCTL_DIR").as_deref(), here.join("sockets").to_str());
        assert_eq!(value(&set, "VRAMCTL_DISK_DIR"), None, "it stays as it is");
        assert_eq!(value(&set, "VRAMCTL_REPORT_DIR").as_deref(), here.join("../reports").to_str());
    }

    #[test]
    fn a_policy_for_a_mistyped_tag_is_noticed() {
        let text = mistyped("weigths=disk", None).unwrap();
        assert!(text.contains("--backup weigths=disk") && text.ends_with("did you mean weights?"), "{text}");
        for (fine, own) in [
            ("weights=disk", None),
            ("activations=disk", None),
            ("w=disk", Some("w")),
            ("kv=discard", None),
            ("weight=disk", Some("weight")),
        ] {
            assert_eq!(mistyped(fine, own), None, "{fine}");
        }
        assert!(mistyped("actoins=disk", Some("actions")).unwrap().ends_with("did you mean actions?"));
    }

    #[test]
    fn options_that_the_library_would_reject_are_refused_at_once() {
        for wrong in [
            ["--backup", "kv_cache"],
            ["--backup", "kv_cache=tape"],
            ["--backup", "=host"],
            ["--tag", "a,b"],
            ["--tag", ""],
            ["--limit", "half"],
            ["--limit", "120%"],
            ["--min-bytes", "lots"],
            ["--log", "loud"],
            ["--name", ""],
            ["--name", "123"],
        ] {
            assert!(Line::try_parse_from(["run", wrong[0], wrong[1], "--", "x"]).is_err(), "{wrong:?}");
        }
        assert!(Line::try_parse_from(["run", "--tag", "a", "--no-tag", "--", "x"]).is_err());
        assert!(Line::try_parse_from(["run"]).is_err());
    }

    #[test]
    fn the_package_comes_first_on_the_python_path_and_once() {
        let folders = ["/p/vramctl/site", "/p/vramctl/dropin"].map(PathBuf::from);
        let path = |present: Option<&str>| python_path(&folders, present.map(OsStr::new)).unwrap().into_string().unwrap();
        let ours = "/p/vramctl/site:/p/vramctl/dropin";
        assert_eq!(path(None), ours);
        assert_eq!(path(Some("/a::/b")), format!("{ours}:/a::/b"), "what was there stays, as it was");
        assert_eq!(path(Some(&format!("/a:{ours}:/b"))), format!("{ours}:/a:/b"), "one run inside another adds nothing");
        assert_eq!(path(Some("/old/vramctl/site:/old/vramctl/dropin:/a/site")), format!("{ours}:/a/site"));
        assert!(python_path(&[PathBuf::from("/with:colon/vramctl/site")], None).unwrap_err().to_string().contains("--no-python"));
    }

    #[test]
    fn without_a_package_the_python_path_is_left_alone() {
        assert_eq!(value(&variables(&[], &[("PYTHONPATH", "/a")]), "PYTHONPATH"), None);
    }
}
