//! The picture of a node: the place of its devices on PCI Express, their health, and their holders.
//!
//! ```text
//!  devices, health, grants ─ Leaf ─ tree ─▶ Part (printed by `topology -o json`)
//!  Part ─ fold ─▶ Figure ─▶ svg, or the lines of a verb
//! ```
//!
//! Everything here is a function of its arguments. The tree has every device. A figure omits
//! uninformative parts: bridges with one entry below them, and the fortieth virtual function that
//! equals the thirty-nine before it.

mod fold;
mod holder;
mod leaf;
pub mod markup;
mod part;
pub mod svg;
#[cfg(test)]
pub(crate) mod testing;
mod tree;

pub use fold::{Alike, Figure, Shown, fold};
pub use holder::{Holder, holders};
pub use leaf::Leaf;
pub use part::{Count, Cpus, Kind, Part, Picture};
pub use tree::tree;
