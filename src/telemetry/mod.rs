//! Telemetry: logs, the one table of metrics, and the HTTP that serves them.

pub mod http;
pub mod logging;
pub mod metrics;
