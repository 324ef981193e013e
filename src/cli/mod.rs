//! The command line: verbs, output and exit codes.

pub mod who;
