//! Telemetry: logs, the one table of metrics, what is counted of it, and the HTTP that serves them;
//! and the labels of the node.

pub mod door;
pub mod exposition;
pub mod http;
pub mod labels;
mod log_writer;
pub mod logging;
pub mod metrics;
mod pace;
mod press;
pub mod table;
mod thread;
mod token;
mod visit;

pub use press::Subject;
pub use token::Token;
pub use visit::Visit;
