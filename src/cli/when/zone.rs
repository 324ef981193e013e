//! The machine's time zone, from the files that every libc reads (RFC 9636). The standard library knows none, and what
//! an operator reads off a clock on the wall is local time.

use super::{DAY, midnight, year_of};
use std::path::Path;

/// Where the zone of the machine is told, and where zones lie by name.
const LOCALTIME: &str = "/etc/localtime";
const ZONEINFO: &str = "/usr/share/zoneinfo";

/// How local time differs from UTC, and since when.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Zone {
    /// Before the first change.
    first: i64,
    /// From each second since 1970 on, so many seconds east of Greenwich.
    changes: Vec<(i64, i64)>,
    /// After the last change.
    rule: Option<Rule>,
}

/// The rule of a zone's present and future: `CET-1CEST,M3.5.0,M10.5.0/3`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Rule {
    standard: i64,
    summer: Option<Summer>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Summer {
    offset: i64,
    begins: Day,
    ends: Day,
}

/// A day of every year, and the local second on it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Day {
    date: Date,
    second: i64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Date {
    /// The `n`-th day from 1; 29 February has no number.
    Julian(i64),
    /// The `n`-th day from 0.
    Ordinal(i64),
    /// Month, week (5 is the last), weekday from Sunday, 0.
    Weekday(i64, i64, i64),
}

impl Zone {
    /// The zone of this process: `TZ` where it is set, else the machine's. What cannot be read is UTC.
    #[must_use]
    pub fn local() -> Self {
        let of_file = |path: &Path| std::fs::read(path).ok().and_then(|bytes| Zone::of_file(&bytes));
        let named = match std::env::var("TZ") {
            Ok(name) if name.is_empty() => Some(Zone::default()),
            Ok(name) => {
                let name = name.trim_start_matches(':');
                of_file(&Path::new(ZONEINFO).join(name)).or_else(|| Zone::of_rule(name))
            }
            Err(_) => of_file(Path::new(LOCALTIME)),
        };
        named.unwrap_or_default()
    }

    /// The zone of a rule alone.
    pub(super) fn of_rule(text: &str) -> Option<Self> {
        let rule = rule(text)?;
        Some(Zone { first: rule.standard, changes: Vec::new(), rule: Some(rule) })
    }

    /// The zone of a TZif file. Those of version 2 and later tell everything twice, with short and with long times.
    fn of_file(bytes: &[u8]) -> Option<Self> {
        let (short, rest) = block(bytes, 4)?;
        if bytes.get(4) == Some(&0) {
            return Some(short);
        }
        let (zone, footer) = block(rest, 8)?;
        let text = std::str::from_utf8(footer).ok()?.strip_prefix('\n')?.split_once('\n')?.0;
        Some(Zone { rule: rule(text), ..zone })
    }

    /// Seconds east of Greenwich at a second since 1970.
    pub(super) fn offset_at(&self, utc: i64) -> i64 {
        let passed = self.changes.partition_point(|(at, _)| *at <= utc);
        match (&self.rule, passed.checked_sub(1).and_then(|last| self.changes.get(last))) {
            (Some(rule), _) if passed == self.changes.len() => rule.offset_at(utc),
            (_, Some((_, offset))) => *offset,
            (_, None) => self.first,
        }
    }

    /// The second since 1970 of a local time. Of a time that comes twice it is the first one; one that is skipped counts
    /// on from before the change.
    pub(super) fn to_utc(&self, local: i64) -> i64 {
        // No zone changes twice within two days.
        let (before, after) = (self.offset_at(local - DAY), self.offset_at(local + DAY));
        let fits = |offset: &i64| self.offset_at(local - offset) == *offset;
        let offset = [before.max(after), before.min(after)].into_iter().find(fits);
        local - offset.unwrap_or(before)
    }
}

/// One half of a TZif file, whose times have so many bytes, and what follows it.
fn block(bytes: &[u8], width: usize) -> Option<(Zone, &[u8])> {
    let header = bytes.get(..44).filter(|header| header.starts_with(b"TZif"))?;
    let count = |n: usize| usize::try_from(number(header.get(20 + 4 * n..24 + 4 * n)?)).ok();
    let (of_utc, of_standard, leaps, times, types, letters) = (count(0)?, count(1)?, count(2)?, count(3)?, count(4)?, count(5)?);
    let mut rest = bytes.get(44..)?;
    let mut take = |length: usize| {
        let (front, back) = rest.split_at_checked(length)?;
        rest = back;
        Some(front)
    };
    let (at, kinds, offsets) = (take(times.checked_mul(width)?)?, take(times)?, take(types.checked_mul(6)?)?);
    take(letters + leaps * (width + 4) + of_standard + of_utc)?;
    let offset = |kind: usize| offsets.get(6 * kind..6 * kind + 4).map(number);
    let changes = at.chunks(width).map(number).zip(kinds);
    let changes = changes.map(|(at, kind)| Some((at, offset(usize::from(*kind))?))).collect::<Option<_>>()?;
    Some((Zone { first: offset(0)?, changes, rule: None }, rest))
}

/// A number of four or eight bytes, the highest first.
fn number(bytes: &[u8]) -> i64 {
    let sign = if bytes.first().is_some_and(|byte| byte & 0x80 > 0) { -1 } else { 0 };
    bytes.iter().fold(sign, |number, byte| number << 8 | i64::from(*byte))
}

impl Rule {
    fn offset_at(&self, utc: i64) -> i64 {
        let Some(Summer { offset, begins, ends }) = &self.summer else { return self.standard };
        let year = year_of(utc + self.standard);
        let (Some(begins), Some(ends)) = (begins.in_year(year), ends.in_year(year)) else { return self.standard };
        let (begins, ends) = (begins - self.standard, ends - offset);
        // In the south the summer goes over the end of the year.
        let is_summer = if begins < ends { (begins..ends).contains(&utc) } else { !(ends..begins).contains(&utc) };
        if is_summer { *offset } else { self.standard }
    }
}

impl Day {
    /// The local second of this year's day.
    fn in_year(&self, year: i64) -> Option<i64> {
        let first = midnight(year, 1, 1)?;
        let date = match self.date {
            Date::Ordinal(n) => first + n * DAY,
            Date::Julian(n) => first + (n - 1 + i64::from(n >= 60 && midnight(year, 2, 29).is_some())) * DAY,
            Date::Weekday(month, week, weekday) => {
                let first = midnight(year, month, 1)?;
                // 1 January 1970 was a Thursday.
                let day = first + (weekday - (first / DAY + 4)).rem_euclid(7) * DAY + (week - 1) * 7 * DAY;
                let next = if month == 12 { midnight(year + 1, 1, 1)? } else { midnight(year, month + 1, 1)? };
                if day < next { day } else { day - 7 * DAY }
            }
        };
        Some(date + self.second)
    }
}

/// Reads the rule at the end of a file, or of `TZ`.
fn rule(text: &str) -> Option<Rule> {
    let (names, days) = text.split_once(',').map_or((text, None), |(names, days)| (names, Some(days)));
    let rest = skip_name(names)?;
    let end = rest.find(|c: char| c.is_ascii_alphabetic() || c == '<').unwrap_or(rest.len());
    let (standard, summer) = rest.split_at(end);
    // The rule counts west of Greenwich.
    let standard = -hours(standard)?;
    if summer.is_empty() {
        return Some(Rule { standard, summer: None });
    }
    let offset = match skip_name(summer)? {
        "" => standard + 3600,
        offset => -hours(offset)?,
    };
    let (begins, ends) = days.unwrap_or("M3.2.0,M11.1.0").split_once(',')?;
    Some(Rule { standard, summer: Some(Summer { offset, begins: day(begins)?, ends: day(ends)? }) })
}

/// What follows the name of a zone: letters, or anything between `<` and `>`.
fn skip_name(text: &str) -> Option<&str> {
    if let Some(quoted) = text.strip_prefix('<') {
        return quoted.split_once('>').map(|(_, rest)| rest);
    }
    let rest = text.trim_start_matches(|c: char| c.is_ascii_alphabetic());
    (text.len() - rest.len() >= 3).then_some(rest)
}

fn day(text: &str) -> Option<Day> {
    let (date, second) = text.split_once('/').map_or(Some((text, 2 * 3600)), |(date, time)| Some((date, hours(time)?)))?;
    let date = if let Some(weekday) = date.strip_prefix('M') {
        let mut parts = weekday.split('.').map(|part| part.parse::<i64>().ok());
        let (month, week, weekday) = (parts.next()??, parts.next()??, parts.next()??);
        let sound = (1..=12).contains(&month) && (1..=5).contains(&week) && (0..=6).contains(&weekday);
        sound.then_some(Date::Weekday(month, week, weekday))?
    } else if let Some(julian) = date.strip_prefix('J') {
        Date::Julian(julian.parse().ok().filter(|n| (1..=365).contains(n))?)
    } else {
        Date::Ordinal(date.parse().ok().filter(|n| (0..=365).contains(n))?)
    };
    Some(Day { date, second })
}

/// `-5`, `+5:30` or `167:00:00`, in seconds.
fn hours(text: &str) -> Option<i64> {
    let sign = if text.starts_with('-') { -1 } else { 1 };
    let mut seconds = 0;
    for (part, worth) in text.trim_start_matches(['+', '-']).split(':').zip([3600, 60, 1]) {
        seconds += part.parse::<i64>().ok().filter(|n| (0..=167).contains(n))? * worth;
    }
    Some(sign * seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn second(text: &str) -> i64 {
        humantime::parse_rfc3339(text).unwrap().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs().try_into().unwrap()
    }

    /// A file as `zic -b slim` writes it: the past in changes, the present in the rule.
    fn slim(changes: &[(i64, u8)], offsets: &[i32], rule: &str) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (width, changes) in [(4, &[][..]), (8, changes)] {
            bytes.extend_from_slice(b"TZif2");
            bytes.extend_from_slice(&[0; 15]);
            for count in [0, 0, 0, changes.len(), offsets.len(), 4] {
                bytes.extend_from_slice(&u32::try_from(count).unwrap().to_be_bytes());
            }
            changes.iter().for_each(|(at, _)| bytes.extend_from_slice(&at.to_be_bytes()[8 - width..]));
            changes.iter().for_each(|(_, kind)| bytes.push(*kind));
            offsets.iter().for_each(|offset| bytes.extend_from_slice(&[&offset.to_be_bytes()[..], &[0, 0]].concat()));
            bytes.extend_from_slice(b"LMT\0");
        }
        bytes.extend_from_slice(format!("\n{rule}\n").as_bytes());
        bytes
    }

    #[test]
    fn a_file_tells_the_past_and_its_rule_the_present() {
        let (first, last) = (second("1971-01-01T00:00:00Z"), second("2000-01-01T00:00:00Z"));
        let bytes = slim(&[(first, 1), (last, 2)], &[-17_762, -18_000, -14_400], "EST5EDT,M3.2.0,M11.1.0");
        let zone = Zone::of_file(&bytes).unwrap();
        for (at, offset) in [
            (first - 1, -17_762),
            (first, -18_000),
            (last - 1, -18_000),
            (second("2026-03-08T06:59:59Z"), -18_000),
            (second("2026-03-08T07:00:00Z"), -14_400),
            (second("2026-11-01T05:59:59Z"), -14_400),
            (second("2026-11-01T06:00:00Z"), -18_000),
        ] {
            assert_eq!(zone.offset_at(at), offset, "{at}");
        }
        for cut in 0..bytes.len() {
            assert_eq!(Zone::of_file(&bytes[..cut]), None, "cut at {cut}");
        }
    }

    #[test]
    fn rules_of_every_form_are_followed() {
        for (rule, at, offset) in [
            ("UTC0", "2026-07-01T00:00:00Z", 0),
            ("<+0545>-5:45", "2026-07-01T00:00:00Z", 20_700),
            ("CET-1CEST,M3.5.0,M10.5.0/3", "2026-03-29T00:59:59Z", 3600),
            ("CET-1CEST,M3.5.0,M10.5.0/3", "2026-03-29T01:00:00Z", 7200),
            ("CET-1CEST,M3.5.0,M10.5.0/3", "2026-10-25T00:59:59Z", 7200),
            ("CET-1CEST,M3.5.0,M10.5.0/3", "2026-10-25T01:00:00Z", 3600),
            // The south, half an hour, and Dublin's winter time.
            ("AEST-10AEDT,M10.1.0,M4.1.0/3", "2026-12-31T23:00:00Z", 39_600),
            ("AEST-10AEDT,M10.1.0,M4.1.0/3", "2026-06-01T00:00:00Z", 36_000),
            ("<+1030>-10:30<+11>-11,M10.1.0,M4.1.0", "2026-01-01T00:00:00Z", 39_600),
            ("IST-1GMT0,M10.5.0,M3.5.0/1", "2026-07-01T00:00:00Z", 3600),
            ("IST-1GMT0,M10.5.0,M3.5.0/1", "2026-12-01T00:00:00Z", 0),
            ("XXX0YYY,J60/0,J300/0", "2024-03-01T00:00:00Z", 3600),
            ("XXX0YYY,59/0,J300/0", "2024-02-29T00:00:00Z", 3600),
        ] {
            assert_eq!(Zone::of_rule(rule).unwrap().offset_at(second(at)), offset, "{rule} at {at}");
        }
        for bad in ["", "C", "CET", "CET-1CEST,M3.5.0", "CET-1CEST,M13.5.0,M10.5.0", "Europe/Berlin"] {
            assert_eq!(Zone::of_rule(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_local_time_that_comes_twice_is_the_first_and_one_that_is_skipped_counts_on() {
        let berlin = Zone::of_rule("CET-1CEST,M3.5.0,M10.5.0/3").unwrap();
        assert_eq!(berlin.to_utc(second("2026-10-25T02:30:00Z")), second("2026-10-25T00:30:00Z"));
        assert_eq!(berlin.to_utc(second("2026-03-29T02:30:00Z")), second("2026-03-29T01:30:00Z"));
        assert_eq!(berlin.to_utc(second("2026-03-29T03:30:00Z")), second("2026-03-29T01:30:00Z"));
        assert_eq!(berlin.to_utc(second("2026-11-21T03:12:00Z")), second("2026-11-21T02:12:00Z"));
    }

    /// The files of this machine, and what its libc makes of them.
    #[test]
    fn the_zones_of_this_machine_are_read_as_its_libc_reads_them() {
        for name in ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Africa/Casablanca", "Asia/Kathmandu"] {
            let Ok(bytes) = std::fs::read(Path::new(ZONEINFO).join(name)) else { continue };
            let zone = Zone::of_file(&bytes).unwrap_or_else(|| panic!("{name}"));
            for at in [0, 900_000_000, 1_774_750_000, 1_795_300_000, 2_500_000_000, 4_000_000_000] {
                let asked = std::process::Command::new("date").env("TZ", name).args(["-d", &format!("@{at}"), "+%::z"]).output();
                let Ok(asked) = asked else { return };
                let text = String::from_utf8(asked.stdout).unwrap();
                let offset = hours(text.trim()).unwrap();
                assert_eq!(zone.offset_at(at), offset, "{name} at {at}");
            }
        }
    }
}
