//! What vramctl needs of the driver, what it was run with, what is expected to work, and what is refused. The coordinator refuses by these
//! tables, `vramctl doctor` compares the machine with them, and docs/support.md is made of them (`UPDATE=1 cargo test --test tree support`).

use crate::ObstacleKind;
use serde::Serialize;
use std::fmt;

/// A version of CUDA, as `cuDriverGetVersion` returns it: 13000 is 13.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct CudaVersion(pub i32);

impl fmt::Display for CudaVersion {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// What an operation needs of the driver.
#[derive(Debug)]
pub struct Requirement {
    /// The operation.
    pub operation: &'static str,
    /// The first version of CUDA whose driver can do it.
    pub cuda: CudaVersion,
    /// That driver.
    pub driver: u32,
    /// What it can do.
    able: &'static str,
    /// What happens with an older one.
    pub otherwise: &'static str,
}

impl Requirement {
    /// The refusal, if a driver of this version cannot do it.
    pub fn refusal(&self, cuda: CudaVersion) -> Option<String> {
        (cuda < self.cuda).then(|| self.text())
    }

    /// The refusal.
    pub fn text(&self) -> String {
        format!("the driver is older than {} and cannot {}", self.driver, self.able)
    }
}

/// Pausing and resuming.
pub const PAUSE: Requirement = Requirement {
    operation: "pause, resume",
    cuda: CudaVersion(12_000),
    driver: 525,
    able: "tell contexts apart",
    otherwise: "programs get plain memory, which cannot be paused",
};

/// Knowing when a context is idle, without holding up the program.
pub const UNPIN: Requirement = Requirement {
    operation: "host memory is unpinned while the program runs",
    cuda: CudaVersion(12_050),
    driver: 555,
    able: "record an event of a whole context",
    otherwise: "host memory stays pinned until the next pause",
};

/// Suspending.
pub const SUSPEND: Requirement = Requirement {
    operation: "suspend",
    cuda: CudaVersion(12_080),
    driver: 570,
    able: "checkpoint",
    otherwise: "exit code 7: nothing changes; `pause` works",
};

/// Moving to another GPU.
pub const MOVE: Requirement = Requirement {
    operation: "move",
    cuda: CudaVersion(13_000),
    driver: 580,
    able: "restore on another GPU",
    otherwise: "exit code 7: nothing changes",
};

/// All requirements.
pub const REQUIREMENTS: [&Requirement; 4] = [&PAUSE, &UNPIN, &SUSPEND, &MOVE];

/// What was run together, on real GPUs.
#[derive(Debug)]
pub struct Run {
    /// A word of the GPU's name.
    pub gpu: &'static str,
    /// How many of them.
    pub gpus: &'static str,
    /// The series of torch; empty without it.
    pub torch: &'static str,
    /// The program.
    pub program: &'static str,
    /// Its version; empty if it has none.
    pub version: &'static str,
    /// What was done with it.
    pub what: &'static str,
    /// The last time.
    pub when: &'static str,
}

/// The driver of all runs, and the newest CUDA that it supports.
pub const DRIVER: (u32, CudaVersion) = (580, CudaVersion(13_000));

/// The architecture of all runs.
pub const ARCHITECTURE: &str = "x86_64";

/// The runs.
pub const RUNS: [Run; 16] = [
    run("H200", "1", "2.11", "vLLM", "0.26.0", "sleep mode, pauses in the middle of requests, suspend, move", "2026-11-24"),
    run("H200", "2", "2.11", "vLLM", "0.26.0", "pauses in the middle of requests, custom all-reduce", "2026-11-23"),
    run("H100", "2", "2.11", "vLLM", "0.26.0", "the same; sleep mode; suspend", "2026-11-27"),
    run("H100", "1", "2.14", "vLLM", "0.33.0", "sleep mode, pauses in the middle of requests, suspend; fp8, chunked prefill", "2026-11-26"),
    run("H200", "1", "2.11", "SGLang", "0.5.16", "its own API, pauses in the middle of requests, suspend", "2026-11-24"),
    run("H200", "2", "2.11", "SGLang", "0.5.16", "pauses in the middle of requests, custom all-reduce", "2026-11-23"),
    run("H100", "2", "2.11", "SGLang", "0.5.16", "the same; suspend", "2026-11-26"),
    run(
        "H200",
        "1",
        "2.11",
        "SGLang",
        "0.5.23",
        "its own API, pauses in the middle of requests, suspend, with sglang-kernel 0.4.5",
        "2026-11-28",
    ),
    run(
        "H200",
        "2",
        "2.11",
        "PyTorch",
        "",
        "training loops, CUDA graphs, `torch.compile`, DistributedDataParallel; suspend, move",
        "2026-11-23",
    ),
    run(
        "H100",
        "2",
        "2.11",
        "NCCL",
        "2.28.9",
        "DistributedDataParallel and FSDP over NVLink, CUDA IPC, host memory and sockets; suspend, move",
        "2026-11-27",
    ),
    run("H100", "1", "2.11", "verl", "0.9.1", "GRPO with vLLM 0.26.0; pauses and suspends of the whole job through Ray 2.60", "2026-11-26"),
    run("H200", "2", "2.11", "verl", "0.9.1", "GRPO with vLLM 0.26.0, FSDP and tensor parallelism over both", "2026-11-29"),
    run("H100", "2", "2.11", "Ray", "2.60", "DistributedDataParallel over two nodes on one host; pause, suspend", "2026-11-27"),
    run("H200", "1", "2.11", "Triton", "3.6", "pause, resume", "2026-11-22"),
    run("H200", "1", "", "CuPy 14.2, JAX 0.11, Numba 0.68", "", "pause, resume", "2026-11-22"),
    run("H200", "1", "", "CUDA runtime", "11.8, 12.4, 13.0", "programs built with nvcc, shared and static; pause, resume", "2026-11-20"),
];

const fn run(
    gpu: &'static str,
    gpus: &'static str,
    torch: &'static str,
    program: &'static str,
    version: &'static str,
    what: &'static str,
    when: &'static str,
) -> Run {
    Run { gpu, gpus, torch, program, version, what, when }
}

/// An engine whose sources were checked for what vramctl hooks: from the first version to the end of the series of the last.
#[derive(Debug)]
pub struct Engine {
    /// Its package.
    pub package: &'static str,
    /// The first version.
    pub first: &'static str,
    /// The last series.
    pub last: &'static str,
}

/// The engines (docs/engines.md).
pub const ENGINES: [Engine; 2] =
    [Engine { package: "vllm", first: "0.26", last: "0.33" }, Engine { package: "sglang", first: "0.5.16", last: "0.5.23" }];

/// What was not run and is expected to work, with the reason.
pub const EXPECTED: [(&str, &str); 8] = [
    ("other GPUs with virtual memory (A100, L40S, B200 …)", "`vramctl doctor` tries it; nothing depends on the model"),
    ("GPUs before compute capability 7.0", "the same; retained contents are copied whole"),
    ("aarch64 (GH200, GB200)", "the same code; the link to host memory is another"),
    ("drivers 525 to 579", "what they lack is in the table above; the library asks for each function before it uses it"),
    ("drivers newer than 580", "CUDA keeps its functions; nothing of a driver's inside is used"),
    (
        "torch 2.8 to 2.10, 2.12, 2.13, and 2.15 or later",
        "the package asks torch for each function that it uses; from 2.5 to 2.7, a region also takes what other threads allocate",
    ),
    ("vLLM 0.27 to 0.32, SGLang 0.5.17 to 0.5.22", "`scripts/test-engines-contract` finds in the released sources what vramctl hooks"),
    ("slime, AReaL; verl with SGLang", "they call the engines' own API, and slime torch_memory_saver's; they were not run on a GPU"),
];

/// Which system call finds the owner of memory that came by descriptor, what cannot be done where it is forbidden, and how to allow it.
pub const WITHOUT_KCMP: &str = "jobs whose processes pass each other memory by descriptor (NCCL) cannot be suspended and moved; allow `kcmp` in the \
     container's seccomp profile (Docker's default one allows it with --cap-add SYS_PTRACE)";

/// What is refused, with what happens instead. What the driver's age prevents is in [`REQUIREMENTS`].
pub const REFUSED: [(&str, &str); 5] = [
    ("a GPU without virtual memory, or a driver that refuses it (some of WSL 2)", "programs get plain memory; `vramctl doctor` fails"),
    ("a program that is statically linked, linked with musl, 32-bit, or set-uid", "it runs without the library; `vramctl run` says so"),
    (
        "a container that forbids `kcmp`",
        "jobs whose processes pass each other memory by descriptor (NCCL) are not suspended or moved; `vramctl doctor` warns",
    ),
    ("torch before 2.5", "`vramctl.region` raises `Unsupported`; a pause from outside works"),
    ("macOS, Windows, and Linux with musl", "nothing is built for them"),
];

/// How a GPU behind MPS is named as an obstacle.
pub const BEHIND_MPS: &str = "a GPU behind MPS";

/// How a GPU in MIG mode is named as an obstacle.
pub fn in_mig_mode(index: u32) -> String {
    format!("GPU {index} is in MIG mode (`nvidia-smi -i {index} -mig 0` ends that, once no program uses it)")
}

/// What an obstacle to a suspend and a move is, and what becomes of it.
pub const fn obstacle(kind: ObstacleKind) -> (&'static str, &'static str) {
    match kind {
        ObstacleKind::Communicator => {
            ("communicators of NVSHMEM, of an NCCL whose memory is left to CUDA, or with ranks elsewhere", "refused")
        }
        ObstacleKind::Shared => ("memory that a process shares with one outside of the job", "refused; `--shared` holds the other"),
        ObstacleKind::Registered => ("untagged memory that a network card or a disk has registered", "refused"),
        ObstacleKind::Peers => ("access of another GPU to single mappings or pools", "refused"),
        ObstacleKind::Multicast => ("multicast objects (NVLink SHARP)", "refused; `NCCL_NVLS_ENABLE=0` avoids them"),
        ObstacleKind::Unified => ("unified memory", "refused"),
        ObstacleKind::Mps => (BEHIND_MPS, "refused"),
        ObstacleKind::Mig => ("a GPU in MIG mode", "refused"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_is_judged_by_the_cuda_that_it_supports() {
        assert_eq!((CudaVersion(12_080).to_string(), CudaVersion(9_020).to_string()), ("12.8".into(), "9.2".into()));
        assert_eq!(SUSPEND.refusal(CudaVersion(12_080)), None);
        assert_eq!(SUSPEND.refusal(CudaVersion(12_070)).unwrap(), "the driver is older than 570 and cannot checkpoint");
        assert_eq!(MOVE.refusal(CudaVersion(12_090)).unwrap(), "the driver is older than 580 and cannot restore on another GPU");
        assert!(REQUIREMENTS.iter().all(|need| need.refusal(DRIVER.1).is_none()), "the runs were with a driver that can do all");
    }
}
