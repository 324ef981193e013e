//! How long the history is kept, and how much room it may take.

use std::time::Duration;

/// What the journal has by itself.
const JOURNAL_BYTES: u64 = 4 * 1024 * 1024;

/// How much of what was given back is remembered. Live grants are no history: no bound of it touches them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// How long a released grant is kept.
    pub age: Duration,
    /// Released grants that are kept, at most.
    pub grants: u64,
    /// What these may take of the disk. In the files of their database records take at least three times their length, so they are kept
    /// to a third of it; and the whole state directory stays below four times as much, whatever is under way there.
    pub bytes: u64,
}

impl Retention {
    /// What a grant is counted with where only a number of grants is said: one of a device takes it.
    pub const BYTES_PER_GRANT: u64 = 4096;

    /// As many grants, of the usual age and size.
    #[must_use]
    pub fn of_grants(grants: u64) -> Self {
        Retention { grants, bytes: grants.saturating_mul(Self::BYTES_PER_GRANT), ..Retention::default() }
    }

    /// As many bytes of the disk, of the usual age.
    #[must_use]
    pub fn of_bytes(bytes: u64) -> Self {
        Retention { bytes, ..Retention::default() }
    }

    /// Bytes of records that are kept beside so many bytes of what is live. Of these, when there are thousands, the journal has up to
    /// three copies, and the database's files, old and new, nine times as much as of any record: the history gives way to them, since it
    /// is the history that somebody has bounded.
    #[must_use]
    pub fn records(&self, live: u64) -> u64 {
        let left = self.bytes.saturating_mul(4).saturating_sub(live.saturating_mul(12)).saturating_sub(JOURNAL_BYTES) / 9;
        left.min(self.bytes / 3).max(self.bytes / 32)
    }

    /// Bytes that the journal may gather for a database that cannot be written.
    #[must_use]
    pub fn journal(&self) -> u64 {
        self.bytes / 2
    }
}

impl Default for Retention {
    /// Longer than the question "who had it when it failed?" usually takes to be asked; some 70,000 grants of one device.
    fn default() -> Self {
        Retention { age: Duration::from_secs(90 * 24 * 3600), grants: u64::MAX, bytes: 256 * 1024 * 1024 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_third_is_for_records_and_less_beside_thousands_of_live_grants() {
        let mib = 1024 * 1024;
        let sixteen = Retention::of_bytes(16 * mib);
        assert_eq!(sixteen.records(0), 16 * mib / 3);
        for live in [mib, 2 * mib, 4 * mib] {
            let all = 12 * live + 9 * sixteen.records(live);
            assert!(all <= 60 * mib, "{live}: {all}");
        }
        assert_eq!(sixteen.records(99 * mib), mib / 2, "something is always remembered");
        assert_eq!(Retention::default().records(16 * mib), 256 * mib / 3, "20,000 grants leave all of the usual size");
        assert!(Retention::of_bytes(u64::MAX).records(7) > 1 << 60);
    }
}
