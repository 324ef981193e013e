//! Micro-benchmarks of the hot paths. `cargo bench`

fn main() {
    divan::main();
}

/// A scan of the simulated node, and what the configuration makes of it.
#[divan::bench]
fn discover(bencher: divan::Bencher<'_, '_>) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let node = holdfast::sim::hardware::SimNode::create(dir.path()).expect("the simulated node");
    let root = holdfast::host::HostRoot::new(node.root());
    let scan = holdfast::hardware::scan(&root);
    let specs: Vec<_> = holdfast::hardware::defaults::specs(&scan).into_iter().map(std::sync::Arc::new).collect();
    bencher.bench_local(|| holdfast::hardware::discover(&root, &specs, &std::collections::BTreeMap::new()));
}
