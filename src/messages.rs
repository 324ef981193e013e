//! Every message that crosses actors.
