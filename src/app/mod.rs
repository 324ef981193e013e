//! The application: wiring, supervision and shutdown; the only place that knows all actors.

pub mod supervisor;
