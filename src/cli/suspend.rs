//! `vramctl suspend`, and the way back in `vramctl resume`.
//!
//! A process is suspended in steps, each of which the next caller can go on from: its tags are paused, its library stands aside,
//! the driver locks it, the driver checkpoints it. What the driver has done is asked of the driver, so a caller may die anywhere.

use crate::completions;
use crate::failure::{CommandError, Exit};
use crate::output;
use crate::processes::{Found, Process, Target};
use crate::target::{TargetArgs, seconds};
use clap_complete::ArgValueCandidates;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::thread;
use std::time::{Duration, Instant};
use vramctl_control::client::{Client, ClientError};
use vramctl_control::protocol;
use vramctl_driver::checkpoint::{self, ProcessState};
use vramctl_driver::{cards, holders_of};
use vramctl_model::{Backup, Bytes, Error, Failure, Registered, Report, Shortage, code};

#[derive(clap::Args)]
#[command(after_help = "\
Holds and pauses the processes as `vramctl pause --hold` does, then has the driver checkpoint what is left: the CUDA contexts, \
the loaded code. Afterwards they have nothing on any GPU, and nvidia-smi does not list them. `vramctl resume` brings them back, \
and their work goes on.

What the driver could not restore is only paused by tag, with exit code 7: processes with NCCL or NVSHMEM communicators, with \
memory shared between processes or GPUs, or with unified memory; and any process under a driver older than 570. `vramctl \
status` lists what is in the way.

If the command is interrupted or fails, run it again, or `vramctl resume`: both go on from where the driver is.

Examples:
  vramctl suspend engine
  vramctl suspend --all --timeout 60
  vramctl resume --name engine --timeout 60     wait for others to free the memory")]
#[allow(clippy::struct_excessive_bools)] // options
pub struct Args {
    /// The processes with this name, or the one with this id [default: the only managed process]
    #[arg(value_name = "NAME", conflicts_with = "target", add = ArgValueCandidates::new(completions::names))]
    process: Option<String>,
    #[command(flatten)]
    target: TargetArgs,
    /// Drop the contents: the memory reads as zero after the resume. Same as --backup discard
    #[arg(long, conflicts_with = "backup")]
    discard: bool,
    /// Where to keep the contents, overriding the tags' policies: host, disk or discard
    #[arg(long, value_name = "POLICY")]
    backup: Option<Backup>,
    /// What to do with memory that another process, a network card or NCCL has registered: refuse or take
    #[arg(long, value_name = "HOW", default_value = "refuse", hide_default_value = true)]
    registered: Registered,
    /// Discard a KV cache although the prefix cache of an engine still describes it
    #[arg(long)]
    force: bool,
    /// How many seconds to wait for GPU work in flight, before the program runs on and nothing has changed
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    hold_timeout: Duration,
    /// Print JSON: {"processes": [{"pid", "name", "report" or "error"}]}
    #[arg(long)]
    pub json: bool,
    /// Print errors and warnings only
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
}

/// A process of the job.
struct Member {
    process: Process,
    client: Client,
    /// As the driver knows it.
    pid: i32,
}

/// What happened to one process.
#[derive(Debug, Default, Serialize)]
struct Suspension {
    /// Bytes freed on the GPUs: paused, and checkpointed.
    bytes: u64,
    paused_bytes: u64,
    checkpointed_bytes: u64,
    stages: Stages,
    ms: f64,
}

/// Milliseconds in each step, in order.
#[derive(Debug, Default)]
struct Stages(Vec<(&'static str, f64)>);

impl Stages {
    fn insert(&mut self, stage: &'static str, ms: f64) {
        self.0.push((stage, ms));
    }
}

impl Serialize for Stages {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().copied())
    }
}

#[derive(Serialize)]
struct SuspendAnswer<'a> {
    pid: u32,
    name: Option<&'a str>,
    report: &'a Suspension,
}

pub fn suspend(args: Args) -> Result<Exit, CommandError> {
    see_all_gpus();
    let target = args.process.map_or_else(|| Target::from(args.target), Target::parse);
    let found = Found::look(&target)?;
    let mut members = join(&found, &target)?;
    let started = Instant::now();
    let mut reports: Vec<Suspension> = members.iter().map(|_| Suspension::default()).collect();
    let request = protocol::Transition {
        backup: args.discard.then_some(Backup::Discard).or(args.backup),
        registered: args.registered,
        force: args.force,
        hold_ms: Some(milliseconds_of(args.hold_timeout)),
        ..protocol::Transition::default()
    };

    let obstacle = obstacle(&members);
    let paused = pause(&mut members, &request)?;
    for (report, paused) in reports.iter_mut().zip(&paused) {
        report.paused_bytes = paused.bytes;
        report.stages.insert("pause", paused.ms);
    }
    let taken = match obstacle {
        Some(why) => Err(CommandError::new(Exit::Unsuspendable, why)),
        None => take(&mut members, args.hold_timeout, &mut reports),
    };
    let ms = milliseconds(started.elapsed());
    for report in &mut reports {
        report.bytes = report.paused_bytes + report.checkpointed_bytes;
        report.ms = ms;
    }
    if args.json && taken.is_ok() {
        let outcome = |(member, report)| outcome(member, report);
        output::json(&members.iter().zip(&reports).map(outcome).collect::<Vec<_>>())?;
    } else if !args.quiet && taken.is_ok() {
        for (member, report) in members.iter().zip(&reports) {
            output::say(&told("suspended", &member.process, report))?;
        }
    }
    let Err(failure) = taken else { return Ok(Exit::Done) };
    let left: u64 =
        members.iter().flat_map(|member| &member.process.status).flat_map(|status| &status.memory.left_alone).map(|left| left.bytes).sum();
    Err(failure.adding(&format!(
        ". All tags are paused, and the context{} on the GPU; `vramctl resume` gives the tags back",
        if left > 0 { format!(" and {} of libraries stay", Bytes(left)) } else { " stays".into() }
    )))
}

fn outcome<'a>(member: &'a Member, report: &'a Suspension) -> SuspendAnswer<'a> {
    SuspendAnswer { pid: member.process.pid, name: member.process.name(), report }
}

fn told(did: &str, process: &Process, report: &Suspension) -> String {
    let moved = if did == "suspended" { "freed" } else { "allocated" };
    let mut text = format!("{did} {process}: {} {moved} in {:.0} ms (", Bytes(report.bytes), report.ms);
    for (at, (stage, ms)) in report.stages.0.iter().enumerate() {
        let _ = write!(text, "{}{stage} {ms:.0}", if at > 0 { ", " } else { "" });
    }
    text + ")"
}

/// A job may be on any GPU, also on those that `CUDA_VISIBLE_DEVICES` hides from this command. Call it before there are threads.
fn see_all_gpus() {
    // SAFETY: no other thread reads the environment yet.
    unsafe { std::env::remove_var("CUDA_VISIBLE_DEVICES") };
}

/// Connects to the processes that match.
fn join(found: &Found, target: &Target) -> Result<Vec<Member>, CommandError> {
    let member = |process: Process| {
        let client = found.connect(process.pid)?;
        Ok(Member { pid: client.seen_as(), client, process })
    };
    found.choose_answering(target)?.into_iter().map(member).collect()
}

/// Why the driver cannot be asked.
fn obstacle(members: &[Member]) -> Option<String> {
    if let Err(failure) = checkpoint::prepare() {
        let why = match failure.code {
            code::NOT_FOUND if failure.call.starts_with("cuCheckpoint") => "the driver is older than 570 and cannot checkpoint".into(),
            _ => format!("the driver cannot be used from here: {failure}"),
        };
        return Some(why);
    }
    let away = members.iter().find(|member| member.pid == 0)?;
    Some(format!("{} is in another container: run vramctl there", away.process))
}

/// Runs a step for all members at once.
fn all<R: Send>(members: &mut [Member], step: impl Fn(&mut Member) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let step = &step;
        let threads: Vec<_> = members.iter_mut().map(|member| scope.spawn(move || step(member))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// The same, with the milliseconds that each has taken.
fn timed<R: Send>(members: &mut [Member], step: impl Fn(&mut Member) -> R + Sync) -> Vec<(R, f64)> {
    all(members, |member| {
        let started = Instant::now();
        let result = step(member);
        (result, milliseconds(started.elapsed()))
    })
}

/// Pauses all tags of all of them, or of none.
fn pause(members: &mut [Member], request: &protocol::Transition) -> Result<Vec<Report>, CommandError> {
    let answers = all(members, |member| {
        if member.process.suspended().is_some() || !member.process.has_memory() {
            return Ok(Report::default());
        }
        member.client.pause(request.clone(), &mut |_| ())
    });
    if answers.iter().all(Result::is_ok) {
        return Ok(answers.into_iter().flatten().collect());
    }
    let mut failure = None;
    for (member, answer) in members.iter_mut().zip(answers) {
        match answer {
            Ok(report) if report.allocations > 0 => _ = member.client.resume(protocol::Transition::default(), &mut |_| ()),
            Ok(_) => (),
            Err(error) => failure = Some(failed(member, error)),
        }
    }
    Err(failure.unwrap_or_else(|| CommandError::new(Exit::Failed, "the pause failed")))
}

fn failed(member: &Member, error: ClientError) -> CommandError {
    CommandError::from(error).adding(&format!(" ({})", member.process))
}

/// Has the driver take what the paused processes still have. After a failure they are paused by tag.
fn take(members: &mut [Member], limit: Duration, reports: &mut [Suspension]) -> Result<(), CommandError> {
    let done = aside(members, reports).and_then(|()| lock(members, limit, reports)).and_then(|()| checkpoint(members, reports));
    if done.is_err() {
        // Whatever each of them has reached. What cannot be undone has been reported above.
        for member in members.iter_mut() {
            let _ = back(member, &[]);
        }
    }
    done
}

fn aside(members: &mut [Member], reports: &mut [Suspension]) -> Result<(), CommandError> {
    for (answer, (member, report)) in all(members, |member| member.client.suspend()).into_iter().zip(members.iter().zip(reports)) {
        report.checkpointed_bytes = answer.map_err(|error| failed(member, error))?.iter().map(|gpu| gpu.bytes).sum();
    }
    Ok(())
}

fn lock(members: &mut [Member], limit: Duration, reports: &mut [Suspension]) -> Result<(), CommandError> {
    let locked = timed(members, |member| match checkpoint::state(member.pid)? {
        ProcessState::Running => checkpoint::lock(member.pid, limit),
        _ => Ok(()),
    });
    for ((answer, ms), (member, report)) in locked.into_iter().zip(members.iter().zip(reports)) {
        report.stages.insert("lock", ms);
        answer.map_err(|failure| match failure.code {
            code::NOT_READY => {
                CommandError::new(Exit::Busy, format!("{}: a CUDA call has not ended in {} ms", member.process, limit.as_millis()))
            }
            _ => refused(member, "lock", failure),
        })?;
    }
    Ok(())
}

fn checkpoint(members: &mut [Member], reports: &mut [Suspension]) -> Result<(), CommandError> {
    let done = timed(members, |member| match checkpoint::state(member.pid)? {
        ProcessState::Locked => checkpoint::checkpoint(member.pid),
        ProcessState::Checkpointed => Ok(()),
        state => Err(Failure {
            call: "cuCheckpointProcessCheckpoint",
            code: if state == ProcessState::Failed { code::UNKNOWN } else { code::ILLEGAL_STATE },
        }),
    });
    let mut first = Ok(());
    for ((answer, ms), (member, report)) in done.into_iter().zip(members.iter().zip(reports)) {
        report.stages.insert("checkpoint", ms);
        first = first.and(answer.map_err(|failure| refused(member, "checkpoint", failure)));
    }
    first
}

/// The driver's refusal, with the state that it has left the process in.
fn refused(member: &Member, step: &str, failure: Failure) -> CommandError {
    let state = match checkpoint::state(member.pid) {
        Ok(ProcessState::Failed) => "; the driver reports the process as FAILED: it is lost. Kill and restart it",
        _ => "",
    };
    CommandError::new(Exit::Failed, format!("the driver did not {step} {}: {failure}{state}", member.process))
}

/// Brings one process back to running, from wherever it is.
fn back(member: &mut Member, map: &[(String, String)]) -> Result<Stages, CommandError> {
    let mut stages = Stages::default();
    let state = |member: &Member| checkpoint::state(member.pid).map_err(|failure| refused(member, "tell the state of", failure));
    let mut time = |stage, work: &dyn Fn() -> Result<(), Failure>| {
        let started = Instant::now();
        let answer = work();
        stages.insert(stage, milliseconds(started.elapsed()));
        answer
    };
    if state(member)? == ProcessState::Checkpointed {
        time("restore", &|| checkpoint::restore(member.pid, map)).map_err(|failure| refused(member, "restore", failure))?;
    }
    match state(member)? {
        ProcessState::Locked => time("unlock", &|| checkpoint::unlock(member.pid)).map_err(|failure| refused(member, "unlock", failure))?,
        ProcessState::Running => (),
        ProcessState::Checkpointed | ProcessState::Failed => {
            return Err(refused(member, "restore", Failure { call: "cuCheckpointProcessRestore", code: code::ILLEGAL_STATE }));
        }
    }
    member.client.awake().map_err(|error| failed(member, error))?;
    Ok(stages)
}

/// Before a resume: brings suspended processes back to the GPU.
pub fn bring_back(target: &Target, all_tags: bool, timeout: Duration, quiet: bool) -> Result<(), CommandError> {
    see_all_gpus();
    let found = Found::look(target)?;
    // Whoever does not answer, or does not exist, is reported by the resume.
    let Ok(chosen) = found.choose(target) else { return Ok(()) };
    if chosen.iter().all(|process| process.suspended().is_none()) {
        return Ok(());
    }
    let mut members: Vec<_> = join(&found, target)?.into_iter().filter(|member| member.process.suspended().is_some()).collect();
    let started = Instant::now();
    checkpoint::prepare().map_err(|failure| CommandError::new(Exit::Failed, format!("the driver cannot be used from here: {failure}")))?;
    wait_for_room(&needs(&members, all_tags), timeout)?;
    let answers = all(&mut members, |member| back(member, &[]));
    let mut first = Ok(());
    for (member, answer) in members.iter().zip(answers) {
        match answer {
            Ok(stages) => {
                let bytes = member.process.suspended().unwrap_or_default().iter().map(|gpu| gpu.bytes).sum();
                let report =
                    Suspension { bytes, checkpointed_bytes: bytes, stages, ms: milliseconds(started.elapsed()), ..Suspension::default() };
                if !quiet {
                    output::say(&told("restored", &member.process, &report))?;
                }
            }
            Err(failure) => first = first.and(Err(failure)),
        }
    }
    first
}

/// Bytes that a restore needs, by GPU. A driver that fails in the middle for lack of memory cannot try again, so there is to be more
/// than what was taken. `with_tags`: and what is paused, so that the job either comes back or stays as it is.
fn needs(members: &[Member], with_tags: bool) -> BTreeMap<String, u64> {
    let mut needs = BTreeMap::<_, u64>::new();
    let has_all = |member: &&Member| matches!(checkpoint::state(member.pid), Ok(ProcessState::Running | ProcessState::Locked));
    for member in members.iter().filter(|member| !has_all(member)) {
        for gpu in member.process.suspended().unwrap_or_default().iter().filter(|gpu| gpu.bytes > 0) {
            *needs.entry(gpu.uuid.clone()).or_default() += gpu.bytes + gpu.bytes / 4;
        }
        let devices = member.process.status.as_ref().map_or(&[][..], |status| &status.memory.devices);
        for device in devices.iter().filter(|_| with_tags) {
            if let Some(uuid) = &device.uuid {
                *needs.entry(uuid.clone()).or_default() += device.paused_bytes;
            }
        }
    }
    needs
}

fn wait_for_room(needs: &BTreeMap<String, u64>, timeout: Duration) -> Result<(), CommandError> {
    const LOOK_AGAIN: Duration = Duration::from_millis(50);
    let deadline = Instant::now() + timeout;
    loop {
        let cards = cards();
        let short = |card: &&vramctl_driver::Card| needs.get(&card.uuid).is_some_and(|needed| *needed > card.free);
        let Some(card) = cards.iter().find(short) else { return Ok(()) };
        if Instant::now() >= deadline {
            let shortage = Shortage {
                device: card.index as i32,
                uuid: Some(card.uuid.clone()),
                needed: needs[&card.uuid],
                free: card.free,
                holders: holders_of(&card.uuid),
            };
            return Err(CommandError::from(&Error::DeviceMemory(shortage)).adding(". The job stays suspended; nothing is lost"));
        }
        thread::sleep(LOOK_AGAIN);
    }
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn milliseconds_of(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
