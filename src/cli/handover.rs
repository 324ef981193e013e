//! `holdfast handover`: the running daemon starts this binary and hands over to it.

use crate::admin::{ControlError, Installed, Upgrade, ask_to_hand_over};
use crate::console::exit::{FAILURE, Failed};
use crate::console::text::Text;
use crate::console::{Global, START_IT, block_on, show};

/// Sends the request, and waits until the new instance serves.
///
/// # Errors
/// When no daemon runs, or when the handover fails and the running daemon continues. The error
/// contains the reason.
pub fn run(global: &Global) -> Result<(), Failed> {
    let upgrade = Upgrade { executable: std::env::current_exe()? };
    let installed =
        block_on(ask_to_hand_over(&global.run_dir, &upgrade))?.map_err(|error| match error {
            ControlError::Absent { .. } => {
                Failed::new(FAILURE, format_args!("{error}; no instance can hand over: {START_IT}"))
            }
            ControlError::Failed { why, .. } => {
                Failed::new(FAILURE, format_args!("the handover failed: {why}"))
            }
        })?;
    show(global.output, &installed, |Installed { from, to, pid }| {
        Text::of_line(format_args!("handed over from {from} to {to} (process {pid})"))
    })
}
