//! The kubelet's APIs on the wire, its sockets and its files, translated to the domain's types.

pub mod api;
pub mod checkpoint;
pub mod codec;
pub mod dra;
pub mod h2;
pub mod pod_resources;
pub mod proto;
pub mod register;
pub mod services;
pub mod tracked_stream;
pub mod uds;
