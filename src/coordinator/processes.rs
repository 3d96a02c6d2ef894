//! Finding the managed processes and choosing among them.

use crate::account;
use crate::deadline::Deadline;
use crate::failure::{CommandError, Exit};
use crate::gpus;
use crate::parallel;
use crate::patience::{HELLO_WITHIN, LOOK_FOR_PROCESSES_EVERY, NEW_SOCKET_WITHIN, STATUS_WITHIN, TURN_WITHIN};
use crate::proc;
pub use crate::process::Process;
use crate::queue::{Entry, Ticket};
use crate::reporter::Reporter;
use crate::starting::{of_other_user, starting};
pub use crate::target::Target;
use crate::target::{self, matches_name};
use crate::text;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};
use std::{env, io, thread};
use vramctl_config as config;
use vramctl_control::absence::{Absence, Absent};
use vramctl_control::address::{ListenerName, hidden};
use vramctl_control::client::{Client, ClientError};
use vramctl_control::discovery::{self, Directory};
use vramctl_control::protocol::{ProcessStatus, Refusal};
use vramctl_driver::uuid_of_index;
use vramctl_host::Unpoison;
use vramctl_host::{program_of, system};
use vramctl_model::{Error, Kind, checked_name, short_uuid};

/// The user's managed processes.
#[derive(Clone)]
pub struct Found {
    directory: Option<Directory>,
    /// Those that listen, by id.
    listening: Vec<u32>,
    /// Those that were asked.
    pub processes: Vec<Process>,
}

impl Found {
    /// Finds the processes and asks those that may match for their status.
    pub fn look(target: &Target) -> Result<Self, CommandError> {
        let failed =
            |error: io::Error| CommandError::new(Exit::Failed, format!("the directory of the control sockets cannot be used: {error}"));
        let begun = Instant::now();
        loop {
            let Some(directory) = Directory::open().map_err(failed)? else {
                return Ok(Self { directory: None, listening: Vec::new(), processes: Vec::new() });
            };
            let listening = directory.processes().map_err(failed)?;
            let is_by_id = matches!(target, Target::Pid(pid) if listening.contains(pid));
            let absent: Vec<_> = if is_by_id { Vec::new() } else { directory.absent() };
            // Those that will listen in a moment. Half of a job is worse than to wait for the rest of it.
            let soon = absent.iter().filter(|absent| matches!(absent.why, Absence::Deleted | Absence::Returning));
            let soon: Vec<_> = soon.cloned().map(silent_one).collect();
            let misses_some = !is_by_id && (directory.is_being_restored() || may_match(&soon, target));
            if misses_some && begun.elapsed() < NEW_SOCKET_WITHIN {
                thread::sleep(LOOK_FOR_PROCESSES_EVERY);
                continue;
            }
            let asked = match target {
                Target::Pid(pid) if is_by_id => std::slice::from_ref(pid),
                _ => listening.as_slice(),
            };
            let mut processes = ask(&directory, asked);
            processes.extend(absent.into_iter().map(silent_one));
            return Ok(Self { processes, directory: Some(directory), listening });
        }
    }

    /// The same, for an operation that waits for its turn: while processes that may match have too many clients, are saved or are loaded, it looks
    /// again.
    pub fn look_in_turn(target: &Target, deadline: &Deadline) -> Result<Self, CommandError> {
        loop {
            let found = Self::look(target)?;
            if !found.waits_for_turn(target, deadline) {
                return Ok(found);
            }
        }
    }

    /// Whether processes that may match have too many clients, are saved or are loaded, and there is time to look again, a little later.
    pub fn waits_for_turn(&self, target: &Target, deadline: &Deadline) -> bool {
        let crowded: Vec<_> =
            self.processes.iter().filter(|process| process.status.as_ref().is_err_and(|failure| failure.is(Kind::Busy))).cloned().collect();
        let waits = may_match(&crowded, target) && deadline.begun.elapsed() < TURN_WITHIN.max(deadline.timeout.unwrap_or_default());
        if waits {
            thread::sleep(LOOK_FOR_PROCESSES_EVERY);
        }
        waits
    }

    /// Drops the processes that use no memory on any of these GPUs, and returns the GPUs' UUIDs. Keeps processes that do not
    /// answer: they may use some.
    pub fn keep_on(&mut self, gpus: &[String]) -> Result<Vec<String>, CommandError> {
        if gpus.is_empty() {
            return Ok(Vec::new());
        }
        let wanted = self.uuids(gpus)?;
        self.processes.retain(|process| process.status.is_err() || wanted.iter().any(|gpu| process.uses(gpu)));
        if self.processes.is_empty() {
            let wanted: Vec<_> = wanted.iter().map(|gpu| short_uuid(gpu)).collect();
            let text = format!("no managed process has memory on {}; `vramctl status` shows the GPUs in use", wanted.join(", "));
            return Err(CommandError::new(Exit::NoProcess, text));
        }
        Ok(wanted)
    }

    /// The UUIDs of the GPUs that the user has named.
    pub fn uuids(&self, gpus: &[String]) -> Result<Vec<String>, CommandError> {
        let known: BTreeSet<_> = self.processes.iter().flat_map(Process::gpus).map(str::to_owned).collect();
        gpus.iter().map(|gpu| uuid_of(gpu, &known)).collect()
    }

    /// The processes that match.
    pub fn choose(&self, target: &Target) -> Result<Vec<Process>, CommandError> {
        choose(&self.processes, target).map_err(|none| {
            if none.exit() != Exit::NoProcess {
                return none;
            }
            if let Some(why) = target.parts().iter().find_map(whose) {
                return none.saying(why);
            }
            match starting(target, &self.processes).as_slice() {
                [] if self.processes.is_empty() && !matches!(target, Target::Pid(_)) => CommandError::new(Exit::NoProcess, self.nothing()),
                [] => none,
                [one] => none.saying(format!("{one} is starting: it has not allocated GPU memory yet")),
                several => {
                    let all: Vec<_> = several.iter().map(ToString::to_string).collect();
                    none.saying(format!("{} are starting: they have not allocated GPU memory yet", all.join(", ")))
                }
            }
        })
    }

    /// The matching processes, for a command that changes them. Fails if one of them does not answer: half an engine paused is worse than
    /// none.
    pub fn choose_answering(&self, target: &Target) -> Result<Vec<Process>, CommandError> {
        let chosen = self.choose(target)?;
        target.parts().iter().try_for_each(|part| self.check_one_job(part))?;
        let silent: Vec<_> = chosen.iter().filter_map(|process| Some((process, process.status.as_ref().err()?))).collect();
        let Some((_, first)) = silent.first() else { return Ok(chosen) };
        let why: Vec<_> = silent.iter().map(|(process, failure)| format!("{process} ({failure})")).collect();
        // One that others work with is not to be touched.
        if silent.iter().all(|(_, failure)| failure.is(Kind::Busy)) {
            return Err(CommandError::new(Exit::Busy, format!("nothing was done: {}; try again", why.join(", "))));
        }
        let pids: Vec<_> = silent.iter().filter(|(_, failure)| !failure.is(Kind::Busy)).map(|(process, _)| process.pid).collect();
        let pids: Vec<_> = pids.into_iter().filter(|pid| hidden(*pid).is_none()).collect();
        let how = if pids.is_empty() {
            "in their containers".into()
        } else {
            pids.iter().fold("kill -CONT".into(), |all, pid| format!("{all} {pid}"))
        };
        let text = format!(
            "nothing was done: these processes may match but do not answer: {}; if they are stopped, continue them ({how}), or choose \
             others with --pid",
            why.join(", ")
        );
        Err(CommandError::new(first.exit(), text))
    }

    /// Fails if a name that is no pattern means several jobs: programs that nobody has named have that of their program.
    fn check_one_job(&self, part: &Target) -> Result<(), CommandError> {
        let Target::Name(name) = part else { return Ok(()) };
        let namesakes: Vec<_> = self.processes.iter().filter(|process| process.name() == Some(name)).collect();
        let jobs: BTreeSet<_> = namesakes.iter().filter(|process| process.status.is_ok()).map(|process| process.job_or_itself()).collect();
        if jobs.len() < 2 {
            return Ok(());
        }
        let text = format!(
            "{} programs that do not belong together are called {}; choose by id, or all of them with a pattern ({}); `vramctl run --name` \
             gives a program a name of its own",
            jobs.len(),
            text::one_line(name),
            text::quoted(&format!("{name}*"))
        );
        Err(CommandError::new(Exit::Usage, text).with_choices(namesakes.into_iter().map(Process::as_choice).collect()))
    }

    /// Separates a command's words into a target and tags. If no target is given, the words that name processes are the target. Fails if a
    /// word is a tag, too: half of a job could come back, and the other half stay away.
    pub fn separate(&self, target: Target, words: Vec<String>) -> Result<(Target, Vec<String>), CommandError> {
        if target != Target::Only {
            return Ok((target, words));
        }
        let (mut named, mut tags) = (Vec::new(), Vec::new());
        for word in words {
            match self.process(&word).or_else(|| self.starting_process(&word)).or_else(|| self.process_of_other(&word)) {
                Some(_) if self.is_tag(&word) => {
                    let word = text::one_line(&word);
                    let text =
                        format!("{word} is the name of processes, and a tag: `--name {word}` means the processes, `--all {word}` the tag");
                    return Err(CommandError::new(Exit::Usage, text));
                }
                Some(process) => named.push(process),
                None => tags.push(word),
            }
        }
        Ok((Target::of(named).unwrap_or(target), tags))
    }

    /// Fails if a word is neither a tag nor a process, for a user who need not say which it is. The tags of processes
    /// that do not answer are not known: then no word is wrong.
    pub fn check_words(&self, tags: &[String]) -> Result<(), CommandError> {
        if self.processes.is_empty() || self.processes.iter().any(|process| process.status.is_err()) {
            return Ok(());
        }
        let known: BTreeSet<_> = self.processes.iter().flat_map(Process::tags).map(|tag| tag.tag.clone()).collect();
        let unknown: Vec<_> = tags.iter().filter(|tag| !known.contains(*tag)).cloned().collect();
        let Some(word) = unknown.first() else { return Ok(()) };
        let names = names(&self.processes);
        let [tag, name] = [&known, &names].map(|all| target::nearest(word, all.iter().cloned()));
        let best = target::nearest(word, tag.iter().chain(&name).cloned());
        let hint = best.as_deref().map_or_else(
            || format!("{}{}", target::listed("; the tags are", &known), target::listed("; the processes are", &names)),
            target::did_you_mean,
        );
        let text = format!("{} is neither a tag nor a process{hint}", text::one_line(word));
        // With a single job, a word need not be a process: it has probably been meant as a tag.
        if best == tag && (tag.is_some() || self.is_one_job()) {
            let refusal = Refusal::from(&Error::UnknownTag { unknown, known: known.into_iter().collect() });
            return Err(CommandError::Refused(Box::new(Refusal { message: text, ..refusal })));
        }
        Err(CommandError::new(Exit::NoProcess, text))
    }

    /// Whether [`Target::Only`] means something.
    fn is_one_job(&self) -> bool {
        choose(&self.processes, &Target::Only).is_ok()
    }

    /// The command to suggest to a user who gave a process where only tags belong.
    pub fn taken_for_tag(&self, command: &str, words: &[String]) -> Option<String> {
        words.iter().find_map(|word| {
            let named = self.process(word).filter(|_| !self.is_tag(word))?;
            Some(format!("; {word} is a process: `{}`", named.command(command)))
        })
    }

    fn is_tag(&self, word: &str) -> bool {
        self.processes.iter().any(|process| process.tags().iter().any(|tag| tag.tag == word))
    }

    /// The process or processes that have this name or id.
    fn process(&self, word: &str) -> Option<Target> {
        let target = Target::parse(word.to_owned());
        let is_there = match &target {
            Target::Pid(pid) => self.listening.contains(pid),
            Target::Name(name) => self.processes.iter().any(|process| process.name().is_some_and(|its| matches_name(name, its))),
            Target::Only | Target::Several(_) | Target::All => false,
        };
        is_there.then_some(target)
    }

    /// The program that has this name or id and is starting, unless the word is a tag.
    fn starting_process(&self, word: &str) -> Option<Target> {
        let target = Target::parse(word.to_owned());
        (!self.is_tag(word) && !starting(&target, &self.processes).is_empty()).then_some(target)
    }

    /// The program that has this name and is another user's, unless the word is a tag.
    fn process_of_other(&self, word: &str) -> Option<Target> {
        let target = Target::parse(word.to_owned());
        (!self.is_tag(word) && whose(&target).is_some()).then_some(target)
    }

    /// Whether all that a target means is still starting, and there is time to look again, a little later.
    pub fn waits_for_start(&self, target: &Target, deadline: &Deadline) -> bool {
        let has_time = deadline.timeout.is_some_and(|timeout| deadline.begun.elapsed() < timeout);
        let waits = has_time && choose(&self.processes, target).is_err() && !starting(target, &self.processes).is_empty();
        if waits {
            thread::sleep(LOOK_FOR_PROCESSES_EVERY);
        }
        waits
    }

    /// The current status of those of these processes that listen.
    pub fn look_again(&self, pids: &[u32]) -> Vec<Process> {
        let listening: Vec<_> = pids.iter().copied().filter(|pid| self.listening.contains(pid)).collect();
        self.directory.as_ref().map_or_else(Vec::new, |directory| ask(directory, &listening))
    }

    /// Whether a process has ended. One that is stopped has not, nor one whose socket was deleted.
    pub fn has_ended(&self, pid: u32) -> bool {
        !proc::has_library(pid) && self.look_again(&[pid]).iter().all(|process| process.status.is_err())
    }

    /// The other processes of a process's job, whoever was asked at first. Those that do not answer are left out.
    pub fn others_of_job(&self, process: &Process) -> Vec<Process> {
        let Some(job) = process.job() else { return Vec::new() };
        let others: Vec<_> = self.listening.iter().copied().filter(|pid| *pid != process.pid).collect();
        self.look_again(&others).into_iter().filter(|other| other.job() == Some(job)).collect()
    }

    /// Asks the programs' own allocators, such as torch's, what they hold. Those that do not answer in time are left out.
    pub fn ask_allocators(&mut self) {
        let Some(directory) = self.directory.clone() else { return };
        let trimming = self.processes.iter_mut().filter_map(|Process { pid, status, .. }| Some((*pid, status.as_mut().ok()?)));
        let trimming = trimming.filter(|(_, status)| status.process.trims && status.memory.suspended.is_none());
        parallel::each_well(trimming, |(pid, status)| {
            let cache = Client::connect(&directory, pid).and_then(|mut client| client.cache());
            status.memory.cache = cache.unwrap_or_default();
        });
    }

    /// Connects to one of them.
    pub fn connect(&self, pid: u32) -> Result<Client, ClientError> {
        Client::connect(&self.directory(pid)?, pid)
    }

    /// Where its socket is.
    pub fn directory(&self, pid: u32) -> Result<Directory, ClientError> {
        self.directory.clone().ok_or_else(|| ClientError::Io { pid, error: io::ErrorKind::NotFound.into() })
    }

    /// Waits for a turn in the queue, if there is one.
    pub fn queue(
        &self,
        ticket: Ticket,
        deadline: Deadline,
        turn_within: Duration,
        reporter: &dyn Reporter,
    ) -> Result<Option<Entry>, Box<Refusal>> {
        let Some(directory) = &self.directory else { return Ok(None) };
        ticket.queue(directory, deadline, turn_within, &mut |ahead| reporter.queued(ahead))
    }

    /// The message for "no managed process", with likely reasons.
    pub fn nothing(&self) -> String {
        let path = config::socket_directory();
        let path = self.directory.as_ref().map_or(path, |directory| directory.path()).display();
        // Root's `ps` shows them, unless it is told where to look.
        if system::user() == 0 && env::var_os("VRAMCTL_DIR").is_none() && of_other_user("*").is_some() {
            return format!(
                "no process of root's is managed (looked in {path}). `vramctl ps` lists those of other users; to act on one: `sudo -u USER vramctl …`"
            );
        }
        format!(
            "no process is managed (looked in {path}). Start a program with `vramctl run -- COMMAND`; it appears here once it has allocated GPU \
             memory. If it runs with a different VRAMCTL_DIR or XDG_RUNTIME_DIR, set VRAMCTL_DIR to match"
        )
    }
}

/// One that lives and does not listen. An operation waits for one that others work with.
fn silent_one(Absent { pid, name, why }: Absent) -> Process {
    let named = || proc::variables(pid, ["VRAMCTL_NAME"])[0].take();
    let name = name.or_else(named).filter(|name| checked_name(name).is_ok());
    let failure = match why {
        Absence::Saved | Absence::Loaded => {
            CommandError::Refused(Box::new(Refusal { code: Kind::Busy, ..Refusal::from(&Error::Invalid(why.to_string())) }))
        }
        Absence::Deleted | Absence::Returning => CommandError::new(Exit::Busy, why.to_string()),
    };
    Process { pid, name, status: Err(failure) }
}

fn may_match(processes: &[Process], target: &Target) -> bool {
    target.parts().iter().any(|part| choose_part(processes, part).map_or_else(|failure| failure.exit() != Exit::NoProcess, |_| true))
}

/// Asks all in parallel for their names and status. Leaves out those that have ended meanwhile.
pub fn ask(directory: &Directory, pids: &[u32]) -> Vec<Process> {
    let connecting = directory.clone();
    let greet = move |pid| Client::greet(&connecting, pid);
    let (mut names, mut clients, mut answers) = (BTreeMap::new(), Vec::new(), BTreeMap::new());
    for (pid, answer) in at_once(pids.iter().map(|&pid| (pid, pid)).collect(), HELLO_WITHIN, greet) {
        match answer {
            Ok((client, hello)) => {
                names.insert(pid, hello.name);
                clients.push((pid, client));
            }
            Err(failure) => _ = answers.insert(pid, Err(failure)),
        }
    }
    answers.extend(at_once(clients, STATUS_WITHIN, |mut client: Client| client.status()));
    let process = |(pid, status): (u32, Result<ProcessStatus, CommandError>)| match names.remove(&pid) {
        None => silent(directory, pid, status),
        name => Some(Process { pid, name, status }),
    };
    answers.into_iter().filter_map(process).collect()
}

/// Runs `work` for each in its own thread. Whatever takes longer than `within` counts as unanswered. Where there is no thread, one waits for
/// the other, as long as a client does.
fn at_once<T: Send + 'static, R: Send + 'static>(
    each: Vec<(u32, T)>,
    within: Duration,
    work: impl Fn(T) -> Result<R, ClientError> + Send + Sync + 'static,
) -> BTreeMap<u32, Result<R, CommandError>> {
    let silent = || Err(CommandError::new(Exit::Busy, format!("no answer within {} s; is it stopped?", within.as_secs())));
    let mut outcomes: BTreeMap<_, _> = each.iter().map(|(pid, _)| (*pid, silent())).collect();
    let (work, (answer, answers)) = (Arc::new(work), mpsc::channel());
    for (pid, one) in each {
        let (work, answer, one) = (Arc::clone(&work), answer.clone(), Arc::new(Mutex::new(Some(one))));
        let ask = |one: &Mutex<Option<T>>, work: &dyn Fn(T) -> Result<R, ClientError>| {
            let taken = one.lock().unpoisoned().take();
            taken.map(|one| work(one).map_err(CommandError::from))
        };
        let its = Arc::clone(&one);
        let by_thread = Arc::clone(&work);
        // Never joined: one that takes too long is abandoned.
        let thread = parallel::spawn(move || ask(&its, &*by_thread).map(|outcome| answer.send((pid, outcome))));
        if thread.is_err() {
            outcomes.extend(ask(&one, &*work).map(|outcome| (pid, outcome)));
        }
    }
    drop(answer);
    let deadline = Instant::now() + within;
    while let Ok((pid, outcome)) = answers.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        outcomes.insert(pid, outcome);
    }
    outcomes
}

/// A process that does not answer. `None` if it has ended.
pub fn silent(directory: &Directory, pid: u32, status: Result<ProcessStatus, CommandError>) -> Option<Process> {
    let is_gone = |error: &io::Error| matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused);
    let stream = match directory.connect(pid) {
        Err(error) if is_gone(&error) && directory.absence_of(pid).is_none() => return None,
        connected => connected.ok(),
    };
    let in_address = stream.as_ref().and_then(ListenerName::of_listener);
    // A socket from a container is named by the pid in there. Here the process has another pid, or cannot be seen.
    let seen_as = stream.and_then(|stream| discovery::peer(&stream).ok()).map(|peer| peer.pid).filter(|pid| *pid != 0);
    // A dead process's child may hold its socket open.
    if seen_as.is_some_and(|pid| !proc::exists(pid)) {
        return None;
    }
    let name = match in_address {
        Some(ListenerName::Given(name)) => Some(name),
        // The program may have another name by now.
        Some(ListenerName::Program(name)) => Some(seen_as.and_then(|pid| program_of(pid.cast_unsigned())).unwrap_or(name)),
        // Best effort: some programs overwrite their environment.
        None => seen_as
            .and_then(|pid| proc::variables(pid.cast_unsigned(), ["VRAMCTL_NAME"])[0].take())
            .filter(|name| checked_name(name).is_ok()),
    };
    Some(Process { pid, name, status })
}

fn choose(processes: &[Process], target: &Target) -> Result<Vec<Process>, CommandError> {
    let chosen = target.parts().iter().map(|part| choose_part(processes, part)).collect::<Result<Vec<_>, _>>()?;
    let pids: BTreeSet<_> = chosen.iter().flatten().map(|process| process.pid).collect();
    Ok(processes.iter().filter(|process| pids.contains(&process.pid)).cloned().collect())
}

fn choose_part<'a>(processes: &'a [Process], part: &Target) -> Result<Vec<&'a Process>, CommandError> {
    let is_here = |pid: u32| processes.iter().any(|process| process.pid == pid);
    let chosen: Vec<_> = processes
        .iter()
        .filter(|process| match part {
            Target::Only | Target::All => true,
            // In a container out of sight, that may be its pid.
            Target::Pid(pid) => process.pid == *pid || (hidden(process.pid) == Some(*pid) && !is_here(*pid)),
            // An unknown name may match.
            Target::Name(name) => process.name().is_none_or(|its| matches_name(name, its)),
            // Not a part.
            Target::Several(_) => false,
        })
        .collect();
    let fail = |exit, why: String| {
        let failure = CommandError::new(exit, why);
        Err(failure.with_choices(processes.iter().map(Process::as_choice).collect()))
    };
    let is_one_job = || chosen[0].job().is_some() && chosen.iter().all(|process| process.job() == chosen[0].job());
    match (part, chosen.len()) {
        (Target::Only, 2..) if !is_one_job() => {
            fail(Exit::Usage, "several processes are managed; choose some by name or id, or all of them with --all".into())
        }
        (Target::Pid(pid), 2..) => fail(Exit::Usage, format!("several processes in containers out of sight have the pid {pid} there")),
        (Target::Pid(pid), 0) => fail(Exit::NoProcess, not_managed(*pid)),
        (Target::Name(name), 0) => Err(CommandError::new(Exit::NoProcess, target::no_such_name(name, &names(processes)))),
        (_, 0) => fail(Exit::NoProcess, "no process is managed".into()),
        _ => Ok(chosen),
    }
}

/// The names of processes, without repetition.
fn names(processes: &[Process]) -> BTreeSet<String> {
    processes.iter().filter_map(Process::name).map(text::one_line).collect()
}

/// The UUID of the GPU that the user has named. `known` are the GPUs with managed memory.
fn uuid_of(gpu: &str, known: &BTreeSet<String>) -> Result<String, CommandError> {
    let usage = |text: String| Err(CommandError::new(Exit::Usage, text));
    if let Ok(index) = gpu.parse() {
        let unknown =
            |none| CommandError::new(Exit::Failed, format!("GPU {index}: {none}. Or give its UUID, which `vramctl status` shows"));
        let text = format!("there is no GPU {index}: NVML reports {}, from 0 on (`nvidia-smi -L` lists them)", gpus::indices().len());
        return uuid_of_index(index).map_err(unknown)?.ok_or_else(|| CommandError::new(Exit::Usage, text));
    }
    let meant: Vec<_> = known.iter().filter(|uuid| gpus::begins_as(uuid, gpu)).collect();
    match meant[..] {
        [uuid] => Ok(uuid.clone()),
        [] => Ok(gpu.to_owned()),
        _ => usage(format!("{gpu} matches several GPUs: {}", meant.into_iter().cloned().collect::<Vec<_>>().join(", "))),
    }
}

/// Says so if a job has several runs, and fails if processes of the job are missing: if there are fewer than `wanted`; without it, if one
/// that the job had when it was last paused or resumed cannot be reached or, if `remembers`, has ended.
pub fn check_whole<'a>(
    processes: impl Iterator<Item = &'a Process> + Clone,
    remembers: bool,
    wanted: Option<usize>,
    reporter: &dyn Reporter,
) -> Result<(), CommandError> {
    if wanted.is_none() {
        note_runs(processes.clone(), reporter);
    }
    let there: BTreeSet<_> = processes.clone().map(|process| process.pid).collect();
    let remembered: BTreeSet<_> = processes.flat_map(Process::ranks).copied().collect();
    let is_out_of_reach = |pid: &u32| proc::has_library(*pid);
    let fate = |pid: &u32| format!("process {pid} {}", if is_out_of_reach(pid) { "lives, but does not listen" } else { "has ended" });
    let missing: Vec<_> = remembered.difference(&there).collect();
    let stays_behind = remembers || missing.iter().any(|pid| is_out_of_reach(pid));
    let what = match wanted {
        Some(wanted) if there.len() < wanted => format!("{} of {wanted} processes are there", there.len()),
        None if stays_behind && !missing.is_empty() => format!("{} of {} processes are there", there.len(), there.len() + missing.len()),
        _ => return Ok(()),
    };
    let gone: Vec<_> = missing.into_iter().map(fate).collect();
    let gone = if gone.is_empty() { String::new() } else { format!(": {}", gone.join(", ")) };
    let text = format!("nothing was done: {what}{gone}. To do without the rest, add --ranks {}", there.len());
    Err(CommandError::new(Exit::NoProcess, text))
}

/// Notes that a name means processes of several runs: they need not belong together.
fn note_runs<'a>(processes: impl Iterator<Item = &'a Process>, reporter: &dyn Reporter) {
    let mut jobs = BTreeMap::<_, BTreeMap<_, Vec<_>>>::new();
    for process in processes {
        if let Some(job) = process.job() {
            jobs.entry(job).or_default().entry(process.run()).or_default().push(process);
        }
    }
    for (job, runs) in jobs.iter().filter(|(_, runs)| runs.len() > 1) {
        let run = |run: Option<&str>, members: &[&Process]| {
            let members: Vec<_> = members.iter().map(|process| process.in_words()).collect();
            format!("{} ({})", run.unwrap_or("started otherwise"), members.join("; "))
        };
        let text = format!(
            "{} runs have the name {}, and count as one job: {}. If they do not belong together, choose with --pid; if they do, say how many \
             processes there are with --ranks, or start them with the same VRAMCTL_JOB",
            runs.len(),
            text::one_line(job),
            runs.iter().map(|(name, members)| run(*name, members)).collect::<Vec<_>>().join(", ")
        );
        reporter.note(&text);
    }
}

/// Whose the program of this name is, if it is another user's, and how to act on it.
fn whose(target: &Target) -> Option<String> {
    let Target::Name(name) = target else { return None };
    let (pid, owner, there) = of_other_user(name)?;
    Some(format!("{} (pid {pid}) {}", text::one_line(name), belongs_to(owner, &there)))
}

/// Of a process of another user.
fn belongs_to(owner: u32, there: &Path) -> String {
    let (name, there) = (account::name_of(owner).unwrap_or_else(|| format!("#{owner}")), there.display());
    format!("is {name}'s: `sudo -u {name} vramctl …`, or with VRAMCTL_DIR={there}")
}

/// Why no process of this id is managed, and what to do.
fn not_managed(pid: u32) -> String {
    if !proc::exists(pid) {
        return format!("there is no process {pid}");
    }
    let there = proc::socket_directory(pid);
    let why = if !proc::is_visible(pid) {
        "this user may not look into it. If it is another user's, run vramctl as that user".into()
    } else if !proc::has_library(pid) {
        format!("it was not started under `vramctl run`. Start it again: vramctl run -- {}", text::one_line(&proc::command_line(pid)))
    } else if there != config::socket_directory() {
        match proc::owner(pid).filter(|owner| *owner != system::user()) {
            Some(owner) => format!("it {}", belongs_to(owner, &there)),
            None => format!(
                "it listens in another directory (VRAMCTL_DIR={}), and this command has looked in {}",
                there.display(),
                config::socket_directory().display()
            ),
        }
    } else {
        "it has not allocated GPU memory yet".into()
    };
    format!("process {pid} is not managed: {why}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::made_up::process;

    fn pids(chosen: Result<Vec<Process>, CommandError>) -> Vec<u32> {
        chosen.unwrap().iter().map(|process| process.pid).collect()
    }

    #[test]
    fn one_process_needs_no_target_and_several_do() {
        let one = [process(1, "a", &[])];
        let two = [process(1, "a", &[]), process(2, "b", &[])];
        assert_eq!(pids(choose(&one, &Target::Only)), [1]);
        let failure = choose(&two, &Target::Only).unwrap_err();
        assert_eq!(failure.exit(), Exit::Usage);
        let text = failure.to_string();
        assert!(text.contains("--all"), "{text}");
        let names: Vec<_> = failure.choices().iter().map(|choice| (choice.pid, &*choice.name)).collect();
        assert_eq!(names, [(1, "a"), (2, "b")]);
        assert_eq!(choose(&[], &Target::Only).unwrap_err().exit(), Exit::NoProcess);
    }

    #[test]
    fn a_name_means_all_of_that_name() {
        let processes = [process(1, "a", &[]), process(2, "b", &[]), process(3, "a", &[])];
        assert_eq!(pids(choose(&processes, &Target::Name("a".into()))), [1, 3]);
        assert_eq!(pids(choose(&processes, &Target::Pid(2))), [2]);
        assert_eq!(pids(choose(&processes, &Target::All)), [1, 2, 3]);
        let failure = choose(&processes, &Target::Name("c".into())).unwrap_err();
        assert_eq!(failure.exit(), Exit::NoProcess);
        assert!(failure.to_string().contains("named c"), "{failure}");
    }

    #[test]
    fn an_unmanaged_process_is_distinguished_from_a_missing_one() {
        let own = std::process::id();
        let why = choose(&[], &Target::Pid(own)).unwrap_err().to_string();
        assert!(why.contains("is not managed: it was not started under `vramctl run`. Start it again: vramctl run -- "), "{why}");
        assert!(choose(&[], &Target::Pid(u32::MAX)).unwrap_err().to_string().contains("there is no process"));
    }

    #[test]
    fn several_are_chosen_once_each_and_each_must_be_there() {
        let processes = [process(1, "a", &[]), process(2, "b", &[]), process(3, "ab", &[])];
        let these = |words: &[&str]| Target::of(words.iter().map(|word| Target::parse((*word).to_owned())).collect()).unwrap();
        assert_eq!(pids(choose(&processes, &these(&["b", "a*", "3"]))), [1, 2, 3]);
        assert_eq!(pids(choose(&processes, &these(&["?b"]))), [3]);
        assert!(choose(&processes, &these(&["a", "c*"])).unwrap_err().to_string().contains("a name like c*; the processes are a, ab, b"));
    }
}
