//! `cudaError_t`: since CUDA 10.1 its codes are the driver's, so they pass through unchanged.

use std::cell::Cell;
use std::ffi::CStr;

/// A `cudaError_t`.
pub type Code = u32;
/// The outcome of a runtime call.
pub type Outcome<T = ()> = Result<T, Code>;

/// `cudaErrorInvalidValue`.
pub const INVALID_VALUE: Code = 1;
/// `cudaErrorInitializationError`.
pub const INITIALIZATION_ERROR: Code = 3;
/// `cudaErrorInvalidMemcpyDirection`.
pub const INVALID_MEMCPY_DIRECTION: Code = 21;
/// `cudaErrorInsufficientDriver`.
pub const INSUFFICIENT_DRIVER: Code = 35;
/// `cudaErrorInvalidDevice`.
pub const INVALID_DEVICE: Code = 101;

thread_local! {
    static LAST: Cell<Code> = const { Cell::new(0) };
}

/// Makes a call and records a failure for the thread's `cudaGetLastError`.
pub fn keep(call: impl FnOnce() -> Outcome) -> Code {
    match call() {
        Ok(()) => 0,
        Err(code) => {
            LAST.set(code);
            code
        }
    }
}

/// Returns and clears the last failure.
pub fn take() -> Code {
    LAST.replace(0)
}

/// The last failure.
pub fn peek() -> Code {
    LAST.get()
}

/// A code's name.
pub fn name(code: Code) -> &'static CStr {
    match code {
        0 => c"cudaSuccess",
        1 => c"cudaErrorInvalidValue",
        2 => c"cudaErrorMemoryAllocation",
        3 => c"cudaErrorInitializationError",
        4 => c"cudaErrorCudartUnloading",
        21 => c"cudaErrorInvalidMemcpyDirection",
        35 => c"cudaErrorInsufficientDriver",
        46 => c"cudaErrorDevicesUnavailable",
        100 => c"cudaErrorNoDevice",
        101 => c"cudaErrorInvalidDevice",
        201 => c"cudaErrorDeviceUninitialized",
        205 => c"cudaErrorMapBufferObjectFailed",
        206 => c"cudaErrorUnmapBufferObjectFailed",
        208 => c"cudaErrorAlreadyMapped",
        211 => c"cudaErrorNotMapped",
        214 => c"cudaErrorECCUncorrectable",
        304 => c"cudaErrorOperatingSystem",
        400 => c"cudaErrorInvalidResourceHandle",
        401 => c"cudaErrorIllegalState",
        500 => c"cudaErrorSymbolNotFound",
        600 => c"cudaErrorNotReady",
        700 => c"cudaErrorIllegalAddress",
        704 => c"cudaErrorPeerAccessAlreadyEnabled",
        705 => c"cudaErrorPeerAccessNotEnabled",
        709 => c"cudaErrorContextIsDestroyed",
        712 => c"cudaErrorHostMemoryAlreadyRegistered",
        713 => c"cudaErrorHostMemoryNotRegistered",
        719 => c"cudaErrorLaunchFailure",
        800 => c"cudaErrorNotPermitted",
        801 => c"cudaErrorNotSupported",
        900 => c"cudaErrorStreamCaptureUnsupported",
        901 => c"cudaErrorStreamCaptureInvalidated",
        902 => c"cudaErrorStreamCaptureMerge",
        903 => c"cudaErrorStreamCaptureUnmatched",
        904 => c"cudaErrorStreamCaptureUnjoined",
        905 => c"cudaErrorStreamCaptureIsolation",
        906 => c"cudaErrorStreamCaptureImplicit",
        907 => c"cudaErrorCapturedEvent",
        908 => c"cudaErrorStreamCaptureWrongThread",
        999 => c"cudaErrorUnknown",
        _ => c"unrecognized error code",
    }
}

/// Descriptions of codes that only the runtime has.
pub fn own_description(code: Code) -> Option<&'static CStr> {
    Some(match code {
        21 => c"invalid copy direction for memcpy",
        35 => c"CUDA driver version is insufficient for CUDA runtime version",
        _ => return None,
    })
}
