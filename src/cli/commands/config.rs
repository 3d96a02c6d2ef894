//! `vramctl config`.

use crate::execute::Execute;
use crate::settings::{Settings, keys};
use crate::ui::output;
use serde_json::json;
use vramctl_coordinator::failure::{CommandError, Exit};

#[derive(clap::Args)]
#[command(after_long_help = "\
Prints the settings that hold here, and where each comes from: the environment, else a [name.NAME] section, else ~/.config/vramctl.toml \
($XDG_CONFIG_HOME), else /etc/vramctl.toml. VRAMCTL_CONFIG names one file in place of both. A key is a variable of docs/settings.md without \
VRAMCTL_, in small letters; options of a command come before all of them. A mistake in a file is told with its line; `run` then refuses to start \
anything, other commands go on without that line.

Examples:
  vramctl config
  vramctl config engine   # for `vramctl run --name engine`
  vramctl config --all")]
pub struct Args {
    /// Also the sections of this name
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// Also the keys that are not set
    #[arg(long)]
    all: bool,
    /// Print JSON: {"settings": [{"key", "variable", "value", "from"}], "files": [{"path", "there"}], "mistakes": […]}
    #[arg(long)]
    json: bool,
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let settings = Settings::get();
        let shown: Vec<_> = settings
            .holding(self.name.as_deref())
            .into_iter()
            .map(|one| {
                let key = one.variable.trim_start_matches("VRAMCTL_").to_lowercase();
                let value = if one.variable.ends_with("_KEY") { "(set)".into() } else { one.value.to_string_lossy().into_owned() };
                (key, one.variable, value, one.from)
            })
            .collect();
        let mistakes: Vec<_> = settings.mistakes.iter().map(ToString::to_string).collect();
        if self.json {
            let setting =
                |(key, variable, value, from): &(_, _, _, _)| json!({ "key": key, "variable": variable, "value": value, "from": from });
            let file = |(path, there): &(std::path::PathBuf, bool)| json!({ "path": path, "there": there });
            let settings_: Vec<_> = shown.iter().map(setting).collect();
            let files: Vec<_> = settings.files.iter().map(file).collect();
            output::print(&format!("{}\n", json!({ "settings": settings_, "files": files, "mistakes": mistakes })))?;
        } else {
            let unset = keys().filter(|key| self.all && shown.iter().all(|(known, ..)| known != key));
            let unset: Vec<_> = unset.map(|key| vec![key, String::new(), "not set".into()]).collect();
            let rows: Vec<_> = shown.into_iter().map(|(key, _, value, from)| vec![key, value, from]).chain(unset).collect();
            let looked: Vec<_> = settings
                .files
                .iter()
                .map(|(path, is_there)| format!("{}{}", path.display(), if *is_there { "" } else { " (not there)" }))
                .collect();
            let table = if rows.is_empty() { "Nothing is set.".into() } else { output::table(&["SETTING", "VALUE", "FROM"], rows) };
            let files = if looked.is_empty() {
                "No file is read: VRAMCTL_CONFIG is empty.".into()
            } else {
                format!("Files: {}", looked.join(", "))
            };
            output::show(&format!("{table}\n\n{files}"))?;
            for mistake in &mistakes {
                output::complain("error", mistake);
            }
        }
        Ok(if mistakes.is_empty() { Exit::Done } else { Exit::Usage })
    }

    fn wants_json(&self) -> bool {
        self.json
    }

    fn tells_mistakes(&self) -> bool {
        true
    }
}
