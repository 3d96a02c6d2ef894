//! Why NVML reports no GPU.

use std::fmt;

/// Why NVML reports no GPU, and what to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoCards {
    /// Its library cannot be loaded: what the loader says.
    NoLibrary(String),
    /// It fails: which call, and how.
    Fails(String),
    /// It works, and there are none.
    None,
}

impl fmt::Display for NoCards {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLibrary(why) => write!(
                out,
                "NVML cannot be loaded: {why}. It comes with the NVIDIA driver; a container gets it with the driver capability `utility`: \
                 start it with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            ),
            Self::Fails(why) => write!(out, "NVML fails: {why}. `nvidia-smi` uses it, too: get that to work first"),
            Self::None => write!(
                out,
                "NVML reports no GPU. A container sees only those that it is given, as by NVIDIA_VISIBLE_DEVICES or `docker run --gpus all`"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_says_what_to_do_next() {
        let text = NoCards::NoLibrary("libnvidia-ml.so.1: cannot open shared object file".into()).to_string();
        assert!(text.contains("libnvidia-ml.so.1: cannot open") && text.contains("NVIDIA_DRIVER_CAPABILITIES=compute,utility"), "{text}");
        let text = NoCards::Fails("nvmlInit_v2 answers 9 (Driver Not Loaded)".into()).to_string();
        assert!(text.contains("nvmlInit_v2 answers 9") && text.contains("nvidia-smi"), "{text}");
        assert!(NoCards::None.to_string().contains("NVIDIA_VISIBLE_DEVICES"));
    }
}
