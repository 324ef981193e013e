//! Points in time as users write them: `2026-11-21T03:12:00Z`, `2026-11-21 03:12`, `03:12`, `2h`.

use crate::domain::Timestamp;
use jiff::civil;
use jiff::tz::TimeZone;
use jiff::{ToSpan as _, Zoned};
use std::time::SystemTime;

/// The accepted forms, for help and errors.
pub const FORMS: &str = "2026-11-21T03:12:00Z, \"2026-11-21 03:12\" or 03:12 in local time, or 2h \
                         for two hours ago";

/// The point in time that `text` names, seen from `now`. A text without a zone is in `zone`. A text
/// without a date is the last such time. A duration counts back from `now`.
///
/// # Errors
/// One sentence, when it is not a time, or is in the future.
pub fn parse(text: &str, now: Timestamp, zone: &TimeZone) -> Result<Timestamp, String> {
    let trimmed = text.trim();
    let found = if trimmed == "now" {
        Some(now)
    } else {
        ago(trimmed, now).or_else(|| date(trimmed, zone)).or_else(|| clock(trimmed, now, zone))
    };
    match found {
        Some(at) if at > now => {
            Err(format!("`{text}` is {}, which is in the future", at.to_seconds()))
        }
        Some(at) => Ok(at),
        None => Err(format!("`{text}` is not a time; use {FORMS}")),
    }
}

/// `2h`, `1day 3h`, `90m ago`.
fn ago(text: &str, now: Timestamp) -> Option<Timestamp> {
    let length = humantime::parse_duration(text.strip_suffix("ago").unwrap_or(text).trim()).ok()?;
    Some(Timestamp(now.0.saturating_sub(u64::try_from(length.as_millis()).ok()?)))
}

/// `2026-11-21`, with or without a time of day, with or without a zone.
fn date(text: &str, zone: &TimeZone) -> Option<Timestamp> {
    let local = || {
        text.parse::<civil::DateTime>()
            .ok()?
            .to_zoned(zone.clone())
            .ok()
            .map(|zoned| zoned.timestamp())
    };
    // Try the longer form first: a timestamp also starts with a date.
    timestamp(text.parse::<jiff::Timestamp>().ok().or_else(local)?)
}

/// `03:12` or `03:12:30`: the last such time.
fn clock(text: &str, now: Timestamp, zone: &TimeZone) -> Option<Timestamp> {
    let padded = if text.find(':') == Some(1) { format!("0{text}") } else { text.to_owned() };
    let time: civil::Time = padded.parse().ok().filter(|_| padded.contains(':'))?;
    let now =
        jiff::Timestamp::from_millisecond(i64::try_from(now.0).ok()?).ok()?.to_zoned(zone.clone());
    let on = |day: &Zoned| day.with().time(time).build().ok();
    let today = on(&now).filter(|at| *at <= now);
    timestamp(today.or_else(|| on(&now.checked_sub(1.day()).ok()?))?.timestamp())
}

/// As a ledger timestamp; `None` before 1970.
fn timestamp(at: jiff::Timestamp) -> Option<Timestamp> {
    u64::try_from(at.as_millisecond()).ok().map(Timestamp)
}

/// The wall clock.
#[must_use]
pub fn now() -> Timestamp {
    Timestamp::from_system(SystemTime::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A Saturday; 13:00 in Berlin.
    const NOW: &str = "2026-11-21T12:00:00Z";

    fn at(text: &str) -> Timestamp {
        Timestamp::from_system(humantime::parse_rfc3339(text).unwrap())
    }

    fn parsed(text: &str) -> String {
        let zone = TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").unwrap();
        parse(text, at(NOW), &zone).map_or_else(|error| error, |at| at.to_string())
    }

    #[test]
    fn every_documented_form_of_a_time_is_parsed() {
        for (text, wanted) in [
            ("2026-11-21T03:12:00Z", "2026-11-21T03:12:00.000Z"),
            ("2026-11-21T03:12:00.250Z", "2026-11-21T03:12:00.250Z"),
            ("2026-11-21T03:12:00+05:30", "2026-11-20T21:42:00.000Z"),
            ("2026-11-21 03:12-01:00", "2026-11-21T04:12:00.000Z"),
            ("2026-11-21 03:12", "2026-11-21T02:12:00.000Z"),
            ("2026-07-01 03:12:30", "2026-07-01T01:12:30.000Z"),
            ("2026-11-21", "2026-11-20T23:00:00.000Z"),
            ("03:12", "2026-11-21T02:12:00.000Z"),
            ("3:12", "2026-11-21T02:12:00.000Z"),
            ("13:00", "2026-11-21T12:00:00.000Z"),
            ("13:00:01", "2026-11-20T12:00:01.000Z"),
            ("23:59", "2026-11-20T22:59:00.000Z"),
            ("2h", "2026-11-21T10:00:00.000Z"),
            ("1day 30m ago", "2026-11-20T11:30:00.000Z"),
            ("now", "2026-11-21T12:00:00.000Z"),
        ] {
            assert_eq!(parsed(text), wanted, "{text}");
        }
    }

    #[test]
    fn an_invalid_time_is_refused_with_the_valid_forms() {
        for text in [
            "",
            "yesterday",
            "25:00",
            "3:60",
            "2026-13-01",
            "2026-02-30 10:00",
            "2026-11-21T03:12:00+27:00",
            "12",
            "1:2:3:4",
            "-2h",
        ] {
            assert!(
                parsed(text).contains("is not a time; use 2026-11-21T03:12:00Z"),
                "{text}: {}",
                parsed(text)
            );
        }
        assert_eq!(
            parsed("2026-11-22 03:12"),
            "`2026-11-22 03:12` is 2026-11-22T02:12:00Z, which is in the future"
        );
    }
}
