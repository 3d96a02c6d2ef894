//! The messages on the control socket: one JSON object per line, or fields for clients that cannot write JSON. `docs/protocol.md` documents them
//! for other programs.

use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::iter;
use vramctl_model::{
    Cached, Error, Events, GpuUse, Holdings, Kind, Lent, MemberState, NoOther, Obstacle, Order, Participants, PauseRequest, Plan, Progress,
    Registration, Report, ResumeRequest, SetAside, Sharing, Shortage, Status, Transition, Trimmed,
};

/// The version of the protocol. Changes only if an old client would misunderstand a new server, or the reverse; new fields and requests do not
/// count: a server refuses those that it does not know.
pub const VERSION: u32 = 1;

/// The maximum length of a request in bytes, with the newline: more than all arguments of a command can have.
pub const LONGEST_REQUEST: usize = 4 << 20;

/// A line from a client: the protocol version and one request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// [`VERSION`] of the client.
    pub version: u32,
    /// The request. Its fields are beside the version.
    #[serde(flatten)]
    pub request: Request,
}

/// The requests. A field that one does not have is refused.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Who are you?
    #[serde(deserialize_with = "no_fields")]
    Hello,
    /// What do you hold?
    #[serde(deserialize_with = "no_fields")]
    Status,
    /// What has happened to your memory? Answered without the driver, and even during a pause.
    Events {
        /// The number of the first event to return; if it is gone, the answer begins with the next one left.
        #[serde(default)]
        since: u64,
        /// The most events in the answer; absent or too large: as many as one answer may have.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        most: Option<usize>,
    },
    /// Record from now on what happens to your memory, until you end.
    #[serde(deserialize_with = "no_fields")]
    Record,
    /// Take memory away.
    Pause(PauseRequest),
    /// What would this pause or resume do?
    Plan(Transition),
    /// Give memory back.
    Resume(ResumeRequest),
    /// Get ready for the driver's checkpoint: from the answer on, the library stays out of the driver, and answers only requests
    /// that do not need it.
    #[serde(deserialize_with = "no_fields")]
    Suspend,
    /// The process is running again: the library may use the driver.
    #[serde(deserialize_with = "no_fields")]
    Awake,
    /// Put the contents that are kept of paused memory into an image, and keep them nowhere else. All memory must be paused. The line carries the
    /// descriptor of a socket, through which others come with one byte: those of `vramctl_store`'s writer, and a file for the list of the contents.
    Store(ImageName),
    /// Read stored contents back through these files. The line carries the descriptor of a socket, as with `store`: through it come a file that
    /// lists where pieces are, which may be none, and two of each pack.
    Origin {
        /// The image.
        image: ImageName,
        /// The packs.
        packs: Vec<u64>,
    },
    /// After `suspend`: close everything by which this process is reached, for as long as somebody has the lock `ADDRESS.saving`, so that it can be
    /// written to a disk. Then it listens anew. As the process of an image, it takes the name that `ADDRESS.loading` says.
    #[serde(deserialize_with = "no_fields")]
    Detach,
    /// First step of a held pause: new calls wait from now on. Everything is undone when the lease ends. The line may carry a
    /// descriptor: the [`Decision`](super::decision::Decision) that the processes of a job share.
    Hold {
        /// How long the process waits for the client's next line, in milliseconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lease_ms: Option<u64>,
    },
    /// After `hold`: wait for calls and work in flight.
    Drain {
        /// At most this many milliseconds.
        limit_ms: u64,
    },
    /// After `hold`: let some of the program's calls pass, which wait or come soon, because other processes wait for this one. Then `drain` again.
    Advance {
        /// How many, at most.
        calls: u32,
    },
    /// Do every step of a pause or resume that can be undone, and wait for `commit`. With the same descriptor.
    Prepare(Prepare),
    /// Replaces `prepare` for a process that pauses nothing of its own: at the `commit`, give up your open memory of your `partners` that
    /// the request selects, and open it again when they have resumed it. With the same descriptor.
    SetAside(SetAside),
    /// Renew the lease. Has no answer.
    #[serde(deserialize_with = "no_fields")]
    Renew,
    /// Complete the prepared pause or resume.
    #[serde(deserialize_with = "no_fields")]
    Commit,
    /// Undo everything.
    #[serde(deserialize_with = "no_fields")]
    Abort,
    /// Set the tag of future allocations outside regions.
    SetTag {
        /// The tag. If null or absent, such allocations are left to CUDA.
        #[serde(default)]
        tag: Option<String>,
    },
    /// NVML counts this much for you, after the pause that I requested.
    Counted {
        /// Bytes by the UUID of the GPU.
        gpus: BTreeMap<String, u64>,
    },
    /// What does the program's own allocator, such as torch's, hold? At most 200 ms.
    #[serde(deserialize_with = "no_fields")]
    Cache,
    /// Watch for little free memory from now on.
    Watch {
        /// Log who uses the memory when less is free on a device; 0 ends the watch. Absent: only return the setting.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        below_bytes: Option<u64>,
        /// Also return what the program's own allocator has cached.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        trim: bool,
    },
    /// Have the program's own allocator return what it has cached.
    Trim {
        /// Within this many milliseconds; 10 s if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        timeout_ms: Option<u64>,
    },
    /// Pass me the memory behind an IPC handle. Between the libraries of two processes. The memory counts as open until it is
    /// closed or the connection ends.
    Open {
        /// The token in the handle.
        token: String,
    },
    /// The line carries a descriptor that I have imported. If you have exported it: pass me the memory behind it, as with `open`. Between the
    /// libraries of two processes. Otherwise the answer is an error with CUDA's code for an invalid handle (400).
    #[serde(deserialize_with = "no_fields")]
    Claim,
    /// I schedule the programs that share this host's GPUs, in this epoch. Answered with `member` lines until the connection ends.
    Share {
        /// Of two schedulers, the newer one has the greater epoch.
        epoch: u64,
    },
    /// On that connection: what to do. Has no answer.
    Order(Order),
    /// Share your GPUs so from now on.
    Sharing(Sharing),
    /// What could you give up, and what have you given up to the scheduler?
    #[serde(deserialize_with = "no_fields")]
    Holdings,
    /// I am about to resume you so: keep room for it, once it is my turn among those that wait there, for as long as this connection lasts. At once
    /// if you do not share your GPUs.
    Room(ResumeRequest),
    /// Have the inference engine reset its prefix cache, if it is idle, so that its KV cache need not be kept. At most 200 ms.
    ResetPrefixCache {
        /// The scheduler's that asks, as in `share`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        epoch: Option<u64>,
    },
    /// I have closed that memory.
    Close {
        /// The token in the handle.
        token: String,
    },
}

/// An image's name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageName {
    /// The directory of images.
    pub directory: String,
    /// The name in there.
    pub name: String,
}

/// What to prepare.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prepare {
    /// As in `hold`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_ms: Option<u64>,
    /// The processes of the job. This one remembers them, so that a missing one is noticed. Empty if these are not all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<u32>,
    /// What to pause or resume.
    #[serde(flatten)]
    pub transition: Transition,
}

/// The server's answer: any number of [`Reply::Progress`] lines, then one of the others.
#[allow(clippy::large_enum_variant)] // one at a time
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "kebab-case")]
pub enum Reply {
    /// To `hello`.
    Hello(Hello),
    /// To `status`.
    Status(ProcessStatus),
    /// To `events`.
    Events(Events),
    /// To `record`.
    Recording {
        /// Whether it has begun now: the process recorded nothing before.
        begun: bool,
    },
    /// To `pause`, `resume` and `commit`.
    Done(Report),
    /// To `hold`: new calls wait.
    Held,
    /// To `drain`: the device has no work any more.
    Drained,
    /// To `prepare`: every step that can fail is done.
    Prepared,
    /// To `plan`.
    Plan(DryRun),
    /// To `suspend`: it may be checkpointed now.
    Suspended {
        /// The GPUs that it sees, and the memory that a restore needs there.
        gpus: Vec<GpuUse>,
    },
    /// To `awake`.
    Awake,
    /// To `store`.
    Stored {
        /// Bytes of contents.
        bytes: u64,
        /// Bytes written: those that are not zero.
        written_bytes: u64,
    },
    /// To `origin`.
    Origin,
    /// To `detach`. The process is not reached from now on.
    Detached,
    /// To `set-tag`.
    Tag {
        /// The new tag.
        tag: Option<String>,
    },
    /// To `counted`.
    Counted,
    /// To `cache`.
    Cache {
        /// By GPU and tag.
        cache: Vec<Cached>,
    },
    /// To `watch`: the current setting.
    Watch {
        /// The level; 0 if nothing is watched.
        below_bytes: u64,
        /// Whether cached memory is returned.
        trim: bool,
    },
    /// To `trim`.
    Trimmed(Trimmed),
    /// To `open` and `claim`: the line carries one file descriptor per piece.
    Opened {
        /// The length of each in bytes.
        pieces: Vec<u64>,
        /// The tag under which the owner pauses the memory.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tag: Option<String>,
        /// How often the memory has been paused; each pause replaces the physical memory.
        #[serde(default)]
        pauses: u64,
        /// To `claim`: the token for `open` and `close`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        token: Option<String>,
    },
    /// To `share`, as often as anything changes.
    Member(MemberState),
    /// To `sharing`: how it shares now.
    Sharing(Sharing),
    /// To `holdings`.
    Holdings(Holdings),
    /// To `room`, before its answer: it still waits.
    Waits {
        /// For whom, in words.
        why: String,
    },
    /// To `room`.
    Room {
        /// Whether there is room now, which is kept. Otherwise nobody can make it.
        granted: bool,
    },
    /// To `reset-prefix-cache`. No engine does that, or it is done.
    PrefixCacheReset,
    /// To `close`.
    Closed,
    /// Progress of a pause or resume.
    Progress(Progress),
    /// The request failed; nothing has changed.
    Error(Refusal),
}

/// Who a process is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The version of the protocol that the server speaks.
    pub protocol: u32,
    /// The version of the library.
    pub library: String,
    /// The process.
    pub pid: u32,
    /// Its name: `VRAMCTL_NAME`, else the program's.
    pub name: String,
    /// The program.
    pub program: String,
    /// The inference engine in the process (`vllm`, `sglang`), if it has registered. Its prefix cache describes the contents
    /// of `kv_cache`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<String>,
    /// The job that it belongs to: its given name, else an id of the `vramctl run` that started it. Absent if it was started otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// The `vramctl run` that started it. Two runs of one name are one job. Absent if it was started otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
    /// For how many seconds it has been running. Absent if the kernel does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub age_s: Option<u64>,
    /// The processes that its job had when it was last paused or resumed as a whole.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<u32>,
    /// Whether it shares its GPUs (`vramctl run --share`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shares: bool,
    /// Whether its own allocator, such as torch's, serves requests: it understands `cache` and `trim`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub trims: bool,
    /// The command that whoever pauses it runs before (`VRAMCTL_ON_PAUSE`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_pause: Option<String>,
    /// The command that whoever resumes it runs after (`VRAMCTL_ON_RESUME`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_resume: Option<String>,
}

/// A process and its memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProcessStatus {
    /// Who it is.
    #[serde(flatten)]
    pub process: Hello,
    /// Its memory.
    #[serde(flatten)]
    pub memory: Status,
}

/// A shortage of host memory for contents, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostShortage {
    /// Bytes that the contents need.
    pub needed: u64,
    /// Bytes available on the host.
    pub available: u64,
}

/// A dry run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DryRun {
    /// What the pause would do.
    #[serde(flatten)]
    pub plan: Plan,
    /// Why it would be refused: there is no room for the contents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<Box<Refusal>>,
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The kind of error. These names never change.
    pub code: Kind,
    /// The error as text.
    pub message: String,
    /// With `unknown_tag`: the existing tags.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub known_tags: Option<Vec<String>>,
    /// With `device_memory`: how much is missing, and who holds it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shortage: Option<Shortage>,
    /// With `host_memory`: how much is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_shortage: Option<HostShortage>,
    /// With `shared`: the tags, and who has them open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lent: Option<Vec<Lent>>,
    /// With `driver` and `work`: the driver's code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda_code: Option<u32>,
    /// With `not_restorable`: why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub obstacles: Option<Vec<Obstacle>>,
    /// With `registered`: which memory, and by whom.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub registered: Option<Vec<Registration>>,
}

impl From<&Error> for Refusal {
    fn from(error: &Error) -> Self {
        let refusal = Self {
            code: error.kind(),
            message: error.to_string(),
            known_tags: None,
            shortage: None,
            host_shortage: None,
            lent: None,
            cuda_code: None,
            obstacles: None,
            registered: None,
        };
        match error {
            Error::UnknownTag { known, .. } => Self { known_tags: Some(known.clone()), ..refusal },
            Error::DeviceMemory(shortage) => Self { shortage: Some(shortage.clone()), ..refusal },
            Error::HostMemory { needed, available, .. } => {
                Self { host_shortage: Some(HostShortage { needed: *needed, available: *available }), ..refusal }
            }
            Error::Shared(lent) => Self { lent: Some(lent.clone()), ..refusal },
            Error::Driver(failure) | Error::Work(failure) => Self { cuda_code: Some(failure.code), ..refusal },
            Error::NotRestorable(list) => Self { obstacles: Some(list.clone()), ..refusal },
            Error::Registered(list) => Self { registered: Some(list.clone()), ..refusal },
            _ => refusal,
        }
    }
}

/// For a request without fields.
fn no_fields<'de, D: Deserializer<'de>>(from: D) -> Result<(), D::Error> {
    NoOther::deserialize(from).map(drop)
}

impl Request {
    /// The processes that it names.
    pub(crate) fn pids(&mut self) -> Vec<&mut u32> {
        match self {
            Self::Pause(wanted) | Self::Plan(Transition::Pause(wanted)) => pids_of(&mut wanted.participants).collect(),
            Self::SetAside(wanted) => wanted.partners.iter_mut().collect(),
            Self::Prepare(Prepare { ranks, transition: Transition::Pause(wanted), .. }) => {
                ranks.iter_mut().chain(pids_of(&mut wanted.participants)).collect()
            }
            Self::Prepare(Prepare { ranks, .. }) => ranks.iter_mut().collect(),
            _ => Vec::new(),
        }
    }
}

fn pids_of(others: &mut Participants) -> impl Iterator<Item = &mut u32> {
    others.partners.iter_mut().chain(&mut others.borrowers)
}

impl Reply {
    /// The processes that it names.
    pub(crate) fn pids(&mut self) -> Vec<&mut u32> {
        match self {
            Self::Hello(hello) => hello.pids().collect(),
            Self::Status(ProcessStatus { process, memory }) => {
                process.pids().chain(memory.borrowed.iter_mut().map(|open| &mut open.owner)).collect()
            }
            Self::Done(report) => report.missing.iter_mut().chain(&mut report.lost).map(|open| &mut open.owner).collect(),
            Self::Error(refusal) => refusal.lent.iter_mut().flatten().map(|lent| &mut lent.by.pid).collect(),
            _ => Vec::new(),
        }
    }
}

impl Hello {
    fn pids(&mut self) -> impl Iterator<Item = &mut u32> {
        iter::once(&mut self.pid).chain(&mut self.ranks)
    }
}

/// Parses one request.
pub fn parse(line: &[u8]) -> Result<Request, Error> {
    match line.trim_ascii_start() {
        [b'{', ..] => parse_json(line),
        _ => parse_json(&json_of_fields(line)?),
    }
}

/// The JSON of a request that is written as fields, `NAME=VALUE` with a tab between two of them, which a shell can write without quoting.
/// Each `tags` adds one. Any other value that is JSON, such as a number, stays what it is.
fn json_of_fields(line: &[u8]) -> Result<Vec<u8>, Error> {
    let wrong = || Error::Invalid("not a request: neither a JSON object nor fields NAME=VALUE with a tab between two of them".into());
    let text = str::from_utf8(line).map_err(|_| wrong())?.trim_end_matches(['\r', '\n']);
    let (mut tags, mut fields) = (Vec::new(), serde_json::Map::new());
    for field in text.split('\t') {
        let (name, value) = field.split_once('=').ok_or_else(wrong)?;
        if name == "tags" {
            tags.push(value);
        } else {
            fields.insert(name.into(), serde_json::from_str(value).unwrap_or_else(|_| value.into()));
        }
    }
    if !tags.is_empty() {
        fields.insert("tags".into(), tags.into());
    }
    serde_json::to_vec(&fields).map_err(|_| wrong())
}

fn parse_json(line: &[u8]) -> Result<Request, Error> {
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    let wrong = |error: serde_json::Error| Error::Invalid(format!("not a request: {error}"));
    // The version first: the rest of a newer protocol may not parse.
    let Versioned { version } = serde_json::from_slice(line).map_err(wrong)?;
    if version != VERSION {
        return Err(Error::Invalid(format!("protocol version {version} is not supported; this library speaks version {VERSION}")));
    }
    serde_json::from_slice(line).map(|message: Message| message.request).map_err(wrong)
}

/// A request of this version's client as a line.
pub fn request_line(request: Request) -> Vec<u8> {
    line(&Message { version: VERSION, request })
}

/// Serialises a message to a line.
pub fn line(message: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(message).unwrap_or_else(|error| {
        // Serialising these types cannot fail; if it does, still answer.
        format!(r#"{{"reply":"error","code":"internal","message":"{error}"}}"#).into_bytes()
    });
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;
    use vramctl_model::{Failure, PauseOptions, Policy, Selection};

    fn tags(tags: &[&str]) -> Selection {
        Selection { tags: tags.iter().map(ToString::to_string).collect(), ..Selection::default() }
    }

    #[test]
    fn requests_read_as_documented() {
        let pause = parse(br#"{"version":1,"request":"pause","tags":["kv_cache"],"backup":"discard","timeout_ms":5}"#).unwrap();
        let wanted = PauseRequest {
            selection: tags(&["kv_cache"]),
            options: PauseOptions { backup: Some(Policy::Discard), ..PauseOptions::default() },
            timeout: Some(Duration::from_millis(5)),
            ..PauseRequest::default()
        };
        assert_eq!(pause, Request::Pause(wanted));
        let pause = parse(br#"{"version":1,"request":"pause","backup":"discard","backups":{"weights":"host","lora":null}}"#).unwrap();
        let backups = [("weights".into(), Some(Policy::Host)), ("lora".into(), None)].into();
        let options = PauseOptions { backup: Some(Policy::Discard), backups, ..PauseOptions::default() };
        assert_eq!(pause, Request::Pause(PauseRequest { options, ..PauseRequest::default() }));
        assert_eq!(parse(br#"{"version":1,"request":"resume"}"#).unwrap(), Request::Resume(ResumeRequest::default()));
        assert_eq!(parse(br#"{"version":1,"request":"set-tag","tag":"x"}"#).unwrap(), Request::SetTag { tag: Some("x".into()) });
        assert_eq!(parse(br#"{"version":1,"request":"set-tag"}"#).unwrap(), Request::SetTag { tag: None });
    }

    #[test]
    fn a_request_may_be_written_as_fields() {
        let pause =
            parse(b"version=1\trequest=pause\ttags=it's \"odd\" \\ \xc3\xbc\ttags=5\tbackup=discard\tforce=true\thold_ms=10\n").unwrap();
        let wanted = PauseRequest {
            selection: tags(&["it's \"odd\" \\ ü", "5"]),
            options: PauseOptions { backup: Some(Policy::Discard), force: true, ..PauseOptions::default() },
            hold: Some(Duration::from_millis(10)),
            ..PauseRequest::default()
        };
        assert_eq!(pause, Request::Pause(wanted));
        assert_eq!(parse(b"version=1\trequest=resume").unwrap(), Request::Resume(ResumeRequest::default()));
        let text = |line: &[u8]| parse(line).unwrap_err().to_string();
        assert!(text(b"version=2\trequest=pause").contains("version 2"));
        assert!(text(b"version=1\trequest=pause\tbackup=tape").contains("tape"));
        for wrong in [&b"pause"[..], b"version=1\trequest=pause\t", b"version=1\xff"] {
            assert!(text(wrong).contains("not a request"), "{wrong:?}");
        }
    }

    #[test]
    fn what_is_not_a_request_is_named() {
        let text = |line: &[u8]| parse(line).unwrap_err().to_string();
        assert!(text(br#"{"version":2,"request":"later"}"#).contains("version 2"));
        assert!(text(br#"{"version":1,"request":"explode"}"#).contains("explode"));
        assert!(text(br#"{"version":1,"request":"pause","backup":"tape"}"#).contains("tape"));
        assert!(text(b"\xff\xfe").contains("not a request"));
        assert!(text(b"").contains("not a request"));
    }

    /// A library that ignored a field would not do what its client relies on.
    #[test]
    fn a_field_that_a_request_does_not_have_is_refused() {
        for request in [
            r#""pause","tags":["a"]"#,
            r#""pause","swap":{"needed":{}}"#,
            r#""plan","of":"pause""#,
            r#""resume""#,
            r#""prepare","of":"pause","lease_ms":1,"ranks":[1]"#,
            r#""prepare","of":"resume","swap":{}"#,
            r#""set-aside""#,
            r#""hold","lease_ms":1"#,
            r#""hello""#,
            r#""suspend""#,
            r#""awake""#,
            r#""renew""#,
            r#""commit""#,
            r#""abort""#,
        ] {
            parse(format!(r#"{{"version":1,"request":{request}}}"#).as_bytes()).unwrap_or_else(|error| panic!("{request}: {error}"));
            let with_more = format!(r#"{{"version":1,"request":{request},"gentle":true}}"#);
            let refused = parse(with_more.as_bytes()).unwrap_err().to_string();
            assert!(refused.contains("unknown field `gentle`"), "{request}: {refused}");
        }
        let nested = parse(br#"{"version":1,"request":"pause","swap":{"gentle":true}}"#).unwrap_err().to_string();
        assert!(nested.contains("unknown field `gentle`"), "{nested}");
    }

    #[test]
    fn a_refusal_has_exactly_the_fields_of_its_error() {
        let failure = Failure { call: "cuMemCreate", code: 2 };
        let shortage = Shortage { device: 1, uuid: None, index: None, needed: 7, free: 5, holders: Vec::new() };
        for (error, code, fields) in [
            (Error::Driver(failure), Kind::Driver, (None, None, None, Some(2))),
            (Error::Work(Failure { code: 700, ..failure }), Kind::Work, (None, None, None, Some(700))),
            (Error::DeviceMemory(shortage.clone()), Kind::DeviceMemory, (None, Some(shortage), None, None)),
            (
                Error::HostMemory { needed: 3, available: 2, capped: false },
                Kind::HostMemory,
                (None, None, Some(HostShortage { needed: 3, available: 2 }), None),
            ),
            (
                Error::UnknownTag { unknown: vec!["a".into()], known: vec!["b".into()] },
                Kind::UnknownTag,
                (Some(vec!["b".to_owned()]), None, None, None),
            ),
            (Error::Capturing, Kind::Capturing, (None, None, None, None)),
        ] {
            let refusal = Refusal::from(&error);
            assert_eq!((refusal.code, &refusal.message), (code, &error.to_string()));
            assert_eq!((refusal.known_tags, refusal.shortage, refusal.host_shortage, refusal.cuda_code), fields);
        }
    }

    proptest! {
        /// Whatever arrives on the socket, parsing must not panic.
        #[test]
        fn garbage_is_refused(line in proptest::collection::vec(any::<u8>(), 0..512)) {
            let _ = parse(&line);
        }

        /// Near misses reach deeper into the parser than noise.
        #[test]
        fn almost_requests_are_refused_or_read(cut in 0usize..120, at in 0usize..100, byte in any::<u8>()) {
            let mut line = br#"{"version":1,"request":"pause","tags":["kv_cache","weights"],"backup":"host","timeout_ms":1000}"#.to_vec();
            line.truncate(cut);
            if let Some(place) = line.get_mut(at) { *place = byte; }
            let _ = parse(&line);
        }

        #[test]
        fn what_is_written_is_read_back(
            tags in proptest::collection::vec(".{0,20}", 0..4),
            timeout in any::<Option<u64>>(),
            progress: bool,
            force: bool,
        ) {
            let selection = Selection { tags, ..Selection::default() };
            let options = PauseOptions { force, ..PauseOptions::default() };
            let pause = PauseRequest { selection, options, timeout: timeout.map(Duration::from_millis), progress, ..PauseRequest::default() };
            for request in [
                Request::Pause(pause.clone()),
                Request::Plan(Transition::Pause(pause.clone())),
                Request::Prepare(Prepare { lease_ms: Some(5), ranks: vec![1], transition: Transition::Pause(pause) }),
            ] {
                prop_assert_eq!(parse(&request_line(request.clone())).unwrap(), request);
            }
        }
    }
}
