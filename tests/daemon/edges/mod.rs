//! The sharp edges of the kubelet, each provoked every time: the real daemon against the simulated kubelet on real
//! sockets, with gates where the kubelet's goroutines may stop.
//!
//! `table` lists all of them by number, with the tests that hold each one or the reason why there is none. An edge that
//! depends on the kubelet's version is provoked on every profile; what only some of them do is said where it is told
//! apart. Nothing sleeps: a test waits for what it provokes, and a time is only a guard against hanging.

mod allocate;
mod alone;
mod checkpoint;
mod evidence;
mod lister;
mod lists;
mod processors;
mod registration;
mod restart;
mod stage;
mod stranger;
mod table;
mod taken;
