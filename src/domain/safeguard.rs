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
    /// No pods are listed before the kubelet has recorded an answer.
    ListAfterRecord,
    /// A device that a running container of another pod provably has is not granted (I2).
    RefusalOnProof,
    /// The grants of another plugin are taken over from the kubelet's checkpoint.
    TakeOver,
    /// An object that a container holds by one id is not granted by another id (I2).
    HeldObjects,
    /// A claim is answered after its record is durable (I1).
    DurableAnswer,
    /// The same for a record that an earlier process has written.
    DurableRecord,
    /// A device with another holder is not given to a claim, nor a claim's device by number (I2).
    ClaimGate,
    /// A claim is answered from its record.
    ClaimRecord,
    /// A record with another allocation is no answer.
    ClaimAllocation,
    /// Prepare reads the claim each time, also one that is recorded.
    ClaimRead,
    /// A claim is not released while a process of its pods runs.
    ClaimInUse,
    /// A Prepare makes an earlier Unprepare void.
    ClaimInUseAgain,
    /// The pods that the kubelet has added to a claim since its Prepare use it too.
    ClaimPods,
    /// The kubelet's record of claims is read at each of its changes.
    ClaimChanges,
    /// A claim that was unprepared early is released after its last process.
    ClaimEnd,
    /// A claim's file is written before the answer.
    ClaimFile,
    /// The record and the file of a claim change in one step.
    ClaimStep,
    /// A part of a record, which a torn write leaves, is no answer.
    ClaimWhole,
    /// The nodes of a record from a former boot are found again.
    ClaimOfBoot,
}

impl Safeguard {
    /// The safeguards of claims.
    #[cfg(test)]
    pub(crate) const OF_CLAIMS: [Safeguard; 15] = [
        Safeguard::ClaimStep,
        Safeguard::DurableAnswer,
        Safeguard::DurableRecord,
        Safeguard::ClaimGate,
        Safeguard::ClaimRecord,
        Safeguard::ClaimAllocation,
        Safeguard::ClaimRead,
        Safeguard::ClaimInUse,
        Safeguard::ClaimInUseAgain,
        Safeguard::ClaimPods,
        Safeguard::ClaimChanges,
        Safeguard::ClaimEnd,
        Safeguard::ClaimFile,
        Safeguard::ClaimWhole,
        Safeguard::ClaimOfBoot,
    ];

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
