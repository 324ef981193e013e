//! Handover: the ledger and the kubelet's connections pass from one instance, OLD, to another, NEW,
//! without a failed Allocate.
//!
//! ```text
//!   NEW (run --take-over)                  OLD
//!        ── connects ──────────────────────▶
//!        ◀── Offer, with the kubelet's ─────  NEW ends here if it cannot read the ledger's version
//!            connections and OLD's sockets
//!        ── Take ──────────────────────────▶  drains: answers the calls that were already sent
//!        ◀── Yours, with the same again ────  releases the connections, closes the ledger
//!   opens the ledger, scans, serves OLD's
//!   sockets too, makes the kubelet send
//!   its unanswered calls again (GOAWAY),
//!   registers
//!        ── Confirmed ─────────────────────▶  ends, or is on standby until SIGTERM
//! ```
//!
//! **One mechanism.** A set of descriptors ([`PassedFds`]) is passed on. It comes from OLD over
//! this socket, from systemd's fd store after `systemctl restart` ([`fd_store`]), or from this
//! process itself, when NEW has died and OLD serves again. Every instance that starts with such a
//! set handles it in the same way (`App::receive`).
//!
//! **What the kubelet sees.** Its connections to OLD are open in NEW too. A kubelet up to 1.36
//! treats the end of any of them as the end of the resource's newest one, and has no device until
//! that one is back. So NEW holds them open until the kubelet closes them, which it does when it is
//! restarted. Calls that the kubelet sends during the handover wait for NEW's start.
//!
//! **The DRA driver** keeps the paths of its sockets. NEW continues with OLD's listening sockets,
//! and refuses all calls on the passed connections, so the kubelet connects again and repeats them.
//!
//! **Either side may die.** The connection between the two is open while both live. When OLD dies,
//! NEW continues: it has the descriptors. When NEW dies, OLD starts again in its own process. If
//! NEW had not confirmed, OLD uses its own copies of the descriptors.
//!
//! **No connection is missed.** From the offer to its end OLD makes no Register. So the kubelet
//! opens no connection that NEW does not get, even if OLD is killed in between. OLD still registers
//! if a Register in progress or NEW's answer takes longer than a second, or if OLD is not ready.
//! These connections come with `Yours`, as does one that the kubelet opens on its own, after a
//! restart.
//!
//! **The ledger's lock decides.** OLD releases the connections before it releases the lock, and NEW
//! writes on them only when it has the lock. So two processes never write on one connection.

pub mod fd_store;
mod listen;
mod passed;
mod wire;

pub use listen::{Asked, Offer, listen};
pub use passed::{Label, PassedFds};
pub use wire::{Message, PROTOCOL, Peer, socket_path};
