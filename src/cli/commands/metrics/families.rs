//! The metrics, and their values on a page.

use crate::everybody::Others;
use crate::ledger::{self, Ledger, Share, What};
use prometheus::core::Collector;
use prometheus::proto::{self, LabelPair, MetricFamily, MetricType};
use prometheus::{CounterVec, GaugeVec, Opts, Registry, TextEncoder};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use vramctl_control::protocol::ProcessStatus;
use vramctl_coordinator::processes::Process;
use vramctl_keeper::View;
use vramctl_model::{Durations, Kind, OF_DRIVER, Stage, Status, Totals, Verb};

/// The owner of a process's residue that is the driver's.
const DRIVER: &str = "driver";

/// A metric.
#[derive(Debug, PartialEq, Eq)]
pub struct Metric {
    pub name: &'static str,
    pub labels: &'static [&'static str],
    pub help: &'static str,
}

impl Metric {
    /// Whether it is a counter, by Prometheus' naming rule.
    pub fn is_counter(&self) -> bool {
        self.name.ends_with("_total")
    }
}

/// Names each metric twice: as a constant here, and on the page. The docs have the same table (`docs/monitoring.md`).
macro_rules! metrics {
    ($($constant:ident = $name:literal, [$($label:literal),*], $help:literal;)*) => {
        $(const $constant: Metric = Metric { name: $name, labels: &[$($label),*], help: $help };)*
        /// All of them.
        #[cfg(test)]
        pub const ALL: &[&Metric] = &[$(&$constant),*];
    };
}

metrics! {
    BUILD = "vramctl_build_info", ["version"], "The version of this command. Always 1.";
    COLLECT = "vramctl_collect_seconds", [], "How long it took to ask all processes and NVML for this page.";

    GPU = "vramctl_gpu_info", ["gpu", "index", "model"], "A GPU: its UUID, its index in nvidia-smi, and its model. Always 1.";
    GPU_TOTAL = "vramctl_gpu_total_bytes", ["gpu"], "Memory of a GPU.";
    GPU_USED = "vramctl_gpu_used_bytes", ["gpu"], "Memory in use on a GPU, whoever uses it, according to NVML.";
    GPU_FREE = "vramctl_gpu_free_bytes", ["gpu"], "Free memory of a GPU.";
    GPU_RESERVED = "vramctl_gpu_reserved_bytes", ["gpu"], "Memory of a GPU that the driver reserves. Absent if it counts as used.";
    GPU_UTILIZATION = "vramctl_gpu_utilization_ratio", ["gpu"], "The share of time in which a GPU was at work, according to NVML. Absent where it does not report that (MIG).";
    LEDGER = "vramctl_ledger_bytes", ["gpu", "name", "pid", "kind", "owner"],
        "Memory in use on a GPU, by who uses it; the sum is vramctl_gpu_used_bytes. Kinds: tag, unmanaged (by library), guard, page_tables, \
         driver, process (one without the library), out_of_sight, unexplained. Negative if the library counts more than NVML.";

    HOST_FREE = "vramctl_host_free_bytes", [], "Host memory that is free: within the tightest limit on any of the processes, else on the machine.";
    HOST_LIMIT = "vramctl_host_limit_bytes", [], "The tightest limit on any of the processes, such as their container's. Absent without one.";

    UP = "vramctl_process_up", ["name", "pid"], "Whether a process answers. One that is stopped does not.";
    PROCESS = "vramctl_process_info", ["name", "pid", "engine", "version"], "A process: the inference engine in it, and the version of its library. Always 1.";
    USER = "vramctl_process_user_info", ["name", "pid", "user"], "Whose process it is. Always 1. Absent unless those of all users are shown.";
    IDLE = "vramctl_process_idle_seconds", ["name", "pid"], "For how long, at least, a process has started no GPU work, counted from the first page on. Absent while it is held.";
    HELD = "vramctl_process_held", ["name", "pid"], "Whether a process is held until everything of it is resumed.";
    WAITING = "vramctl_process_waiting_threads", ["name", "pid"], "Threads of a held process that wait to start GPU work.";
    SUSPENDED = "vramctl_process_suspended", ["name", "pid"], "Whether a process is suspended, or is being suspended or restored.";
    MANAGED = "vramctl_managed_bytes", ["name", "pid", "tag", "state"], "Managed memory by tag, on all GPUs. States: active, paused.";
    MANAGED_GPU = "vramctl_gpu_managed_bytes", ["name", "pid", "gpu", "state"], "Managed memory by GPU. States: active, paused.";
    LIMIT = "vramctl_gpu_limit_bytes", ["name", "pid", "gpu"], "The most memory that a process may take of a GPU. Absent without a limit.";
    COUNTED = "vramctl_gpu_counted_bytes", ["name", "pid", "gpu"],
        "What counts against that: managed memory, also while it is paused, what is left to CUDA, and the context.";
    UNMANAGED = "vramctl_unmanaged_bytes", ["name", "pid", "library"], "Memory left to CUDA, by the library that asked for it.";
    LATE = "vramctl_late_bytes", ["name", "pid"], "Memory of paused tags that the driver has not taken back yet.";
    BACKUP = "vramctl_backup_bytes", ["name", "pid", "tag", "place"], "Saved contents of paused memory, and retained ones of active memory. Places: host, disk.";
    HOST_READY = "vramctl_host_ready_bytes", ["name", "pid"], "Host memory of a process for backups, in use or not.";
    HOST_PINNED = "vramctl_host_pinned_bytes", ["name", "pid"], "Of vramctl_host_ready_bytes, what is pinned.";
    HOST_OTHER = "vramctl_host_other_bytes", ["name", "pid", "kind"], "Other host memory of a process. Kinds: own, shared.";
    RESIDUE = "vramctl_residue_bytes", ["name", "pid", "owner"],
        "Memory left to CUDA when the process was last paused, by library; for the owner driver its context, loaded code and small \
         allocations, if known.";
    GROWTH = "vramctl_residue_growth_bytes", ["name", "pid", "owner"], "Owners that had more at each of the last pauses, and how much per cycle: a leak? Tags are named tag NAME.";

    OPERATIONS = "vramctl_operations_total", ["name", "pid", "operation"], "Operations that changed anything. Operations: pause, resume.";
    FAILURES = "vramctl_operation_failures_total", ["name", "pid", "operation", "code"],
        "Operations that failed and changed nothing, by the error's code (docs/protocol.md). Each attempt of a job counts.";
    BYTES = "vramctl_operation_bytes_total", ["name", "pid", "operation"], "GPU memory that pauses released, or resumes allocated again.";
    CONTENTS = "vramctl_operation_contents_bytes_total", ["name", "pid", "operation", "fate"],
        "The same by what happened to its contents. Fates: copied, unchanged (in a retained backup already), discarded.";
    SECONDS = "vramctl_operation_seconds_total", ["name", "pid", "operation"], "Time that operations took.";
    DURATION = "vramctl_operation_duration_seconds", ["name", "pid", "operation"], "How long each operation took: a histogram.";
    STAGE_SECONDS = "vramctl_operation_stage_seconds_total", ["name", "pid", "operation", "stage"],
        "The same by stage. Stages: wait, save, unmap, release, guard, map, restore; map and restore overlap.";

    SHARE_AWAY = "vramctl_share_away_bytes", ["name", "pid"],
        "Memory that the scheduler has taken from a program that shares its GPUs. Of the programs of `vramctl run --share` alone.";
    SHARE_WAITS = "vramctl_share_waiting_seconds", ["name", "pid"], "How long the program's oldest waiting call or request has waited. 0: none waits.";
    SHARE_CHANGES = "vramctl_share_changes_total", ["outcome"], "Changes of places since this scheduler took over. Outcomes: changed, refused, failed.";
    SHARE_GAVE_WAY = "vramctl_share_gave_way_total", ["reason"],
        "Programs that gave way, by why. Reasons: idle, lower (priority), turn (was over), waits (itself), away (in part).";
    SHARE_TURNS = "vramctl_share_turns_total", [], "Changes that brought a program's memory back: its turn began.";
    SHARE_BYTES = "vramctl_share_bytes_total", [], "GPU memory that left in changes of places.";
    SHARE_WAIT = "vramctl_share_wait_seconds", [], "How long calls and requests of a program waited, until none of it waits: a histogram.";
}

/// How many tags or libraries of one process have labels of their own: the largest ones. The others are summed as [`REST`], because a
/// program may use any number.
const MOST_OWNERS: usize = 32;
const REST: &str = "(rest)";

/// The page about these GPUs and processes, including the figures of the kernel.
/// `users`: whose they are, if that is to be told.
pub fn page(ledgers: &[Ledger], processes: &[Process], users: Option<&Others>, sharing: Option<&View>, begun: Instant) -> String {
    let host = ledger::host(processes, processes);
    let mut page = Exposition::default();
    page.put(&BUILD, &[env!("CARGO_PKG_VERSION")], 1);
    for ledger in ledgers {
        page.gpu(ledger);
    }
    page.put(&HOST_FREE, &[], host.free_bytes);
    if let Some(limit) = host.limit_bytes {
        page.put(&HOST_LIMIT, &[], limit);
    }
    for Share { pid, name, what, bytes, .. } in host.shares.iter().filter(|share| matches!(share.what, What::Own | What::Shared)) {
        page.put_signed(&HOST_OTHER, &[name.as_deref().unwrap_or_default(), &text(*pid), what.name()], *bytes);
    }
    for process in processes {
        page.process(process);
        if let Some(users) = users {
            page.put(&USER, &[process.name().unwrap_or_default(), &process.pid.to_string(), &users.user_of(process.pid)], 1);
        }
    }
    if let Some(view) = sharing {
        page.sharing(view);
    }
    page.put_seconds(&COLLECT, &[], begun.elapsed().as_secs_f64());
    page.text()
}

/// A page, as it grows.
#[derive(Default)]
struct Exposition {
    gauges: BTreeMap<&'static str, GaugeVec>,
    counters: BTreeMap<&'static str, CounterVec>,
    histograms: BTreeMap<&'static str, MetricFamily>,
}

impl Exposition {
    /// Adds to a metric: values without a label of their own are summed.
    fn put_seconds(&mut self, metric: &Metric, labels: &[&str], value: f64) {
        let options = || Opts::new(metric.name, metric.help);
        if metric.is_counter() {
            let made = self.counters.entry(metric.name).or_insert_with(|| CounterVec::new(options(), metric.labels).expect("sound"));
            made.with_label_values(labels).inc_by(value.max(0.0));
        } else {
            let made = self.gauges.entry(metric.name).or_insert_with(|| GaugeVec::new(options(), metric.labels).expect("sound"));
            made.with_label_values(labels).add(value);
        }
    }

    /// The library itself makes histograms only of what it has counted.
    fn put_durations(&mut self, metric: &Metric, labels: &[&str], durations: &Durations) {
        let family = self.histograms.entry(metric.name).or_insert_with(|| {
            let mut family = MetricFamily::default();
            family.set_name(metric.name.into());
            family.set_help(metric.help.into());
            family.set_field_type(MetricType::HISTOGRAM);
            family
        });
        let buckets = durations.up_to().map(|(most, count)| {
            let mut bucket = proto::Bucket::default();
            bucket.set_upper_bound(most);
            bucket.set_cumulative_count(count);
            bucket
        });
        let mut histogram = proto::Histogram::default();
        histogram.set_bucket(buckets.collect());
        histogram.set_sample_count(durations.count());
        histogram.set_sample_sum(durations.seconds);
        let pairs = metric.labels.iter().zip(labels).map(|(name, value)| {
            let mut pair = LabelPair::default();
            pair.set_name((*name).into());
            pair.set_value((*value).into());
            pair
        });
        let mut one = proto::Metric::from_label(pairs.collect());
        one.set_histogram(histogram);
        family.mut_metric().push(one);
    }

    fn sharing(&mut self, view: &View) {
        for member in &view.members {
            let of = [&*member.name, &text(Some(member.pid))];
            self.put(&SHARE_AWAY, &of, member.away_bytes);
            self.put_seconds(&SHARE_WAITS, &of, member.waits_ms.unwrap_or(0) as f64 / 1000.0);
        }
        let vramctl_keeper::Totals { changes, gave_way, turns, bytes, waits } = &view.totals;
        for (metric, counts) in [(&SHARE_CHANGES, changes), (&SHARE_GAVE_WAY, gave_way)] {
            for (label, count) in counts {
                self.put(metric, &[label], *count);
            }
        }
        self.put(&SHARE_TURNS, &[], *turns);
        self.put(&SHARE_BYTES, &[], *bytes);
        self.put_durations(&SHARE_WAIT, &[], waits);
    }

    fn put(&mut self, metric: &Metric, labels: &[&str], value: u64) {
        self.put_seconds(metric, labels, value as f64);
    }

    fn put_signed(&mut self, metric: &Metric, labels: &[&str], value: i64) {
        self.put_seconds(metric, labels, value as f64);
    }

    fn gpu(&mut self, ledger: &Ledger) {
        let gpu = ledger.uuid.as_str();
        self.put(&GPU, &[gpu, &ledger.index.to_string(), &ledger.name], 1);
        self.put(&GPU_TOTAL, &[gpu], ledger.total_bytes);
        self.put(&GPU_USED, &[gpu], ledger.used_bytes);
        self.put(&GPU_FREE, &[gpu], ledger.free_bytes);
        if let Some(percent) = ledger.utilization {
            self.put_seconds(&GPU_UTILIZATION, &[gpu], f64::from(percent) / 100.0);
        }
        if let Some(bytes) = ledger.reserved_bytes {
            self.put(&GPU_RESERVED, &[gpu], bytes);
        }
        let mut sizes = BTreeMap::<_, Vec<_>>::new();
        for share in &ledger.shares {
            sizes.entry(share.pid).or_default().push((share.of.as_deref().unwrap_or_default(), share.bytes.unsigned_abs()));
        }
        let owners: BTreeMap<_, _> = sizes.into_iter().map(|(pid, sizes)| (pid, Owners::of(sizes))).collect();
        for Share { pid, name, what, of, bytes, .. } in &ledger.shares {
            let owner = owners[pid].label(of.as_deref().unwrap_or_default());
            self.put_signed(&LEDGER, &[gpu, name.as_deref().unwrap_or_default(), &text(*pid), what.name(), owner], *bytes);
        }
    }

    fn process(&mut self, process: &Process) {
        let pid = process.pid.to_string();
        let of = [process.name().unwrap_or_default(), pid.as_str()];
        self.put(&UP, &of, process.status.is_ok().into());
        let Ok(ProcessStatus { process: hello, memory }) = &process.status else { return };
        self.put(&PROCESS, &[of[0], of[1], hello.engine.as_deref().unwrap_or_default(), &hello.library], 1);
        self.put(&HELD, &of, memory.held.into());
        if let Some(idle) = memory.idle_ms {
            self.put_seconds(&IDLE, &of, Duration::from_millis(idle).as_secs_f64());
        }
        self.put(&WAITING, &of, memory.waiting_threads as u64);
        self.put(&SUSPENDED, &of, memory.suspended.is_some().into());
        self.memory(of, memory);
        for verb in [Verb::Pause, Verb::Resume] {
            self.totals(of, verb, &memory.totals.get(&verb).cloned().unwrap_or_default());
        }
    }

    fn memory(&mut self, [name, pid]: [&str; 2], memory: &Status) {
        let tags = Owners::of(memory.tags.iter().map(|tag| (tag.tag.as_str(), tag.bytes)));
        for tag in &memory.tags {
            let label = tags.label(&tag.tag);
            self.put(&MANAGED, &[name, pid, label, "active"], tag.bytes.saturating_sub(tag.paused_bytes));
            self.put(&MANAGED, &[name, pid, label, "paused"], tag.paused_bytes);
            self.put(&BACKUP, &[name, pid, label, "host"], tag.host_bytes);
            self.put(&BACKUP, &[name, pid, label, "disk"], tag.disk_bytes);
        }
        for device in &memory.devices {
            let gpu = device.uuid.as_deref().unwrap_or_default();
            self.put(&MANAGED_GPU, &[name, pid, gpu, "active"], device.active_bytes);
            self.put(&MANAGED_GPU, &[name, pid, gpu, "paused"], device.paused_bytes);
            if let Some(limit) = device.limit_bytes {
                self.put(&LIMIT, &[name, pid, gpu], limit);
                self.put(&COUNTED, &[name, pid, gpu], device.counted_bytes);
            }
        }
        let libraries = Owners::of(memory.unmanaged.iter().map(|left| (left.owner.as_str(), left.bytes)));
        for left in &memory.unmanaged {
            self.put(&UNMANAGED, &[name, pid, libraries.label(&left.owner)], left.bytes);
        }
        self.put(&LATE, &[name, pid], memory.late_bytes);
        self.put(&HOST_READY, &[name, pid], memory.host.ready_bytes);
        self.put(&HOST_PINNED, &[name, pid], memory.host.pinned_bytes);
        if let Some(last) = memory.cycles.last() {
            let libraries = Owners::of(last.unmanaged.iter().map(|(owner, bytes)| (owner.as_str(), *bytes)));
            for (owner, bytes) in &last.unmanaged {
                self.put(&RESIDUE, &[name, pid, libraries.label(owner)], *bytes);
            }
            last.driver.values().for_each(|bytes| self.put(&RESIDUE, &[name, pid, DRIVER], *bytes));
        }
        let growing = Owners::of(memory.growing.iter().map(|growth| (growth.owner.as_str(), growth.bytes_per_cycle)));
        for growth in &memory.growing {
            let owner = if growth.owner == OF_DRIVER { DRIVER } else { growing.label(&growth.owner) };
            self.put(&GROWTH, &[name, pid, owner], growth.bytes_per_cycle);
        }
    }

    fn totals(&mut self, [name, pid]: [&str; 2], verb: Verb, totals: &Totals) {
        /// Also reported while they are 0, so that the first failure shows as an increase.
        const EXPECTED: [Kind; 3] = [Kind::Busy, Kind::DeviceMemory, Kind::HostMemory];
        let operation = verb.name();
        self.put(&OPERATIONS, &[name, pid, operation], totals.done);
        self.put(&BYTES, &[name, pid, operation], totals.bytes);
        self.put_seconds(&SECONDS, &[name, pid, operation], totals.ms / 1e3);
        self.put_durations(&DURATION, &[name, pid, operation], &totals.durations);
        let fates = [("copied", totals.copied_bytes()), ("unchanged", totals.unchanged_bytes), ("discarded", totals.discarded_bytes)];
        for (fate, bytes) in fates {
            self.put(&CONTENTS, &[name, pid, operation, fate], bytes);
        }
        for (stage, ms) in &totals.stages {
            self.put_seconds(&STAGE_SECONDS, &[name, pid, operation, Stage::name(*stage)], ms / 1e3);
        }
        let failures = EXPECTED.into_iter().map(|kind| (kind, 0)).chain(totals.failed.iter().map(|(kind, count)| (*kind, *count)));
        for (kind, count) in failures {
            self.put(&FAILURES, &[name, pid, operation, &code(kind)], count);
        }
    }

    fn text(self) -> String {
        let registry = Registry::new();
        let gauges = self.gauges.into_values().map(|gauge| Box::new(gauge) as Box<dyn Collector>);
        let counters = self.counters.into_values().map(|counter| Box::new(counter) as Box<dyn Collector>);
        for family in gauges.chain(counters) {
            registry.register(family).expect("each name once");
        }
        let families: Vec<_> = registry.gather().into_iter().chain(self.histograms.into_values()).collect();
        TextEncoder::new().encode_to_string(&families).expect("into memory")
    }
}

/// The owners with a label of their own.
struct Owners<'a>(BTreeSet<&'a str>);

impl<'a> Owners<'a> {
    fn of(sizes: impl IntoIterator<Item = (&'a str, u64)>) -> Self {
        let mut sizes: Vec<_> = sizes.into_iter().collect();
        sizes.sort_by_key(|(owner, bytes)| (std::cmp::Reverse(*bytes), *owner));
        Self(sizes.into_iter().map(|(owner, _)| owner).take(MOST_OWNERS).collect())
    }

    fn label<'b>(&self, owner: &'b str) -> &'b str {
        if self.0.contains(owner) { owner } else { REST }
    }
}

/// As in the protocol.
fn code(kind: Kind) -> String {
    json!(kind).as_str().unwrap_or_default().to_owned()
}

fn text(pid: Option<u32>) -> String {
    pid.map_or_else(String::new, |pid| pid.to_string())
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // whole numbers
mod tests {
    use super::*;
    use serde_json::Value;
    use std::fs;
    use std::path::Path;
    use vramctl_coordinator::failure::{CommandError, Exit};
    use vramctl_coordinator::process::made_up::process;
    use vramctl_model::{Cycle, Growth, TagState, TagStatus, Unmanaged};

    fn of(process: &Process) -> String {
        let mut page = Exposition::default();
        page.process(process);
        page.text()
    }

    fn file(path: &str) -> String {
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)).unwrap()
    }

    /// The sum of a metric's values, and how many there are.
    fn sum(page: &str, metric: &str) -> (f64, usize) {
        let lines = page.lines().filter(|line| line.starts_with(&format!("{metric}{{")));
        let values: Vec<f64> = lines.map(|line| line.rsplit_once(' ').unwrap().1.parse().unwrap()).collect();
        (values.iter().sum(), values.len())
    }

    #[test]
    fn a_process_is_reported_by_tag_and_by_operation() {
        let mut engine = process(7, "eng\"ine\\", &[("kv", TagState::Active), ("weights", TagState::Paused)]);
        let memory = &mut engine.status.as_mut().unwrap().memory;
        let stages = [(Stage::Save, 1500.0)].into();
        let failed = [(Kind::Busy, 2), (Kind::Aborted, 1)].into();
        let durations = Durations { counts: vec![1, 0, 1, 0, 0, 1], seconds: 2.5 };
        let pause = Totals {
            done: 3,
            bytes: 300,
            kept_bytes: 200,
            unchanged_bytes: 50,
            discarded_bytes: 100,
            stages,
            ms: 2500.0,
            durations,
            failed,
        };
        memory.totals = [(Verb::Pause, pause)].into();
        memory.unmanaged = vec![Unmanaged { owner: "libnccl.so.2".into(), bytes: 5, gpus: BTreeMap::new() }];
        let unmanaged = [("libnccl.so.2".into(), 4)].into();
        memory.cycles = vec![Cycle { unmanaged, driver: [("a".into(), 10), ("b".into(), 20)].into(), ..Cycle::default() }];
        let growth = |owner: &str, bytes_per_cycle| Growth { owner: owner.into(), bytes_per_cycle, cycles: 3 };
        memory.growing = vec![growth("tag kv", 9), growth(OF_DRIVER, 8)];
        let page = of(&engine);
        let p = r#"name="eng\"ine\\""#;
        for line in [
            format!(r#"vramctl_process_up{{{p},pid="7"}} 1"#),
            format!(r#"vramctl_managed_bytes{{{p},pid="7",state="active",tag="kv"}} 1073741824"#),
            format!(r#"vramctl_managed_bytes{{{p},pid="7",state="paused",tag="weights"}} 1073741824"#),
            format!(r#"vramctl_unmanaged_bytes{{library="libnccl.so.2",{p},pid="7"}} 5"#),
            format!(r#"vramctl_residue_bytes{{{p},owner="libnccl.so.2",pid="7"}} 4"#),
            format!(r#"vramctl_residue_bytes{{{p},owner="driver",pid="7"}} 30"#),
            format!(r#"vramctl_residue_growth_bytes{{{p},owner="tag kv",pid="7"}} 9"#),
            format!(r#"vramctl_residue_growth_bytes{{{p},owner="driver",pid="7"}} 8"#),
            format!(r#"vramctl_operations_total{{{p},operation="pause",pid="7"}} 3"#),
            format!(r#"vramctl_operations_total{{{p},operation="resume",pid="7"}} 0"#),
            format!(r#"vramctl_operation_contents_bytes_total{{fate="copied",{p},operation="pause",pid="7"}} 150"#),
            format!(r#"vramctl_operation_seconds_total{{{p},operation="pause",pid="7"}} 2.5"#),
            format!(r#"vramctl_operation_stage_seconds_total{{{p},operation="pause",pid="7",stage="save"}} 1.5"#),
            format!(r#"vramctl_operation_duration_seconds_bucket{{{p},pid="7",operation="pause",le="0.03"}} 1"#),
            format!(r#"vramctl_operation_duration_seconds_bucket{{{p},pid="7",operation="pause",le="300"}} 3"#),
            format!(r#"vramctl_operation_duration_seconds_bucket{{{p},pid="7",operation="pause",le="+Inf"}} 3"#),
            format!(r#"vramctl_operation_duration_seconds_sum{{{p},pid="7",operation="pause"}} 2.5"#),
            format!(r#"vramctl_operation_duration_seconds_count{{{p},pid="7",operation="resume"}} 0"#),
            format!(r#"vramctl_operation_failures_total{{code="busy",{p},operation="pause",pid="7"}} 2"#),
            format!(r#"vramctl_operation_failures_total{{code="aborted",{p},operation="pause",pid="7"}} 1"#),
            format!(r#"vramctl_operation_failures_total{{code="device_memory",{p},operation="resume",pid="7"}} 0"#),
        ] {
            assert!(page.lines().any(|found| found == line), "{line} is not in\n{page}");
        }
        // The three fates add up to the total.
        assert_eq!(sum(&page, CONTENTS.name).0, sum(&page, BYTES.name).0);
    }

    #[test]
    fn a_silent_process_is_down_and_has_no_other_metrics() {
        let mut silent = process(7, "engine", &[("kv", TagState::Active)]);
        silent.status = Err(CommandError::new(Exit::Busy, "no answer"));
        let page = of(&silent);
        let samples: Vec<_> = page.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(samples, [r#"vramctl_process_up{name="engine",pid="7"} 0"#]);
    }

    #[test]
    fn a_program_with_any_number_of_tags_makes_no_more_series() {
        let mut engine = process(7, "engine", &[]);
        let tag = |number: u64| TagStatus { tag: format!("lora-{number}"), bytes: number << 20, ..TagStatus::default() };
        engine.status.as_mut().unwrap().memory.tags = (1..=1000).map(tag).collect();
        let page = of(&engine);
        assert_eq!(sum(&page, MANAGED.name), ((500_500_u64 << 20) as f64, 2 * (MOST_OWNERS + 1)));
        assert!(page.contains(r#"tag="lora-1000""#) && page.contains(r#"tag="(rest)""#) && !page.contains(r#"tag="lora-1""#));
    }

    #[test]
    fn a_ledger_adds_up_to_what_is_in_use() {
        let share = |pid, what, of: &str, bytes| Share { pid, of: Some(of.into()), ..Share::new(what, bytes) };
        let mut shares: Vec<_> = (0..100).map(|number| share(Some(1), What::Tag, &format!("tag-{number}"), 10 + number)).collect();
        shares.extend([share(Some(2), What::Process, "", 500), share(None, What::Unexplained, "", -50)]);
        let used_bytes = shares.iter().map(|share| share.bytes).sum::<i64>() as u64;
        let (uuid, name) = ("GPU-0".into(), "H200".into());
        let mut page = Exposition::default();
        page.gpu(&Ledger {
            index: 0,
            uuid,
            name,
            total_bytes: 9999,
            free_bytes: 1,
            used_bytes,
            reserved_bytes: None,
            utilization: Some(7),
            shares,
        });
        let page = page.text();
        assert_eq!(sum(&page, LEDGER.name), (used_bytes as f64, MOST_OWNERS + 1 + 2));
        assert!(!page.contains(GPU_RESERVED.name));
    }

    #[test]
    fn the_ledgers_help_lists_its_kinds() {
        let (_, kinds) = LEDGER.help.split_once("Kinds: ").unwrap();
        let kinds: Vec<_> =
            kinds.split_once(". ").unwrap().0.split(", ").map(|kind| kind.split_once(" (").map_or(kind, |(kind, _)| kind)).collect();
        assert_eq!(kinds, What::OF_A_GPU.map(What::name));
    }

    #[test]
    fn the_docs_list_all_metrics_as_they_are() {
        let docs = file("docs/monitoring.md");
        let rows: Vec<_> = docs.lines().filter(|line| line.starts_with("| `vramctl_")).map(str::to_owned).collect();
        let wanted: Vec<_> = ALL
            .iter()
            .map(|metric: &&Metric| {
                let labels: Vec<_> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
                format!("| `{}` | {} | {} |", metric.name, labels.join(", "), metric.help)
            })
            .collect();
        assert_eq!(rows.join("\n"), wanted.join("\n"), "the table should be:\n{}", wanted.join("\n"));
    }

    /// `scripts/check-metrics` evaluates the queries in a real Prometheus.
    #[test]
    fn the_dashboard_asks_for_metrics_that_exist_by_labels_that_they_have() {
        let dashboard: Value = serde_json::from_str(&file("grafana/vramctl.json")).unwrap();
        let panels = dashboard["panels"].as_array().unwrap();
        let queries: Vec<_> = panels.iter().flat_map(|panel| panel["targets"].as_array().into_iter().flatten()).collect();
        assert!(queries.len() >= 8, "{}", queries.len());
        for query in queries {
            let query = query["expr"].as_str().unwrap();
            let words: BTreeSet<_> = query.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).collect();
            let metrics: Vec<_> = words.iter().filter(|word| word.starts_with("vramctl_")).collect();
            assert!(!metrics.is_empty(), "{query}");
            let found: Vec<_> = metrics
                .iter()
                .map(|name| ALL.iter().find(|metric| metric.name == **name).unwrap_or_else(|| panic!("{name} in {query}")))
                .collect();
            for labels in query.split(" by (").skip(1).map(|rest| rest.split(')').next().unwrap()) {
                for label in labels.split(", ") {
                    assert!(found.iter().any(|metric| metric.labels.contains(&label)), "{label} in {query}");
                }
            }
        }
    }
}
