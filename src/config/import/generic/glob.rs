//! Patterns of Go's path.Match in our syntax.

pub(super) fn is_glob(path: &str) -> bool {
    path.contains(['*', '?', '['])
}

/// A pattern of Go's path.Match in our syntax, or the reason why that is impossible.
pub(in crate::config::import) fn glob(pattern: &str) -> Result<String, &'static str> {
    let mut ours = String::with_capacity(pattern.len());
    let mut rest = pattern;
    while let Some(next) = rest.chars().next() {
        rest = &rest[next.len_utf8()..];
        match next {
            // In our syntax two stars also match folders.
            '*' if ours.ends_with('*') => {}
            '\\' => {
                let literal = rest.chars().next().ok_or("is not a pattern")?;
                rest = &rest[literal.len_utf8()..];
                if "*?[".contains(literal) {
                    ours.extend(['[', literal, ']']);
                } else {
                    ours.push(literal);
                }
            }
            '[' => {
                let (class, behind) = rest.split_once(']').ok_or("is not a pattern")?;
                let (not, class) =
                    class.strip_prefix('^').map_or(("", class), |class| ("!", class));
                let is_simple = class.chars().all(|c| c.is_alphanumeric() || "-_.".contains(c));
                if class.is_empty() || !is_simple || class.starts_with('-') || class.ends_with('-')
                {
                    return Err("is a pattern without an equivalent");
                }
                ours.push_str(&format!("[{not}{class}]"));
                rest = behind;
            }
            other => ours.push(other),
        }
    }
    Ok(ours)
}

#[cfg(test)]
mod tests {
    use super::glob;

    #[test]
    fn a_pattern_of_go_becomes_one_of_ours() {
        for (theirs, ours) in [
            ("/dev/ttyUSB*", Ok("/dev/ttyUSB*")),
            ("/dev/tty**", Ok("/dev/tty*")),
            ("/dev/tty[0-9a-f]?", Ok("/dev/tty[0-9a-f]?")),
            ("/dev/tty[^S]*", Ok("/dev/tty[!S]*")),
            ("/dev/a\\*b\\c", Ok("/dev/a[*]bc")),
            ("/dev/a[", Err(())),
            ("/dev/a[]", Err(())),
            ("/dev/a[b", Err(())),
            ("/dev/a[\\]]", Err(())),
            ("/dev/a\\", Err(())),
        ] {
            assert_eq!(glob(theirs).map_err(|_| ()), ours.map(str::to_owned), "{theirs}");
        }
    }
}
