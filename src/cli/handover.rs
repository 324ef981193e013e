//! `holdfast handover`: the running daemon starts this binary in its own place and hands over to it.

use super::exit::{FAILURE, Failed};
use super::text::Text;
use super::{Global, block_on, show};
use crate::app::{ControlError, Installed, Upgrade, ask_to_hand_over};

/// Asks, and waits until the other instance serves.
///
/// # Errors
/// When there is no daemon, or when it goes on by itself, and why.
pub fn run(global: &Global) -> Result<(), Failed> {
    let upgrade = Upgrade { executable: std::env::current_exe()? };
    let installed = block_on(ask_to_hand_over(&global.run_dir, &upgrade))?.map_err(|error| match error {
        ControlError::Absent { .. } => Failed::new(FAILURE, format_args!("{error}; there is nothing to be handed over")),
        ControlError::Failed { why, .. } => Failed::new(FAILURE, format_args!("no handover: {why}")),
    })?;
    show(global.output, &installed, |Installed { from, to, pid }| {
        Text::of_line(format_args!("handed over from {from} to {to} (process {pid})"))
    })
}
