//! Failed driver calls and their status codes.

use std::fmt;

/// `CUresult` as a number, so codes added by newer drivers are valid values.
pub type StatusCode = u32;

/// A failed driver call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// The function's name.
    pub call: &'static str,
    /// What it returned.
    pub code: StatusCode,
}

impl Failure {
    /// Turns a call's status code into a result.
    pub fn check(call: &'static str, code: StatusCode) -> Result<(), Self> {
        if code == code::SUCCESS { Ok(()) } else { Err(Self { call, code }) }
    }

    /// Whether the error was left behind by failed GPU work. It is sticky: every later call that needs the context returns it
    /// (`cuda.h`: "the process must be terminated").
    pub fn is_of_earlier_work(self) -> bool {
        matches!(
            self.code,
            code::ECC_UNCORRECTABLE
                | code::NVLINK_UNCORRECTABLE
                | code::ILLEGAL_ADDRESS
                | code::CONTAINED
                | code::LAUNCH_TIMEOUT
                | code::ASSERT
                | code::HARDWARE_STACK_ERROR
                | code::ILLEGAL_INSTRUCTION
                | code::MISALIGNED_ADDRESS
                | code::INVALID_ADDRESS_SPACE
                | code::INVALID_PC
                | code::LAUNCH_FAILED
        )
    }

    /// Whether the driver refused what it might have done: there is memory, the program's work has not failed, and CUDA is in use.
    pub fn is_refusal(self) -> bool {
        let is_state = matches!(self.code, code::OUT_OF_MEMORY | code::NOT_INITIALIZED | code::DEINITIALIZED);
        !is_state && !self.is_of_earlier_work() && !self.is_capture() && !self.is_of_gone_context()
    }

    /// Whether the call failed because of a stream capture.
    pub fn is_capture(self) -> bool {
        (code::STREAM_CAPTURE_UNSUPPORTED..=code::STREAM_CAPTURE_WRONG_THREAD).contains(&self.code)
    }

    /// Whether the call failed because its context has been destroyed.
    pub fn is_of_gone_context(self) -> bool {
        matches!(self.code, code::INVALID_CONTEXT | code::CONTEXT_IS_DESTROYED)
    }

    /// Whether the driver was not called because a call of the program's may be ending the context. Its work may still run.
    pub fn is_of_ending_context(self) -> bool {
        self.code == code::NOT_READY
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} returned {}", self.call, self.code)?;
        code::name(self.code).map_or(Ok(()), |name| write!(out, " ({name})"))
    }
}

impl std::error::Error for Failure {}

/// The driver's status codes, by their names in `cuda.h` without the prefix `CUDA_ERROR_` (`CUDA_` for success).
pub mod code {
    use super::StatusCode;

    macro_rules! codes {
        ($($name:ident = $number:literal;)*) => {
            $(
                #[allow(missing_docs)]
                pub const $name: StatusCode = $number;
            )*

            /// The name of a code in `cuda.h`; `None` if it is newer than CUDA 13.
            pub fn name(code: StatusCode) -> Option<&'static str> {
                match code {
                    SUCCESS => Some("CUDA_SUCCESS"),
                    $($name => Some(concat!("CUDA_ERROR_", stringify!($name))),)*
                    _ => None,
                }
            }
        };
    }

    /// No error.
    pub const SUCCESS: StatusCode = 0;

    codes! {
        INVALID_VALUE = 1;
        OUT_OF_MEMORY = 2;
        NOT_INITIALIZED = 3;
        DEINITIALIZED = 4;
        PROFILER_DISABLED = 5;
        PROFILER_NOT_INITIALIZED = 6;
        PROFILER_ALREADY_STARTED = 7;
        PROFILER_ALREADY_STOPPED = 8;
        STUB_LIBRARY = 34;
        CALL_REQUIRES_NEWER_DRIVER = 36;
        DEVICE_UNAVAILABLE = 46;
        MULTICAST_RESOURCE_FULL = 47;
        NO_DEVICE = 100;
        INVALID_DEVICE = 101;
        DEVICE_NOT_LICENSED = 102;
        INVALID_IMAGE = 200;
        INVALID_CONTEXT = 201;
        CONTEXT_ALREADY_CURRENT = 202;
        MAP_FAILED = 205;
        UNMAP_FAILED = 206;
        ARRAY_IS_MAPPED = 207;
        ALREADY_MAPPED = 208;
        NO_BINARY_FOR_GPU = 209;
        ALREADY_ACQUIRED = 210;
        NOT_MAPPED = 211;
        NOT_MAPPED_AS_ARRAY = 212;
        NOT_MAPPED_AS_POINTER = 213;
        ECC_UNCORRECTABLE = 214;
        UNSUPPORTED_LIMIT = 215;
        CONTEXT_ALREADY_IN_USE = 216;
        PEER_ACCESS_UNSUPPORTED = 217;
        INVALID_PTX = 218;
        INVALID_GRAPHICS_CONTEXT = 219;
        NVLINK_UNCORRECTABLE = 220;
        JIT_COMPILER_NOT_FOUND = 221;
        UNSUPPORTED_PTX_VERSION = 222;
        JIT_COMPILATION_DISABLED = 223;
        UNSUPPORTED_EXEC_AFFINITY = 224;
        UNSUPPORTED_DEVSIDE_SYNC = 225;
        CONTAINED = 226;
        INSUFFICIENT_LOADER_VERSION = 227;
        INVALID_SOURCE = 300;
        FILE_NOT_FOUND = 301;
        SHARED_OBJECT_SYMBOL_NOT_FOUND = 302;
        SHARED_OBJECT_INIT_FAILED = 303;
        OPERATING_SYSTEM = 304;
        INVALID_HANDLE = 400;
        ILLEGAL_STATE = 401;
        LOSSY_QUERY = 402;
        NOT_FOUND = 500;
        NOT_READY = 600;
        ILLEGAL_ADDRESS = 700;
        LAUNCH_OUT_OF_RESOURCES = 701;
        LAUNCH_TIMEOUT = 702;
        LAUNCH_INCOMPATIBLE_TEXTURING = 703;
        PEER_ACCESS_ALREADY_ENABLED = 704;
        PEER_ACCESS_NOT_ENABLED = 705;
        PRIMARY_CONTEXT_ACTIVE = 708;
        CONTEXT_IS_DESTROYED = 709;
        ASSERT = 710;
        TOO_MANY_PEERS = 711;
        HOST_MEMORY_ALREADY_REGISTERED = 712;
        HOST_MEMORY_NOT_REGISTERED = 713;
        HARDWARE_STACK_ERROR = 714;
        ILLEGAL_INSTRUCTION = 715;
        MISALIGNED_ADDRESS = 716;
        INVALID_ADDRESS_SPACE = 717;
        INVALID_PC = 718;
        LAUNCH_FAILED = 719;
        COOPERATIVE_LAUNCH_TOO_LARGE = 720;
        TENSOR_MEMORY_LEAK = 721;
        NOT_PERMITTED = 800;
        NOT_SUPPORTED = 801;
        SYSTEM_NOT_READY = 802;
        SYSTEM_DRIVER_MISMATCH = 803;
        COMPAT_NOT_SUPPORTED_ON_DEVICE = 804;
        MPS_CONNECTION_FAILED = 805;
        MPS_RPC_FAILURE = 806;
        MPS_SERVER_NOT_READY = 807;
        MPS_MAX_CLIENTS_REACHED = 808;
        MPS_MAX_CONNECTIONS_REACHED = 809;
        MPS_CLIENT_TERMINATED = 810;
        CDP_NOT_SUPPORTED = 811;
        CDP_VERSION_MISMATCH = 812;
        STREAM_CAPTURE_UNSUPPORTED = 900;
        STREAM_CAPTURE_INVALIDATED = 901;
        STREAM_CAPTURE_MERGE = 902;
        STREAM_CAPTURE_UNMATCHED = 903;
        STREAM_CAPTURE_UNJOINED = 904;
        STREAM_CAPTURE_ISOLATION = 905;
        STREAM_CAPTURE_IMPLICIT = 906;
        CAPTURED_EVENT = 907;
        STREAM_CAPTURE_WRONG_THREAD = 908;
        TIMEOUT = 909;
        GRAPH_EXEC_UPDATE_FAILURE = 910;
        EXTERNAL_DEVICE = 911;
        INVALID_CLUSTER_SIZE = 912;
        FUNCTION_NOT_LOADED = 913;
        INVALID_RESOURCE_TYPE = 914;
        INVALID_RESOURCE_CONFIGURATION = 915;
        KEY_ROTATION = 916;
        STREAM_DETACHED = 917;
        GRAPH_RECAPTURE_FAILURE = 918;
        FABRIC_NOT_READY = 919;
        UNKNOWN = 999;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_says_what_has_failed() {
        assert_eq!(Failure::check("call", code::SUCCESS), Ok(()));
        let kind = |code| {
            let failure = Failure::check("call", code).unwrap_err();
            [failure.is_of_earlier_work(), failure.is_capture(), failure.is_of_gone_context(), failure.is_refusal()]
        };
        assert_eq!(kind(code::ILLEGAL_ADDRESS), [true, false, false, false]);
        assert_eq!(kind(code::STREAM_CAPTURE_WRONG_THREAD), [false, true, false, false]);
        assert_eq!(kind(code::CONTEXT_IS_DESTROYED), [false, false, true, false]);
        assert_eq!(kind(code::OUT_OF_MEMORY), [false; 4]);
        assert_eq!(Failure { call: "cuMemMap", code: 2 }.to_string(), "cuMemMap returned 2 (CUDA_ERROR_OUT_OF_MEMORY)");
    }
}
