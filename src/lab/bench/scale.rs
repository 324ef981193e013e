//! `holdfast bench scale`: the cost of a daemon as the node grows, and the cost of many daemons on
//! one machine.
//!
//! There are three tables: one daemon with a growing number of devices, one with a growing number
//! of virtual functions, and a growing number of daemons. The daemons are private processes; their
//! simulated kubelets run in this process. All readings are from `/proc`, after each daemon has
//! been idle.

use super::measurements::{Column, Measurements, column, number, quantile};
use super::node::{Node, NodeOptions, interrupted, plain_config, plain_files};
use super::plot::{Axis, Scale};
use super::process::Readings;
use crate::config;
use crate::console::exit::{FAILURE, Failed};
use crate::console::progress::Progress;
use crate::console::text::Text;
use crate::console::{Global, block_on, show};
use crate::hardware;
use crate::host::HostRoot;
use crate::lab::sim::hardware::{SimNode, VFS_MAX};
use clap::Args;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Defaults if no sizes are given.
const DEVICES: [u64; 5] = [64, 1_000, 2_500, 5_000, 10_000];
const VFS: [u64; 4] = [64, 512, 2_048, 4_096];
const DAEMONS: [u64; 5] = [1, 10, 50, 100, 200];
/// Devices of each of many daemons.
const DEVICES_OF_EACH: usize = 8;
/// Memory limit of an idle daemon with ten thousand devices.
const IDLE_RSS_MIB: f64 = 40.0;
/// Number of timed scans for each row.
const SCANS: usize = 5;

/// The sizes, as integers separated by commas. If none of the three is given, all are measured.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Devices of one daemon [default: 64,1000,2500,5000,10000]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=100_000))]
    devices: Vec<u64>,
    /// Resources that offer these devices, evenly distributed
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=256))]
    resources: u64,
    /// SR-IOV virtual functions of one daemon's node [default: 64,512,2048,4096]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=VFS_MAX as u64))]
    vfs: Vec<u64>,
    /// Number of daemons, each with 8 devices [default: 1,10,50,100,200]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=500))]
    daemons: Vec<u64>,
    /// Idle seconds over which CPU time is measured
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=3600))]
    idle: u64,
    /// Draw each table as SVG; the name of the table is inserted before the suffix
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    node: NodeOptions,
}

const fn columns(first: Column) -> [Column; 11] {
    [
        first,
        column("first_lists_ms", "first lists ms", 0),
        column("scan_ms", "scan ms", 1),
        column("rss_mib", "rss MiB", 1),
        column("anon_mib", "anon MiB", 1),
        column("private_mib", "private MiB", 1),
        column("descriptors", "fds", 0),
        column("threads", "threads", 0),
        column("cpu_seconds_per_minute", "cpu s/min", 2),
        column("sleeps_per_minute", "sleeps/min", 0),
        column("state_kib", "state KiB", 0),
    ]
}

const OF_DEVICES: [Column; 11] = columns(column("devices", "devices", 0));
const OF_VFS: [Column; 11] = columns(column("vfs", "vfs", 0));
const OF_DAEMONS: [Column; 11] = columns(column("daemons", "daemons", 0));

pub(super) fn run(global: &Global, options: &Options) -> Result<(), Failed> {
    block_on(async {
        tokio::select! {
            measured = measure(global, options) => measured,
            () = interrupted() => Err(Failed::new(FAILURE, "interrupted; all files were removed")),
        }
    })?
}

async fn measure(global: &Global, options: &Options) -> Result<(), Failed> {
    let nothing = [&options.devices, &options.vfs, &options.daemons].into_iter().all(Vec::is_empty);
    let points =
        |asked: &[u64], usual: &[u64]| if nothing { usual.to_vec() } else { asked.to_vec() };
    let idle = Duration::from_secs(options.idle);
    let resources = count(options.resources);
    let mut tables = Vec::new();

    let mut measurements = Measurements::new(&OF_DEVICES);
    for devices in points(&options.devices, &DEVICES) {
        let config = plain_config(resources.min(count(devices)), 1);
        let host = |host: &Path| plain_files(host, resources.min(count(devices)), count(devices));
        let mut nodes = [options.node.start(&global.state_dir, &config, host).await?];
        measurements.add(&row(devices, &mut nodes, scan_ms, idle).await?);
        end(nodes).await?;
    }
    tables.push(("devices", "devices, in the requested number of resources", measurements));

    let mut measurements = Measurements::new(&OF_VFS);
    for vfs in points(&options.vfs, &VFS) {
        let config = "[[resource]]\nname = \"example.com/vf\"\nclass = \"rdma\"\nselect = { vf = true }\n\
                      [[resource]]\nname = \"nvidia.com/gpu\"\nclass = \"gpu\"\nselect = { vendor = [\"10de\"] }\n";
        // Further functions: those of a large server (560), and twice as many as the adapters of
        // the virtual functions need.
        let host = |host: &Path| {
            SimNode::create_large(host, 560 + count(vfs) + count(vfs) / 16, count(vfs)).map(drop)
        };
        let mut nodes = [options.node.start(&global.state_dir, config, host).await?];
        measurements.add(&row(vfs, &mut nodes, scan_ms, idle).await?);
        end(nodes).await?;
    }
    tables.push(("vfs", "virtual functions", measurements));

    let mut measurements = Measurements::new(&OF_DAEMONS);
    let mut nodes = Vec::new();
    let mut steps = points(&options.daemons, &DAEMONS);
    steps.sort_unstable();
    for daemons in steps {
        let mut progress = Progress::new("daemons started");
        while nodes.len() < count(daemons) {
            progress.at(nodes.len(), Some(count(daemons)));
            nodes.push(
                options
                    .node
                    .start(&global.state_dir, &plain_config(1, 1), |host| {
                        plain_files(host, 1, DEVICES_OF_EACH)
                    })
                    .await?,
            );
        }
        drop(progress);
        measurements.add(&row(daemons, &mut nodes, |_| f64::NAN, idle).await?);
    }
    end(nodes).await?;
    tables.push(("daemons", "daemons on one machine, each with 8 devices", measurements));

    tables.retain(|(_, _, measurements)| !measurements.is_empty());
    print_results(global, options, &tables)
}

fn print_results(
    global: &Global,
    options: &Options,
    tables: &[(&str, &str, Measurements)],
) -> Result<(), Failed> {
    for (key, title, measurements) in tables {
        if let Some(file) = &options.plot {
            let axis = |label, scale| Axis { label, scale };
            let lines =
                [("rss_mib", "resident"), ("private_mib", "private"), ("anon_mib", "anonymous")];
            let file = plot_file(file, key, tables.len());
            measurements.draw(
                &file,
                &format!("Memory of an idle daemon: {title}"),
                (key, axis(key, Scale::Linear)),
                axis("MiB", Scale::Linear),
                &lines,
            )?;
        }
    }
    let mut document: Map<String, Value> = tables
        .iter()
        .map(|(key, _, measurements)| ((*key).to_owned(), measurements.json()))
        .collect();
    document.extend([
        ("schema".to_owned(), json!(1)),
        ("resources".to_owned(), json!(options.resources)),
        ("idle_seconds".to_owned(), json!(options.idle)),
    ]);
    show(global.output, &Value::Object(document), |_| {
        let parts = tables.iter().map(|(key, title, measurements)| {
            format!("{title}\n{}{}\n", measurements.table(), summary(key, measurements))
        });
        Text::document(&parts.collect::<String>())
    })
}

/// The summary of a table.
fn summary(key: &str, measurements: &Measurements) -> String {
    let (counts, rss) = (measurements.all(key), measurements.all("rss_mib"));
    let of_last = |column: &str| measurements.all(column).last().copied().unwrap_or(f64::NAN);
    match (key, counts.last(), rss.last()) {
        ("daemons", Some(daemons), Some(_)) => {
            format!(
                "{daemons} daemons: {:.0} MiB of private memory, {:.2} processors\n",
                daemons * of_last("private_mib"),
                daemons * of_last("cpu_seconds_per_minute") / 60.0
            )
        }
        ("devices", Some(devices), Some(rss)) => {
            let verdict = if *devices > 10_000.0 {
                "which does not apply to this number"
            } else if *rss <= IDLE_RSS_MIB {
                "it holds"
            } else {
                "it does NOT hold"
            };
            format!(
                "{devices} devices: {rss:.1} MiB resident; the limit is {IDLE_RSS_MIB:.0} MiB \
                 for 10000: {verdict}\n"
            )
        }
        _ => String::new(),
    }
}

/// One row of the table with `of` devices, functions or daemons. The scan is that of the first
/// daemon. Private memory, CPU time and context switches are means over all daemons; all other
/// figures are their maximum.
async fn row(
    of: u64,
    nodes: &mut [Node],
    scan: impl Fn(&Node) -> f64,
    idle: Duration,
) -> Result<[f64; 11], Failed> {
    let first_lists = nodes.iter().map(|node| node.first_lists).max().unwrap_or_default();
    // The start ends with the settling Registers; then measure an idle window.
    tokio::time::sleep(SETTLED_AFTER).await;
    let scan = nodes.first().map_or(f64::NAN, scan);
    let mut progress = Progress::new("seconds of idling");
    let before = readings(nodes)?;
    let began = Instant::now();
    while began.elapsed() < idle {
        let seconds = |time: Duration| usize::try_from(time.as_secs()).unwrap_or(0);
        progress.at(seconds(began.elapsed()), Some(seconds(idle)));
        tokio::time::sleep(Duration::from_millis(500).min(idle - began.elapsed().min(idle))).await;
    }
    let (minutes, after) = (began.elapsed().as_secs_f64() / 60.0, readings(nodes)?);
    let most = |of: fn(&Readings) -> f64| after.iter().map(of).fold(0.0, f64::max);
    let mean = |of: fn(&Readings) -> f64| after.iter().map(of).sum::<f64>() / number(after.len());
    let grown = |of: fn(&Readings) -> f64| {
        mean(of) - before.iter().map(of).sum::<f64>() / number(before.len())
    };
    let bytes: u64 = nodes.iter().map(Node::state_bytes).max().unwrap_or_default();
    Ok([
        number(count(of)),
        first_lists.as_secs_f64() * 1e3,
        scan,
        most(|read| read.rss_kib) / 1024.0,
        most(|read| read.anon_kib) / 1024.0,
        mean(|read| read.private_kib) / 1024.0,
        most(|read| read.descriptors),
        most(|read| read.threads),
        grown(|read| read.cpu_seconds) / minutes,
        grown(|read| read.switches) / minutes,
        number(count(bytes)) / 1024.0,
    ])
}

/// The second settling Register comes 12 s after a lost stream, which does not happen at a start:
/// two seconds cover the rest.
const SETTLED_AFTER: Duration = Duration::from_secs(2);

fn readings(nodes: &mut [Node]) -> Result<Vec<Readings>, Failed> {
    nodes.iter_mut().map(Node::readings).collect()
}

/// Duration of one scan of the node, made in this process as the daemon makes it.
fn scan_ms(node: &Node) -> f64 {
    let root = HostRoot::new(node.roots().host);
    let Ok(config) = config::load(Some(&node.config_file()), &config::Node::default()) else {
        return f64::NAN;
    };
    let took = |_| {
        let began = Instant::now();
        let found = hardware::discover(&root, &config.resources, &BTreeMap::new());
        let took = began.elapsed().as_secs_f64() * 1e3;
        drop(found);
        took
    };
    quantile(&(0..SCANS).map(took).collect::<Vec<_>>(), 0.5)
}

/// Stops all daemons at once.
async fn end(nodes: impl IntoIterator<Item = Node>) -> Result<(), Failed> {
    let ended = futures_util::future::join_all(nodes.into_iter().map(Node::stop)).await;
    ended.into_iter().collect()
}

/// The file name of a table, such as `figure-devices.svg`, if there are several.
fn plot_file(file: &Path, key: &str, tables: usize) -> PathBuf {
    if tables < 2 {
        return file.to_owned();
    }
    let part = |of: Option<&std::ffi::OsStr>| {
        of.map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
    };
    let suffix =
        file.extension().map(|suffix| format!(".{}", suffix.to_string_lossy())).unwrap_or_default();
    file.with_file_name(format!("{}-{key}{suffix}", part(file.file_stem())))
}

fn count(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_of_several_plots_has_its_own_file() {
        let file = Path::new("/tmp/scale.svg");
        assert_eq!(plot_file(file, "vfs", 3), Path::new("/tmp/scale-vfs.svg"));
        assert_eq!(plot_file(file, "vfs", 1), file);
        assert_eq!(plot_file(Path::new("plot"), "devices", 2), Path::new("plot-devices"));
    }

    #[test]
    fn the_summary_compares_with_the_limit() {
        let with = |devices: f64, rss: f64| {
            let mut measurements = Measurements::new(&OF_DEVICES);
            let mut row = [0.0; 11];
            (row[0], row[3]) = (devices, rss);
            measurements.add(&row);
            summary("devices", &measurements)
        };
        assert_eq!(
            with(10_000.0, 31.25),
            "10000 devices: 31.2 MiB resident; the limit is 40 MiB for 10000: it holds\n"
        );
        assert!(with(10_000.0, 41.0).ends_with("it does NOT hold\n"));
    }
}
