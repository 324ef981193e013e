//! Reads a start from the kubelet's log: how long each resource had no devices.

/// Logged when the kubelet accepts registrations, and when a list has arrived.
const BEGIN: &str = "Starting device plugin registration server";
const LISTED: &str = "State pushed for device plugin";
/// Logged when the kubelet processes pods; the first time possibly none.
const PODS: &str = "\"SyncLoop ADD\"";
/// Logged when the kubelet drops the connection of a resource. Until the next list it has no
/// device.
const DROPPED: &str = "Mark all resources Unhealthy for resource";

/// Logged when the devices of a list are allocatable.
const COUNTED: &str = "Processed device updates for resource";

/// Logged when a stream has ended, right before the kubelet reacts.
const ENDED: &str = "ListAndWatch ended unexpectedly";

/// Whether the devices of `resource` are allocatable after everything in the log. With
/// `has_to_end`, a stream of it must have ended before.
pub(crate) fn counts(log: &str, resource: &str, has_to_end: bool) -> bool {
    let named = format!("\"{resource}\"");
    let (mut has_ended, mut counts) = (false, true);
    for line in log.lines().filter(|line| line.contains(&named)) {
        has_ended |= line.contains(ENDED);
        counts = line.contains(COUNTED) || counts && !line.contains(DROPPED);
    }
    counts && (has_ended || !has_to_end)
}

/// Milliseconds from the start of registration to the first list of `resource`; `None` without one.
pub(crate) fn first_list_ms(log: &str, resource: &str) -> Option<f64> {
    let named = format!("\"{resource}\"");
    since_begin_ms(log, |line| line.contains(LISTED) && line.contains(&named))
}

/// Milliseconds from the start of registration to the first pods that the kubelet processes.
pub(crate) fn first_pods_ms(log: &str) -> Option<f64> {
    since_begin_ms(log, |line| line.contains(PODS) && !line.contains("pods=[]"))
}

fn since_begin_ms(log: &str, fits: impl Fn(&str) -> bool) -> Option<f64> {
    let begin = log.lines().find(|line| line.contains(BEGIN)).and_then(stamp)?;
    let found = log.lines().find(|line| fits(line)).and_then(stamp)?;
    Some(ms_between(begin, found))
}

/// The milliseconds between two times of day, also over midnight. Two threads may log in the other
/// order, a fraction of a millisecond apart.
fn ms_between(begin: f64, end: f64) -> f64 {
    const DAY: f64 = 86_400_000.0;
    let passed = (end - begin).rem_euclid(DAY);
    if passed > DAY / 2.0 { 0.0 } else { passed }
}

/// The periods without devices of `resource`, from the start to the next list, in milliseconds. A
/// period without an end is infinite.
pub(crate) fn dips_ms(log: &str, resource: &str) -> Vec<f64> {
    let named = format!("\"{resource}\"");
    let (mut dips, mut begin) = (Vec::new(), None);
    for line in log.lines().filter(|line| line.contains(&named)) {
        if line.contains(DROPPED) {
            begin = begin.or(stamp(line));
        } else if line.contains(LISTED)
            && let Some((begin, end)) = begin.take().zip(stamp(line))
        {
            dips.push(ms_between(begin, end));
        }
    }
    dips.extend(begin.map(|_| f64::INFINITY));
    dips
}

/// Milliseconds of the day of a line such as `I1120 11:34:56.123456  77 server.go:90] …`.
fn stamp(line: &str) -> Option<f64> {
    let mut parts = line.split_whitespace().nth(1)?.split(':');
    let mut part = || parts.next()?.parse::<f64>().ok();
    Some(((part()? * 60.0 + part()?) * 60.0 + part()?) * 1000.0)
}

#[test]
fn times_without_devices_are_read_from_the_log() {
    let log = "\
I1120 23:59:59.990000   77 manager.go:420] \"Mark all resources Unhealthy for resource\" resourceName=\"example.com/x\"
I1120 23:59:59.991000   77 manager.go:300] \"State pushed for device plugin\" resource=\"example.com/other\" resourceCapacity=1
I1121 00:00:00.002750   77 manager.go:300] \"State pushed for device plugin\" resource=\"example.com/x\" resourceCapacity=8
I1121 00:00:00.003000   77 manager.go:300] \"State pushed for device plugin\" resource=\"example.com/x\" resourceCapacity=8
I1121 00:00:01.000000   77 manager.go:420] \"Mark all resources Unhealthy for resource\" resourceName=\"example.com/x\"";
    let dips = dips_ms(log, "example.com/x");
    assert!((dips[0] - 12.75).abs() < 1e-3 && dips[1].is_infinite() && dips.len() == 2, "{dips:?}");
    assert!(dips_ms(log, "example.com/other").is_empty());
    assert_eq!(ms_between(5.54, 5.0), 0.0);
}

#[test]
fn devices_count_again_after_the_next_list() {
    let line = |text: &str| {
        format!("I1120 11:34:56.123456   77 x.go:1] \"{text}\" resource=\"example.com/x\"\n")
    };
    let log = |texts: &[&str]| texts.iter().map(|text| line(text)).collect::<String>();
    for (texts, always, with_an_end) in [
        (&[COUNTED][..], true, false),
        (&[COUNTED, ENDED], true, true),
        (&[COUNTED, DROPPED, ENDED], false, false),
        (&[DROPPED, ENDED, LISTED], false, false),
        (&[DROPPED, ENDED, LISTED, COUNTED], true, true),
    ] {
        for (has_to_end, expected) in [(false, always), (true, with_an_end)] {
            assert_eq!(counts(&log(texts), "example.com/x", has_to_end), expected, "{texts:?}");
        }
        assert!(!counts(&log(texts), "example.com/other", true));
    }
}

/// The median.
pub(crate) fn median(figures: &[f64]) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

#[test]
fn the_times_to_the_first_list_and_to_the_first_pods_are_read_from_the_log() {
    let log = "\
I1120 23:59:59.990500   77 server.go:90] \"Starting device plugin registration server\"
I1120 23:59:59.999000   77 manager.go:300] \"State pushed for device plugin\" resource=\"example.com/other\" resourceCapacity=1
I1121 00:00:00.002750   77 manager.go:300] \"State pushed for device plugin\" resource=\"example.com/x\" resourceCapacity=8
I1121 00:00:00.010500   77 kubelet.go:2724] \"SyncLoop ADD\" source=\"file\" pods=[]
I1121 00:00:00.020500   77 kubelet.go:2724] \"SyncLoop ADD\" source=\"file\" pods=[\"default/a-node\"]
I1121 00:00:09.000000   77 manager.go:300] \"State pushed for device plugin\" resource=\"example.com/x\" resourceCapacity=8";
    assert!((first_list_ms(log, "example.com/x").unwrap() - 12.25).abs() < 1e-3);
    assert_eq!(first_list_ms(log, "example.com/none"), None);
    assert!((first_pods_ms(log).unwrap() - 30.0).abs() < 1e-3);
}
