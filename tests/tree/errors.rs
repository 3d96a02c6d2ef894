//! The table of the error codes in `src/model/kind.rs`, and what is told of it elsewhere; `UPDATE=1` writes the documents.

use crate::common;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::PathBuf;
use vramctl_coordinator::failure::Exit;
use vramctl_model::{Kind, Surface};

fn path(of: &str) -> PathBuf {
    crate::root().join(of)
}

/// A kind's code in the protocol.
fn code(kind: Kind) -> String {
    serde_json::to_value(kind).unwrap().as_str().unwrap().to_owned()
}

fn fields(kind: Kind) -> String {
    if kind.fields().is_empty() { String::new() } else { format!("{} ", kind.fields()) }
}

fn table() -> String {
    let mut text = String::from("| `code` | number | exit code | meaning | further fields |\n| --- | --- | --- | --- | --- |\n");
    for &kind in Kind::ALL.iter().filter(|kind| kind.surface() != Surface::C) {
        let (code, meaning) = (code(kind), kind.meaning().trim_end_matches('.'));
        writeln!(text, "| `{code}` | {} | {} | {meaning} | {}|", kind as i32, Exit::from(kind) as u8, fields(kind)).unwrap();
    }
    text
}

#[test]
fn the_protocols_page_has_them() {
    const FROM: &str = "<!-- Made of src/model/kind.rs by `UPDATE=1 cargo test --test tree errors`. -->\n";
    let found = fs::read_to_string(path("docs/protocol.md")).unwrap();
    let (before, rest) = found.split_once(FROM).expect("the place of the table");
    let (_, after) = rest.split_once("\n\n").expect("an empty line after the table");
    let wanted = format!("{before}{FROM}{}\n{after}", table());
    common::generated::check("docs/protocol.md", &wanted, "src/model/kind.rs");
}

/// Each has an exception of the same name, code and number, and no other exception has a number.
#[test]
fn python_has_them() {
    let source = fs::read_to_string(path("python/vramctl/errors.py")).unwrap();
    let found: BTreeMap<i32, (String, String)> = source
        .split("\nclass ")
        .skip(1)
        .filter_map(|class| {
            let value = |name: &str| class.split_once(&format!("\n    {name} = ")).map(|(_, rest)| rest.lines().next().unwrap());
            let name = class.split(['(', ':']).next().unwrap();
            Some((value("number")?.parse().unwrap(), (name.to_owned(), value("code").expect("a code").trim_matches('"').to_owned())))
        })
        .collect();
    let wanted = Kind::ALL.iter().map(|&kind| (kind as i32, (format!("{kind:?}"), code(kind)))).collect();
    assert_eq!(found, wanted);
}

/// `vramctl ray` becomes a Python program, with the exit codes of the other commands.
#[test]
fn the_command_for_ray_has_their_exit_codes() {
    let source = fs::read_to_string(path("python/vramctl/ray.py")).unwrap();
    let (_, table) = source.split_once("_EXITS = {\n").expect("the table");
    let (table, _) = table.split_once('}').unwrap();
    let entry = |line: &str| {
        let (code, exit) = line.trim().trim_end_matches(',').split_once(": ").unwrap();
        (code.trim_matches('"').to_owned(), exit.parse().unwrap())
    };
    let found: BTreeMap<String, u8> = table.lines().filter(|line| !line.trim().is_empty()).map(entry).collect();
    let of_kinds = Kind::ALL.iter().filter(|kind| kind.surface() != Surface::C).map(|kind| (code(*kind), Exit::from(*kind) as u8));
    let of_commands =
        [("several_processes", Exit::Usage), ("no_process", Exit::NoProcess)].map(|(code, exit)| (code.to_owned(), exit as u8));
    let wanted = of_kinds.chain(of_commands).filter(|(_, exit)| *exit != Exit::Failed as u8).collect();
    assert_eq!(found, wanted);
}

#[test]
fn the_page_for_python_names_them() {
    let page = fs::read_to_string(path("docs/python.md")).unwrap();
    for kind in Kind::ALL.iter().filter(|kind| **kind != Kind::BufferTooSmall) {
        assert!(page.contains(&format!("`{kind:?}`")), "docs/python.md does not name {kind:?}");
    }
}
