//! Finds the library and the Python package: in a checkout, an unpacked archive, or where pip installs a wheel.

use std::env;
use std::fs;
use std::path::{self, Path, PathBuf};
use vramctl_coordinator::failure::{CommandError, Exit};

pub const LIBRARY: &str = "libvramctl.so";

/// `$VRAMCTL_LIB`, else beside this binary, else in `../lib`, else in the Python package that this binary came with.
pub fn library() -> Result<PathBuf, CommandError> {
    let candidates = chosen("VRAMCTL_LIB").map_or_else(|| with_binary(libraries), |path| vec![path]);
    find(&candidates, Path::is_file).ok_or_else(|| {
        let way_out = "build it with `cargo build --release`, or set VRAMCTL_LIB to its path";
        CommandError::new(Exit::Failed, format!("{LIBRARY} not found (looked for {}); {way_out}", list(&candidates)))
    })
}

/// The directories of the Python package that belong on `PYTHONPATH`: those of `$VRAMCTL_PYTHON`, else of the package that
/// this binary came with, else of the checkout that it was built in. Empty if there is no package; an error only if
/// `$VRAMCTL_PYTHON` names a missing one.
pub fn python_path() -> Result<Vec<PathBuf>, CommandError> {
    let folders = package()?.map_or_else(Vec::new, |package| ["site", "dropin"].map(|folder| package.join(folder)).into());
    Ok(folders.into_iter().filter(|folder| folder.is_dir()).collect())
}

/// The directory of the Python package, as in [`python_path`].
pub fn package() -> Result<Option<PathBuf>, CommandError> {
    let is_package = |path: &Path| path.join("__init__.py").is_file();
    match chosen("VRAMCTL_PYTHON") {
        Some(path) => find(&[path], is_package).ok_or_else(no_package).map(Some),
        None => Ok(find(&with_binary(packages), is_package)),
    }
}

/// The error for commands that need the package.
pub fn no_package() -> CommandError {
    let looked = list(&chosen("VRAMCTL_PYTHON").map_or_else(|| with_binary(packages), |path| vec![path]));
    let way_out = "install the wheel, or set VRAMCTL_PYTHON to the directory python/vramctl of a checkout";
    CommandError::new(Exit::Failed, format!("the Python package was not found (looked for {looked}); {way_out}"))
}

/// The path in an environment variable, unless it is empty.
fn chosen(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).filter(|path| !path.is_empty()).map(PathBuf::from)
}

fn with_binary(places: impl Fn(&Path) -> Vec<PathBuf>) -> Vec<PathBuf> {
    env::current_exe().map_or_else(|_| Vec::new(), |binary| places(&binary))
}

/// The first candidate that exists, as an absolute path, since the program may change its directory. Symbolic links are not
/// resolved: they work around paths with spaces.
fn find(candidates: &[PathBuf], is_there: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    candidates.iter().find(|path| is_there(path)).and_then(|path| path::absolute(path).ok())
}

fn list(candidates: &[PathBuf]) -> String {
    candidates.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn libraries(binary: &Path) -> Vec<PathBuf> {
    let folder = binary.parent();
    let lib = folder.and_then(Path::parent).map(|above| above.join("lib"));
    let beside = folder.map(Path::to_owned).into_iter().chain(lib);
    beside.chain(installed(binary)).map(|folder| folder.join(LIBRARY)).collect()
}

fn packages(binary: &Path) -> Vec<PathBuf> {
    // target/release/vramctl, or target/TRIPLE/release/vramctl.
    let target = binary.ancestors().find(|folder| folder.ends_with("target"));
    let checkout = target.and_then(Path::parent).map(|root| root.join("python/vramctl"));
    installed(binary).into_iter().chain(checkout).collect()
}

/// Where pip puts the package that this binary belongs to: `pip install --target`, then each Python of a prefix (a virtual
/// environment, `~/.local`, `/usr/local`), those with this binary's version first.
fn installed(binary: &Path) -> Vec<PathBuf> {
    let Some(prefix) = binary.parent().and_then(Path::parent) else { return Vec::new() };
    let mut sites = Vec::new();
    for lib in ["lib", "lib64"] {
        let pythons = fs::read_dir(prefix.join(lib)).into_iter().flatten().flatten().map(|entry| entry.path());
        let pythons =
            pythons.filter(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("python3")));
        sites.extend(pythons.flat_map(|python| [python.join("site-packages"), python.join("dist-packages")]));
    }
    sites.retain(|site| site.join("vramctl").is_dir());
    sites.sort();
    sites.sort_by_key(|site| !site.join(concat!("vramctl-", env!("CARGO_PKG_VERSION"), ".dist-info")).is_dir());
    [prefix.to_owned()].into_iter().chain(sites).map(|site| site.join("vramctl")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }

    #[test]
    fn the_library_lies_beside_the_binary_or_in_lib_or_in_a_package() {
        let wanted = ["/nowhere/bin/libvramctl.so", "/nowhere/lib/libvramctl.so", "/nowhere/vramctl/libvramctl.so"];
        assert_eq!(libraries(Path::new("/nowhere/bin/vramctl")), wanted.map(Path::new));
    }

    #[test]
    fn a_package_is_found_where_pip_puts_it() {
        let prefix = tempfile::tempdir().unwrap();
        let binary = prefix.path().join("bin/vramctl");
        let site = |python: &str| prefix.path().join("lib").join(python);
        for folder in ["python3.8/site-packages", "python3.12/site-packages", "python3.13/dist-packages"] {
            touch(&site(folder).join("vramctl/libvramctl.so"));
        }
        touch(&site("python3.9/site-packages/other/__init__.py"));
        touch(&site(&format!("python3.12/site-packages/vramctl-{}.dist-info/METADATA", env!("CARGO_PKG_VERSION"))));
        let found: Vec<_> = installed(&binary).iter().map(|path| path.strip_prefix(prefix.path()).unwrap().to_owned()).collect();
        let wanted = [
            "vramctl",
            "lib/python3.12/site-packages/vramctl",
            "lib/python3.13/dist-packages/vramctl",
            "lib/python3.8/site-packages/vramctl",
        ];
        assert_eq!(found, wanted.map(PathBuf::from), "the one with this version comes first, of those with a package");
    }

    #[test]
    fn a_checkouts_package_is_found_from_its_binaries() {
        for built in ["/c/target/debug/vramctl", "/c/target/x86_64-unknown-linux-gnu/release/vramctl"] {
            assert!(packages(Path::new(built)).contains(&PathBuf::from("/c/python/vramctl")), "{built}");
        }
        assert!(packages(Path::new("/usr/bin/vramctl")).iter().all(|path| path.starts_with("/usr")));
    }
}
