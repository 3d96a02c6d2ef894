//! What all commands are to `main`.

use vramctl_coordinator::failure::{CommandError, Exit};

/// A command, as its arguments say it.
pub trait Execute {
    /// Does it. What it prints on success, it prints itself.
    fn execute(&self) -> Result<Exit, CommandError>;

    /// Whether its failure is printed as JSON.
    fn wants_json(&self) -> bool {
        false
    }

    /// Whether it asks the driver about checkpoints of other processes, which may be on a GPU that `CUDA_VISIBLE_DEVICES` hides.
    fn drives_checkpoints(&self) -> bool {
        false
    }

    /// The name of the program that it becomes or starts: the settings of that name hold for it.
    fn program_name(&self) -> Option<String> {
        None
    }

    /// Whether it says itself what is wrong in the files of settings.
    fn tells_mistakes(&self) -> bool {
        false
    }

    /// Whether the program that it becomes has this process's limits.
    fn becomes_program(&self) -> bool {
        false
    }
}
