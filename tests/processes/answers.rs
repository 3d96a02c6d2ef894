//! What a program is told and what it is refused: with the library as without it. The sample program `answers` asks.

use crate::common::machine::{Machine, Ran};
use crate::common::{built, library};
use std::path::Path;

fn lines(part: &str, preloaded: &[&Path]) -> Vec<String> {
    let machine = Machine::with(2, "1G");
    let mut command = machine.preloaded(preloaded, built("answers", "answers.c", &[]), &[part]);
    command.env("VRAMCTL_TAG", "default");
    Ran::of(&mut command).expect(0, "", "").out.lines().map(str::to_owned).collect()
}

/// The answers of a part: as many as there should be at least, the same with managed memory.
#[track_caller]
fn compare(part: &str, at_least: usize) {
    let library = library();
    let (plain, managed) = (lines(part, &[]), lines(part, &[&library]));
    assert!(plain.len() >= at_least && plain.len() == managed.len(), "{} and {} answers", plain.len(), managed.len());
    let differ = plain.iter().zip(&managed).filter(|(plain, managed)| plain != managed);
    let differ: Vec<_> = differ.map(|(plain, managed)| format!("{plain}\n  managed: {managed}")).collect();
    assert!(differ.is_empty(), "{part}: {} of {} differ:\n{}", differ.len(), plain.len(), differ.join("\n"));
}

/// A step that cannot be captured is tried and refused; then the program does it directly.
#[test]
fn a_capture_that_must_fail_fails() {
    compare("captures", 500);
}

#[test]
fn a_broken_context_refuses_what_the_library_answers_itself() {
    compare("lost", 30);
}

#[test]
fn statistics_of_the_default_pool_contain_managed_memory() {
    compare("pool", 20);
}

#[test]
fn an_allocation_ends_where_the_program_has_asked_for() {
    compare("ranges", 80);
}

#[test]
fn a_copy_of_the_wrong_kind_is_refused() {
    compare("kinds", 1000);
}
