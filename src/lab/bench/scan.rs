//! `holdfast bench scan`: the duration of a scan of this machine's tree, of a captured one, or of a
//! generated one of any size.
//!
//! A scan is timed as the daemon makes it: all PCI functions are read, described, and selected by
//! the configured resources, or by the default ones. The floor is measured after each scan: the
//! `uevent` file of each function, which contains driver and kind, is opened, read and closed. No
//! program that needs these can do less; the content is neither parsed nor kept.

use super::instance::temporary;
use super::measurements::{Column, Measurements, column, number, quantile};
use super::node::interrupted;
use super::plot::{Axis, Scale};
use crate::console::exit::{FAILURE, Failed};
use crate::console::progress::Progress;
use crate::console::text::Text;
use crate::console::{Global, block_on, show};
use crate::domain::{DeviceClass, MigStrategy, ResourceSpec};
use crate::hardware::{self, Discovery};
use crate::host::HostRoot;
use crate::lab::sim::hardware::{FUNCTIONS_MAX, SimNode, VFS_MAX};
use clap::Args;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// The sizes of `--sweep`.
const SWEEP: [u64; 5] = [560, 1_000, 2_000, 5_000, 10_000];
/// The file of each function that the floor reads.
const FLOOR_FILE: &str = "uevent";
const FLOOR: &str = "each function's uevent opened, read and closed";

const COLUMNS: [Column; 12] = [
    column("functions", "functions", 0),
    column("vfs", "vfs", 0),
    column("devices", "devices", 0),
    column("offered", "offered", 0),
    column("p50_ms", "p50 ms", 2),
    column("p99_ms", "p99 ms", 2),
    column("max_ms", "max ms", 2),
    column("us_per_function", "ms/1000", 2),
    column("floor_files", "files", 0),
    column("floor_p50_ms", "floor p50 ms", 2),
    column("floor_us_per_function", "floor ms/1000", 2),
    column("times_floor", "× floor", 2),
];

/// The tree, and the number of scans.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Scan this tree, such as an unpacked capture [default: --host-root]
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// Generate a node with N PCI functions and scan it; several numbers, separated by commas, are
    /// scanned one after the other [default without a number: 560]
    #[arg(long, value_name = "N", conflicts_with = "root", num_args = 0..=1, value_delimiter = ',', default_missing_value = "560",
          value_parser = clap::value_parser!(u64).range(1..=FUNCTIONS_MAX as u64))]
    functions: Vec<u64>,
    /// Make N of the generated functions virtual ones, in addition to the eight of every generated
    /// node
    #[arg(long, value_name = "N", conflicts_with = "root", default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=VFS_MAX as u64))]
    vfs: u64,
    /// Scan nodes with 560, 1000, 2000, 5000 and 10000 functions, to show how the time grows
    #[arg(long, conflicts_with_all = ["root", "functions"])]
    sweep: bool,
    /// Measured scans of each tree, after one unmeasured scan
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    rounds: u64,
    /// Draw the result to FILE, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

pub(super) fn run(global: &Global, options: &Options) -> Result<(), Failed> {
    let stop = Stop::new()?;
    let mut measurements = Measurements::new(&COLUMNS);
    let sizes = if options.sweep { SWEEP.to_vec() } else { options.functions.clone() };
    let sizes = if sizes.is_empty() && options.vfs > 0 {
        vec![SWEEP[0].max(2 * options.vfs)]
    } else {
        sizes
    };
    let root = options.root.as_deref().unwrap_or(&global.host_root);
    if sizes.is_empty() {
        let configured =
            if options.root.is_some() { Vec::new() } else { global.load_config()?.resources };
        measurements.add(&measure(root, &configured, options.rounds, &stop)?);
    }
    for functions in &sizes {
        let dir = temporary(&std::env::temp_dir())?;
        let count = |of: u64| usize::try_from(of).unwrap_or(usize::MAX);
        {
            let _making = Progress::uncounted("creating a node");
            SimNode::create_large(dir.path(), count(*functions), count(options.vfs))?;
        }
        measurements.add(&measure(dir.path(), &[], options.rounds, &stop)?);
    }
    if let Some(file) = &options.plot {
        let axis = |label, scale| Axis { label, scale };
        let lines =
            [("p99_ms", "scan, p99"), ("p50_ms", "scan, p50"), ("floor_p50_ms", "floor, p50")];
        let x = ("functions", axis("PCI functions", Scale::Linear));
        measurements.draw(file, "Duration of a scan", x, axis("ms", Scale::Linear), &lines)?;
    }
    let tree = sizes.is_empty().then(|| root.display().to_string());
    let document = json!({ "schema": 1, "root": tree, "rounds": options.rounds, "floor": FLOOR, "scans": measurements.json() });
    show(global.output, &document, |_: &Value| {
        Text::document(&table(&measurements, options.rounds))
    })
}

/// Whether a signal has requested the end. A scan blocks, so this is checked between rounds.
#[derive(Debug)]
struct Stop(Arc<AtomicBool>);

impl Stop {
    fn new() -> Result<Self, Failed> {
        let wanted = Arc::new(AtomicBool::new(false));
        let stop = Stop(Arc::clone(&wanted));
        let listen =
            move || block_on(interrupted()).map(|()| wanted.store(true, Ordering::Relaxed));
        std::thread::Builder::new().name("interrupts".into()).spawn(listen)?;
        Ok(stop)
    }

    fn check(&self) -> Result<(), Failed> {
        if self.0.load(Ordering::Relaxed) {
            Err(Failed::new(FAILURE, "interrupted; all files were removed"))
        } else {
            Ok(())
        }
    }
}

fn table(measurements: &Measurements, rounds: u64) -> String {
    let mut text = format!("{}floor of the same {rounds} rounds: {FLOOR}\n", measurements.table());
    let (functions, each) = (measurements.all("functions"), measurements.all("us_per_function"));
    if let (Some(few), Some(many), Some(first), Some(last)) =
        (functions.first(), functions.last(), each.first(), each.last())
        && many > few
    {
        let (of_functions, of_time) = (many / few, last / first * many / few);
        text.push_str(&format!("{of_functions:.1} × the functions take {of_time:.1} × the time\n"));
    }
    text
}

/// One row of the table.
fn measure(
    tree: &Path,
    configured: &[Arc<ResourceSpec>],
    rounds: u64,
    stop: &Stop,
) -> Result<[f64; COLUMNS.len()], Failed> {
    let root = HostRoot::new(tree);
    let found = scan_once(&root, configured);
    let function_dirs = function_dirs(&root, &found);
    if function_dirs.is_empty() {
        let place = root.path("sys/bus/pci/devices");
        return Err(Failed::new(
            FAILURE,
            format_args!("`{}` has no PCI functions; there is nothing to scan", place.display()),
        ));
    }
    let (mut scans, mut floors, mut files) = (Vec::new(), Vec::new(), 0);
    let mut progress = Progress::new("scans");
    for round in 0..rounds {
        stop.check()?;
        progress.at(usize::try_from(round).unwrap_or(0), usize::try_from(rounds).ok());
        // Scan and floor alternate, so that a machine that slows down affects both.
        let began = Instant::now();
        let again = scan_once(&root, configured);
        scans.push(began.elapsed().as_secs_f64() * 1e3);
        // Freeing the result is not part of the scan.
        drop(again);
        let began = Instant::now();
        files = function_dirs.iter().map(|dir| read_floor_file(dir)).sum();
        floors.push(began.elapsed().as_secs_f64() * 1e3);
    }
    let functions = number(found.scan.functions.len());
    let vfs = found.scan.functions.values().filter(|function| function.is_vf()).count();
    let devices = found.devices.iter().filter(|device| device.class != DeviceClass::Other).count();
    let offered: usize = found.selection.resources.values().map(Vec::len).sum();
    let (p50, floor) = (quantile(&scans, 0.5), quantile(&floors, 0.5));
    let each = |ms: f64| ms * 1e3 / functions;
    Ok([
        functions,
        number(vfs),
        number(devices),
        number(offered),
        p50,
        quantile(&scans, 0.99),
        quantile(&scans, 1.0),
        each(p50),
        number(files),
        floor,
        each(floor),
        p50 / floor,
    ])
}

/// A scan as the daemon makes it.
fn scan_once(root: &HostRoot, configured: &[Arc<ResourceSpec>]) -> Discovery {
    let scan = hardware::scan(root);
    let specs = hardware::defaults::or_usual(configured, MigStrategy::None, &scan);
    hardware::discover_with(root, scan, &specs, &hardware::DiscoverInput::first(&BTreeMap::new()))
}

/// The directories of the functions, without links in their paths.
fn function_dirs(root: &HostRoot, found: &Discovery) -> Vec<PathBuf> {
    let link = |address| root.path(&format!("sys/bus/pci/devices/{address}"));
    found.scan.functions.keys().filter_map(|address| fs::canonicalize(link(address)).ok()).collect()
}

/// Reads the floor file of one function, as [`FLOOR`] describes. Returns 1 if it could be read,
/// else 0.
fn read_floor_file(dir: &Path) -> usize {
    let mut page = [0; 4096];
    File::open(dir.join(FLOOR_FILE)).and_then(|mut file| file.read(&mut page)).is_ok().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_reports_how_the_time_grows() {
        let mut measurements = Measurements::new(&COLUMNS);
        for (functions, us) in [(500.0, 10.0), (1000.0, 15.0)] {
            let mut row = [1.0; COLUMNS.len()];
            (row[0], row[7]) = (functions, us);
            measurements.add(&row);
        }
        assert!(
            table(&measurements, 7).ends_with(
                "of the same 7 rounds: each function's uevent opened, read and closed\n2.0 × the functions take 3.0 × the time\n"
            )
        );
    }

    #[test]
    fn a_tree_without_functions_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let failed = measure(dir.path(), &[], 1, &Stop::new().unwrap()).unwrap_err();
        assert!(failed.sentence.unwrap().contains("sys/bus/pci/devices` has no PCI functions"));
    }
}
