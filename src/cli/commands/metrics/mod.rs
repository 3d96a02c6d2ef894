//! `vramctl metrics`: the processes' memory and operations, for Prometheus.

mod families;
mod serve;

use crate::everybody::EverybodyArgs;
use crate::execute::Execute;
use crate::ledger;
use crate::ui::output;
use std::fs::{self, OpenOptions, Permissions};
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::Instant;
use std::{io, process};
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::processes::{Found, Target};
use vramctl_driver::keep_nvml;

#[derive(clap::Args)]
#[command(after_long_help = "\
Prints all metrics once, in Prometheus' text format. With --listen it serves them at /metrics until it is stopped. With --textfile it \
writes them to a file for node_exporter's textfile collector, which never sees half of a file.

docs/monitoring.md lists the metrics; grafana/vramctl.json is a Grafana dashboard.

Examples:
  vramctl metrics | grep paused
  vramctl metrics --listen 9977         # for a Prometheus on this machine
  vramctl metrics --listen 0.0.0.0:9977 # for all who can reach this machine
  vramctl metrics --textfile /var/lib/prometheus/node-exporter/vramctl.prom")]
pub struct Args {
    /// Serve the metrics over HTTP, at this port of 127.0.0.1 or at ADDRESS:PORT; port 0 takes any free one
    #[arg(long, value_name = "[ADDRESS:]PORT", value_parser = address)]
    listen: Option<SocketAddr>,
    /// Write the metrics to this file, replacing it in one step
    #[arg(long, value_name = "PATH", conflicts_with = "listen")]
    textfile: Option<PathBuf>,
    #[command(flatten)]
    everybody: EverybodyArgs,
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        match (self.listen, &self.textfile) {
            (Some(address), _) => {
                keep_nvml([]);
                serve::serve(address, &|| self.page().map_err(|failure| failure.to_string()))
            }
            (None, Some(path)) => replace(path, &self.page()?)
                .map(|()| Exit::Done)
                .map_err(|error| CommandError::new(Exit::Failed, format!("cannot write {}: {error}", path.display()))),
            (None, None) => output::print(&self.page()?).map(|()| Exit::Done),
        }
    }
}

impl Args {
    fn page(&self) -> Result<String, CommandError> {
        let begun = Instant::now();
        let others = self.everybody.look()?;
        let mut processes = Found::look(&Target::All)?.processes;
        processes.extend(others.iter().flat_map(|others| others.processes.clone()));
        let ledgers = ledger::take(&processes, &[]).unwrap_or_else(|none| {
            static WARNED: Once = Once::new();
            WARNED.call_once(|| output::complain("warning", &format!("the metrics of the GPUs are missing: {none}")));
            Vec::new()
        });
        // A scheduler that does not answer is no reason to have no page.
        let sharing = vramctl_keeper::ask().ok().flatten();
        Ok(families::page(&ledgers, &processes, others.as_ref(), sharing.as_ref(), begun))
    }
}

/// Replaces a file atomically. The collector may be another user who can write to the folder, so a file that already exists under the
/// temporary name is never written to.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    // A rename would put a file in the place of a device, such as /dev/null, or of a link.
    if fs::symlink_metadata(path).is_ok_and(|there| !there.is_file()) {
        let why = "it is no plain file, but a link, a device or a folder. Give the path of the file itself; without --textfile, the metrics go to stdout";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    // Not `….prom`: the collector reads those.
    let mut name = path.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not the path of a file"))?.to_owned();
    name.push(format!(".{}.new", process::id()));
    let new = path.with_file_name(name);
    // Left behind by a killed process with the same pid.
    let _ = fs::remove_file(&new);
    let mut file = OpenOptions::new().write(true).create_new(true).open(&new)?;
    let written = file
        .write_all(text.as_bytes())
        .and_then(|()| file.set_permissions(Permissions::from_mode(0o644)))
        .and_then(|()| fs::rename(&new, path));
    written.inspect_err(|_| _ = fs::remove_file(&new))
}

/// An address to listen at.
fn address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(port) = text.parse::<u16>() {
        return Ok(([127, 0, 0, 1], port).into());
    }
    text.parse().map_err(|_| "not a port, and not an address with a port, such as 127.0.0.1:9977, 0.0.0.0:9977 or [::1]:9977".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_listen_on_localhost_by_default() {
        assert_eq!(address("9977"), Ok("127.0.0.1:9977".parse().unwrap()));
        assert_eq!(address("0.0.0.0:1"), Ok("0.0.0.0:1".parse().unwrap()));
        assert_eq!(address("[::1]:1"), Ok("[::1]:1".parse().unwrap()));
        for wrong in ["", ":9977", "localhost", "65536", "-1", "1.2.3.4"] {
            assert!(address(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_file_is_replaced_as_a_whole_and_nothing_is_left_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vramctl.prom");
        for text in ["first\n", "second\n"] {
            replace(&path, text).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
        // A link that somebody else has put under the temporary name is not followed.
        let (other, link) = (folder.path().join("other"), folder.path().join(format!("vramctl.prom.{}.new", process::id())));
        fs::write(&other, "theirs").unwrap();
        std::os::unix::fs::symlink(&other, &link).unwrap();
        replace(&path, "third\n").unwrap();
        assert_eq!((fs::read_to_string(&other).unwrap(), fs::read_to_string(&path).unwrap()), ("theirs".into(), "third\n".into()));
        assert!(!path.is_symlink());
        fs::remove_file(other).unwrap();
        // What is no file, and may be in use as something else, stays what it is.
        let (link, pipe) = (folder.path().join("link"), folder.path().join("pipe"));
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let name = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
        // SAFETY: the name ends with NUL.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        for other in [&link, &pipe] {
            assert!(replace(other, "x").unwrap_err().to_string().contains("no plain file"));
        }
        assert!(link.is_symlink() && !pipe.is_file());
        for other in [link, pipe] {
            fs::remove_file(other).unwrap();
        }
        // A folder cannot be replaced by a file.
        let taken = folder.path().join("taken");
        fs::create_dir(&taken).unwrap();
        assert!(replace(&taken, "x").is_err() && replace(Path::new("/"), "x").is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
