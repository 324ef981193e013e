//! The devices of this node as `ResourceSlice` objects of Dynamic Resource Allocation (DRA), for
//! the scheduler. Pure: no clock, disk, log or connection.
//!
//! [`wanted_devices`](wanted::wanted_devices) turns the inventory into the devices of each pool,
//! with their names and attributes. A [`Layout`](wanted::Layout) puts them into slices. The
//! [`Publisher`](publisher::Publisher) compares the slices with those of the API server, and
//! decides the next request. [`Others`](others::Others) finds the devices that other drivers
//! publish too, and [`Published`](published::Published) is what an operator sees of all this.

pub mod api;
pub mod attributes;
pub mod holders;
pub mod names;
pub mod others;
pub mod published;
pub mod publisher;
pub mod wanted;

pub use crate::domain::DRA_DRIVER as DRIVER;
