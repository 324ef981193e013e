//! Where NVIDIA's driver is on the host.

/// The root of a driver in a container, as NVIDIA's GPU operator mounts it.
const OF_CONTAINER: &str = "/run/nvidia/driver";
/// The folder of GKE's installer: `lib64` has the libraries, and `bin` the programs.
const OF_GKE: &str = "/home/kubernetes/bin/nvidia";

/// The roots of NVIDIA's driver (`[nvidia] driver_root`, `dev_root`). A root is an absolute path
/// without a slash at its end; the host's own is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NvidiaRoots {
    /// The root of libraries, programs and firmware; `None`: where they are found.
    pub driver: Option<String>,
    /// The root whose `dev` has the nodes; `None`: the driver's root where it has the node, else
    /// the host.
    pub dev: Option<String>,
}

impl NvidiaRoots {
    /// The roots to search for libraries, the host's own first.
    #[must_use]
    pub fn of_driver(&self) -> Vec<&str> {
        match &self.driver {
            Some(root) => vec![root],
            None => vec!["", OF_CONTAINER, OF_GKE],
        }
    }

    /// The roots to search for a node: the first that has it counts.
    #[must_use]
    pub fn of_nodes(&self) -> Vec<&str> {
        match (&self.dev, self.driver.as_deref()) {
            (Some(root), _) => vec![root],
            (None, None) => vec!["", OF_CONTAINER],
            (None, Some("")) => vec![""],
            (None, Some(root)) => vec![root, ""],
        }
    }

    /// The root of a node that none of them has.
    #[must_use]
    pub fn of_missing_nodes(&self) -> &str {
        self.dev.as_deref().unwrap_or_default()
    }

    /// The configured roots with their keys, without the host's own.
    pub fn configured(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let roots = [("driver_root", &self.driver), ("dev_root", &self.dev)];
        let given = roots.into_iter().filter_map(|(key, root)| Some((key, root.as_deref()?)));
        given.filter(|(_, root)| !root.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configured_root_is_the_only_one_and_nodes_fall_back_to_the_host() {
        let roots = |driver: Option<&str>, dev: Option<&str>| NvidiaRoots {
            driver: driver.map(str::to_owned),
            dev: dev.map(str::to_owned),
        };
        let usual = roots(None, None);
        assert_eq!(usual.of_driver(), ["", OF_CONTAINER, OF_GKE]);
        assert_eq!((usual.of_nodes(), usual.of_missing_nodes()), (vec!["", OF_CONTAINER], ""));
        let host = roots(Some(""), None);
        assert_eq!((host.of_driver(), host.of_nodes()), (vec![""], vec![""]));
        assert_eq!(host.configured().count(), 0);
        let gke = roots(Some(OF_GKE), None);
        assert_eq!((gke.of_driver(), gke.of_nodes()), (vec![OF_GKE], vec![OF_GKE, ""]));
        let both = roots(Some("/a"), Some("/b"));
        assert_eq!((both.of_nodes(), both.of_missing_nodes()), (vec!["/b"], "/b"));
        assert_eq!(
            both.configured().collect::<Vec<_>>(),
            [("driver_root", "/a"), ("dev_root", "/b")]
        );
    }
}
