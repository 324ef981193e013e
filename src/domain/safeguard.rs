//! The safeguards that the simulation turns off, one at a time, to see that its oracles would notice.

/// Something that Holdfast does for the sake of a rare event. Outside tests all of them are on, and cost nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Safeguard {
    /// After a recovery the resource is registered once more, later.
    SettlingRegister,
    /// A Register without a stream is repeated.
    StreamDeadline,
    /// The end of any stream leads to Register.
    ReRegister,
    /// A held id stays in the list (I3).
    HeldIds,
    /// Every registration has a socket of its own.
    UniqueSockets,
    /// Every open stream gets every list.
    Broadcast,
    /// What the kubelet has is held against what is ours.
    Audit,
    /// What a living container of another pod provably has is not granted (I2).
    RefusalOnProof,
    /// What a container holds by one id is not granted by another one (I2).
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

    /// Runs something on this thread without it.
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
