//! `include/vramctl.h` is generated from `src/intercept/abi.rs` and the table of the error codes; `UPDATE=1` writes it.

use crate::common;
use std::fmt::Write;
use std::process::Command;
use vramctl_model::{Kind, Surface};

/// The result codes that C can get, as an enum for cbindgen.
fn results() -> String {
    let mut text = String::from(
        "/// A result code. Codes never change their meaning; new ones may be added.\n#[repr(i32)]\npub enum VramctlResult {\n/// Success.\nOk = 0,\n",
    );
    for kind in Kind::ALL.iter().filter(|kind| kind.surface() != Surface::Socket) {
        writeln!(text, "/// {}\n{kind:?} = {},", kind.meaning(), *kind as i32).unwrap();
    }
    text + "}\n"
}

fn header() -> String {
    let root = crate::root();
    let folder = tempfile::tempdir().unwrap();
    let codes = folder.path().join("result.rs");
    std::fs::write(&codes, results()).unwrap();
    let config = cbindgen::Config::from_file(root.join("include/cbindgen.toml")).unwrap();
    let builder = cbindgen::Builder::new().with_config(config).with_src(codes).with_src(root.join("src/intercept/abi.rs"));
    let mut text = Vec::new();
    builder.generate().unwrap().write(&mut text);
    // Rust's heading for what the caller must see to.
    String::from_utf8(text).unwrap().replace("//\n// # Safety\n", "//\n")
}

#[test]
fn the_header_is_current() {
    common::generated::check("include/vramctl.h", &header(), "src/intercept/abi.rs, with src/model/kind.rs,");
}

/// It is read by people who know C: no headings of Rust's documents, no paths, no variants of an enum.
#[test]
fn the_header_shows_no_rust() {
    let variants = Kind::ALL.iter().map(|kind| format!("{kind:?}")).chain(["Default", "Discard", "Host"].map(String::from));
    let rust: Vec<_> =
        variants.map(|name| format!("`{name}`")).chain(["# Safety", "::", "[`", "`None`", "Some("].map(String::from)).collect();
    for line in header().lines() {
        assert!(rust.iter().all(|rust| !line.contains(rust.as_str())), "{line}");
        assert!(line.len() <= 150, "{line}");
    }
}

/// The header must compile on its own, as C and as C++.
#[test]
fn the_header_compiles_as_c_and_cpp() {
    for (compiler, language, standard) in [("cc", "c", "c99"), ("c++", "c++", "c++11")] {
        let header = crate::root().join("include/vramctl.h");
        let standard = format!("-std={standard}");
        let done = Command::new(compiler)
            .args(["-x", language, &standard, "-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only"])
            .arg(header)
            .output();
        let done = done.unwrap_or_else(|error| panic!("{compiler} is needed (Debian: build-essential): {error}"));
        assert!(done.status.success(), "{compiler}: {}", String::from_utf8_lossy(&done.stderr));
    }
}
