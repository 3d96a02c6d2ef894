//! The modules of a crate do not depend on each other in circles: neither its top-level modules nor those beside each other in a folder.
//! Found by a parser, so that no way to write an import is missed.

use crate::{files, root};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use syn::visit::{self, Visit};

/// A module's path in its crate; the crate root is empty.
type Module = Vec<String>;

/// The files of a crate, by module.
fn modules(folder: &str) -> BTreeMap<Module, syn::File> {
    let root = root().join(folder);
    let module = |path: &Path| {
        let mut parts: Module = path.strip_prefix(&root).unwrap().iter().map(|part| part.to_str().unwrap().to_owned()).collect();
        let last = parts.pop().unwrap();
        if !matches!(&*last, "mod.rs" | "lib.rs" | "main.rs") {
            parts.push(last.trim_end_matches(".rs").to_owned());
        }
        parts
    };
    let parse = |path: PathBuf| (module(&path), syn::parse_file(&fs::read_to_string(&path).unwrap()).unwrap());
    files(folder, &["rs"]).into_iter().map(parse).collect()
}

fn is_for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes
        .iter()
        .any(|attribute| attribute.path().is_ident("cfg") && quote::ToTokens::to_token_stream(attribute).to_string().contains("test"))
}

/// Collects the paths that a module names, each as segments.
struct Names(Vec<Vec<String>>);

impl Names {
    fn tree(&mut self, mut before: Vec<String>, tree: &syn::UseTree) {
        match tree {
            syn::UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.tree(before, &path.tree);
            }
            syn::UseTree::Group(group) => group.items.iter().for_each(|tree| self.tree(before.clone(), tree)),
            syn::UseTree::Name(name) => self.name(before, &name.ident),
            syn::UseTree::Rename(name) => self.name(before, &name.ident),
            syn::UseTree::Glob(_) => self.0.push(before),
        }
    }

    fn name(&mut self, mut before: Vec<String>, name: &syn::Ident) {
        if name != "self" {
            before.push(name.to_string());
        }
        self.0.push(before);
    }

    /// Macros are tokens: every `crate::…` in them counts, too.
    fn tokens(&mut self, tokens: proc_macro2::TokenStream) {
        let mut path: Vec<String> = Vec::new();
        for token in tokens {
            match token {
                proc_macro2::TokenTree::Ident(name) if path.is_empty() && !(name == "crate" || name == "super") => (),
                proc_macro2::TokenTree::Ident(name) => path.push(name.to_string()),
                proc_macro2::TokenTree::Punct(mark) if mark.as_char() == ':' => (),
                proc_macro2::TokenTree::Group(group) => {
                    self.0.push(std::mem::take(&mut path));
                    self.tokens(group.stream());
                }
                _ => self.0.push(std::mem::take(&mut path)),
            }
        }
        self.0.push(path);
    }
}

impl<'ast> Visit<'ast> for Names {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.tree(Vec::new(), &item.tree);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.0.push(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        self.tokens(item.tokens.clone());
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        // What a module in the same file says of `super` is this module itself.
        if !is_for_tests(&item.attrs) && item.content.is_none() {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attributes = match item {
            syn::Item::Use(item) => &item.attrs,
            syn::Item::Fn(item) => &item.attrs,
            syn::Item::Impl(item) => &item.attrs,
            _ => return visit::visit_item(self, item),
        };
        if !is_for_tests(attributes) {
            visit::visit_item(self, item);
        }
    }
}

/// The module that a path names, from within a module; `None` if it is another crate's.
fn resolve(path: &[String], within: &Module, known: &BTreeSet<Module>) -> Option<Module> {
    let (mut base, mut rest) = match path.first()?.as_str() {
        "crate" => (Module::new(), &path[1..]),
        "super" => (within.split_last()?.1.to_vec(), &path[1..]),
        "self" => (within.clone(), &path[1..]),
        _ => return None,
    };
    while let [first, more @ ..] = rest {
        match first.as_str() {
            "super" => _ = base.pop(),
            name => {
                base.push(name.to_owned());
                if !known.contains(&base) {
                    base.pop();
                    break;
                }
            }
        }
        rest = more;
    }
    Some(base)
}

/// Modules beside each other that depend on each other, as text.
fn circles(files: &BTreeMap<Module, syn::File>) -> Vec<String> {
    let known: BTreeSet<_> = files.keys().cloned().collect();
    // By folder, then by module in it: the modules beside it that it uses.
    let mut uses = BTreeMap::<Module, BTreeMap<String, BTreeSet<String>>>::new();
    for (module, file) in files {
        let mut names = Names(Vec::new());
        names.visit_file(file);
        for used in names.0.iter().filter_map(|path| resolve(path, module, &known)) {
            let common = module.iter().zip(&used).take_while(|(one, other)| one == other).count();
            if let (Some(from), Some(to)) = (module.get(common), used.get(common)) {
                uses.entry(module[..common].to_vec()).or_default().entry(from.clone()).or_default().insert(to.clone());
            }
        }
    }
    let mut found = Vec::new();
    for (folder, graph) in &uses {
        let reach = |start: &String| {
            let (mut seen, mut stack) = (BTreeSet::new(), vec![start]);
            while let Some(one) = stack.pop() {
                for to in graph.get(one).into_iter().flatten() {
                    if seen.insert(to.clone()) {
                        stack.push(to);
                    }
                }
            }
            seen
        };
        let circular: Vec<_> = graph.keys().filter(|module| reach(module).contains(*module)).cloned().collect();
        if !circular.is_empty() {
            found.push(format!("in {}: {}", if folder.is_empty() { "the root".into() } else { folder.join("::") }, circular.join(", ")));
        }
    }
    found
}

#[test]
fn no_modules_depend_on_each_other_in_circles() {
    let crates = fs::read_dir(root().join("src")).unwrap().map(|entry| entry.unwrap()).filter(|entry| entry.path().is_dir());
    let found: Vec<_> = crates
        .flat_map(|entry| {
            let folder = format!("src/{}", entry.file_name().display());
            circles(&modules(&folder)).into_iter().map(move |text| format!("{folder} {text}"))
        })
        .collect();
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// However it is written.
#[test]
fn a_circle_is_found() {
    let file = |text: &str| syn::parse_file(text).unwrap();
    let there = |there: &str| {
        let root = file("mod one; mod two;");
        BTreeMap::from([(vec![], root), (vec!["one".into()], file(there)), (vec!["two".into()], file("use crate::one::One;"))])
    };
    for text in [
        "use crate::two::Two;",
        "use crate::{two};",
        "use crate::{two::{Two}};",
        "use super::two;",
        "use crate::two as other;",
        "fn one() { crate::two::two() }",
        "fn one(two: super::two::Two) {}",
        "fn one() { println!(\"{}\", crate::two::two()) }",
    ] {
        assert_eq!(circles(&there(text)), ["in the root: one, two"], "{text}");
    }
    for text in ["use std::two;", "#[cfg(test)] mod tests { use crate::two::Two; }", "// crate::two"] {
        assert!(circles(&there(text)).is_empty(), "{text}");
    }
}
