//! Configuration: TOML files and drop-ins, merged, then validated into what the daemon runs on.
