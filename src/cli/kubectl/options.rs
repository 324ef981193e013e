//! The command line of `kubectl holdfast`, and the command that each node gets.

use crate::cli::query::GrantFilter;
use crate::cli::when;
use crate::console::non_empty;
use crate::domain::Timestamp;
use clap::{Args, Subcommand};
use jiff::tz::TimeZone;
use std::path::PathBuf;
use std::time::Duration;

/// Time for the answer of a node.
const DEADLINE: Duration = Duration::from_secs(5);
/// The same for `doctor`, which reads the disks and asks the driver.
const DOCTOR_DEADLINE: Duration = Duration::from_secs(30);

/// The verb, the nodes, and the way to the API server.
#[derive(Debug, Args)]
pub struct Options {
    #[command(flatten)]
    pub(super) access: Access,
    #[command(flatten)]
    pub(super) nodes: Nodes,
    #[command(subcommand)]
    pub(super) verb: Verb,
}

/// Options for kubectl.
#[derive(Debug, Default, Args)]
pub(super) struct Access {
    /// The kubeconfig file [default: as kubectl]
    #[arg(long, global = true, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// The context of the kubeconfig [default: the current one]
    #[arg(long, global = true, value_name = "NAME")]
    context: Option<String>,
    /// The user to impersonate
    #[arg(long = "as", global = true, value_name = "USER")]
    impersonated: Option<String>,
}

impl Access {
    /// The options as kubectl has them.
    pub(super) fn arguments(&self) -> Vec<String> {
        let kubeconfig = self.kubeconfig.as_ref().map(|file| file.display().to_string());
        [("kubeconfig", &kubeconfig), ("context", &self.context), ("as", &self.impersonated)]
            .into_iter()
            .filter_map(|(name, value)| Some(format!("--{name}={}", value.as_ref()?)))
            .collect()
    }
}

/// The selected nodes.
#[derive(Debug, Args)]
pub(super) struct Nodes {
    /// Only these nodes, separated by commas
    #[arg(long, global = true, value_name = "NODE,…", value_delimiter = ',', value_parser = non_empty)]
    pub(super) nodes: Vec<String>,
    /// Only nodes with these labels, as for kubectl: `gpu=a100,zone!=b`
    #[arg(short = 'l', long, global = true, value_name = "LABELS", value_parser = non_empty)]
    pub(super) selector: Option<String>,
    /// The namespace of the daemon's pods
    #[arg(short, long, global = true, value_name = "NAME", default_value = "kube-system", value_parser = non_empty)]
    pub(super) namespace: String,
    /// The labels of the daemon's pods
    #[arg(long, global = true, value_name = "LABELS", default_value = "app.kubernetes.io/name=holdfast", value_parser = non_empty)]
    pub(super) pod_selector: String,
    /// How long each node may take [default: 5s; for `doctor` 30s]
    #[arg(long, global = true, value_name = "DURATION", value_parser = humantime::parse_duration)]
    timeout: Option<Duration>,
}

impl Nodes {
    /// Whether the operator chose nodes.
    pub(super) fn is_selection(&self) -> bool {
        !self.nodes.is_empty() || self.selector.is_some()
    }

    pub(super) fn deadline(&self, verb: &Verb) -> Duration {
        let usual = if matches!(verb, Verb::Doctor { .. }) { DOCTOR_DEADLINE } else { DEADLINE };
        self.timeout.unwrap_or(usual)
    }
}

/// Verbs on many nodes.
#[derive(Debug, Subcommand)]
pub(super) enum Verb {
    /// Show which container holds which device, or the holder of one device, now or at a time
    Who {
        /// The device: its id or a prefix of it, a PCI address, a node such as /dev/fuse, or its
        /// name on the host such as mlx5_2
        device: Option<String>,
        #[command(flatten)]
        filter: GrantFilter,
        /// The holders at this time: 2026-11-21T03:12:00Z, "2026-11-21 03:12" or 03:12 in local
        /// time, or 2h ago
        #[arg(long, allow_hyphen_values = true, value_name = "TIME")]
        at: Option<String>,
    },
    /// Show past and present grants: who held which device, and when
    History {
        /// Show only this device, in the forms of `who`
        #[arg(long, value_name = "DEVICE")]
        device: Option<String>,
        #[command(flatten)]
        filter: GrantFilter,
        /// Show only grants held at this time, in the forms of `who`
        #[arg(long, allow_hyphen_values = true, value_name = "TIME", conflicts_with = "since")]
        at: Option<String>,
        /// Show only grants held at this time or later
        #[arg(long, allow_hyphen_values = true, value_name = "TIME")]
        since: Option<String>,
    },
    /// Explain a device, a pod or a claim: what is known, why, and what happens next
    Explain {
        /// A device in the forms of `who`, or a pod or a ResourceClaim: [NAMESPACE/]NAME or uid:…
        #[arg(value_parser = non_empty)]
        subject: String,
    },
    /// Show the state of each daemon and its problems
    Status,
    /// List the hardware of the nodes: model, driver, place, health and holder of each device
    Topology {
        /// Show only devices with this text in a value: class, model, driver, id, resource, …
        #[arg(long = "match", value_name = "TEXT", value_parser = non_empty)]
        wanted: Option<String>,
    },
    /// Show the health of the devices that resources offer, or of one device
    Devices {
        /// Show only this device, in the forms of `who`
        device: Option<String>,
        /// Show only devices with this text in a value: resource, health, reason, id, …
        #[arg(long = "match", value_name = "TEXT", value_parser = non_empty)]
        wanted: Option<String>,
    },
    /// Check the nodes and list each problem
    Doctor {
        /// Also list the checks that found no problem
        #[arg(long)]
        all: bool,
    },
    /// Cordon a device: give it to no new container until `uncordon`
    Cordon {
        /// The device, in the forms of `who`
        device: String,
        /// The reason, shown to other operators
        #[arg(long, value_name = "TEXT", value_parser = non_empty)]
        reason: String,
        /// Also delete the pods that use the device by a claim (Dynamic Resource Allocation)
        #[arg(long)]
        evict: bool,
    },
    /// Uncordon a device; also ends the wait for an operator after a fault or repeated failures
    Uncordon {
        /// The device, in the forms of `who`
        device: String,
    },
}

impl Verb {
    /// The arguments of `holdfast` on a node. Times become instants: the clock and the zone of the
    /// operator count, not those of the container.
    ///
    /// # Errors
    /// One sentence, when an option is no time.
    pub(super) fn arguments(&self, now: Timestamp, zone: &TimeZone) -> Result<Vec<String>, String> {
        let instant = |name: &str, text: &Option<String>| {
            let parsed = text.as_ref().map(|text| when::parse(text, now, zone)).transpose()?;
            Ok::<_, String>(parsed.map(|at| format!("--{name}={at}")))
        };
        let text = |name: &str, value: &Option<String>| {
            value.as_ref().map(|value| format!("--{name}={value}"))
        };
        let (words, options): (&[&str], Vec<Option<String>>) = match self {
            Verb::Who { device, filter, at: at @ Some(_) } => {
                let options = [text("device", device), instant("at", at)?];
                (&["history"], options.into_iter().chain(of_filter(filter)).collect())
            }
            Verb::Who { device, filter, at: None } => {
                (&["who"], of_filter(filter).into_iter().chain(operand(device.as_ref())).collect())
            }
            Verb::History { device, filter, at, since } => {
                let options =
                    [text("device", device), instant("at", at)?, instant("since", since)?];
                (&["history"], options.into_iter().chain(of_filter(filter)).collect())
            }
            Verb::Explain { subject } => (&["explain"], operand(Some(subject)).into()),
            Verb::Status => (&["status"], Vec::new()),
            Verb::Topology { .. } => (&["topology"], Vec::new()),
            Verb::Devices { device, .. } => (&["device", "show"], operand(device.as_ref()).into()),
            Verb::Doctor { .. } => (&["doctor"], Vec::new()),
            Verb::Cordon { device, reason, evict } => {
                let evict = evict.then(|| "--evict".to_owned());
                let options = [Some(format!("--reason={reason}")), evict];
                (&["device", "cordon"], options.into_iter().chain(operand(Some(device))).collect())
            }
            Verb::Uncordon { device } => (&["device", "uncordon"], operand(Some(device)).into()),
        };
        let words = words.iter().copied().chain(["--output=json"]).map(str::to_owned);
        Ok(words.chain(options.into_iter().flatten()).collect())
    }

    /// The text of `--match`.
    pub(super) fn wanted(&self) -> Option<&str> {
        match self {
            Verb::Topology { wanted } | Verb::Devices { wanted, .. } => wanted.as_deref(),
            _ => None,
        }
    }
}

/// A device that may begin with `-` is no option.
fn operand(device: Option<&String>) -> [Option<String>; 2] {
    [device.map(|_| "--".to_owned()), device.cloned()]
}

fn of_filter(GrantFilter { pod, resource, claim }: &GrantFilter) -> [Option<String>; 3] {
    let option = |name: &str, value: &Option<String>| {
        value.as_ref().map(|value| format!("--{name}={value}"))
    };
    let resource = resource.as_ref().map(ToString::to_string);
    [option("pod", pod), option("resource", &resource), option("claim", claim)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn parsed(words: &str) -> Options {
        Line::try_parse_from(["x"].into_iter().chain(words.split(' '))).unwrap().options
    }

    #[test]
    fn each_verb_becomes_the_verb_of_a_node() {
        // 2023-11-14T22:13:20Z, seen an hour east of Greenwich.
        let (now, zone) = (Timestamp(1_700_000_000_000), TimeZone::posix("CET-1").unwrap());
        for (typed, wanted) in [
            ("who", "who --output=json"),
            (
                "who --pod ml/train --resource nvidia.com/gpu GPU-5a",
                "who --output=json --pod=ml/train --resource=nvidia.com/gpu -- GPU-5a",
            ),
            (
                "who GPU-5a --at 03:12",
                "history --output=json --device=GPU-5a --at=2023-11-14T02:12:00.000Z",
            ),
            (
                "history --since 2h --claim ml/c",
                "history --output=json --since=2023-11-14T20:13:20.000Z --claim=ml/c",
            ),
            ("explain ml/train-0", "explain --output=json -- ml/train-0"),
            ("status", "status --output=json"),
            ("topology --match x", "topology --output=json"),
            ("devices mlx5_2", "device show --output=json -- mlx5_2"),
            ("doctor --all", "doctor --output=json"),
            (
                "cordon GPU-5a --reason fan --evict",
                "device cordon --output=json --reason=fan --evict -- GPU-5a",
            ),
            ("uncordon GPU-5a", "device uncordon --output=json -- GPU-5a"),
        ] {
            let arguments = parsed(typed).verb.arguments(now, &zone).unwrap();
            assert_eq!(arguments.join(" "), wanted, "{typed}");
        }
        let wrong = parsed("who --at yesterday").verb.arguments(now, &zone).unwrap_err();
        assert!(wrong.starts_with("`yesterday` is not a time"), "{wrong}");
    }

    #[test]
    fn options_are_allowed_after_the_verb() {
        let options =
            parsed("status --nodes a,b -l gpu=a100 -n devices --context prod --as me --timeout 9s");
        assert_eq!(options.nodes.nodes, ["a", "b"]);
        assert_eq!(options.nodes.namespace, "devices");
        assert_eq!(options.nodes.deadline(&options.verb), Duration::from_secs(9));
        assert_eq!(options.access.arguments(), ["--context=prod", "--as=me"]);
        assert!(options.nodes.is_selection() && !parsed("status").nodes.is_selection());
    }

    #[test]
    fn a_node_understands_the_arguments() {
        let zone = TimeZone::UTC;
        for typed in [
            "who GPU-5a",
            "who -- -x",
            "who --at 2h",
            "history --since 2h --pod a/b",
            "status",
            "topology",
            "devices -- -x",
            "explain -- -x",
            "doctor",
            "cordon --reason x -- -y",
            "uncordon GPU-5a",
        ] {
            let words = parsed(typed).verb.arguments(Timestamp(1_700_000_000_000), &zone).unwrap();
            let line = ["holdfast".to_owned(), "--host-root=/host".to_owned()];
            let matched = crate::cli::command().try_get_matches_from(line.iter().chain(&words));
            assert!(matched.is_ok(), "{words:?}: {matched:?}");
        }
    }
}
