//! The table of driver functions against the headers of several releases of CUDA.

use std::collections::BTreeSet;
use vramctl_intercept::entries;
use vramctl_intercept::table::Flavour;

/// Written by `scripts/driver-functions`.
const HEADERS: &str = include_str!("../data/driver-functions.txt");

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

/// Of most functions, the oldest variants are left out: their addresses have 32 bits. What ends a context or opens memory takes none.
#[test]
fn every_variant_that_ends_a_context_or_opens_memory_is_listed() {
    let meant = ["cuCtxDestroy", "cuCtxDetach", "cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxReset", "cuIpcOpenMemHandle"];
    let variants = variants();
    let meant: Vec<_> = variants.iter().filter(|variant| meant.contains(&variant.name)).map(|variant| variant.symbol).collect();
    let missing: Vec<_> = meant.iter().filter(|symbol| entries::all().all(|known| known.symbol.to_str() != Ok(symbol))).collect();
    assert!(meant.len() == 9 && missing.is_empty(), "{meant:?} without {missing:?}");
}

/// Functions about memory that are not in the table, and why. A name that ends with `*` stands for all that begin so.
const LEFT_OUT: &[(&str, &[&str])] = &[
    (
        "host memory, which stays where it is",
        &["cuMemAllocHost", "cuMemFreeHost", "cuMemHostAlloc", "cuMemHostGetFlags", "cuMemHostRegister", "cuMemHostUnregister"],
    ),
    ("managed memory migrates by itself; other memory it does not concern", &["cuMemAdvise", "cuMemRangeGet*"]),
    ("asks for no memory and tells of none", &["cuMemGetLocationInfo", "cuMemGetAllocationGranularity", "cuMulticastGetGranularity"]),
    (
        "the pool itself: its allocations and frees are in the table",
        &["cuMemPoolGetAccess", "cuMemGetDefaultMemPool", "cuMemGetMemPool", "cuMemSetMemPool"],
    ),
    ("events, not memory", &["cuIpcGetEventHandle", "cuIpcOpenEventHandle"]),
    ("the multicast object has no memory until some is bound", &["cuMulticastCreate", "cuMulticastAddDevice"]),
    (
        "nor has the logical endpoint",
        &[
            "cuLogicalEndpointAddDevice",
            "cuLogicalEndpointCreate",
            "cuLogicalEndpointExport",
            "cuLogicalEndpointGetLimits",
            "cuLogicalEndpointI*",
            "cuLogicalEndpointQuery",
        ],
    ),
];

#[test]
fn every_other_function_about_memory_is_left_out_for_a_reason() {
    let about_memory =
        |name: &str| ["cuMem", "cuIpc", "cuMulticast", "cuLogicalEndpoint", "cuPointer"].iter().any(|family| name.starts_with(family));
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

/// Functions that do not pass the gate, and why. As above, but no star reaches into the families of [`NAMED_EACH`]: there, a function that
/// starts work may have a name like its neighbours'.
const NOT_GATED: &[(&str, &[&str])] = &[
    (
        "asks, and changes nothing",
        &[
            "cuCtxGet*",
            "cuDeviceCanAccessPeer",
            "cuDeviceComputeCapability",
            "cuDeviceGet*",
            "cuDevicePrimaryCtxGetState",
            "cuDeviceTotalMem",
            "cuDriverGetVersion",
            "cuFlushGPUDirectRDMAWrites",
            "cuGetErrorName",
            "cuGetErrorString",
            "cuGetExportTable",
            "cuGetProcAddress",
            "cuGraphDebugDotPrint",
            "cuGraphBatchMemOpNodeGetParams",
            "cuGraphChildGraphNodeGetGraph",
            "cuGraphEventRecordNodeGetEvent",
            "cuGraphEventWaitNodeGetEvent",
            "cuGraphExecGetFlags",
            "cuGraphExecGetId",
            "cuGraphExternalSemaphoresSignalNodeGetParams",
            "cuGraphExternalSemaphoresWaitNodeGetParams",
            "cuGraphGetEdges",
            "cuGraphGetId",
            "cuGraphGetNodes",
            "cuGraphGetRootNodes",
            "cuGraphHostNodeGetParams",
            "cuGraphKernelNodeGetAttribute",
            "cuGraphKernelNodeGetParams",
            "cuGraphMemAllocNodeGetParams",
            "cuGraphMemFreeNodeGetParams",
            "cuGraphMemcpyNodeGetParams",
            "cuGraphMemsetNodeGetParams",
            "cuGraphNodeFindInClone",
            "cuGraphNodeGetContainingGraph",
            "cuGraphNodeGetDependencies",
            "cuGraphNodeGetDependentNodes",
            "cuGraphNodeGetEnabled",
            "cuGraphNodeGetLocalId",
            "cuGraphNodeGetParams",
            "cuGraphNodeGetToolsId",
            "cuGraphNodeGetType",
            "cuMemGet*",
            "cuMemRange*",
            "cuPointerGet*",
            "cuStreamGetAttribute",
            "cuStreamGetCaptureInfo",
            "cuStreamGetCtx",
            "cuStreamGetDevResource",
            "cuStreamGetDevice",
            "cuStreamGetFlags",
            "cuStreamGetGreenCtx",
            "cuStreamGetId",
            "cuStreamGetPriority",
            "cuStreamIsCapturing",
        ],
    ),
    // The driver may load code in these, too, if it is given a handle of `cuModuleEnumerateFunctions`, or a kernel in place of a function.
    // Few programs do that, and queries must pass.
    (
        "asks about code: about what one of the gated functions has loaded before, or what is in no context",
        &[
            "cuFuncGetAttribute",
            "cuFuncGetModule",
            "cuFuncGetName",
            "cuFuncGetParamCount",
            "cuFuncGetParamInfo",
            "cuFuncIsLoaded",
            "cuKernelGetAttribute",
            "cuKernelGetLibrary",
            "cuKernelGetName",
            "cuKernelGetParamCount",
            "cuKernelGetParamInfo",
            "cuLibraryEnumerateKernels",
            "cuLibraryGetKernel",
            "cuLibraryGetKernelCount",
            "cuLibraryGetUnifiedFunction",
            "cuModuleEnumerateFunctions",
            "cuModuleGetFunctionCount",
            "cuModuleGetLoadingMode",
            "cuModuleGetSurfRef",
            "cuModuleGetTexRef",
            "cuOccupancy*",
        ],
    ),
    ("waits: threads in it are released when the work ends", &["cuCtxSynchronize", "cuEventSynchronize", "cuStreamSynchronize"]),
    ("orders work that others start, and touches no memory", &["cuEventRecord*", "cuCtxRecordEvent", "cuGreenCtxRecordEvent"]),
    (
        "is work of its stream, and passes the gate in its own handler",
        &["cuMemAllocAsync", "cuMemAllocFromPoolAsync", "cuMemMapArrayAsync"],
    ),
    (
        "takes, gives or names memory, which waits for the pause by itself; it does not touch what is paused",
        &[
            "cuMemAlloc",
            "cuMemAllocHost",
            "cuMemAllocManaged",
            "cuMemAllocPitch",
            "cuMemFree*",
            "cuMemHost*",
            "cuMemPool*",
            "cuMemSetMemPool",
            "cuMemCreate",
            "cuMemRelease",
            "cuMemMap",
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
            "cuDeviceGraphMemTrim",
            "cuLogicalEndpoint*",
        ],
    ),
    (
        "makes a context or destroys it, with what is in it",
        &[
            "cuCtxAttach",
            "cuCtxCreate",
            "cuCtxDestroy",
            "cuCtxDetach",
            "cuDevicePrimaryCtxRelease",
            "cuDevicePrimaryCtxReset",
            "cuDevicePrimaryCtxRetain",
            "cuGreenCtxCreate",
            "cuGreenCtxDestroy",
        ],
    ),
    (
        "gives back what code and graphs take, as a free does",
        &["cuGraphDestroy", "cuGraphExecDestroy", "cuLibraryUnload", "cuModuleUnload"],
    ),
    (
        "the host's own objects",
        &[
            "cuInit",
            "cuDeviceRegisterAsyncNotification",
            "cuDeviceSet*",
            "cuDeviceUnregisterAsyncNotification",
            "cuDevicePrimaryCtxSetFlags",
            "cuCtxDisablePeerAccess",
            "cuCtxEnablePeerAccess",
            "cuCtxFromGreenCtx",
            "cuCtxPopCurrent",
            "cuCtxPushCurrent",
            "cuCtxResetPersistingL2Cache",
            "cuCtxSet*",
            "cuStreamCreate",
            "cuStreamCreateWithPriority",
            "cuStreamDestroy",
            "cuStreamCopyAttributes",
            "cuStreamSetAttribute",
            "cuEventCreate*",
            "cuEventDestroy",
            "cuGreenCtxGet*",
            "cuGreenCtxStreamCreate",
            "cuDevSm*",
            "cuDevResource*",
            "cuThread*",
            "cuCoredump*",
            "cuLogs*",
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
        ],
    ),
    (
        "says how code is to run, on the host",
        &[
            "cuFuncSetAttribute",
            "cuFuncSetBlockShape",
            "cuFuncSetCacheConfig",
            "cuFuncSetSharedMemConfig",
            "cuFuncSetSharedSize",
            "cuKernelSetAttribute",
            "cuKernelSetCacheConfig",
            "cuParamSet*",
        ],
    ),
    ("advises how managed memory migrates, which it does by itself", &["cuMemAdvise"]),
    ("acts on other processes", &["cuCheckpoint*"]),
    ("compiles and links on the host", &["cuLink*"]),
    (
        "describes work, and starts none",
        &[
            "cuGraphAddDependencies",
            "cuGraphAddEmptyNode",
            "cuGraphAddEventRecordNode",
            "cuGraphAddEventWaitNode",
            "cuGraphAddExternalSemaphoresSignalNode",
            "cuGraphAddExternalSemaphoresWaitNode",
            "cuGraphAddHostNode",
            "cuGraphClone",
            "cuGraphConditionalHandleCreate",
            "cuGraphCreate",
            "cuGraphDestroyNode",
            "cuGraphEventRecordNodeSetEvent",
            "cuGraphEventWaitNodeSetEvent",
            "cuGraphExternalSemaphoresSignalNodeSetParams",
            "cuGraphExternalSemaphoresWaitNodeSetParams",
            "cuGraphHostNodeSetParams",
            "cuGraphKernelNodeCopyAttributes",
            "cuGraphKernelNodeSetAttribute",
            "cuGraphNodeSetEnabled",
            "cuGraphReleaseUserObject",
            "cuGraphRemoveDependencies",
            "cuGraphRetainUserObject",
            "cuStreamBeginCapture",
            "cuStreamBeginCaptureToCig",
            "cuStreamBeginCaptureToGraph",
            "cuStreamBeginRecaptureToGraph",
            "cuStreamEndCapture",
            "cuStreamEndCaptureToCig",
            "cuStreamUpdateCaptureDependencies",
        ],
    ),
    (
        "makes or changes an executable graph on the host: it reaches the device when it is uploaded or launched",
        &[
            "cuGraphExecEventRecordNodeSetEvent",
            "cuGraphExecEventWaitNodeSetEvent",
            "cuGraphExecExternalSemaphoresSignalNodeSetParams",
            "cuGraphExecExternalSemaphoresWaitNodeSetParams",
            "cuGraphExecHostNodeSetParams",
        ],
    ),
];

/// The families of names in which each function that is not gated is listed by its whole name.
const NAMED_EACH: &[&str] = &["cuFunc", "cuGraph", "cuKernel", "cuLaunch", "cuLibrary", "cuModule", "cuStream"];

fn excuses(pattern: &str, name: &str) -> bool {
    // The functions for graphics are a family of their own.
    let is_named_each = NAMED_EACH.iter().any(|family| name.starts_with(family)) && !name.starts_with("cuGraphics");
    match pattern.strip_suffix('*') {
        Some(beginning) => !is_named_each && name.starts_with(beginning),
        None => name == pattern,
    }
}

#[test]
fn every_function_is_gated_or_listed_as_an_exception() {
    let excused = || NOT_GATED.iter().flat_map(|(_, patterns)| patterns.iter());
    let variants = variants();
    let names: BTreeSet<_> = variants.iter().map(|variant| variant.name).collect();
    for name in &names {
        let gated = vramctl_intercept::launch::GATED.iter().any(|function| function.name == *name);
        let count = excused().filter(|pattern| excuses(pattern, name)).count();
        assert!(gated || count > 0, "{name}: let it pass the gate, or say here why not");
        // Else the gate's line could be deleted unnoticed.
        assert!(!gated || count == 0, "{name} is gated, and listed as an exception");
        assert!(count <= 1, "{name} is listed as an exception for {count} reasons");
    }
    for pattern in excused() {
        assert!(names.iter().any(|name| excuses(pattern, name)), "no function is named {pattern}");
    }
}
