//! Validates paths and texts that reach a container, a program or the kernel unchanged.

use super::error::hidden;
use crate::domain::template;
use std::collections::BTreeMap;

/// The limit of one argument or variable with its name and NUL (`MAX_ARG_STRLEN` of Linux). With a
/// longer one no program starts.
const ARGUMENT_BYTES_MAX: usize = 128 * 1024;
/// The limit of a resource's environment in total. It is in every answer and in every record of a
/// grant, and a record has at most 2 MB.
const ENV_BYTES_MAX: usize = 1_000_000;

/// A path must be absolute, without `.` and `..`. `of` names its key.
pub(super) fn path(path: &str, of: &str) -> Result<(), String> {
    if path.contains(char::is_control) {
        return Err(format!("the path `{}` of `{of}` contains a control character", hidden(path)));
    }
    let Some(below) = path.strip_prefix('/') else {
        return Err(format!("the path `{}` of `{of}` must be absolute", hidden(path)));
    };
    if below.split('/').any(|step| matches!(step, "." | "..")) {
        return Err(format!("the path `{}` of `{of}` must not contain `.` or `..`", hidden(path)));
    }
    Ok(())
}

/// Every placeholder of a text must be known. `of` names its key.
pub(super) fn placeholders(text: &str, of: &str) -> Result<(), String> {
    template::unknown(text).map_or(Ok(()), |name| {
        Err(format!(
            "`{{{}}}` of `{}` is not a placeholder; the known ones are {}; `{{{{{}}}}}` is the \
             text itself",
            hidden(name),
            hidden(of),
            template::known(),
            hidden(name)
        ))
    })
}

/// An id of up to four hexadecimal digits, as PCI and USB have them. `what` names it.
pub(super) fn hex_id(what: &str, text: &str) -> Result<u16, String> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    let plain = digits.len() <= 4 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let id = plain.then(|| u16::from_str_radix(digits, 16).ok()).flatten();
    id.ok_or_else(|| {
        format!("the {what} id `{}` must be up to four hex digits, as in \"10de\"", hidden(text))
    })
}

/// An argument of a command line.
pub(super) fn argument(argument: &str, of: &str) -> Result<(), String> {
    if argument.contains('\0') {
        return Err(format!(
            "the command of `{of}` has an argument with a NUL, which the kernel cannot pass to a \
             program"
        ));
    }
    if argument.len() >= ARGUMENT_BYTES_MAX {
        return Err(format!(
            "the command of `{of}` has an argument of {} bytes; the kernel's limit is {}",
            argument.len(),
            ARGUMENT_BYTES_MAX - 1
        ));
    }
    Ok(())
}

/// The environment that every container of a resource gets. A value may have several lines, as a
/// certificate has.
pub(super) fn environment(env: &BTreeMap<String, String>) -> Result<(), String> {
    let mut all = 0;
    for (name, value) in env {
        if name.is_empty() || name.contains(|c: char| c == '=' || c.is_control()) {
            return Err(format!(
                "`{}` of `env` cannot be the name of an environment variable",
                hidden(name)
            ));
        }
        if value.contains('\0') {
            return Err(format!(
                "the value of `{}` in `env` contains a NUL, which an environment variable cannot \
                 contain",
                hidden(name)
            ));
        }
        placeholders(value, &format!("env.{name}"))?;
        let bytes = name.len() + value.len() + 2;
        all += bytes;
        if bytes > ARGUMENT_BYTES_MAX {
            return Err(format!(
                "the variable `{}` of `env` has {bytes} bytes; the kernel's limit is \
                 {ARGUMENT_BYTES_MAX}",
                hidden(name)
            ));
        }
    }
    if all > ENV_BYTES_MAX {
        return Err(format!(
            "`env` has {all} bytes; at most {ENV_BYTES_MAX} fit into the record of a grant"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{Node, load};

    /// The error that `config check` finds in a resource, with its line.
    fn problem(text: &str) -> Option<(String, usize)> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        let text = if text.starts_with('[') {
            text.to_owned()
        } else {
            let paths = if text.contains("paths =") { "" } else { "paths = [\"/dev/a\"]" };
            format!("[[resource]]\nname = \"a.b/c\"\nclass = \"char\"\n{paths}\n{text}\n")
        };
        std::fs::write(&file, text).unwrap();
        load(Some(&file), &Node::default())
            .err()
            .map(|error| (error.problem().to_owned(), error.line().unwrap_or_default()))
    }

    /// Each text is refused with a sentence that contains this part, at this line.
    fn assert_refused(cases: &[(&str, &str, usize)]) {
        for (text, expected, line) in cases {
            let (problem, at) = problem(text).unwrap_or_else(|| panic!("valid: {text}"));
            assert!(problem.contains(expected), "{problem}\nshould contain: {expected}");
            assert_eq!(at, *line, "{problem}");
        }
    }

    #[test]
    fn impossible_variables_and_mounts_are_errors() {
        assert_refused(&[
            (r#"env = { "A=B" = "x" }"#, "`A=B` of `env` cannot be the name", 5),
            (r#"env = { "" = "x" }"#, "`` of `env` cannot be the name", 5),
            (r#"env = { "A\u0000" = "x" }"#, "`A\\u{0}` of `env` cannot be the name", 5),
            (r#"env = { "A\nB" = "x" }"#, "`A\\nB` of `env` cannot be the name", 5),
            (r#"env = { A = "a\u0000b" }"#, "the value of `A` in `env` contains a NUL", 5),
            (
                r#"mounts = [{ host = "/a\u0000", container = "/x" }]"#,
                "the path `/a\\u{0}` of `mounts` contains a control character",
                5,
            ),
            (
                r#"mounts = [{ host = "/a", container = "/x\u001b" }]"#,
                "of `mounts` contains a control character",
                5,
            ),
            (
                r#"mounts = [{ host = "/a/../b", container = "/x" }]"#,
                "the path `/a/../b` of `mounts` must not contain `.` or `..`",
                5,
            ),
            (
                r#"mounts = [{ host = "/a", container = "/x/../../y" }]"#,
                "the path `/x/../../y` of `mounts` must not contain `.` or `..`",
                5,
            ),
            (
                r#"mounts = [{ host = "/a", container = "x" }]"#,
                "the path `x` of `mounts` must be absolute",
                5,
            ),
            (
                r#"mounts = [{ host = "/a", container = "//" }]"#,
                "would hide the container's own files",
                5,
            ),
            (
                r#"mounts = [{ host = "/a", container = "/x" }, { host = "/b", container = "/x/" }]"#,
                "`/a` and `/b` of `mounts` would both",
                5,
            ),
        ]);
    }

    #[test]
    fn impossible_paths_and_arguments_are_errors() {
        assert_refused(&[
            (r#"paths = ["/dev/a\u0000b"]"#, "of `paths` contains a control character", 5),
            (
                r#"paths = ["/dev/../etc/passwd"]"#,
                "must begin with `/dev/` and must not contain empty parts, `.` or `..`",
                5,
            ),
            (
                r#"paths = [{ host = "/dev/a", container = "/dev/../../etc/x" }]"#,
                "of `paths` must not contain `.` or `..`",
                5,
            ),
            (
                r#"paths = [{ host = "/dev/a", container = "/dev/a\tb" }]"#,
                "of `paths` contains a control character",
                5,
            ),
            (
                r#"paths = [{ host = "/dev/a", container = "a" }]"#,
                "the path `a` of `paths` must be absolute",
                5,
            ),
            (
                r#"after_release = { command = ["/a/../b"] }"#,
                "of `after_release` must not contain `.` or `..`",
                5,
            ),
            (
                r#"after_release = { command = ["/a\u0000"] }"#,
                "of `after_release` contains a control character",
                5,
            ),
            (r#"before_start = { command = ["/a", "x\u0000y"] }"#, "has an argument with a NUL", 5),
            (r#"check = { command = ["/a", "x\u0000y"] }"#, "has an argument with a NUL", 5),
            (
                "[cdi]\ndirectory = \"/a/../b\"",
                "the path `/a/../b` of `cdi.directory` must not contain `.` or `..`",
                2,
            ),
            (
                "[cdi]\ndirectory = \"/a\\u0000\"",
                "of `cdi.directory` contains a control character",
                2,
            ),
            (
                "[device_info]\ndirectory = \"/a/./b\"",
                "of `device_info.directory` must not contain `.` or `..`",
                2,
            ),
            (
                "[labels]\nfeatures_d = \"/a/..\"",
                "of `labels.features_d` must not contain `.` or `..`",
                2,
            ),
            (
                "[kubelet]\npod_resources_socket = \"/a\\u0007\"",
                "of `kubelet.pod_resources_socket` contains a control character",
                2,
            ),
            (
                "[nvidia]\ndriver_root = \"/a/../b\"",
                "of `nvidia.driver_root` must not contain `.` or `..`",
                2,
            ),
            ("[nvidia]\nnvml = \"/a/../b\"", "of `nvidia.nvml` must not contain `.` or `..`", 2),
            (
                "[nvidia]\ndev_root = \"/a/./b\"",
                "of `nvidia.dev_root` must not contain `.` or `..`",
                2,
            ),
        ]);
    }

    #[test]
    fn unusual_but_possible_values_are_valid() {
        for text in [
            r#"env = { A = "two\nlines\tand a tab", "ä.b-c" = "" }"#,
            r#"mounts = [{ host = "/", container = "/host" }, { host = "/a..b", container = "/x/" }]"#,
            r#"paths = [{ host = "/dev/a", container = "/" }]"#,
            r#"after_release = { command = ["/bin/sh", "-c", "one\ntwo", ""] }"#,
            "[cdi]\ndirectory = \"/etc/cdi/\"",
        ] {
            assert_eq!(problem(text), None, "{text}");
        }
    }

    #[test]
    fn the_length_of_an_environment_is_limited() {
        let env = |count: usize, bytes: usize| {
            let one = |n| format!("A{n} = \"{}\"", "x".repeat(bytes));
            format!("env = {{ {} }}", (0..count).map(one).collect::<Vec<_>>().join(", "))
        };
        assert_eq!(problem(&env(7, 131_068)), None);
        assert!(
            problem(&env(1, 131_069))
                .unwrap()
                .0
                .contains("the variable `A0` of `env` has 131073 bytes")
        );
        assert!(
            problem(&env(8, 131_068))
                .unwrap()
                .0
                .contains("`env` has 1048576 bytes; at most 1000000")
        );
        assert!(
            problem(&format!("check = {{ command = [\"/a\", \"{}\"] }}", "x".repeat(131_072)))
                .unwrap()
                .0
                .contains("131072 bytes")
        );
    }
}
