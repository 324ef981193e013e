//! The kubelet's side: its APIs on the wire, its sockets and its files, turned into the domain's values.

pub mod api;
pub mod checkpoint;
pub mod codec;
pub mod h2;
pub mod pod_resources;
pub mod proto;
pub mod register;
pub mod services;
pub mod tracked_stream;
pub mod uds;
