//! The host, and the privileges of this process.

use super::super::codes::{
    INOTIFY_EXHAUSTED, INOTIFY_LOW, KERNEL_LOG_UNREADABLE, LOOK_HANGS, NOT_ROOT, SELINUX_LABEL,
    USER_NAMESPACE,
};
use super::super::gather::INOTIFY_WANTED;
use super::super::{Facts, Finding};
use super::text;
use crate::host::InotifyRefusal;

pub(super) fn privileges(facts: &Facts) -> Option<Vec<Finding>> {
    let todo = "run it as root, so that every check can run";
    let found = Finding::new(&NOT_ROOT, "holdfast doctor", "it does not run as root", todo)
        .by("sudo holdfast doctor");
    Some(if facts.is_root { Vec::new() } else { vec![found] })
}

pub(super) fn readers(facts: &Facts) -> Option<Vec<Finding>> {
    let todo = "find the cause: a network file system, a driver, or a stopped process";
    let find = |what: &&'static str| {
        Finding::new(&LOOK_HANGS, what, "reading it did not end in time", todo)
            .by("ps -eo pid,stat,wchan:32,args | grep ' D'")
    };
    Some(facts.hanging.iter().map(find).collect())
}

pub(super) fn user_namespace(facts: &Facts) -> Option<Vec<Finding>> {
    if !facts.is_in_user_namespace()? {
        return Some(Vec::new());
    }
    let numbers: Vec<&str> = facts.uid_map.as_ref()?.split_whitespace().collect();
    let found = format!("it runs in a user namespace (uid_map: {})", numbers.join(" "));
    let todo = "set `hostUsers: true` in the pod, or remove the key; on a host, run it outside of \
                the namespace";
    Some(vec![Finding::new(&USER_NAMESPACE, "holdfast", found, todo)])
}

pub(super) fn inotify(facts: &Facts) -> Option<Vec<Finding>> {
    let inotify = facts.host.as_ref()?.inotify.as_ref()?;
    let (why, todo, command) = match &inotify.refused {
        None => return Some(Vec::new()),
        Some(InotifyRefusal::Limit { name, value }) => {
            let is = value.map(|value| format!(" ({value})")).unwrap_or_default();
            // At least the present value.
            let usual = if name.ends_with("watches") { USUAL_WATCHES } else { USUAL_INSTANCES };
            let more = value.unwrap_or_default().saturating_mul(2).max(usual);
            let todo = "raise the limit (in /etc/sysctl.d to make it persistent), or stop the \
                        processes that use it up (docs/doctor.md shows how to find them)";
            (
                format!("this user has reached {name}{is}"),
                todo,
                Some(format!("sysctl {name}={more}")),
            )
        }
        Some(InotifyRefusal::Other(why)) => (
            why.clone(),
            "find what prevents this process from watching files: a sandbox, an old kernel",
            None,
        ),
    };
    let found = match inotify.instances {
        0 => Finding::new(
            &INOTIFY_EXHAUSTED,
            "inotify",
            format!("no further file can be watched: {why}"),
            todo,
        ),
        made => Finding::new(
            &INOTIFY_LOW,
            "inotify",
            format!(
                "only {made} of {INOTIFY_WANTED} further inotify instances could be created: {why}"
            ),
            todo,
        ),
    };
    Some(vec![Finding { command, ..found }])
}

pub(super) fn kernel_log(facts: &Facts) -> Option<Vec<Finding>> {
    // The kernel log is read for NVIDIA devices only.
    if !facts.resources.as_ref()?.iter().any(|resource| resource.is_nvidia) {
        return Some(Vec::new());
    }
    // The daemon's access to the log counts. It may differ from the access of this process.
    let reported = facts.status().map(|status| {
        status.get("signals_off").map(|off| text(off, "kernel_log")).unwrap_or_default()
    });
    let why = match reported {
        Some(reported) => reported.to_owned(),
        None if !facts.may_read_all() => return None,
        None => facts.host.as_ref()?.kernel_log.clone().unwrap_or_default(),
    };
    if why.is_empty() {
        return Some(Vec::new());
    }
    let todo = "install the drop-in or the component `kernel-log`, which gives the daemon \
                /dev/kmsg and CAP_SYSLOG (docs/install.md)";
    Some(vec![Finding::new(&KERNEL_LOG_UNREADABLE, "/dev/kmsg", why, todo)])
}

/// Common values on nodes with many pods.
const USUAL_INSTANCES: u64 = 1024;
const USUAL_WATCHES: u64 = 524_288;

/// The label that the kubelet gives the directory (`KubeletPluginsDirSELinuxLabel`).
const SOCKETS_TYPE: &str = "container_file_t";

pub(super) fn selinux(facts: &Facts) -> Option<Vec<Finding>> {
    if !facts.host.as_ref()?.is_enforcing {
        return Some(Vec::new());
    }
    let label = facts.kubelet.as_ref()?.label.as_ref()?;
    if label.split(':').nth(2) == Some(SOCKETS_TYPE) {
        return Some(Vec::new());
    }
    let dir = facts.roots.kubelet.join("device-plugins").display().to_string();
    let found = format!("SELinux is enforcing, but the label is {label}");
    let todo = format!(
        "set the type that the kubelet sets, {SOCKETS_TYPE}; `ausearch -m avc -ts \
         recent` shows refused accesses"
    );
    Some(vec![
        Finding::new(&SELINUX_LABEL, &dir, found, todo)
            .by(format!("chcon -R -t {SOCKETS_TYPE} {dir}")),
    ])
}
