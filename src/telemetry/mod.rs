//! Telemetry: logs, the table of metrics, their counters, the HTTP server that serves them, and the
//! node's labels.

pub mod amd_labels;
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
mod readers;
mod recorder;
mod render;
mod reviews;
pub mod server;
pub mod table;
mod thread;
#[cfg(feature = "cluster")]
mod tls;
#[cfg(not(feature = "cluster"))]
#[path = "tls_absent.rs"]
mod tls;
mod token;

pub use connections::Connection;
pub use log_format::LogFormat;
pub use readers::Readers;
pub use render::PageKey;
pub use reviews::{Review, Reviews, Verdict};
pub use tls::Tls;
pub use token::Token;
