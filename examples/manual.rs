//! Writes the manual pages (`man1/`) and the completions of bash, zsh and fish into a directory,
//! generated from the command line: `cargo run --example manual -- DIRECTORY`. Package builds use
//! it; the daemon does not contain it.

use clap_complete::Shell;
use std::path::PathBuf;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let folder = env::args_os()
        .nth(1)
        .map(PathBuf::from)
        .ok_or_else(|| io::Error::other("the directory is missing; usage: manual DIRECTORY"))?;
    let (manual, completions) = (folder.join("man1"), folder.join("completions"));
    fs::create_dir_all(&manual)?;
    fs::create_dir_all(&completions)?;
    let command = holdfast::cli::command();
    clap_mangen::generate_to(command.clone(), &manual)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut command.clone(), "holdfast", &completions)?;
    }
    Ok(())
}
