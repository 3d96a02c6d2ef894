//! A pause or resume as this process carries it out: the request, and what the process itself adds.

use vramctl_model::{PauseRequest, ResumeRequest, Span};

/// A pause.
#[derive(Debug, Clone, Default)]
pub struct Pause {
    /// What the caller asks for.
    pub request: PauseRequest,
    /// Another process asks.
    pub is_from_outside: bool,
    /// The inference engine whose KV cache must not be discarded because its prefix cache describes it.
    pub engine: Option<String>,
    /// Device memory whose contents need not be kept, whatever the policy. Only the program itself knows that.
    pub unused: Vec<Span>,
}

/// A resume.
#[derive(Debug, Clone, Default)]
pub struct Resume {
    /// What the caller asks for.
    pub request: ResumeRequest,
    /// Another process asks.
    pub is_from_outside: bool,
}
