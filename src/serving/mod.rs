//! The serving actor: the device-plugin API on unix sockets.
