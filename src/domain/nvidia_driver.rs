//! The installed files of NVIDIA's driver: what a container needs in addition to the device nodes.

/// The files of the driver on a host. Paths without a mention of the host are paths in the
/// container, and paths below [`NvidiaDriver::root`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NvidiaDriver {
    /// The root of the driver on the host: empty for the host's own, else such as
    /// `/run/nvidia/driver`.
    pub root: String,
    /// The release, such as `580.95.05`; empty for a Tegra system, whose libraries have several.
    pub version: String,
    /// The libraries, and other files that links lead to.
    pub libraries: Vec<DriverLibrary>,
    /// Programs, firmware and files of settings, which are read only.
    pub files: Vec<DriverFile>,
    /// Sockets of the driver's daemons.
    pub sockets: Vec<DriverFile>,
    /// NVIDIA's program for hooks of containers, if it is installed.
    pub hook: Option<CdiHookProgram>,
}

/// A library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverLibrary {
    /// Its path.
    pub path: String,
    /// The links to it in its folder.
    pub links: Vec<DriverLink>,
}

/// A symbolic link: `libcuda.so.1` to `libcuda.so.580.95.05`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DriverLink {
    /// Its path.
    pub path: String,
    /// The literal target.
    pub target: String,
}

/// A file with its path in the container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverFile {
    /// Its real path on the host, with the root of the driver.
    pub host: String,
    /// Its path in the container.
    pub container: String,
}

/// NVIDIA's program for hooks: `nvidia-cdi-hook`, or `nvidia-ctk` with its verb `hook`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CdiHookProgram {
    /// Its path on the host.
    pub path: String,
    /// The hooks beyond those of the first releases that it has.
    pub hooks: Vec<&'static str>,
}

impl NvidiaDriver {
    /// The path on the host of a file of the driver.
    #[must_use]
    pub fn host_path(&self, path: &str) -> String {
        format!("{}{path}", self.root)
    }
}
