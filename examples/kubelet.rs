//! A kubelet to try or test a daemon without a cluster.
//!
//! `cargo run --example kubelet -- RESOURCE [DIRECTORY] [TIME]`: one pod gets a device and keeps
//! it; others start and end, one after the other, until SIGTERM. Every event is printed to standard
//! output, one a line.
//!
//! The directory replaces `/`: the kubelet's directory is `var/lib/kubelet` in it. Without one, it
//! is this machine's own, as in the system that `packaging/test/service` boots. The time, such as
//! `10s`, is how long each of the other pods runs.

#![expect(clippy::print_stdout, reason = "the output is the purpose of this program")]

use holdfast::domain::ResourceName;
use holdfast::lab::sim::kubelet::{Kubelet, KubeletConfig, PodOutcome, PodSpec};
use std::path::PathBuf;
use std::time::Duration;
use std::{env, io};

/// Default run time of a pod: not longer than its admission takes, so that there are many.
const RUNS_FOR: Duration = Duration::from_millis(20);
/// A wait without an end.
const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);

fn main() -> io::Result<()> {
    let mut arguments = env::args().skip(1);
    let resource = arguments.next().and_then(|name| name.parse().ok()).ok_or_else(|| {
        io::Error::other("the resource is missing; usage: kubelet RESOURCE [DIRECTORY] [TIME]")
    })?;
    let root = arguments.next().map_or_else(|| PathBuf::from("/"), PathBuf::from);
    let runs_for = arguments
        .next()
        .map_or(Ok(RUNS_FOR), |time| humantime::parse_duration(&time))
        .map_err(io::Error::other)?;
    actix::System::new().block_on(async {
        let kubelet =
            Kubelet::start(KubeletConfig::new(root.join("var/lib/kubelet"), root)).await?;
        tokio::select! {
            () = print_events(&kubelet) => Ok(()),
            done = pods(&kubelet, &resource, runs_for) => done,
        }
    })
}

/// Prints every event as soon as it happens.
async fn print_events(kubelet: &Kubelet) {
    let mut printed = 0;
    loop {
        let new_lines = kubelet.wait_for_some(
            |view| {
                let events = view.events();
                let new = usize::try_from(events.total() - printed).unwrap_or(usize::MAX);
                let lines: Vec<String> =
                    events.iter().rev().take(new).map(ToString::to_string).collect();
                (new > 0).then(|| (events.total(), lines))
            },
            FOREVER,
        );
        let Ok((total, lines)) = new_lines.await else { return };
        printed = total;
        lines.iter().rev().for_each(|line| println!("{line}"));
    }
}

/// Runs one pod that stays, and others one after the other.
async fn pods(kubelet: &Kubelet, resource: &ResourceName, runs_for: Duration) -> io::Result<()> {
    let offered =
        |view: &holdfast::lab::sim::kubelet::View<'_>| view.capacity(resource).allocatable > 1;
    kubelet.wait_for(offered, FOREVER).await.map_err(io::Error::other)?;
    add(kubelet, resource, "stays".into()).await;
    for number in 0_u64.. {
        let PodOutcome { uid, .. } = add(kubelet, resource, format!("goes-{number}")).await;
        tokio::time::sleep(runs_for).await;
        kubelet.delete_pod(&uid)?;
    }
    Ok(())
}

async fn add(kubelet: &Kubelet, resource: &ResourceName, name: String) -> PodOutcome {
    kubelet.add_pod(PodSpec::new("default", name).app("main", resource, 1)).await
}
