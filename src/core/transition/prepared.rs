//! The two phases of a pause or resume: what is prepared can still be undone, and nothing of its commit can fail.

use std::time::Duration;
use vramctl_model::{Error, Observer, Report};

/// A pause or resume of which every step that can fail is done. It has the transition lock, so no other begins before it is committed or undone.
pub trait Prepared {
    /// The caller has not decided yet. Called now and then, with how long that has taken.
    fn wait(&self, _waited: Duration) {}

    /// Completes it.
    fn commit(self: Box<Self>, observer: &mut dyn Observer) -> Report;

    /// Takes everything back. Returns the error, with what could not be undone.
    fn undo(self: Box<Self>, why: Error) -> Error;
}

/// A prepared pause or resume, or why it could not be prepared.
pub type Preparation<'a> = Result<Box<dyn Prepared + 'a>, Failed<'a>>;

/// A pause or resume that could not be prepared.
pub struct Failed<'a> {
    /// Why.
    pub why: Error,
    /// What has been done.
    begun: Option<Box<dyn Prepared + 'a>>,
}

impl From<Error> for Failed<'_> {
    fn from(why: Error) -> Self {
        Self { why, begun: None }
    }
}

impl<'a> Failed<'a> {
    /// After some steps.
    pub(super) fn after(why: Error, begun: impl Prepared + 'a) -> Self {
        Self { why, begun: Some(Box::new(begun)) }
    }

    /// Whether anything is to be undone. Until then, this has the transition lock.
    pub(super) fn has_begun(&self) -> bool {
        self.begun.is_some()
    }

    /// With another error.
    #[must_use]
    pub fn map(self, with: impl FnOnce(Error) -> Error) -> Self {
        Self { why: with(self.why), ..self }
    }

    /// Undoes what has been done. In a swap, that may have to wait for memory that the other job gives back, so the other job must know by then
    /// that the swap is off.
    pub fn undo(self) -> Error {
        match self.begun {
            Some(begun) => begun.undo(self.why),
            None => self.why,
        }
    }

    /// Undoes it for another attempt if the error allows one. Returns the error.
    pub(super) fn undo_to_retry(self, may_retry: impl Fn(&Error) -> bool) -> Result<Error, Self> {
        if !may_retry(&self.why) {
            return Err(self);
        }
        let why = self.undo();
        if may_retry(&why) { Ok(why) } else { Err(why.into()) }
    }

    /// Wraps what is prepared, or what a failure has begun, so that more is committed or undone with it.
    pub(super) fn wrap(
        preparation: Preparation<'a>,
        with: impl FnOnce(Box<dyn Prepared + 'a>) -> Box<dyn Prepared + 'a>,
    ) -> Preparation<'a> {
        match preparation {
            Ok(prepared) => Ok(with(prepared)),
            Err(Self { why, begun }) => Err(Self { why, begun: begun.map(with) }),
        }
    }
}

/// Completes what is prepared at once: there is nobody to ask.
pub(super) fn complete(preparation: Preparation<'_>, observer: &mut dyn Observer) -> Result<Report, Error> {
    match preparation {
        Ok(prepared) => Ok(prepared.commit(observer)),
        Err(failed) => Err(failed.undo()),
    }
}
