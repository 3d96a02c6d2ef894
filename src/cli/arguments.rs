//! Arguments that several commands have.

use crate::candidates;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use clap_complete::ArgValueCandidates;
use std::env;
use std::ffi::OsStr;
use std::time::Duration;
use vramctl_coordinator::deadline::Deadline;
use vramctl_coordinator::engine::{self, checked_address};
use vramctl_coordinator::operation::HowToPause;
use vramctl_coordinator::processes::Target;
use vramctl_coordinator::{Operation, Scope};
use vramctl_model::{self as model, Limit, Policy, Registered, Verb, parse_bytes};

/// The options that choose processes.
#[derive(clap::Args, Clone)]
#[group(id = "target", multiple = true)]
pub struct TargetArgs {
    /// The process with this id; may be repeated
    #[arg(long, value_name = "PID", add = ArgValueCandidates::new(candidates::pids))]
    pid: Vec<u32>,
    /// All processes with this name (`vramctl run --name`, else the program's name), or a pattern: 'eng*'; may be repeated
    #[arg(long, short, add = ArgValueCandidates::new(candidates::names))]
    name: Vec<String>,
    /// All managed processes
    #[arg(long, conflicts_with_all = ["pid", "name"])]
    all: bool,
}

/// Processes as words, or as options. Without either, all of them or the only job.
#[derive(clap::Args)]
pub struct ProcessArgs<const ALL: bool> {
    #[arg(value_name = "NAME", help = Self::HELP, conflicts_with = "target", add = ArgValueCandidates::new(candidates::targets))]
    words: Vec<String>,
    #[command(flatten)]
    options: TargetArgs,
}

/// For commands that only look.
pub type ProcessesOrAll = ProcessArgs<true>;
/// For commands that change something.
pub type ProcessesOrOnly = ProcessArgs<false>;

impl<const ALL: bool> ProcessArgs<ALL> {
    const HELP: &'static str = if ALL {
        "Processes by name, pattern ('eng*') or id [default: all]"
    } else {
        "Processes by name, pattern ('eng*') or id [default: the only job]"
    };

    /// Whether any are named.
    pub fn are_named(&self) -> bool {
        !self.words.is_empty() || Target::from(self.options.clone()) != Target::Only
    }

    /// The processes that are meant.
    pub fn target(&self) -> Target {
        let words = self.words.iter().cloned().map(Target::parse).collect();
        let target = Target::of(words).unwrap_or_else(|| self.options.clone().into());
        if ALL { target.or_all() } else { target }
    }
}

/// A limit as the library reads it.
pub fn checked_limit(text: &str) -> Result<String, String> {
    text.parse::<Limit>().map(|_| text.to_owned())
}

/// The option that chooses GPUs.
#[derive(clap::Args)]
pub struct GpuArgs {
    /// Only what is on this GPU: its index in `nvidia-smi`, its UUID or a prefix of it; may be repeated
    #[arg(long, value_name = "GPU", value_parser = checked_gpu, add = ArgValueCandidates::new(candidates::gpus))]
    pub gpu: Vec<String>,
}

/// The options that pauses and resumes share.
#[derive(clap::Args)]
pub struct TransitionArgs {
    /// Tags [default: all]. Without --name, --pid or --all, words that are no tags are processes, by name, pattern ('eng*') or id
    #[arg(value_name = "TAG", value_parser = checked_tag, add = ArgValueCandidates::new(candidates::tags_and_names))]
    pub words: Vec<String>,
    #[command(flatten)]
    pub target: TargetArgs,
    #[command(flatten)]
    pub gpu: GpuArgs,
    /// How many processes there must be [default: as many as when the job was last paused or resumed]
    #[arg(long, value_name = "N", value_parser = count)]
    pub ranks: Option<usize>,
    /// Wait at most this many seconds, all in all, for what is in the way (for another command, at least 10); fractions are allowed
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub timeout: Option<Duration>,
    /// Print errors and warnings only
    #[arg(long, short, conflicts_with = "json")]
    pub quiet: bool,
}

impl TransitionArgs {
    /// The operation that they ask for.
    pub fn operation(&self, verb: Verb, pause: HowToPause) -> Operation {
        let scope = Scope::Tags { words: self.words.clone(), may_name: true, gpus: self.gpu.gpu.clone() };
        Operation { ranks: self.ranks, ..Operation::new(verb, self.target.clone().into(), scope, Deadline::new(self.timeout), pause) }
    }
}

/// The options of a pause that concern engines.
#[derive(clap::Args)]
pub struct EngineArgs {
    /// Ask the inference engine at this address first (docs/engines.md); may be repeated. Those of `VRAMCTL_ENGINE` are asked if a KV
    /// cache or requests would lose their memory
    #[arg(long, value_name = "URL", value_delimiter = ',', value_parser = checked_address)]
    engine: Vec<String>,
    /// Those of the environment.
    #[arg(long, value_name = "URL", hide = true, env = "VRAMCTL_ENGINE", value_delimiter = ',', value_parser = checked_address)]
    usual_engine: Vec<String>,
    /// Ask no engine, and discard a KV cache even if its engine's prefix cache still describes it
    #[arg(long, conflicts_with = "engine")]
    pub force: bool,
}

impl EngineArgs {
    pub fn addresses(&self) -> engine::Addresses {
        let always = !self.engine.is_empty();
        let chosen = if always { &self.engine } else { &self.usual_engine };
        // An empty variable counts as unset.
        let addresses = chosen.iter().filter(|address| !address.is_empty()).cloned().collect();
        engine::Addresses { addresses, key: engine_key(), always }
    }
}

/// The API key of the engines. It is no option: every user of the machine can read command lines.
pub fn engine_key() -> Option<String> {
    env::var("VRAMCTL_ENGINE_KEY").ok().filter(|key| !key.is_empty())
}

/// The option that limits how long a hold waits.
#[derive(clap::Args)]
pub struct HoldTimeoutArgs {
    /// How many seconds to wait for GPU work in flight; after that, nothing has changed and the program continues
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    pub hold_timeout: Duration,
}

/// The options that choose where contents go.
#[derive(clap::Args)]
pub struct BackupArgs {
    /// Drop the contents: the memory reads as zero after the resume
    #[arg(long, conflicts_with = "backup")]
    discard: bool,
    /// Where to keep the contents, overriding the tags' policies: host or disk
    #[arg(long, value_name = "POLICY", value_parser = backup(), hide_possible_values = true)]
    backup: Option<Policy>,
}

impl BackupArgs {
    /// `None`: as the tags' policies say.
    pub fn policy(&self) -> Option<Policy> {
        self.discard.then_some(Policy::Discard).or(self.backup)
    }
}

fn backup() -> impl TypedValueParser<Value = Policy> {
    OnePolicy(PossibleValuesParser::new([Policy::Host, Policy::Disk].map(Policy::name))).try_map(|name| name.parse())
}

/// Explains what a pause has for `discard` and `TAG=POLICY`, which `vramctl run --backup` takes.
#[derive(Clone)]
struct OnePolicy(PossibleValuesParser);

impl TypedValueParser for OnePolicy {
    type Value = String;

    fn parse_ref(&self, command: &clap::Command, argument: Option<&clap::Arg>, value: &OsStr) -> Result<String, clap::Error> {
        let refused = |text: String| Err(clap::Error::raw(ErrorKind::ValueValidation, text).with_cmd(command));
        if value == Policy::Discard.name() {
            return refused("to drop the contents, `--discard` in place of `--backup`\n".into());
        }
        if let Some((tag, policy)) = value.to_str().and_then(|text| text.split_once('=')) {
            return refused(format!(
                "a pause has one policy for all that it pauses: to pause the tag {tag} alone, `vramctl pause {tag} --backup {policy}`; \
                 for the policy of each tag, `vramctl run --backup TAG=POLICY`\n"
            ));
        }
        self.0.parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        self.0.possible_values()
    }
}

/// What to do with registered memory, as an argument: one of these choices.
pub fn registered<const N: usize>(choices: [Registered; N]) -> impl TypedValueParser<Value = Registered> {
    PossibleValuesParser::new(choices.map(Registered::name)).try_map(|name| name.parse())
}

impl From<TargetArgs> for Target {
    fn from(TargetArgs { pid, name, all }: TargetArgs) -> Self {
        let parts = name.into_iter().map(Self::Name).chain(pid.into_iter().map(Self::Pid)).collect();
        Self::of(parts).unwrap_or(if all { Self::All } else { Self::Only })
    }
}

/// The levels of `VRAMCTL_LOG`.
pub const LEVELS: [&str; 5] = ["off", "error", "warn", "info", "debug"];

/// A tag as an argument.
pub fn checked_tag(text: &str) -> Result<String, String> {
    model::checked_tag(text).map(|tag| tag.to_string()).map_err(|error| error.to_string())
}

/// A GPU as an argument. An empty one, from a script's empty variable, would be a prefix of every UUID.
pub fn checked_gpu(text: &str) -> Result<String, String> {
    let is_name = !text.trim().is_empty() && !text.starts_with('-');
    is_name.then(|| text.to_owned()).ok_or_else(|| "not a GPU: give its index in `nvidia-smi`, or its UUID or a prefix of it".into())
}

/// A duration as an argument: seconds, or with a unit. Longer than anyone waits is still small enough to add to an `Instant`.
pub fn seconds(text: &str) -> Result<Duration, String> {
    const LONGEST: f64 = (1u64 << 32) as f64;
    const UNITS: [(&str, f64); 5] = [("ms", 1e-3), ("min", 60.0), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];
    let unit = UNITS.iter().find_map(|(name, seconds)| Some((text.strip_suffix(name)?, *seconds)));
    let (digits, unit) = unit.filter(|(digits, _)| digits.ends_with(|last: char| last.is_ascii_digit())).unwrap_or((text, 1.0));
    match digits.parse::<f64>() {
        Ok(number) if number >= 0.0 => Ok(Duration::from_secs_f64((number * unit).min(LONGEST))),
        _ if is_negative(text) => Err("seconds must not be negative".into()),
        _ => Err("not a number of seconds, such as 90, 2.5 or 5m".into()),
    }
}

/// A number of bytes as an argument.
pub fn size(text: &str) -> Result<usize, String> {
    match parse_bytes(text) {
        Some(bytes) => Ok(bytes),
        None if is_negative(text) => Err("a size must not be negative".into()),
        None => Err("not a size: give bytes, or a number with K, M, G, KiB, MiB, GiB (powers of 1024), KB, MB or GB (of 1000)".into()),
    }
}

/// Whether a value begins as a negative number, whatever unit follows.
fn is_negative(text: &str) -> bool {
    text.strip_prefix('-').is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit() || first == '.'))
}

/// A number of processes as an argument.
pub fn count(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| "not a number of processes".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn a_gpu_has_a_name() {
        for wrong in ["", " ", "-1"] {
            assert!(checked_gpu(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(checked_gpu("GPU-0f5c"), Ok("GPU-0f5c".into()));
    }

    #[test]
    fn seconds_may_have_fractions() {
        assert_eq!(seconds("2.5"), Ok(Duration::from_millis(2500)));
        for (text, wanted) in [("90s", 90_000), ("250ms", 250), ("5m", 300_000), ("1.5min", 90_000), ("2h", 7_200_000)] {
            assert_eq!(seconds(text), Ok(Duration::from_millis(wanted)), "{text}");
        }
        for wrong in ["", "x", "-1", "nan", "-inf", "m", "5 m", "5d", "1hm"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
        for long in ["inf", "1e300", "1e19"] {
            assert!(Instant::now() + seconds(long).unwrap() > Instant::now(), "{long}");
        }
        assert_eq!(seconds("-0"), Ok(Duration::ZERO));
    }
}
