//! The admin interface: what an operator and other programs read of a running daemon, and the
//! orders that they send to it.
//!
//! Everything is read from snapshots ([`Views`]). `status` and `devices` make reports of them,
//! `problems` states what is wrong and its remedy. Two servers show the reports: the control socket
//! (`control`), for the other verbs on this host, and the telemetry address (`listen`), with the
//! probes, `/metrics` (`measures`) and the page at `/` (`page`).

mod apis;
mod config_report;
pub(crate) mod control;
mod devices;
pub(crate) mod listen;
mod measures;
mod page;
mod problems;
pub(crate) mod processors;
pub(crate) mod status;
mod views;

pub use apis::{ApiReport, ApisReport};
pub use config_report::ConfigReport;
pub use control::{
    ControlError, Installed, LedgerEnd, Order, ReleaseOrder, Upgrade, UpgradeOrder,
    ask_to_hand_over, get as control_get, order as control_order, read_ledger, release_claim,
    verify as verify_ledger,
};
pub use devices::{DeviceReport, ListedHealth};
pub use measures::write_held;
pub use problems::{Problem, problem_summary};
pub use processors::Processors;
pub use status::{HookReport, PendingReport, ResourceReport, Status};
pub use views::Views;
