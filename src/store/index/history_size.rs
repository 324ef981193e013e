//! The size of the history.

/// Number and size of the released grants in the database.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct HistorySize {
    /// Records.
    pub(crate) count: u64,
    /// Their bytes with the keys.
    pub(crate) bytes: u64,
}

impl HistorySize {
    pub(super) fn add(&mut self, key: &[u8], value: &[u8]) {
        self.count += 1;
        self.bytes += (key.len() + value.len()) as u64;
    }

    pub(super) fn remove(&mut self, key: &[u8], value: &[u8]) {
        self.count = self.count.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub((key.len() + value.len()) as u64);
    }
}
