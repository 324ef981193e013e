//! The simulated node under naive plugins.
