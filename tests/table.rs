//! The table of driver functions against the headers of several releases of CUDA.
#![allow(missing_docs)]

use std::collections::BTreeSet;
use vramctl_intercept::entries;
use vramctl_intercept::table::Flavour;

/// Written by `scripts/driver-functions`.
const HEADERS: &str = include_str!("data/driver-functions.txt");

/// A variant of a function in the headers.
struct Variant {
    name: &'static str,
    version: i32,
    flavour: Flavour,
    arguments: usize,
    symbol: &'static str,
    releases: Vec<&'static str>,
}

fn variants() -> Vec<Variant> {
    let variant = |line: &'static str| {
        let words: Vec<_> = line.split(' ').collect();
        let [name, version, flavour, arguments, symbol, releases] = words[..] else { panic!("{line}") };
        Variant {
            name,
            version: version.parse().unwrap(),
            flavour: if flavour == "plain" { Flavour::Plain } else { Flavour::PerThread },
            arguments: arguments.parse().unwrap(),
            symbol,
            releases: releases.split(',').collect(),
        }
    };
    HEADERS.lines().filter(|line| !line.starts_with('#')).map(variant).collect()
}

#[test]
fn every_line_is_a_function_of_the_headers() {
    let variants = variants();
    assert!(variants.len() > 600);
    for function in entries::all() {
        let symbol = function.symbol.to_str().unwrap();
        let variant = variants.iter().find(|variant| variant.symbol == symbol).unwrap_or_else(|| panic!("{symbol} is in no header"));
        assert_eq!(
            (function.name, function.version, function.flavour, function.arguments),
            (variant.name, variant.version, variant.flavour, variant.arguments),
            "{symbol}"
        );
        assert!(variant.releases.contains(&"13.5"), "{symbol} is gone: {:?}", variant.releases);
    }
}

/// The table has all variants of a function from its oldest listed one on: a missing newer one would be returned instead of ours, and its
/// memory would not be managed.
#[test]
fn no_newer_variant_is_missing() {
    for function in entries::all() {
        for variant in variants().iter().filter(|variant| variant.name == function.name && variant.version >= function.version) {
            assert!(
                entries::all().any(|known| known.symbol.to_str() == Ok(variant.symbol)),
                "{} has a variant of CUDA {}, {}",
                function.name,
                variant.version,
                variant.symbol
            );
        }
    }
}

/// Functions about memory that are not in the table, and why. A name that ends with `*` stands for all that begin so.
const LEFT_OUT: &[(&str, &[&str])] = &[
    ("host memory, which stays where it is", &["cuMemAllocHost", "cuMemFreeHost", "cuMemHost*"]),
    ("managed memory migrates by itself; other memory it does not concern", &["cuMemAdvise", "cuMemRangeGet*"]),
    (
        "asks for no memory and tells of none",
        &["cuMemGetInfo", "cuMemGetLocationInfo", "cuMemGetAllocationGranularity", "cuMulticastGetGranularity"],
    ),
    (
        "the pool itself: its allocations and frees are in the table",
        &[
            "cuMemPoolC*",
            "cuMemPoolD*",
            "cuMemPoolE*",
            "cuMemPoolG*",
            "cuMemPoolI*",
            "cuMemPoolSetAttribute",
            "cuMemPoolT*",
            "cuMemGetDefaultMemPool",
            "cuMemGetMemPool",
            "cuMemSetMemPool",
        ],
    ),
    ("events, not memory", &["cuIpcGetEventHandle", "cuIpcOpenEventHandle"]),
    ("the multicast object has no memory until some is bound", &["cuMulticastCreate", "cuMulticastAddDevice"]),
];

#[test]
fn every_other_function_about_memory_is_left_out_for_a_reason() {
    let about_memory = |name: &str| ["cuMem", "cuIpc", "cuMulticast", "cuPointer"].iter().any(|family| name.starts_with(family));
    let variants = variants();
    let names: BTreeSet<_> = variants.iter().map(|variant| variant.name).filter(|name| about_memory(name)).collect();
    let matches = |pattern: &str, name: &str| pattern.strip_suffix('*').map_or(pattern == name, |beginning| name.starts_with(beginning));
    let left_out = || LEFT_OUT.iter().flat_map(|(_, patterns)| patterns.iter());
    for name in &names {
        let known = entries::all().any(|function| function.name == *name);
        let excused = left_out().any(|pattern| matches(pattern, name));
        assert!(known || excused, "{name}: put it into the table, or say here why not");
        assert!(!known || !excused, "{name} is in the table");
    }
    for pattern in left_out() {
        assert!(names.iter().any(|name| matches(pattern, name)), "no function is named {pattern}");
    }
}

/// Functions that do not pass the gate, and why. As above, and a name that begins with `*` stands for all that end so.
const NOT_GATED: &[(&str, &[&str])] = &[
    (
        "asks, and changes nothing",
        &[
            "*Get*",
            "*Query*",
            "*CanAccess*",
            "*IsCapturing",
            "cuGraphDebugDotPrint",
            "cuOccupancy*",
            "cuGetErrorName",
            "cuGetErrorString",
            "cuFuncIsLoaded",
            "cuEventElapsedTime",
            "cuGraphKernelNodeCopyAttributes",
            "cuStreamCopyAttributes",
            "cuFlushGPUDirectRDMAWrites",
        ],
    ),
    ("waits: threads in it are released when the work ends", &["*Synchronize"]),
    (
        "orders work that others start, and touches no memory",
        &["cuStreamWaitEvent", "cuEventRecord*", "cuCtxWaitEvent", "cuCtxRecordEvent"],
    ),
    ("runs on the host, where calls of CUDA are not permitted", &["cuStreamAddCallback"]),
    (
        "takes or gives memory, which waits for the pause by itself; it does not touch what is paused",
        &[
            "cuMemAlloc*",
            "cuMemFree*",
            "cuMemHost*",
            "cuMemPool*",
            "cuMemSetMemPool",
            "cuMemCreate",
            "cuMemRelease",
            "cuMemMap*",
            "cuMemUnmap",
            "cuMemSetAccess",
            "cuMemAddress*",
            "cuMemExport*",
            "cuMemImport*",
            "cuMemRetain*",
            "cuMulticast*",
            "cuIpc*",
            "cuArray*",
            "cuMipmappedArray*",
            "cuMemAdvise",
            "cuMemRange*",
        ],
    ),
    (
        "the host's own objects",
        &[
            "cuInit",
            "cuDevice*",
            "cuCtx*",
            "cuStreamCreate*",
            "cuStreamDestroy",
            "cuStreamSet*",
            "cuEventCreate*",
            "cuEventDestroy",
            "cuGreenCtx*",
            "cuDevSm*",
            "cuDevResource*",
            "cuThread*",
            "cuProfiler*",
            "cuCoredump*",
            "cuLog*",
            "cuUserObject*",
            "cuPointerSet*",
            "cuImportExternal*",
            "cuExternalMemory*",
            "cuDestroyExternal*",
            "cuTensorMap*",
            "cuTexRef*",
            "cuTexObject*",
            "cuSurf*",
            "cuGraphics*",
            "cuGL*",
            "cuEGL*",
            "cuVDPAU*",
            "cuD3D*",
            "cuCheckpoint*",
        ],
    ),
    (
        "describes work, and starts none",
        &[
            "cuGraph*",
            "cuStreamBeginCapture*",
            "cuStreamEndCapture*",
            "cuStreamUpdateCapture*",
            "cuFuncSet*",
            "cuFuncLoad",
            "cuParamSet*",
            "cuLink*",
            "cuLibrary*",
            "cuKernel*",
            "cuModule*",
            "cuStreamBeginRecaptureToGraph",
        ],
    ),
];

#[test]
fn every_function_that_starts_work_is_gated_or_listed_as_an_exception() {
    let matches = |pattern: &str, name: &str| match (pattern.strip_prefix('*'), pattern.strip_suffix('*')) {
        (Some(inner), Some(_)) => name.contains(inner.trim_end_matches('*')),
        (Some(end), None) => name.ends_with(end),
        (None, Some(beginning)) => name.starts_with(beginning),
        (None, None) => name == pattern,
    };
    let excused = || NOT_GATED.iter().flat_map(|(_, patterns)| patterns.iter());
    let variants = variants();
    for name in variants.iter().map(|variant| variant.name).collect::<BTreeSet<_>>() {
        let gated = vramctl_intercept::launch::GATED.iter().any(|function| function.name == name);
        assert!(gated || excused().any(|pattern| matches(pattern, name)), "{name}: let it pass the gate, or say here why not");
    }
}
