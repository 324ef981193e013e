//! Handover: the ledger and the kubelet go from one instance, OLD, to another, NEW, without a failed Allocate.
//!
//! ```text
//!   NEW (run --take-over)                        OLD
//!        ── connects ────────────────────────────▶
//!        ◀── Offer, with the kubelet's ───────────     NEW ends here if it does not know the ledger's version
//!            connections and OLD's sockets
//!        ── Take ────────────────────────────────▶
//!                                                      drains: answers the calls that the kubelet has sent, reads no more,
//!        ◀── Yours, with the same once more ──────     releases the connections, closes the ledger
//!   opens the ledger, scans, serves OLD's sockets too,
//!   has the kubelet send again what it has sent and
//!   got no answer to (GOAWAY), registers
//!        ── Confirmed ───────────────────────────▶     ends, or stands by until SIGTERM
//! ```
//!
//! **One mechanism.** What is passed on is a set of descriptors ([`PassedFds`]). It comes from OLD over this socket, from systemd's fd store
//! after `systemctl restart` ([`fd_store`]), or from this process itself, when NEW has died and OLD serves again. Whoever starts with such
//! a set does the same with it (`App::receive`).
//!
//! **What the kubelet sees.** Its connections to OLD are open in NEW too. Up to 1.36 it takes the end of any of them for the end of the newest
//! one of the resource, and has no device until that one is back. So NEW holds them until the kubelet closes them, which it does when it
//! is restarted. What it asks meanwhile waits for NEW's start.
//!
//! **Either side may die.** The connection between both lives as long as both do. When OLD is gone NEW goes on: it has the descriptors. When NEW
//! is gone OLD starts again in its own process, with its own copies if NEW had not confirmed.
//!
//! **No connection is missed.** From the offer to the end OLD makes no Register, so the kubelet makes no connection that NEW does not get, also
//! when OLD is killed between. One that comes by itself, after a restart of the kubelet, comes with `Yours`.
//!
//! **The ledger's lock decides.** OLD releases the connections before it releases the lock, and NEW writes on them only when it has the lock.
//! So two processes never write on one connection.

pub mod fd_store;
mod listen;
mod passed;
mod wire;

pub use listen::{Asked, Offer, listen};
pub use passed::{Label, PassedFds};
pub use wire::{Message, PROTOCOL, Peer, socket_path};
