//! The syntax of names, versions and quantities in the API; pure.

/// A DNS label (RFC 1123): lower case, at most 63 bytes.
pub(super) fn is_label(text: &str) -> bool {
    let is_end = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = text.as_bytes();
    bytes.len() <= 63
        && bytes.first().is_some_and(|first| is_end(*first))
        && bytes.last().is_some_and(|last| is_end(*last))
        && bytes.iter().all(|byte| is_end(*byte) || *byte == b'-')
}

/// A DNS subdomain (RFC 1123): lower case. Its parts have no limit of their own in Kubernetes.
pub(super) fn is_subdomain(text: &str, bytes_max: usize) -> bool {
    let is_end = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_part = |part: &str| {
        let bytes = part.as_bytes();
        bytes.first().is_some_and(|first| is_end(*first))
            && bytes.last().is_some_and(|last| is_end(*last))
            && bytes.iter().all(|byte| is_end(*byte) || *byte == b'-')
    };
    text.len() <= bytes_max && text.split('.').all(is_part)
}

/// An identifier of the language C, at most 32 bytes.
pub(super) fn is_identifier(text: &str) -> bool {
    let is_first = |byte: u8| byte.is_ascii_alphabetic() || byte == b'_';
    text.len() <= 32
        && text.as_bytes().first().is_some_and(|first| is_first(*first))
        && text.bytes().all(|byte| is_first(byte) || byte.is_ascii_digit())
}

/// The name of an attribute or a capacity: an identifier, with or without a domain.
pub(super) fn is_attribute(text: &str) -> bool {
    match text.split_once('/') {
        Some((domain, name)) => is_subdomain(domain, 63) && is_identifier(name),
        None => is_identifier(text),
    }
}

/// The name of a pool: DNS subdomains, joined by `/`.
pub(super) fn is_pool(text: &str) -> bool {
    text.len() <= 253 && text.split('/').all(|part| is_subdomain(part, 253))
}

/// A part of a label: at most 63 bytes.
fn is_label_text(text: &str) -> bool {
    let bytes = text.as_bytes();
    bytes.len() <= 63
        && bytes.first().is_some_and(u8::is_ascii_alphanumeric)
        && bytes.last().is_some_and(u8::is_ascii_alphanumeric)
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(byte))
}

/// The name of a label, with or without a domain.
pub(super) fn is_label_name(text: &str) -> bool {
    match text.split_once('/') {
        Some((domain, name)) => is_subdomain(domain, 253) && is_label_text(name),
        None => is_label_text(text),
    }
}

/// The value of a label.
pub(super) fn is_label_value(text: &str) -> bool {
    text.is_empty() || is_label_text(text)
}

/// A version by semver.org 2.0.0.
pub(super) fn is_version(text: &str) -> bool {
    let is_number = |part: &str| {
        !part.is_empty()
            && part.bytes().all(|byte| byte.is_ascii_digit())
            && (part == "0" || !part.starts_with('0'))
    };
    let is_word = |part: &str| {
        !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    let is_digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let (text, build) = text.split_once('+').map_or((text, None), |(a, b)| (a, Some(b)));
    let (core, pre) = text.split_once('-').map_or((text, None), |(a, b)| (a, Some(b)));
    let numbers: Vec<&str> = core.split('.').collect();
    numbers.len() == 3
        && numbers.into_iter().all(is_number)
        && pre.is_none_or(|pre| {
            pre.split('.').all(|part| is_word(part) && (!is_digits(part) || is_number(part)))
        })
        && build.is_none_or(|build| build.split('.').all(is_word))
}

/// A quantity (apimachinery's `resource.Quantity`): its value in units of 10⁻⁹, and the text that
/// the API server writes for it. `None` if it is none, or has an exponent.
pub(super) fn quantity(text: &str) -> Option<(i128, String)> {
    let (sign, plain) = match text.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let end = plain.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(plain.len());
    let (number, suffix) = plain.split_at(end);
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && part.is_empty()) || part.len() > 9 || part.contains('.') {
        return None;
    }
    let digits = |text: &str| if text.is_empty() { Some(0) } else { text.parse::<i128>().ok() };
    let nanos = digits(whole)?.checked_mul(NANO)?.checked_add(digits(&format!("{part:0<9}"))?)?;
    let binary = BINARY.iter().position(|known| *known == suffix && !suffix.is_empty());
    if let Some(power) = binary {
        let value = nanos.checked_mul(1024_i128.checked_pow(u32::try_from(power).ok()?)?)?;
        if value >= 1024 * NANO && value % NANO == 0 {
            let (mut left, mut power) = (value / NANO, 0);
            while left % 1024 == 0 && power + 1 < BINARY.len() {
                (left, power) = (left / 1024, power + 1);
            }
            return Some((sign * value, format!("{}{left}{}", minus(sign), BINARY[power])));
        }
        return Some((sign * value, decimal(sign, value)));
    }
    let power = DECIMAL.iter().position(|known| *known == suffix)?;
    let value = nanos.checked_mul(1000_i128.checked_pow(u32::try_from(power).ok()?)?)? / NANO;
    Some((sign * value, decimal(sign, value)))
}

const NANO: i128 = 1_000_000_000;
const BINARY: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
/// From 10⁻⁹.
const DECIMAL: [&str; 10] = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];

fn minus(sign: i128) -> &'static str {
    if sign < 0 { "-" } else { "" }
}

/// The shortest text without a fraction.
fn decimal(sign: i128, nanos: i128) -> String {
    if nanos == 0 {
        return "0".into();
    }
    let (mut left, mut power) = (nanos, 0);
    while left % 1000 == 0 && power + 1 < DECIMAL.len() {
        (left, power) = (left / 1000, power + 1);
    }
    format!("{}{left}{}", minus(sign), DECIMAL[power])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_strict() {
        for text in ["0.0.0", "580.95.5", "1.2.3-rc.1", "1.2.3-0a.b", "1.2.3+007", "1.2.3-a+b.c"] {
            assert!(is_version(text), "{text}");
        }
        for text in
            ["580.95.05", "1.2", "1.2.3.4", "v1.2.3", "1.2.3-01", "1.2.3-", "1.2.3+", "", "1..3"]
        {
            assert!(!is_version(text), "{text}");
        }
    }

    #[test]
    fn names_have_their_syntax_and_limits() {
        let long = "a".repeat(64);
        for (check, right, wrong) in [
            (
                is_label as fn(&str) -> bool,
                vec!["gpu-0", "0", &long[..63]],
                vec!["", "-a", "a-", "A", "a.b", "a_b", &long],
            ),
            (is_identifier, vec!["a", "_1", "A9", &long[..32]], vec!["", "1a", "a-b", &long[..33]]),
            (
                is_attribute,
                vec!["model", "holdfast.dev/model"],
                vec!["a/b/c", "/a", "a/", "Holdfast.dev/a", "a.b"],
            ),
            (is_pool, vec!["n1", "n1.example/gpu"], vec!["", "/", "n1/", "N1/gpu", "a//b"]),
            (is_label_name, vec!["a", "holdfast.dev/device-gone"], vec!["", "a/", "a b", &long]),
            (is_label_value, vec!["", "A.b_c-d"], vec!["-", "a/b", &long]),
        ] {
            right.iter().for_each(|text| assert!(check(text), "{text}"));
            wrong.iter().for_each(|text| assert!(!check(text), "{text}"));
        }
        assert!(is_subdomain("a.b-c", 63) && !is_subdomain(&long, 63) && !is_subdomain("a..b", 63));
    }

    #[test]
    fn quantities_are_written_as_the_api_server_writes_them() {
        for (text, expected) in [
            ("1024Mi", "1Gi"),
            ("1.5Gi", "1536Mi"),
            ("80Gi", "80Gi"),
            ("1000", "1k"),
            ("65536", "65536"),
            ("0.5", "500m"),
            ("0", "0"),
            ("512Ki", "512Ki"),
            ("0.5Ki", "512"),
            ("-1024Ki", "-1Mi"),
            ("+3", "3"),
        ] {
            assert_eq!(quantity(text).map(|(_, text)| text).as_deref(), Some(expected), "{text}");
        }
        assert!(quantity("1Ki").unwrap().0 > quantity("1k").unwrap().0);
        for text in ["", "Gi", "1 Gi", "1.2.3", "1Xi", "a", "."] {
            assert_eq!(quantity(text), None, "{text}");
        }
    }
}
