//! `vramctl images`.

use crate::execute::Execute;
use crate::ui::output;
use clap::Subcommand;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_images::store::{self, Store, Summary};
use vramctl_images::store_failure;
use vramctl_model::Bytes;

#[derive(clap::Args)]
#[command(after_long_help = "\
Examples:
  vramctl images /images                # what is there, and how large
  vramctl images /images verify llama   # read all of it, compare the hashes
  vramctl images /images rm llama       # its pieces go with the next gc
  vramctl images /images gc
  vramctl images /images export llama /mnt/usb/images")]
pub struct Args {
    /// The directory of images
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    #[command(subcommand)]
    action: Option<Action>,
    /// Print JSON: {"images": [{"name", "gpus", "bytes": {"process", "contents", "stored", "shared"}, …}]}
    #[arg(long)]
    json: bool,
}

#[derive(Subcommand)]
enum Action {
    /// Remove an image
    Rm {
        /// The image
        name: String,
    },
    /// Read an image and compare all hashes; exit code 1 if it is damaged
    Verify {
        /// The image
        name: String,
    },
    /// Remove pieces that no image has, and what killed saves have left
    Gc,
    /// Copy an image with its pieces to another directory of images
    Export {
        /// The image
        name: String,
        /// The other directory, made if it is not there
        to: PathBuf,
    },
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let store = Store::open(&self.directory).map_err(store_failure)?;
        let Some(action) = &self.action else {
            let images = store.images().map_err(store_failure)?;
            return output::told(self.list(&images), Exit::Done);
        };
        let (text, exit) = act(&store, action).map_err(store_failure)?;
        output::told(output::say(&text), exit)
    }

    fn wants_json(&self) -> bool {
        self.json
    }
}

impl Args {
    fn list(&self, images: &[Summary]) -> Result<(), CommandError> {
        if self.json {
            let images: Vec<_> = images.iter().map(as_json).collect();
            return output::print(&format!("{}\n", json!({ "images": images })));
        }
        if images.is_empty() {
            return output::say(&format!("no images in {}", self.directory.display()));
        }
        let header = ["NAME", "PROCESS", "CONTENTS", "STORED", "SHARED", "AGE", "GPUS", "DRIVER"];
        output::show(&output::table(&header, images.iter().map(row)))
    }
}

fn row(image: &Summary) -> Vec<String> {
    let Ok(manifest) = &image.manifest else {
        return vec![image.name.clone(), "damaged".into()];
    };
    let age = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs().saturating_sub(manifest.saved_at);
    let days = match age / 3600 {
        0 => format!("{} min", age / 60),
        hours @ ..48 => format!("{hours} h"),
        hours => format!("{} d", hours / 24),
    };
    let sizes = [image.files, image.contents, image.stored, image.shared].map(|bytes| Bytes(bytes).to_string());
    let cuda = manifest.more.get("process").and_then(|details| details["cuda"].as_str()).unwrap_or_default();
    let last = [days, manifest.gpus.len().to_string(), format!("CUDA {cuda}")];
    [image.name.clone()].into_iter().chain(sizes).chain(last).collect()
}

fn as_json(image: &Summary) -> Value {
    let bytes = json!({"process": image.files, "contents": image.contents, "stored": image.stored, "shared": image.shared});
    match &image.manifest {
        Ok(manifest) => {
            let gpus: Vec<_> = manifest.gpus.iter().map(|gpu| &gpu.uuid).collect();
            json!({"name": image.name, "saved_at": manifest.saved_at, "gpus": gpus, "bytes": bytes})
        }
        Err(error) => json!({"name": image.name, "error": error.to_string()}),
    }
}

fn act(store: &Store, action: &Action) -> store::Result<(String, Exit)> {
    /// How long `gc` waits for saves and loads.
    const PATIENCE: Duration = Duration::from_secs(60);
    match action {
        Action::Rm { name } => store.remove(name).map(|()| (format!("removed {name}; `gc` frees its pieces"), Exit::Done)),
        Action::Verify { name } => {
            let found = store.inspect(name)?.verify()?;
            let errors: Vec<_> = found.errors.iter().map(ToString::to_string).collect();
            Ok(match errors.as_slice() {
                [] => (format!("{name} is whole: {} read", Bytes(found.bytes)), Exit::Done),
                errors => (errors.join("\n"), Exit::Failed),
            })
        }
        Action::Gc => {
            let cleaned = store.gc(PATIENCE)?;
            let freed = format!("freed {} in {} packs", Bytes(cleaned.freed), cleaned.packs);
            let left = cleaned.left.iter().map(|error| format!("left: {error}"));
            Ok(([freed].into_iter().chain(left).collect::<Vec<_>>().join("\n"), Exit::Done))
        }
        Action::Export { name, to } => {
            let written = store.export(name, to)?;
            Ok((format!("exported {name}: {} written", Bytes(written.stored())), Exit::Done))
        }
    }
}
