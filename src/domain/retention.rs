//! Retention of the history: its age and its size.

use std::time::Duration;

/// The bytes of an empty journal.
const JOURNAL_BYTES: u64 = 4 * 1024 * 1024;

/// Limits of the history of released grants. Live grants do not count, and no limit here affects
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// How long a released grant is kept.
    pub age: Duration,
    /// The maximum number of released grants.
    pub grants: u64,
    /// The disk space of the history. In the files of their database, records take at least three
    /// times their length, so their length is limited to a third of this. The whole state directory
    /// always stays below four times this, during every operation.
    pub bytes: u64,
}

impl Retention {
    /// The assumed size of a grant, if only the number of grants is configured. A grant of one
    /// device fits.
    pub const BYTES_PER_GRANT: u64 = 4096;

    /// A limit of `grants` grants, with the default age and size for each.
    #[must_use]
    pub fn of_grants(grants: u64) -> Self {
        Retention {
            grants,
            bytes: grants.saturating_mul(Self::BYTES_PER_GRANT),
            ..Retention::default()
        }
    }

    /// A limit of `bytes` bytes of disk, with the default age.
    #[must_use]
    pub fn of_bytes(bytes: u64) -> Self {
        Retention { bytes, ..Retention::default() }
    }

    /// Bytes of history records that are kept next to `live` bytes of live records. With thousands
    /// of live records, the journal has up to three copies of them. The database's files, old and
    /// new, take nine times the size of any record. The history is reduced for the live records,
    /// since the operator has limited only the history.
    #[must_use]
    pub fn records(&self, live: u64) -> u64 {
        let left = self
            .bytes
            .saturating_mul(4)
            .saturating_sub(live.saturating_mul(12))
            .saturating_sub(JOURNAL_BYTES)
            / 9;
        left.min(self.bytes / 3).max(self.bytes / 32)
    }

    /// Bytes that the journal may collect for a database that cannot be written.
    #[must_use]
    pub fn journal(&self) -> u64 {
        self.bytes / 2
    }
}

impl Default for Retention {
    /// Long enough for the question "which container had the device when it failed?"; about 70,000
    /// grants of one device.
    fn default() -> Self {
        Retention {
            age: Duration::from_secs(90 * 24 * 3600),
            grants: u64::MAX,
            bytes: 256 * 1024 * 1024,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_third_is_for_records_and_less_with_thousands_of_live_grants() {
        let mib = 1024 * 1024;
        let sixteen = Retention::of_bytes(16 * mib);
        assert_eq!(sixteen.records(0), 16 * mib / 3);
        for live in [mib, 2 * mib, 4 * mib] {
            let all = 12 * live + 9 * sixteen.records(live);
            assert!(all <= 60 * mib, "{live}: {all}");
        }
        assert_eq!(sixteen.records(99 * mib), mib / 2, "something is always remembered");
        assert_eq!(
            Retention::default().records(16 * mib),
            256 * mib / 3,
            "20,000 grants leave all of the usual size"
        );
        assert!(Retention::of_bytes(u64::MAX).records(7) > 1 << 60);
    }
}
