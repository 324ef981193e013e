//! Telemetry: logs, the one table of metrics, and the HTTP that serves them.
