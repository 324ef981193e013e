//! The `holdfast` command.

fn main() -> std::process::ExitCode {
    holdfast::cli::main()
}
