//! `include/vramctl.h` is generated from `src/intercept/abi.rs`; `UPDATE=1` writes it.
#![allow(missing_docs)]

use std::path::Path;
use std::process::Command;

fn generated() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(root.join("include/cbindgen.toml")).unwrap();
    let bindings = cbindgen::Builder::new().with_config(config).with_src(root.join("src/intercept/abi.rs")).generate().unwrap();
    let mut text = Vec::new();
    bindings.write(&mut text);
    String::from_utf8(text).unwrap()
}

#[test]
fn the_header_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/vramctl.h");
    let wanted = generated();
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &wanted).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(found == wanted, "include/vramctl.h is not what src/intercept/abi.rs says; run `UPDATE=1 cargo test --test header`");
}

/// The header must compile on its own, as C and as C++.
#[test]
fn the_header_compiles_as_c_and_cpp() {
    for (compiler, language, standard) in [("cc", "c", "c99"), ("c++", "c++", "c++11")] {
        let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/vramctl.h");
        let standard = format!("-std={standard}");
        let done = Command::new(compiler)
            .args(["-x", language, &standard, "-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only"])
            .arg(header)
            .output();
        let done = done.unwrap_or_else(|error| panic!("{compiler} is needed (Debian: build-essential): {error}"));
        assert!(done.status.success(), "{compiler}: {}", String::from_utf8_lossy(&done.stderr));
    }
}
