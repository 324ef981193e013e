//! The kubelet's edge cases, each provoked in every run: the real daemon with the simulated kubelet
//! on real sockets, with gates where the kubelet's goroutines may stop.
//!
//! `table` lists all of them by number, with the tests of each, or the reason why there is none. An
//! edge case that depends on the kubelet's version runs on every profile; differences between
//! profiles are asserted where they matter. Nothing sleeps: a test waits for the provoked state,
//! and a time is only a guard against hanging.

mod allocate;
mod alone;
mod checkpoint;
mod evidence;
mod lister;
mod lists;
mod processors;
mod registration;
mod restart;
mod rival_plugin;
mod stage;
mod table;
mod taken;
