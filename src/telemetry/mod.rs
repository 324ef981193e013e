//! Telemetry: logs, the table of metrics, their counters, the HTTP server that serves them, and the
//! node's labels.

mod connections;
pub mod exposition;
pub mod gpu_labels;
pub mod http;
mod label_value;
pub mod labels;
mod log_format;
mod log_writer;
pub mod logging;
pub mod metrics;
mod rate;
mod recorder;
mod render;
pub mod server;
pub mod table;
mod thread;
mod token;

pub use connections::Connection;
pub use log_format::LogFormat;
pub use render::PageKey;
pub use token::Token;
