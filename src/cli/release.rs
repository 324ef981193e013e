//! `holdfast release`: releases a claim that no proof ends.

use crate::admin::{ControlError, ReleaseOrder, release_claim};
use crate::console::exit::{FAILURE, Failed};
use crate::console::text::Text;
use crate::console::{Global, START_IT, block_on, show};
use crate::domain::ClaimRef;
use clap::Args;
use serde::Serialize;

/// Options of the verb.
#[derive(Debug, Args)]
pub struct Options {
    /// The `ResourceClaim`: its namespace and name as in ml/train, or its UID
    #[arg(long, value_name = "CLAIM", value_parser = crate::console::non_empty)]
    claim: String,
    /// Also release a claim whose pods are not known. First make sure that no container has its
    /// devices
    #[arg(long)]
    force: bool,
}

/// The document of `release -o json`.
#[derive(Debug, Serialize)]
struct Document {
    schema: u32,
    claim: ClaimRef,
}

/// Makes the running daemon release the claim.
///
/// # Errors
/// When no daemon runs, when the claim may be in use, or when the release cannot be recorded.
pub fn run(global: &Global, options: &Options) -> Result<(), Failed> {
    let order = ReleaseOrder { claim: options.claim.clone(), force: options.force };
    let claim = block_on(release_claim(&global.run_dir, &order))?.map_err(|error| match error {
        ControlError::Absent { .. } => {
            let why = format_args!("{error}; only a daemon releases a claim: {START_IT}");
            Failed::new(FAILURE, why)
        }
        ControlError::Failed { .. } => Failed::new(FAILURE, error),
    })?;
    show(global.output, &Document { schema: 1, claim: claim.clone() }, |_| {
        Text::of_line(format_args!("claim {claim} is released: its devices are free"))
    })
}
