//! Telemetry: logs, the one table of metrics, what is counted of it, and the HTTP that serves them;
//! and the labels of the node.

mod connections;
pub mod exposition;
pub mod http;
pub mod labels;
mod log_writer;
pub mod logging;
pub mod metrics;
mod rate;
mod render;
pub mod server;
pub mod table;
mod thread;
mod token;

pub use connections::Connection;
pub use render::PageKey;
pub use token::Token;
