//! Fault injection: makes requests fail or fall short in tests.

use super::ALIGNMENT;
use super::engine::{FileRequest, Operation};
use std::fmt;

/// Faults to inject.
#[derive(Default)]
pub struct Faults {
    /// Called before each request with its operation, offset and bytes.
    pub request: Option<Box<Shape>>,
}

pub type Shape = dyn Fn(Operation, u64, usize) -> Fault + Send + Sync;

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// It moves at most this many bytes.
    Short(usize),
    /// It fails with this code, whatever it has moved.
    Fail(i32),
    /// It moves nothing.
    Nothing,
}

impl Faults {
    pub fn shape(&self, operation: Operation, job: &mut FileRequest, bytes: usize) -> usize {
        let fault = self.request.as_ref().map_or(Fault::None, |ask| ask(operation, job.at + job.done as u64, bytes));
        match fault {
            Fault::None => bytes,
            Fault::Short(most) => {
                job.forced = Some(most.min(bytes) as i32);
                bytes.min(most.next_multiple_of(ALIGNMENT))
            }
            Fault::Fail(code) => {
                job.forced = Some(-code);
                bytes
            }
            Fault::Nothing => {
                job.forced = Some(0);
                bytes
            }
        }
    }
}

impl fmt::Debug for Faults {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Faults")
    }
}
