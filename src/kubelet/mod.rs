//! The kubelet's side: its APIs on the wire, its sockets and its files, turned into the domain's values.

pub mod checkpoint;
pub mod proto;
