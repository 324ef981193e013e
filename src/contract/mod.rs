//! What a container gets for its devices: one file for each contract, all of them pure.
