//! The ledger actor: who holds what, durable before it is answered.

pub mod core;
