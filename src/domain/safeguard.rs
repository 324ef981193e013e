//! Safeguards that the simulation turns off, one at a time, to prove that its oracles notice.

/// A measure against a rare event. Outside of tests all safeguards are on, and cost nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Safeguard {
    /// After a recovery the resource is registered a second time, later.
    SettlingRegister,
    /// A Register that leads to no stream is repeated.
    StreamDeadline,
    /// The end of any stream leads to Register.
    ReRegister,
    /// A held id stays in the list (I3).
    HeldIds,
    /// Every registration has a socket of its own.
    UniqueSockets,
    /// Every open stream gets every list.
    Broadcast,
    /// The kubelet's list is compared with ours.
    Audit,
    /// A device that a running container of another pod provably has is not granted (I2).
    RefusalOnProof,
    /// An object that a container holds by one id is not granted by another id (I2).
    HeldObjects,
}

impl Safeguard {
    /// Whether it is on.
    #[cfg(not(test))]
    #[must_use]
    pub const fn is_on(self) -> bool {
        true
    }

    /// Whether it is on.
    #[cfg(test)]
    pub fn is_on(self) -> bool {
        OFF.get() != Some(self)
    }

    /// Runs a function on this thread without this safeguard.
    #[cfg(test)]
    pub(crate) fn without<T>(self, run: impl FnOnce() -> T) -> T {
        struct On;
        impl Drop for On {
            fn drop(&mut self) {
                OFF.set(None);
            }
        }
        let _on = On;
        OFF.set(Some(self));
        run()
    }
}

#[cfg(test)]
thread_local! {
    static OFF: std::cell::Cell<Option<Safeguard>> = const { std::cell::Cell::new(None) };
}
