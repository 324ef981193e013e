//! The hooks of a resource: before a container starts, after a release, and the periodic check.

use super::error::hidden;
use super::fragments::{self, Resource};
use super::text;
use crate::domain::{Check, DeviceClass, Hook, Hooks, Phase, Select, Sharing};
use std::ops::RangeInclusive;
use std::time::Duration;

/// The kubelet waits for 30 s, and several devices of one container may have to wait for each
/// other.
const BEFORE_START_MAX: Duration = Duration::from_secs(25);
const BEFORE_START_USUAL: Duration = Duration::from_secs(20);
/// Enough to overwrite the largest disk.
const AFTER_RELEASE_MAX: Duration = Duration::from_secs(24 * 3600);
const AFTER_RELEASE_USUAL: Duration = Duration::from_secs(60);
/// A check that takes longer is not suited to be run periodically.
const CHECK_MAX: Duration = Duration::from_secs(60);
const CHECK_USUAL: Duration = Duration::from_secs(10);
const CHECK_EVERY: Duration = Duration::from_secs(60);
/// With a shorter period the node would do little else.
const CHECK_EVERY_MIN: Duration = Duration::from_secs(5);
const CHECK_EVERY_MAX: Duration = Duration::from_secs(24 * 3600);
const LIMIT_MIN: Duration = Duration::from_secs(1);

pub(super) fn hooks(
    resource: &Resource,
    class: DeviceClass,
    select: &Select,
    sharing: Sharing,
) -> Result<Hooks, String> {
    let hook = |phase, hook: &Option<fragments::Hook>| match hook {
        None | Some(fragments::Hook::None) => Ok(None),
        Some(fragments::Hook::Reset) => reset(phase, class, select, sharing).map(Some),
        Some(fragments::Hook::Command { command, timeout }) => {
            self::command(phase, command, timeout.as_deref()).map(Some)
        }
    };
    Ok(Hooks {
        before_start: hook(Phase::BeforeStart, &resource.before_start)?,
        after_release: hook(Phase::AfterRelease, &resource.after_release)?,
        check: resource.check.as_ref().map(check).transpose()?,
    })
}

fn check(check: &fragments::Check) -> Result<Check, String> {
    let every = check
        .every
        .as_ref()
        .map(|text| time(Phase::Check, "every", text, "60s", CHECK_EVERY_MIN..=CHECK_EVERY_MAX))
        .transpose()?;
    let run = command(Phase::Check, &check.command, check.timeout.as_deref())?;
    Ok(Check { run, every: every.unwrap_or(CHECK_EVERY) })
}

/// The time if it is within its bounds, else the error message.
fn time(
    phase: Phase,
    key: &str,
    text: &str,
    example: &str,
    bounds: RangeInclusive<Duration>,
) -> Result<Duration, String> {
    let (min, max) =
        (humantime::format_duration(*bounds.start()), humantime::format_duration(*bounds.end()));
    let time = humantime::parse_duration(text).ok().filter(|time| bounds.contains(time));
    time.ok_or_else(|| {
        format!("the `{key}` of `{phase}` is `{}`, but must be a time such as `{example}`, from {min} to {max}", hidden(text))
    })
}

fn reset(
    phase: Phase,
    class: DeviceClass,
    select: &Select,
    sharing: Sharing,
) -> Result<Hook, String> {
    if sharing != Sharing::Exclusive {
        return Err(format!(
            "`{phase}` = \"reset\" would reset the device under its other containers; leave out \
             `replicas` and `pool`, or use a command"
        ));
    }
    if class == DeviceClass::Char {
        return Err(format!(
            "`{phase}` = \"reset\" needs a PCI function, and the class `{class}` has none; use a command"
        ));
    }
    if select.part == Some(true) || !select.mdev_type.is_empty() || !select.mig_profile.is_empty() {
        return Err(format!(
            "`{phase}` = \"reset\" would reset the other parts of the PCI function too, and this \
             resource offers parts; use a command"
        ));
    }
    Ok(Hook::Reset)
}

fn command(phase: Phase, argv: &[String], timeout: Option<&str>) -> Result<Hook, String> {
    let Some(program) = argv.first() else {
        return Err(format!(
            "the command of `{phase}` is empty; begin it with the program's path, as in command = \
             [\"/usr/bin/wipe\", \"--all\"]"
        ));
    };
    if !program.starts_with('/') {
        return Err(format!(
            "the command of `{phase}` begins with `{}`, but must begin with an absolute path, as \
             no shell runs it",
            hidden(program)
        ));
    }
    text::path(program, phase.as_str())?;
    argv.iter().try_for_each(|argument| text::argument(argument, phase.as_str()))?;
    let (usual, max) = match phase {
        Phase::BeforeStart => (BEFORE_START_USUAL, BEFORE_START_MAX),
        Phase::AfterRelease => (AFTER_RELEASE_USUAL, AFTER_RELEASE_MAX),
        Phase::Check => (CHECK_USUAL, CHECK_MAX),
    };
    let limit = timeout
        .map(|text| time(phase, "timeout", text, "20s", LIMIT_MIN..=max))
        .transpose()?
        .unwrap_or(usual);
    Ok(Hook::Command { argv: argv.to_vec(), limit })
}

#[cfg(test)]
mod tests {
    use super::super::{Node, load};
    use super::*;

    /// The hooks of a GPU resource with these keys, or the error message.
    fn hooks(text: &str) -> Result<Hooks, String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        let class = if text.contains("class =") { "" } else { "class = \"gpu\"\n" };
        std::fs::write(&file, format!("[[resource]]\nname = \"a.b/c\"\n{class}{text}\n")).unwrap();
        load(Some(&file), &Node::default())
            .map(|config| config.resources[0].hooks.clone())
            .map_err(|error| error.in_full())
    }

    fn command(argv: &[&str], seconds: u64) -> Option<Hook> {
        Some(Hook::Command {
            argv: argv.iter().map(ToString::to_string).collect(),
            limit: Duration::from_secs(seconds),
        })
    }

    #[test]
    fn a_hook_is_none_a_reset_or_a_command_with_a_limit() {
        for (text, before_start, after_release) in [
            ("", None, None),
            ("before_start = \"none\"\nafter_release = \"none\"", None, None),
            (
                "before_start = \"reset\"\nafter_release = \"reset\"",
                Some(Hook::Reset),
                Some(Hook::Reset),
            ),
            ("before_start = { command = [\"/bin/a\"] }", command(&["/bin/a"], 20), None),
            (
                "after_release = { command = [\"/bin/a\", \"b c\"], timeout = \"2h\" }",
                None,
                command(&["/bin/a", "b c"], 7200),
            ),
            (
                "replicas = 2\nafter_release = { command = [\"/bin/a\"] }",
                None,
                command(&["/bin/a"], 60),
            ),
        ] {
            assert_eq!(
                hooks(text),
                Ok(Hooks { before_start, after_release, check: None }),
                "{text}"
            );
        }
    }

    #[test]
    fn a_check_is_a_periodic_command() {
        let check = |seconds, every| {
            command(&["/bin/a"], seconds)
                .map(|run| Check { run, every: Duration::from_secs(every) })
        };
        for (text, wanted) in [
            ("check = { command = [\"/bin/a\"] }", check(10, 60)),
            ("check = { command = [\"/bin/a\"], timeout = \"3s\", every = \"5m\" }", check(3, 300)),
        ] {
            assert_eq!(hooks(text).unwrap().check, wanted);
        }
        for (text, sentence) in [
            ("check = { command = [\"a\"] }", "the command of `check` begins with `a`"),
            (
                "check = { command = [\"/bin/a\"], every = \"1s\" }",
                "the `every` of `check` is `1s`, but must be a time such as `60s`, from 5s to 1day",
            ),
            (
                "check = { command = [\"/bin/a\"], timeout = \"2m\" }",
                "the `timeout` of `check` is `2m`",
            ),
            (
                "check = { command = [\"/bin/a\"], evry = \"1m\" }",
                "unknown key `evry`; did you mean `every`?",
            ),
        ] {
            let problem = hooks(text).unwrap_err();
            assert!(problem.contains(sentence), "{problem}");
        }
    }

    #[test]
    fn every_mistake_is_one_sentence() {
        for (text, expected) in [
            (
                "replicas = 2\nbefore_start = \"reset\"",
                "`before_start` = \"reset\" would reset the device under its other containers",
            ),
            (
                "class = \"rdma\"\npool = 2\nafter_release = \"reset\"",
                "leave out `replicas` and `pool`",
            ),
            (
                "class = \"char\"\npaths = [\"/dev/a\"]\nafter_release = \"reset\"",
                "the class `char` has none; use a command",
            ),
            (
                "select = { part = true }\nafter_release = \"reset\"",
                "would reset the other parts of the PCI function",
            ),
            (
                "select = { mdev_type = [\"nvidia-754\"] }\nafter_release = \"reset\"",
                "would reset the other parts of the PCI function",
            ),
            ("after_release = \"rest\"", "unknown value `rest`; did you mean `reset`?"),
            ("after_release = { command = [] }", "the command of `after_release` is empty"),
            (
                "after_release = { command = [\"wipe\"] }",
                "begins with `wipe`, but must begin with an absolute path",
            ),
            ("after_release = { command = [\"/a\", \"b\\u0000c\"] }", "an argument with a NUL"),
            (
                "after_release = { command = [\"/a\"], timeout = \"soon\" }",
                "is `soon`, but must be a time such as `20s`, from 1s to 1day",
            ),
            ("after_release = { command = [\"/a\"], timeout = \"2days\" }", "from 1s to 1day"),
            (
                "before_start = { command = [\"/a\"], timeout = \"26s\" }",
                "the `timeout` of `before_start` is `26s`",
            ),
            ("before_start = { command = [\"/a\"], timeout = \"0s\" }", "from 1s to 25s"),
            (
                "before_start = { comand = [\"/a\"] }",
                "unknown key `comand`; did you mean `command`?",
            ),
            ("before_start = { timeout = \"3s\" }", "the key `command` is missing"),
            ("before_start = true", "`none`, `reset`, or a table such as"),
        ] {
            let sentence = hooks(text).unwrap_err();
            assert!(sentence.contains(expected), "{sentence}\nshould contain: {expected}");
            assert_eq!(sentence.lines().count(), 1, "{sentence}");
        }
    }
}
