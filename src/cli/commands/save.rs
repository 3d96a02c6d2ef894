//! `vramctl save`.

use crate::arguments::{BackupArgs, HoldTimeoutArgs};
use crate::candidates;
use crate::execute::Execute;
use crate::ui::Ui;
use crate::ui::interrupt;
use crate::ui::output;
use clap_complete::ArgValueCandidates;
use serde_json::json;
use std::path::PathBuf;
use vramctl_coordinator::deadline::Deadline;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::operation::{Hold, HowToPause};
use vramctl_coordinator::processes::Target;
use vramctl_coordinator::{Operation, Scope};
use vramctl_images::{HowToSave, Save};
use vramctl_model::{PauseOptions, Verb};

#[derive(clap::Args)]
#[command(after_long_help = "\
Suspends the program as `vramctl suspend` does, and writes it to a directory: the contents of its GPU memory, and with CRIU the process \
and all that came of it. Then it ends; with --keep it goes on. `vramctl load` starts it again, as often as wanted.

An idle inference engine (vLLM, SGLang) resets its prefix cache, and what is in its KV cache is not in the image, if it was started with \
`vramctl run --image` or `--share`. With --keep-cache, it is.

Needs root and CRIU 4.1 or later (VRAMCTL_CRIU, else on the PATH). A program that cannot be saved is refused with exit code 7, and nothing \
changes: the message names what is in the way, such as an io_uring, or a forked child with its parent's GPU files. Connections to outside \
are named, and are not in the image.

An image has all of the program's memory in it, and so its secrets. Only its owner and root can read it.

Examples:
  vramctl save engine /images/llama
  vramctl save engine /images/llama --keep
  vramctl load /images/llama --name e1")]
#[allow(clippy::struct_excessive_bools)] // independent options
pub struct Args {
    /// The program, by name, or the id of its first process
    #[arg(value_name = "NAME", add = ArgValueCandidates::new(candidates::targets))]
    process: String,
    /// The directory to make
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Have the program go on afterwards
    #[arg(long)]
    keep: bool,
    /// Read the image back; the program ends only if all is as it was written
    #[arg(long)]
    verify: bool,
    /// Put files that the program writes other than by appending into the image, too: each loaded program gets its own copies, in memory
    #[arg(long)]
    copy_files: bool,
    /// Keep the KV cache of an idle inference engine, too
    #[arg(long)]
    keep_cache: bool,
    #[command(flatten)]
    backup: BackupArgs,
    #[command(flatten)]
    hold: HoldTimeoutArgs,
    /// Print JSON: {"bytes": {"contents", "written", "process"}, "stages": {…}}
    #[arg(long)]
    json: bool,
    /// Print errors and warnings only
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let ui = Ui::new(self.json, self.quiet);
        let how = HowToSave { keeps: self.keep, verifies: self.verify, copies_files: self.copy_files };
        let save = Save::plan(&self.operation(), &self.directory, how, &ui)?;
        interrupt::hold();
        interrupt::watch(|| {
            output::complain("interrupted", "the image is not complete; `vramctl resume` brings the program back");
        });
        let saved = save.run(&ui)?;
        if self.json {
            let stages: serde_json::Map<_, _> =
                saved.stages.iter().map(|(stage, took)| ((*stage).to_owned(), json!(took.as_secs_f64() * 1e3))).collect();
            let bytes = json!({"contents": saved.contents_bytes, "written": saved.written_bytes, "process": saved.process_bytes});
            return output::told(output::print(&format!("{}\n", json!({"bytes": bytes, "stages": stages}))), Exit::Done);
        }
        let said = if self.quiet { Ok(()) } else { output::say(&saved.to_string()) };
        output::told(said, Exit::Done)
    }

    fn wants_json(&self) -> bool {
        self.json
    }

    fn drives_checkpoints(&self) -> bool {
        true
    }
}

impl Args {
    fn operation(&self) -> Operation {
        let options = PauseOptions { backup: self.backup.policy(), forgets_cache: !self.keep_cache, ..PauseOptions::default() };
        let pause = HowToPause { options, hold: Hold::Within(self.hold.hold_timeout), ..HowToPause::default() };
        Operation::new(Verb::Pause, Target::parse(self.process.clone()), Scope::Device, Deadline::new(None), pause)
    }
}
