//! The modules of a crate do not depend on each other in circles: neither its top-level modules nor those beside each other in a folder.
//! Found by a parser, so that no way to write an import is missed. And functions whose names ask something do not act.

use crate::{files, root};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
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
    files(folder, &["rs"]).into_iter().map(|path| (module(&path), syn::parse_file(&fs::read_to_string(&path).unwrap()).unwrap())).collect()
}

fn is_for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes
        .iter()
        .any(|attribute| attribute.path().is_ident("cfg") && quote::ToTokens::to_token_stream(attribute).to_string().contains("test"))
}

/// What a module names and has, as it is written.
#[derive(Default)]
struct Names {
    /// Paths, each as segments.
    paths: Vec<Vec<String>>,
    /// What it imports, by the name that this has here.
    imports: BTreeMap<String, Vec<String>>,
    /// The modules that it imports as a whole (`*`).
    globs: Vec<Vec<String>>,
    /// The items at its top.
    items: BTreeSet<String>,
}

impl Names {
    fn of(file: &syn::File) -> Self {
        let mut names = Self::default();
        names.visit_file(file);
        names.items = file.items.iter().filter_map(name_of).collect();
        names
    }

    fn tree(&mut self, mut before: Vec<String>, tree: &syn::UseTree) {
        match tree {
            syn::UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.tree(before, &path.tree);
            }
            syn::UseTree::Group(group) => group.items.iter().for_each(|tree| self.tree(before.clone(), tree)),
            syn::UseTree::Name(name) => self.import(before, &name.ident, &name.ident),
            syn::UseTree::Rename(name) => self.import(before, &name.ident, &name.rename),
            syn::UseTree::Glob(_) => {
                self.globs.push(before.clone());
                self.paths.push(before);
            }
        }
    }

    fn import(&mut self, mut path: Vec<String>, name: &syn::Ident, here: &syn::Ident) {
        let mut here = here.to_string();
        if name != "self" {
            path.push(name.to_string());
        } else if here == "self" {
            here = path.last().cloned().unwrap_or_default();
        }
        // `use name;` leads nowhere.
        if path != [here.as_str()] {
            self.imports.insert(here, path.clone());
        }
        self.paths.push(path);
    }

    /// Macros are tokens: every path in them counts, too.
    fn tokens(&mut self, tokens: proc_macro2::TokenStream) {
        let (mut path, mut colons) = (Vec::<String>::new(), 0);
        for token in tokens {
            match token {
                proc_macro2::TokenTree::Punct(mark) if mark.as_char() == ':' => colons += 1,
                proc_macro2::TokenTree::Ident(name) => {
                    if colons != 2 {
                        self.paths.push(std::mem::take(&mut path));
                    }
                    path.push(name.to_string());
                    colons = 0;
                }
                other => {
                    self.paths.push(std::mem::take(&mut path));
                    colons = 0;
                    if let proc_macro2::TokenTree::Group(group) = other {
                        self.tokens(group.stream());
                    }
                }
            }
        }
        self.paths.push(path);
    }
}

fn name_of(item: &syn::Item) -> Option<String> {
    let name = match item {
        syn::Item::Const(item) => &item.ident,
        syn::Item::Enum(item) => &item.ident,
        syn::Item::Fn(item) => &item.sig.ident,
        syn::Item::Static(item) => &item.ident,
        syn::Item::Struct(item) => &item.ident,
        syn::Item::Trait(item) => &item.ident,
        syn::Item::Type(item) => &item.ident,
        syn::Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(name.to_string())
}

impl<'ast> Visit<'ast> for Names {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.tree(Vec::new(), &item.tree);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.paths.push(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
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

/// The modules of a crate.
struct Tree {
    names: BTreeMap<Module, Names>,
    /// The modules that each imports as a whole.
    globs: BTreeMap<Module, Vec<Module>>,
}

/// How many imports of imports are followed: some lead in a circle.
const MOST_STEPS: usize = 16;

impl Tree {
    fn of(files: &BTreeMap<Module, syn::File>) -> Self {
        let names = files.iter().map(|(module, file)| (module.clone(), Names::of(file))).collect();
        let plain = Self { names, globs: BTreeMap::new() };
        let globs = |(module, names): (&Module, &Names)| {
            let found = names.globs.iter().filter_map(|glob| plain.find(glob, module, 0)).filter(|of| of != module);
            (module.clone(), found.collect())
        };
        let globs = plain.names.iter().map(globs).collect();
        Self { globs, ..plain }
    }

    /// The module that has what a path names from within a module, wherever it is imported or exported again. `None` if another crate has it.
    fn find(&self, path: &[String], within: &Module, steps: usize) -> Option<Module> {
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            _ if steps > MOST_STEPS => None,
            "crate" => self.walk(Module::new(), rest, steps),
            "super" => self.walk(within.split_last()?.1.to_vec(), rest, steps),
            "self" => self.walk(within.clone(), rest, steps),
            _ if self.offers(within, first, steps) => self.walk(within.clone(), path, steps),
            _ => None,
        }
    }

    /// The module that has what a path names from a module on.
    fn walk(&self, base: Module, path: &[String], steps: usize) -> Option<Module> {
        let Some((first, rest)) = path.split_first() else { return Some(base) };
        if first == "super" {
            return self.walk(base.split_last()?.1.to_vec(), rest, steps);
        }
        if self.names.contains_key(&child(&base, first)) {
            return self.walk(child(&base, first), rest, steps);
        }
        if let Some(import) = self.names[&base].imports.get(first) {
            let whole: Vec<_> = import.iter().chain(rest).cloned().collect();
            return self.find(&whole, &base, steps + 1);
        }
        let is_own = self.names[&base].items.contains(first);
        match self.globs.get(&base).into_iter().flatten().find(|of| !is_own && self.offers(of, first, steps + 1)) {
            Some(of) => self.walk(of.clone(), path, steps + 1),
            None => Some(base),
        }
    }

    /// Whether a module has this name: of an item, of a module in it, or of what it imports.
    fn offers(&self, module: &Module, name: &String, steps: usize) -> bool {
        let Names { items, imports, .. } = &self.names[module];
        let has = items.contains(name) || imports.contains_key(name) || self.names.contains_key(&child(module, name));
        has || steps <= MOST_STEPS && self.globs.get(module).into_iter().flatten().any(|of| self.offers(of, name, steps + 1))
    }
}

fn child(module: &Module, name: &str) -> Module {
    module.iter().cloned().chain([name.to_owned()]).collect()
}

/// Modules beside each other that depend on each other, as text.
fn circles(files: &BTreeMap<Module, syn::File>) -> Vec<String> {
    let tree = Tree::of(files);
    // By folder, then by module in it: the modules beside it that it uses.
    let mut uses = BTreeMap::<Module, BTreeMap<String, BTreeSet<String>>>::new();
    for (module, names) in &tree.names {
        for used in names.paths.iter().filter_map(|path| tree.find(path, module, 0)) {
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
        let root = file("mod one; mod two; pub use two::Again; pub use two::deep::*;");
        let deep = vec!["two".to_owned(), "deep".into()];
        let two = file("use crate::one::One; pub mod deep;");
        BTreeMap::from([(vec![], root), (vec!["one".into()], file(there)), (vec!["two".into()], two), (deep, file("pub struct Deep;"))])
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
        "use crate as root; fn one() { root::two::two() }",
        "use super as above; fn one() { println!(\"{}\", above::two::two()) }",
        "use crate::Again;",
        "use crate::Deep;",
        "use crate::*; fn one(it: Deep) {}",
        "use super::*; fn one() { two::two() }",
        "fn one() { println!(\"{}\", crate::Again::new()) }",
    ] {
        assert_eq!(circles(&there(text)), ["in the root: one, two"], "{text}");
    }
    for text in [
        "use std::two;",
        "#[cfg(test)] mod tests { use crate::two::Two; }",
        "// crate::two",
        "use crate::Elsewhere;",
        "use super::*; fn one(it: Two) {}",
        "use std::deep; fn one() { deep::Deep::new() }",
        "struct Deep; fn one(it: Deep) {}",
    ] {
        assert!(circles(&there(text)).is_empty(), "{text}");
    }
}

/// Functions whose names ask something (`is_`, `has_`, `are_`), although they may change what they are asked of, or have no answer.
fn acting_predicates(file: &syn::File) -> Vec<String> {
    struct Predicates(Vec<String>);
    impl<'ast> Visit<'ast> for Predicates {
        fn visit_signature(&mut self, function: &'ast syn::Signature) {
            let name = function.ident.to_string();
            let changes_self = function.receiver().is_some_and(|own| own.reference.is_some() && own.mutability.is_some());
            let has_no_answer = matches!(function.output, syn::ReturnType::Default);
            if ["is_", "has_", "are_"].iter().any(|asks| name.starts_with(asks)) && (changes_self || has_no_answer) {
                self.0.push(name);
            }
        }
    }
    let mut found = Predicates(Vec::new());
    found.visit_file(file);
    found.0
}

#[test]
fn a_function_that_acts_has_a_verb_for_a_name() {
    /// These ask the client, over its connection.
    const KNOWN: [&str; 2] = ["is_gone", "is_wanted"];
    let files = files("src", &["rs"]).into_iter();
    let found: Vec<_> = files
        .flat_map(|path| {
            let found = acting_predicates(&syn::parse_file(&fs::read_to_string(&path).unwrap()).unwrap());
            found.into_iter().filter(|name| !KNOWN.contains(&&**name)).map(move |name| format!("{}: {name}", path.display()))
        })
        .collect();
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn a_predicate_that_acts_is_found() {
    let found = |text: &str| acting_predicates(&syn::parse_file(text).unwrap());
    assert_eq!(found("impl One { fn is_closed(&mut self) -> bool { true } }"), ["is_closed"]);
    assert_eq!(found("trait One { fn are_saved(&self); } fn has_waited() {}"), ["are_saved", "has_waited"]);
    assert!(
        found("impl One { fn is_open(&self) -> bool { true } fn close(&mut self) {} fn is_own(mut self) -> bool { true } }").is_empty()
    );
}
