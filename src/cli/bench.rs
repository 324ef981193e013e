//! stub
use super::Global;
use super::exit::Failed;
#[derive(Debug, clap::Subcommand)]
pub enum Verb {
    Allocate,
}
pub fn run(_: &Global, _: &Verb) -> Result<(), Failed> {
    Ok(())
}
