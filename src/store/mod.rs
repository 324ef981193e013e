//! The store: a write-ahead journal and sled, each able to rebuild the other.
