//! `vramctl ps`.

use crate::arguments::{GpuArgs, ProcessesOrAll};
use crate::everybody::{EverybodyArgs, Others};
use crate::execute::Execute;
use crate::ui::output;
use clap::ValueEnum;
use serde_json::json;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use vramctl_coordinator::checkpoint::{self, Whereabouts};
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::gpus;
use vramctl_coordinator::processes::{Found, Process, Target};
use vramctl_coordinator::starting::{Starting, starting};
use vramctl_coordinator::text;
use vramctl_model::{Bytes, DeviceStatus};

#[derive(clap::Args)]
#[command(after_long_help = "\
A program that `vramctl run` has started is \"starting\" until its first allocation of GPU memory (1 MiB or more). A process that does not answer is listed with the \
reason. ON GPU is its managed memory there now; AWAY is where the contents of the rest are: in the host's memory, in files, or dropped. \
\"held\" is a program that stands still until a resume; SINCE says for how long, and BY of `-o wide` who asked for it. Whether the driver has lost a suspended \
program, only `-o wide` asks, because that takes a while. \
A job is all processes of one `vramctl run`, or of one --name: \"engine 2/4\" is its second of four processes. They are \
paused and resumed as one. If a name has several runs, the column says which, and for how long the process has been running. Where programs share \
GPUs (`vramctl run --share`), a column says who is in place, who gave way to whom, and who waits for what. \
In a terminal, command lines are cut to the room that is left, and what is too wide for it with `-o wide` is a line for each column.

Examples:
  vramctl ps
  vramctl ps engine --output wide # also who paused it, limit and tags
  vramctl ps --gpu 0 --sort bytes
  vramctl pause $(vramctl ps --gpu 0 -o name)
  vramctl ps --json | jq -r '.processes[].pid'")]
pub struct Args {
    #[command(flatten)]
    processes: ProcessesOrAll,
    #[command(flatten)]
    gpu: GpuArgs,
    #[command(flatten)]
    everybody: EverybodyArgs,
    /// More columns (wide), JSON, or the names alone
    #[arg(long, short, value_name = "FORMAT")]
    output: Option<Format>,
    /// The order, largest first for bytes
    #[arg(long, value_name = "COLUMN", default_value = "pid")]
    sort: Column,
    /// Print JSON, as `--output json`: {"processes": […]}, each as in `vramctl status --json`, and "starting" if some are
    #[arg(long, conflicts_with = "output")]
    json: bool,
}

/// How to print the list.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Wide,
    Json,
    Name,
}

/// What to sort it by.
#[derive(Clone, Copy, ValueEnum)]
enum Column {
    Pid,
    Name,
    State,
    Bytes,
    Gpu,
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let target = self.processes.target();
        let mut found = Found::look(&Target::All)?;
        // Names are for other commands, which act on the user's own.
        let others = if self.output == Some(Format::Name) { None } else { self.everybody.look()? };
        found.processes.extend(others.iter().flat_map(|others| others.processes.clone()));
        let jobs = Jobs::of(&found.processes);
        found.keep_on(&self.gpu.gpu)?;
        let starting = if self.gpu.gpu.is_empty() { starting(&target, &found.processes) } else { Vec::new() };
        let mut chosen = match target {
            Target::All => found.processes.clone(),
            _ => found.choose(&target).or_else(|none| if starting.is_empty() { Err(none) } else { Ok(Vec::new()) })?,
        };
        let indices = gpus::indices();
        sort(&mut chosen, self.sort, &indices);
        if self.wants_json() {
            let mut answer = json!({ "processes": chosen });
            if let Some(others) = &others {
                for (process, told) in chosen.iter().zip(answer["processes"].as_array_mut().into_iter().flatten()) {
                    told["user"] = json!(others.user_of(process.pid));
                }
            }
            if !starting.is_empty() {
                answer["starting"] = json!(starting);
            }
            output::answer(answer)?;
        } else if chosen.is_empty() && starting.is_empty() {
            output::complain("note", &found.nothing());
        } else if self.output == Some(Format::Name) {
            output::say(&names(&chosen).join("\n"))?;
        } else {
            // Only the driver knows who is lost, and to start it takes a while.
            let is_wide = self.output.is_some();
            let whereabouts = if is_wide { checkpoint::seen_by_driver(&found, &chosen) } else { checkpoint::seen_by_nvml(&found, &chosen) };
            let rows = chosen
                .iter()
                .map(|process| row(process, whereabouts.get(&process.pid).copied(), &jobs, &indices))
                .chain(starting.iter().map(starting_row));
            let shown = if is_wide { COLUMNS.len() - 1 } else { COLUMNS_AT_FIRST };
            // The list is there without a scheduler that answers, too.
            let sharing = vramctl_keeper::ask();
            let stranded = matches!(sharing, Ok(None)).then(|| vramctl_keeper::stranded(&chosen)).flatten();
            let sharing = sharing.ok().flatten().filter(|view| !view.members.is_empty());
            let sharing_of =
                |row: &[String]| sharing.as_ref().map(|view| row[0].parse().ok().and_then(|pid| view.standing(pid)).unwrap_or_default());
            let mut headers: Vec<_> =
                COLUMNS[..shown].iter().copied().chain(sharing.as_ref().map(|_| "SHARING")).chain(COLUMNS.last().copied()).collect();
            let rows = rows.map(|mut row| {
                let (user, standing, command) = (others.as_ref().map(|others| user_of(others, &row)), sharing_of(&row), row.pop());
                let mut row: Vec<_> = row.into_iter().take(shown).chain(standing).chain(command).collect();
                row.splice(1..1, user);
                row
            });
            let rows: Vec<Vec<String>> = rows.collect();
            headers.splice(1..1, others.is_some().then_some("USER"));
            output::show(&if is_wide { output::wide_table(&headers, rows) } else { output::table_with_commands(&headers, rows) })?;
            if let Some(stranded) = stranded {
                output::complain("note", &stranded);
            }
        }
        Ok(Exit::Done)
    }

    fn wants_json(&self) -> bool {
        self.json || self.output == Some(Format::Json)
    }

    fn drives_checkpoints(&self) -> bool {
        true
    }
}

fn user_of(others: &Others, row: &[String]) -> String {
    row[0].parse().map_or_else(|_| String::new(), |pid| others.user_of(pid))
}

/// Each name once, in order; the id of a process without a name.
fn names(processes: &[Process]) -> Vec<String> {
    let mut names = Vec::new();
    for process in processes {
        let name = process.name().map_or_else(|| process.pid.to_string(), text::one_line);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// Those that are alike stay in the order of their ids.
fn sort(processes: &mut [Process], by: Column, indices: &BTreeMap<String, u32>) {
    let bytes = |process: &Process| process.tags().iter().map(|tag| tag.bytes).sum::<u64>();
    match by {
        Column::Pid => processes.sort_by_key(|process| process.pid),
        Column::Name => processes.sort_by_key(|process| process.name.clone()),
        Column::State => processes.sort_by_cached_key(Process::state),
        Column::Bytes => processes.sort_by_key(|process| Reverse(bytes(process))),
        Column::Gpu => {
            processes.sort_by_cached_key(|process| process.gpus().map(|gpu| gpus::short_name(gpu, indices)).collect::<Vec<_>>());
        }
    }
}

/// The processes of each job, in order, with the run of each.
struct Jobs(BTreeMap<String, Vec<(u32, Option<String>)>>);

impl Jobs {
    fn of(processes: &[Process]) -> Self {
        let mut jobs = BTreeMap::<_, Vec<_>>::new();
        for process in processes {
            jobs.entry(process.job().unwrap_or_default().to_owned()).or_default().push((process.pid, process.run().map(str::to_owned)));
        }
        Self(jobs)
    }

    /// The job, and which of its processes this is; also its run if the job has several.
    fn place_of(&self, process: &Process) -> String {
        let Some((job, members)) = process.job().and_then(|job| self.0.get_key_value(job)) else { return String::new() };
        let rank = 1 + members.iter().position(|(pid, _)| *pid == process.pid).unwrap_or_default();
        let is_of_several = members.iter().any(|(_, run)| run.as_deref() != process.run());
        let age = process
            .status
            .as_ref()
            .ok()
            .and_then(|status| status.process.age_s)
            .map_or_else(String::new, |age| format!(" for {}", text::age(age)));
        let run = if is_of_several { format!(" ({}{age})", process.run().unwrap_or("no run")) } else { String::new() };
        format!("{job} {rank}/{}{run}", members.len())
    }
}

/// The columns. Those that are shown at first fit a terminal; the command line is shown where there is room.
const COLUMNS: [&str; 12] = ["PID", "NAME", "STATE", "ON GPU", "AWAY", "GPU", "SINCE", "JOB", "BY", "LIMIT", "TAGS", "COMMAND"];
const COLUMNS_AT_FIRST: usize = 8;

fn starting_row(Starting { pid, name, program }: &Starting) -> Vec<String> {
    let mut row = vec![pid.to_string(), name.clone(), "starting".into(), Bytes(0).to_string()];
    row.resize(COLUMNS.len() - 1, String::new());
    row.push(program.clone());
    row
}

/// `whereabouts`: of a suspended process, if that can be seen.
fn row(process: &Process, whereabouts: Option<Whereabouts>, jobs: &Jobs, indices: &BTreeMap<String, u32>) -> Vec<String> {
    let (pid, unknown) = (process.pid.to_string(), || "?".to_owned());
    let status = match &process.status {
        Ok(status) => status,
        Err(failure) => {
            let (name, why) = (process.name().unwrap_or("?").to_owned(), failure.to_string());
            let mut row = vec![pid, name, why, unknown(), unknown(), unknown()];
            row.resize(COLUMNS.len(), String::new());
            return row;
        }
    };
    let tags: Vec<_> = status.memory.tags.iter().map(|tag| format!("{} {}", tag.tag, Bytes(tag.bytes))).collect();
    let gpus: Vec<_> = process.gpus().map(|uuid| gpus::short_name(uuid, indices)).collect();
    let state = match whereabouts {
        Some(Whereabouts::Lost) => "lost (FAILED)".into(),
        Some(Whereabouts::OnGpu) => "partly suspended".into(),
        Some(Whereabouts::Away) | None => process.standing(),
    };
    let limit = |device: &DeviceStatus| Some(format!("{} of {}", Bytes(device.counted_bytes), Bytes(device.limit_bytes?)));
    let limits: Vec<_> = status.memory.devices.iter().filter_map(limit).collect();
    let standing = status.memory.standing.as_ref();
    vec![
        pid,
        status.process.name.clone(),
        state,
        Bytes(process.active_bytes()).to_string(),
        process.away().to_string(),
        gpus.join(", "),
        standing.map_or_else(String::new, |standing| text::age(standing.seconds)),
        jobs.place_of(process),
        standing.map_or_else(String::new, |standing| standing.by.as_ref().map_or_else(|| "sharing".into(), ToString::to_string)),
        limits.join(", "),
        tags.join(", "),
        status.process.program.clone(),
    ]
}
