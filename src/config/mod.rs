//! The configuration: TOML files and drop-ins, merged and validated.
//!
//! | part | its work |
//! | --- | --- |
//! | `parse` `tree` `write` | a file as a tree of values that know their place, and back as text |
//! | `merge` | checks each part of a file separately, so that every error is one sentence |
//! | | with its place; then merges `config.toml`, the drop-ins of `config.d/` by name, and the |
//! | | sections for this `node`: a later key wins, resources add up |
//! | `files` | the main file and its drop-ins |
//! | `preset` | a name in place of the keys of a resource |
//! | `condition` | which nodes a section is for, by their hardware and labels |
//! | `labels` | the file with the node's labels, and the copy of those of the API server |
//! | `effective` | the result as TOML again |
//! | `fragments` `path_entries` | the keys of a file, read by `typed` |
//! | `validate` `resource` `paths` | turn them into a [`Config`] |
//! | `validated` | the [`Config`] itself |
//! | `contract` | validates the options of a contract |
//! | `api` | validates which resources can be given to claims |
//! | `sharing` | validates how many containers share a device |
//! | `health` | validates the policy of device health |
//! | `text` | validates text that reaches a container or a program unchanged |
//! | `keys` | every key with its default |
//! | `import` | converts another plugin's file to ours |
//! | `change` | compares two configurations |

mod api;
mod change;
mod condition;
mod contract;
mod effective;
mod error;
mod files;
mod fragments;
mod health;
mod hooks;
pub mod import;
mod keys;
mod labels;
mod merge;
mod node;
mod parse;
mod path_entries;
mod paths;
mod preset;
mod resource;
mod section;
mod sharing;
mod telemetry;
mod text;
mod tree;
mod typed;
mod validate;
mod validated;
mod write;

#[cfg(test)]
mod tests;

pub use change::{Change, ResourceChange};
pub use effective::{Origin, Shown};
pub use error::ConfigError;
pub use files::read_file;
pub use labels::{ComparedLabels, Labels, copied_labels, copy_of_labels};
pub use merge::{Examined, PROBLEMS_MAX, load};
pub use node::{Node, keep_name};
pub use section::Section;
pub(crate) use validated::POD_RESOURCES;
pub use validated::{Config, DEFAULT_PATH, Roots};
