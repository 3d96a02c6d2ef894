//! The documentation's links resolve, and its environment variables are those that the code reads.

use crate::{files, root};
use std::fs;
use std::path::{Path, PathBuf};

fn pages() -> Vec<PathBuf> {
    let mut pages =
        ["README.md", "ARCHITECTURE.md", "tests/simgpu/README.md", "tests/apps/README.md"].map(|page| root().join(page)).to_vec();
    pages.extend(files("docs", &["md"]));
    pages
}

/// The anchors that a page's headings have on GitHub.
fn anchors(page: &Path) -> Vec<String> {
    let text = fs::read_to_string(page).unwrap();
    let headings = text.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim().to_lowercase());
    headings.map(|heading| heading.replace(|c: char| !c.is_alphanumeric() && !" -_".contains(c), "").replace(' ', "-")).collect()
}

#[test]
fn links_resolve() {
    let mut links = 0;
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        for link in text.split("](").skip(1).map(|rest| rest.split(')').next().unwrap()).filter(|link| !link.contains("://")) {
            links += 1;
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { page.clone() } else { page.parent().unwrap().join(file) };
            assert!(target.exists(), "{}: {link} does not exist", page.display());
            assert!(anchor.is_empty() || anchors(&target).contains(&anchor.to_owned()), "{}: {link} has no such heading", page.display());
        }
    }
    assert!(links > 5, "only {links} links were found: is this test still looking?");
}

/// The map names files from their crate on.
#[test]
fn files_that_the_map_names_exist() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let is_file = |name: &&str| !name.contains(' ') && Path::new(name).extension().is_some_and(|extension| extension == "rs");
    let named: Vec<_> = text.split('`').skip(1).step_by(2).filter(is_file).collect();
    assert!(named.len() > 30, "only {} names were found: is this test still looking?", named.len());
    for name in named {
        assert!(root().join("src").join(name).exists() || root().join(name).exists(), "ARCHITECTURE.md names {name}, which does not exist");
    }
}

/// Every variable that the code reads is in a table in the README or a page.
#[test]
fn every_variable_is_documented() {
    let code = ["src/config/lib.rs", "src/cli/commands/run.rs", "src/cli/installation.rs", "src/cli/arguments.rs"]
        .map(|file| fs::read_to_string(root().join(file)).unwrap())
        .join("\n");
    let text: String = pages().iter().map(|page| fs::read_to_string(page).unwrap()).collect();
    let mut names: Vec<_> = code
        .match_indices("VRAMCTL_")
        .chain(code.match_indices("TMS_"))
        .map(|(at, _)| code[at..].split(|c: char| !(c.is_ascii_uppercase() || c == '_')).next().unwrap())
        .collect();
    names.sort_unstable();
    names.dedup();
    assert!(names.len() >= 16, "{names:?}");
    for name in names {
        assert!(text.contains(name), "{name} is read by the code and not documented");
    }
}

/// Every variable and control function of the simulated GPU is on its page.
#[test]
fn the_simulated_gpus_controls_are_documented() {
    let page = fs::read_to_string(root().join("tests/simgpu/README.md")).unwrap();
    let word = |text: &str| text.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect::<String>();
    let mut found = Vec::new();
    for path in files("tests/simgpu/src", &["rs"]) {
        let text = fs::read_to_string(path).unwrap();
        found.extend(text.split("\"C\" fn ").map(word).filter(|name| name.starts_with("simgpu_")));
        found.extend(text.match_indices("SIMGPU_").map(|(at, _)| word(&text[at..])));
    }
    assert!(found.len() > 20, "{found:?}");
    for name in found {
        assert!(page.contains(&name), "{name} is not documented");
    }
}

/// Every exported function of the C ABI is in the header, and each function that the documentation mentions exists.
#[test]
fn functions_that_the_documentation_names_exist() {
    let header = fs::read_to_string(root().join("include/vramctl.h")).unwrap();
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        for (at, _) in text.match_indices("vramctl_") {
            let name: String = text[at..].chars().take_while(|c| c.is_ascii_lowercase() || *c == '_').collect();
            if text[at + name.len()..].starts_with('(') {
                assert!(header.contains(&format!("{name}(")), "{}: {name} is not in the header", page.display());
            }
        }
    }
}

/// Each message that the page explains is one that the code has. `…` on the page stands for what differs.
#[test]
fn explained_messages_exist() {
    let sources = files("src", &["rs", "py"]).into_iter().chain(files("python/vramctl", &["rs", "py"]));
    let text: String = sources.map(|path| fs::read_to_string(path).unwrap()).collect();
    // Long texts go on in the next line, after a backslash in Rust and as another string in Python.
    let text: String = text.split('\n').map(str::trim).map(|line| line.strip_suffix('\\').unwrap_or(line)).collect();
    let text = text.replace("\"\"", "").replace("\"f\"", "");
    let page = fs::read_to_string(root().join("docs/troubleshooting.md")).unwrap();
    let messages = page.split("\n## Messages\n").nth(1).unwrap().split("\n## ").next().unwrap();
    let explained: Vec<_> = messages.split("**`").skip(1).map(|rest| rest.split('`').next().unwrap()).collect();
    assert!(explained.len() > 20, "only {} messages were found: is this test still looking?", explained.len());
    for message in explained {
        for part in message.split(['…', ':', ';', ',']).map(str::trim) {
            assert!(text.contains(part), "{message}: no message has {part:?}");
        }
    }
}

/// What a first try needs, said by the README and by the demo.
#[test]
fn the_demo_needs_what_the_readme_says() {
    let read = |file: &str| fs::read_to_string(root().join(file)).unwrap();
    let rust = read("Cargo.toml")
        .lines()
        .find_map(|line| line.strip_prefix("rust-version = ").map(|version| version.trim_matches('"').to_owned()))
        .unwrap();
    assert!(read("README.md").contains(&format!("From a checkout, you need Rust {rust} or later and a C compiler.")));
    assert!(read("scripts/demo").contains("Needs Rust and a C compiler, and nothing else on the simulated GPU."));
}

/// A chart's recorded figures are those of the table beside it.
#[test]
fn charts_have_the_figures_of_their_tables() {
    let read = |file: &str| fs::read_to_string(root().join("docs").join(file)).unwrap();
    let page = read("performance.md");
    let rows: Vec<Vec<_>> =
        page.lines().filter(|line| line.starts_with('|')).map(|line| line.split('|').map(str::trim).collect()).collect();
    let ms = |seconds: &serde_json::Value| format!("{:.0}", seconds.as_f64().unwrap() * 1000.0);
    let bench: serde_json::Value = serde_json::from_str(&read("pictures/bench.json")).unwrap();
    for (step, ours, theirs) in [
        ("first pause", "first", "first"),
        ("first pause, backup retained", "first_retained", "first"),
        ("later pause", "kept", "again"),
        ("later pause, backup retained", "steady", "steady"),
        ("resume", "resume_kept", "resume"),
        ("resume, backup retained", "resume_retained", "resume_retained"),
    ] {
        let wanted = [ms(&bench["seconds"]["vramctl"][ours]), ms(&bench["seconds"]["torch_memory_saver"][theirs])];
        let row = rows.iter().find(|row| row[2] == step).expect(step);
        let shown = [row[3], row[4]].map(|cell| cell.split(' ').next().unwrap().to_owned());
        assert_eq!(shown, wanted, "{step}");
    }
}
