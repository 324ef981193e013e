//! Time as a value. The cores never read a clock: the shells pass a [`Moment`].

use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Wall-clock time, milliseconds since 1970 UTC. For records that people read; it may jump.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// Converts from the system's time. Times before 1970 become 0.
    #[must_use]
    pub fn from_system(time: SystemTime) -> Self {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        Timestamp(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
    }

    /// RFC 3339 in whole seconds, for tables.
    #[must_use]
    pub fn to_seconds(self) -> String {
        humantime::format_rfc3339_seconds(self.to_system()).to_string()
    }

    /// RFC 3339 ends with the year 9999, and humantime refuses later times.
    fn to_system(self) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(self.0.min(253_402_300_799_999))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", humantime::format_rfc3339_millis(self.to_system()))
    }
}

impl Serialize for Timestamp {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        humantime::parse_rfc3339(&text)
            .map(Timestamp::from_system)
            .map_err(serde::de::Error::custom)
    }
}

/// The present time, on both clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Moment {
    /// `CLOCK_BOOTTIME`: never jumps, and counts suspend. All waits and ages are measured with it.
    pub boot: Duration,
    /// The wall clock, for records.
    pub wall: Timestamp,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timestamp_survives_json() {
        let stamp = Timestamp(1_700_000_000_123);
        let json = serde_json::to_string(&stamp).unwrap();
        assert_eq!(json, "\"2023-11-14T22:13:20.123Z\"");
        assert_eq!(serde_json::from_str::<Timestamp>(&json).unwrap(), stamp);
    }

    #[test]
    fn the_largest_timestamp_is_printed_without_a_panic() {
        assert_eq!(Timestamp(u64::MAX).to_string(), "9999-12-31T23:59:59.999Z");
        // The last time that can be read is written as it was read.
        let last: Timestamp = serde_json::from_str("\"9999-12-31T23:59:59.999Z\"").unwrap();
        assert_eq!(serde_json::to_string(&last).unwrap(), "\"9999-12-31T23:59:59.999Z\"");
    }
}
