//! Points in time as people say them: `2026-11-21T03:12:00Z`, `2026-11-21 03:12`, `03:12`, `2h`.

mod zone;

pub use zone::Zone;

use crate::domain::Timestamp;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const DAY: i64 = 24 * 3600;

/// What every option that takes a time says of it.
pub const FORMS: &str = "2026-11-21T03:12:00Z, \"2026-11-21 03:12\" or 03:12 by the machine's clock, or 2h for two hours ago";

/// The point in time that `text` names at `now`. Without a zone of its own it is of `zone`; without a day it is the last
/// such time; a duration counts back.
///
/// # Errors
/// One sentence, when it names none, or one that is still to come.
pub fn parse(text: &str, now: Timestamp, zone: &Zone) -> Result<Timestamp, String> {
    let said = text.trim();
    let found = if said == "now" { Some(now) } else { ago(said, now).or_else(|| date(said, zone)).or_else(|| clock(said, now, zone)) };
    match found {
        Some(at) if at > now => Err(format!("`{text}` is {}, which is still to come", at.to_seconds())),
        Some(at) => Ok(at),
        None => Err(format!("`{text}` is no time; say {FORMS}")),
    }
}

/// `2h`, `1day 3h`, `90m ago`.
fn ago(text: &str, now: Timestamp) -> Option<Timestamp> {
    let length = humantime::parse_duration(text.strip_suffix("ago").unwrap_or(text).trim()).ok()?;
    Some(Timestamp(now.0.saturating_sub(u64::try_from(length.as_millis()).ok()?)))
}

/// `2026-11-21`, with or without a time of the day, with or without a zone.
fn date(text: &str, zone: &Zone) -> Option<Timestamp> {
    let (day, rest) = text.split_at_checked(10)?;
    let rest = rest.strip_prefix(['T', 't', ' ']).or_else(|| rest.is_empty().then_some("00:00"))?;
    let signs = rest.find(['Z', 'z', '+', '-']).unwrap_or(rest.len());
    let (time, offset) = rest.split_at(signs);
    let seconds = if time.len() == 5 { ":00" } else { "" };
    let written = humantime::parse_rfc3339(&format!("{day}T{}{seconds}Z", time.trim_end())).ok()?;
    let millis = i64::try_from(Timestamp::from_system(written).0).ok()?;
    let (whole, part) = (millis.div_euclid(1000), millis.rem_euclid(1000));
    let utc = match offset {
        "" => zone.to_utc(whole),
        "Z" | "z" => whole,
        _ => whole - hours_and_minutes(offset)?,
    };
    u64::try_from(utc * 1000 + part).ok().map(Timestamp)
}

/// `+05:30` in seconds.
fn hours_and_minutes(text: &str) -> Option<i64> {
    let sign = if text.starts_with('-') { -1 } else { 1 };
    let (hours, minutes) = text.get(1..)?.split_once(':')?;
    Some(sign * (two_digits(hours, 23)? * 3600 + two_digits(minutes, 59)? * 60))
}

/// `03:12` or `03:12:30`: the last such time.
fn clock(text: &str, now: Timestamp, zone: &Zone) -> Option<Timestamp> {
    let mut parts = text.split(':');
    let (hours, minutes) = (two_digits(parts.next()?, 23)?, two_digits(parts.next()?, 59)?);
    let seconds = parts.next().map_or(Some(0), |seconds| two_digits(seconds, 59))?;
    if parts.next().is_some() {
        return None;
    }
    let now = i64::try_from(now.0 / 1000).ok()?;
    let today = (now + zone.offset_at(now)).div_euclid(DAY) * DAY;
    let on = |day: i64| zone.to_utc(day + hours * 3600 + minutes * 60 + seconds);
    let last = Some(on(today)).filter(|at| *at <= now).unwrap_or_else(|| on(today - DAY));
    u64::try_from(last * 1000).ok().map(Timestamp)
}

fn two_digits(text: &str, max: i64) -> Option<i64> {
    let digits = (1..=2).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten().filter(|number| *number <= max)
}

/// Midnight of a day of UTC, in seconds since 1970; `None` before that, and for a day that the calendar does not have.
fn midnight(year: i64, month: i64, day: i64) -> Option<i64> {
    let at = humantime::parse_rfc3339(&format!("{year:04}-{month:02}-{day:02}T00:00:00Z")).ok()?;
    at.duration_since(UNIX_EPOCH).ok().and_then(|since| i64::try_from(since.as_secs()).ok())
}

/// The year of UTC in which a second since 1970 lies.
fn year_of(seconds: i64) -> i64 {
    let at = UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or(0).min(253_402_300_799));
    let text = humantime::format_rfc3339_seconds(at).to_string();
    text.get(..4).and_then(|year| year.parse().ok()).unwrap_or(1970)
}

/// The wall clock.
#[must_use]
pub fn now() -> Timestamp {
    Timestamp::from_system(SystemTime::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Saturday; in Berlin it is 13:00.
    const NOW: &str = "2026-11-21T12:00:00Z";

    fn at(text: &str) -> Timestamp {
        Timestamp::from_system(humantime::parse_rfc3339(text).unwrap())
    }

    fn said(text: &str) -> String {
        parse(text, at(NOW), &Zone::of_rule("CET-1CEST,M3.5.0,M10.5.0/3").unwrap()).map_or_else(|error| error, |at| at.to_string())
    }

    #[test]
    fn a_time_is_taken_in_every_form_that_the_help_names() {
        for (text, wanted) in [
            ("2026-11-21T03:12:00Z", "2026-11-21T03:12:00.000Z"),
            ("2026-11-21T03:12:00.250Z", "2026-11-21T03:12:00.250Z"),
            ("2026-11-21T03:12:00+05:30", "2026-11-20T21:42:00.000Z"),
            ("2026-11-21 03:12-01:00", "2026-11-21T04:12:00.000Z"),
            ("2026-11-21 03:12", "2026-11-21T02:12:00.000Z"),
            ("2026-07-01 03:12:30", "2026-07-01T01:12:30.000Z"),
            ("2026-11-21", "2026-11-20T23:00:00.000Z"),
            ("03:12", "2026-11-21T02:12:00.000Z"),
            ("13:00", "2026-11-21T12:00:00.000Z"),
            ("13:00:01", "2026-11-20T12:00:01.000Z"),
            ("23:59", "2026-11-20T22:59:00.000Z"),
            ("2h", "2026-11-21T10:00:00.000Z"),
            ("1day 30m ago", "2026-11-20T11:30:00.000Z"),
            ("now", "2026-11-21T12:00:00.000Z"),
        ] {
            assert_eq!(said(text), wanted, "{text}");
        }
    }

    #[test]
    fn what_is_no_time_is_refused_with_the_forms_that_are() {
        for text in
            ["", "yesterday", "25:00", "3:60", "2026-13-01", "2026-02-30 10:00", "2026-11-21T03:12:00+25:00", "12", "1:2:3:4", "-2h"]
        {
            assert!(said(text).contains("is no time; say 2026-11-21T03:12:00Z"), "{text}: {}", said(text));
        }
        assert_eq!(said("2026-11-22 03:12"), "`2026-11-22 03:12` is 2026-11-22T02:12:00Z, which is still to come");
    }
}
