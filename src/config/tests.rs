//! Tests with damaged configuration files.
//!
//! Each file must be valid, or lead to errors with their places; all errors are reported at once.

use super::{Examined, Node, PROBLEMS_MAX, read_file};
use proptest::prelude::*;
use proptest::test_runner::{Config as Runs, TestRunner};
use std::path::Path;

/// The number of variants that a test plays; `HOLDFAST_VARIANTS` overrides it.
pub(super) fn variants(usual: u32) -> u32 {
    std::env::var("HOLDFAST_VARIANTS").ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// One damage to a file; places are in thousandths of its length.
#[derive(Debug, Clone)]
pub(super) enum Damage {
    Cut(usize),
    Flip(usize, u8),
    Insert(usize, &'static str),
    /// The place, and the number of bytes.
    Remove(usize, usize),
    /// Repeats a line at another place.
    Repeat(usize, usize),
}

impl Damage {
    pub(super) fn to(&self, mut bytes: Vec<u8>) -> Vec<u8> {
        let at = |place: usize| place * bytes.len() / 1000;
        match *self {
            Damage::Cut(place) => bytes.truncate(at(place)),
            Damage::Flip(place, bit) => {
                let place = at(place);
                bytes.get_mut(place).into_iter().for_each(|byte| *byte ^= 1 << (bit % 8));
            }
            Damage::Insert(place, what) => {
                let place = at(place);
                bytes.splice(place..place, what.bytes());
            }
            Damage::Remove(place, count) => {
                let place = at(place);
                let end = (place + count).min(bytes.len());
                bytes.drain(place..end);
            }
            Damage::Repeat(from, to) => {
                let (from, to) = (at(from), at(to));
                let line: Vec<u8> = bytes[from..]
                    .split_inclusive(|byte| *byte == b'\n')
                    .next()
                    .unwrap_or_default()
                    .to_vec();
                bytes.splice(to..to, line);
            }
        }
        bytes
    }
}

pub(super) fn damage() -> impl Strategy<Value = Vec<Damage>> {
    const PIECES: &[&str] = &[
        "[",
        "]",
        "{",
        "}",
        "=",
        "\"",
        "'",
        "\n",
        ",",
        "#",
        "[[resource]]\n",
        "[[node]]\n",
        "[ledger]\n",
        "name = 1\n",
        "-1",
        "\u{e9}",
        "\0",
        "\\",
        "''' ",
        "0x",
        "match = { name = \"*\" }\n",
    ];
    let place = || 0_usize..1000;
    let one = prop_oneof![
        1 => place().prop_map(Damage::Cut),
        4 => (place(), any::<u8>()).prop_map(|(place, bit)| Damage::Flip(place, bit)),
        4 => (place(), prop::sample::select(PIECES)).prop_map(|(place, piece)| Damage::Insert(place, piece)),
        3 => (place(), 1_usize..40).prop_map(|(place, count)| Damage::Remove(place, count)),
        2 => (place(), place()).prop_map(|(from, to)| Damage::Repeat(from, to)),
    ];
    prop::collection::vec(one, 1..4)
}

/// A configuration with every kind of table.
const WHOLE: &str = r#"
[ledger]
durability = "power-loss"
history_size = 5000
[telemetry]
listen = "127.0.0.1:9477"
[health]
poll = "10s"
fatal_xids = [48, 64]
ignore = ["no_carrier"]

[[resource]]
name = "nvidia.com/gpu"
class = "gpu"
contract = "nvidia"
nvidia = { device_list_strategy = ["envvar", "cdi-cri"], pass_device_specs = true }
select = { vendor = ["10de"], driver = ["nvidia"], vf = false, numa_node = [0, 1] }
exclude = { address = ["0000:18:00.0"] }
replicas = 4
check = { command = ["/usr/bin/check", "--all"], every = "1m" }

[[resource]]
name = "example.com/fuse"
class = "char"
paths = [
  "/dev/fuse",
  { host = "/dev/net/tun", container = "/dev/tun", permissions = "rw" },
]
env = { EXAMPLE = "1" }
mounts = [{ host = "/etc/a", container = "/etc/a", read_only = true }]

[[node]]
match = { name = ["gpu-*"], file = "/etc/role" }
[node.nvidia]
nvml = "off"
[[node.resource]]
name = "nvidia.com/gpu"
class = "gpu"
before_start = "reset"

[[node]]
match = { gpu = ["10de:2330"], dmi = { product_name = ["p5.*"] }, label = { "a.b/c" = "d" } }
health.poll = "5s"
"#;

#[test]
fn a_damaged_file_is_valid_or_an_error_with_its_place() {
    let whole =
        Examined::alone(WHOLE.as_bytes(), Path::new("f"), &Node::named("gpu-1", Path::new("/")));
    assert_eq!(whole.problems, []);
    let runs = Runs { cases: variants(1000), failure_persistence: None, ..Runs::default() };
    let wrong = std::cell::Cell::new(0_u32);
    TestRunner::new(runs)
        .run(&damage(), |damage| {
            let bytes =
                damage.iter().fold(WHOLE.as_bytes().to_vec(), |bytes, damage| damage.to(bytes));
            let node = Node::named("gpu-1", Path::new("/"));
            let examined = Examined::alone(&bytes, Path::new("f"), &node);
            let text = String::from_utf8_lossy(&bytes).into_owned();
            match examined.config() {
                Ok(config) => {
                    prop_assert!(examined.problems.is_empty());
                    let shown = examined.show(&node).unwrap();
                    let again =
                        Examined::alone(shown.text.as_bytes(), Path::new("f"), &node).config();
                    prop_assert_eq!(again, Ok(config), "{}", shown.text);
                }
                Err(error) => {
                    wrong.set(wrong.get() + 1);
                    prop_assert!(
                        !examined.problems.is_empty(),
                        "found only after the merge: {error}\n{text}"
                    );
                    let lines = text.split('\n').count();
                    for problem in &examined.problems {
                        let place = problem.line().zip(problem.column());
                        prop_assert!(
                            place.is_some_and(|(line, column)| line >= 1
                                && line <= lines
                                && column >= 1),
                            "{problem}\n{text}"
                        );
                        prop_assert!(
                            problem.file() == Some(Path::new("f"))
                                && !problem.to_string().contains('\n'),
                            "{problem}"
                        );
                    }
                }
            }
            Ok(())
        })
        .unwrap();
    assert!(wrong.get() > 0, "nothing was damaged");
}

#[test]
fn all_mistakes_are_reported_each_with_its_place() {
    let text = concat!(
        "[ledgr]\n",                                                       // 1
        "[telemetry]\nlisten = \"9477\"\n",                                // 3
        "[health]\npol = \"1s\"\n",                                        // 5
        "[[resource]]\nname = \"a.b/c\"\nclass = \"gpu\"\nreplicas = 0\n", // 9
        "[[resource]]\nclass = \"gpu\"\n",                                 // 10
        "[[resource]]\nname = \"a.b/c\"\nclass = \"nic\"\n",               // 13
        "[[resource]]\nname = \"a.b/d\"\nclass = \"char\"\npaths = [\n  \"/dev/a\",\n  { hots = \"/dev/b\" },\n]\n", // 21
        "[[node]]\nmatch = { name = \"x\" }\n[[node.resource]]\nname = \"a.b/e\"\nclass = \"gpu\"\nselect = { vendor = [\"xyz\"] }\n", // 27
        "[[node]]\nmatch = {}\n", // 29
    );
    let examined = Examined::alone(text.as_bytes(), Path::new("f"), &Node::default());
    let found: Vec<(usize, usize, &str)> = examined
        .problems
        .iter()
        .map(|problem| (problem.line().unwrap(), problem.column().unwrap(), problem.problem()))
        .collect();
    let expected = [
        (1, 2, "unknown key `ledgr`; did you mean `ledger`?"),
        (
            3,
            1,
            "`telemetry.listen` is `9477`, but must be an address and port such as `127.0.0.1:9477`, or `off`",
        ),
        (5, 1, "unknown key `pol`; did you mean `poll`?"),
        (9, 1, "resource `a.b/c`: `replicas` is 0, but must be between 1 and 16384"),
        (10, 1, "the key `name` is missing"),
        (13, 8, "two resources are named `a.b/c`; give each resource its own name"),
        (20, 5, "unknown key `hots`; did you mean `host`?"),
        (
            27,
            22,
            "resource `a.b/e`: the vendor id `xyz` must be up to four hex digits, as in \"10de\"",
        ),
        (29, 1, "`match` is empty; put settings of all nodes outside the section"),
    ];
    assert_eq!(found, expected);
}

#[test]
fn the_first_mistakes_are_reported_and_the_rest_counted() {
    for (text, count, last) in [
        (
            (0..5000).map(|n| format!("[x{n}]\na = 1\n")).collect::<String>(),
            5000,
            "unknown key `x99`",
        ),
        (
            (0..500)
                .map(|n| format!("[[resource]]\nname = \"bad{n}\"\nclass = \"nic\"\n"))
                .collect(),
            500,
            "`bad99` is not a resource name",
        ),
        ((0..150).map(|n| format!("[x{n}]\n[[node]]\n")).collect(), 300, "unknown key `x99`"),
    ] {
        let examined = Examined::alone(text.as_bytes(), Path::new("f"), &Node::default());
        assert_eq!(
            (examined.problems.len(), examined.more_problems),
            (PROBLEMS_MAX, count - PROBLEMS_MAX)
        );
        let problem = examined.problems.last().unwrap().problem();
        assert!(problem.contains(last), "{problem}");
        // Unknown keys are left out of the lists that are searched for each key.
        assert!(
            examined.merged.0.iter().all(|entry| entry.key == "resource"),
            "{:?}",
            examined.merged.0.len()
        );
        assert!(examined.config().is_err());
    }
    let twice = "[ledger]\nzzz = 1\nhistory_size = 2000\n";
    let examined = Examined::alone(twice.as_bytes(), Path::new("f"), &Node::default());
    assert_eq!(
        examined
            .merged
            .get("ledger")
            .and_then(|ledger| ledger.as_table())
            .map(|ledger| ledger.0.len()),
        Some(1)
    );
}

#[test]
fn an_endless_file_is_an_error() {
    let error = read_file(Path::new("/dev/zero")).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::FileTooLarge);
    let examined = Examined::of(Some(Path::new("/dev/zero")), &Node::default());
    let problem = examined.problems[0].to_string();
    assert!(
        problem.contains("`/dev/zero`: cannot be read: it is a device, not a regular file"),
        "{problem}"
    );
}

/// A value may be a secret in the wrong place: a token where a number belongs, a password in a
/// list. The message in the log, the page and doctor's archive shows no value, for any key and
/// type. The message of `holdfast config check` does.
#[test]
fn public_messages_contain_no_values() {
    let secrets = ["hunter2, expected `u32`", "hunter2\n\"x\" = 1", "4242424242", "hunter2"];
    let wrong = [
        "\"hunter2, expected `u32`\"",
        "\"\"\"hunter2\n\"x\" = 1\"\"\"",
        "4242424242",
        "-4242424242",
        "4242424242.5",
        "[\"hunter2\"]",
        "[[\"hunter2\"], 4242424242]",
        "{ hunter = \"hunter2\" }",
        "{ \"TOKEN=hunter2\" = 4242424242 }",
        "{ command = [\"hunter2\", \"4242424242\"] }",
        "{ command = \"/bin/sh -c hunter2\" }",
        "{ command = [\"/bin/sh\"], timeout = \"hunter2\", every = 4242424242 }",
        "{ host = \"hunter2\", container = \"hunter2\", permissions = \"4242424242\" }",
        "[{ host = \"/dev/hunter2*\", container = \"/4242424242\", permissions = \"hunter2\" }]",
        "[{ host = \"hunter2\", container = \"4242424242\" }]",
        "[{ host = \"/hunter2/..\", container = \"/4242424242/..\" }]",
        "[{ host = \"/hunter2\", container = \"/\" }, { host = \"/4242424242\", container = \"/\" }]",
        "[{ regex = \"hunter2(\" }, { regex = \"4242424242(\" }]",
        "[{ regex = \"^/dev/hunter2\" }]",
        "[\"/dev/hunter2/../4242424242\"]",
        "[\"/dev/hunter2[\"]",
    ];
    let (mut seen, mut quoted) = (0, 0);
    for (table, key, _) in super::keys::KEYS {
        for value in wrong {
            for other_keys in [
                "class = \"gpu\"",
                "class = \"char\"\npaths = [\"/dev/a\"]",
                "class = \"nic\"\ncontract = \"sriov\"",
            ] {
                let other_keys =
                    if *key == "class" || *key == "paths" && other_keys.contains("paths") {
                        ""
                    } else {
                        other_keys
                    };
                let name = if *key == "name" { "" } else { "name = \"a.b/c\"" };
                let text = match table.strip_prefix("resource") {
                    None => format!("[{table}]\n{key} = {value}\n"),
                    Some("") => format!("[[resource]]\n{name}\n{other_keys}\n{key} = {value}\n"),
                    Some(below) => format!(
                        "[[resource]]\n{name}\n{other_keys}\n[resource{below}]\n{key} = {value}\n"
                    ),
                };
                let examined = Examined::alone(text.as_bytes(), Path::new("f"), &Node::default());
                let failed = examined.config().err();
                for error in examined.problems.iter().chain(&failed) {
                    let public = error.to_string();
                    seen += 1;
                    quoted +=
                        usize::from(secrets.iter().any(|secret| error.problem().contains(secret)));
                    assert!(
                        !public.contains("hunter2") && !public.contains("4242424242"),
                        "{text}\n{public}"
                    );
                }
            }
        }
    }
    assert!(seen > 1000 && quoted > 500, "{seen} {quoted}");
    // Keys, and the parser's own errors.
    for text in [
        "\"TOKEN=hunter2\" = 1",
        "hunter2",
        "[x]\nhunter2 hunter2 = 4242424242",
        "[[node]]\nmatch = { name = \"hunter2[\" }",
        "a = \"hunter2",
    ] {
        let examined = Examined::alone(text.as_bytes(), Path::new("f"), &Node::default());
        let public = examined.problems[0].to_string();
        assert!(!public.contains("hunter2") && !public.contains("4242424242"), "{text}\n{public}");
    }
}

#[test]
fn a_file_that_is_not_toml_leads_to_the_form_that_is_expected() {
    for text in ["name = nvidia.com/gpu", "name: nvidia.com/gpu", "{\"resource\": []}", "[ledger"] {
        let examined = Examined::alone(text.as_bytes(), Path::new("f"), &Node::default());
        let problem = examined.problems[0].problem();
        assert!(problem.contains("TOML is expected"), "{text}\n{problem}");
    }
    let twice = "[ledger]\nsync = true\nsync = true";
    let examined = Examined::alone(twice.as_bytes(), Path::new("f"), &Node::default());
    assert_eq!(examined.problems[0].problem(), "duplicate key");
}
