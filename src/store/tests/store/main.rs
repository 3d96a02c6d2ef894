//! Images on disk: saved and loaded, by whatever it is interrupted.
#![allow(missing_docs)]

mod common;
mod crashes;
mod damage;
mod images;
mod model;
mod others;
