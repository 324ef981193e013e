//! An archive with the data for a problem report, without secrets: a plain `tar` with mode 0600.
//!
//! `README.txt` in the archive lists its contents and the data that could not be collected. Secrets
//! are excluded by their place: texts of operators and commands, environments, arguments, mounts
//! and answers to the kubelet are not collected at all (`outline.rs`), and the daemon never logs
//! them. As a second line of defence, all data passes the [`Redactor`].

use super::{Facts, Redactor, Target, examine, outline};
use crate::domain::{Timestamp, printable};
use crate::host::{self, HostRoot, open_to_read};
use crate::kubelet::checkpoint;
use serde_json::{Value, json};
use std::fs::OpenOptions;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Maximum size of a log; its end is kept.
const LOG_BYTES: u64 = 1024 * 1024;
/// Maximum size of a configuration file. A larger file is left out.
const CONFIG_BYTES_MAX: u64 = 16 << 20;
/// Maximum size of a verb's document. A larger one is left out: a history may have a hundred
/// thousand grants.
const DOCUMENT_BYTES_MAX: usize = 32 * 1024 * 1024;

/// The verbs whose documents are collected.
const VERBS: [(&str, &[&str]); 6] = [
    ("status.json", &["status"]),
    ("devices.json", &["device", "show"]),
    ("who.json", &["who"]),
    ("history.json", &["history"]),
    ("ledger-verify.json", &["ledger", "verify"]),
    ("discover.json", &["discover", "--all"]),
];

/// The collected files.
#[derive(Debug)]
pub struct Bundle {
    redactor: Redactor,
    files: Vec<(String, String)>,
    /// The data that could not be collected, each with the reason.
    missing: Vec<(String, String)>,
}

impl Bundle {
    /// Collects everything. `verb` runs a verb with `-o json` and returns its output or an error;
    /// `log` returns the latest log of the daemon.
    pub fn collect(
        target: &Target,
        facts: &Facts,
        redactor: Redactor,
        verb: impl Fn(&[&str]) -> Result<Vec<u8>, String>,
        log: impl Fn() -> Result<String, String>,
    ) -> Self {
        let mut this = Bundle { redactor, files: Vec::new(), missing: Vec::new() };
        // First, so that the redactor knows the secrets of the configuration before it processes
        // other texts.
        this.configuration(target, facts);
        this.json(
            "doctor.json",
            serde_json::to_value(examine(&facts.clone().without_texts()))
                .map_err(|error| error.to_string()),
        );
        for (name, words) in VERBS {
            this.json(name, verb(words).and_then(|bytes| document(&bytes)));
        }
        this.json("kubelet-checkpoint.json", kubelet_checkpoint(&target.roots.kubelet));
        let mounts = std::fs::read_to_string(target.own.join("mountinfo"));
        this.text(
            "mountinfo.txt",
            mounts.map(|table| outline::of_mounts(&table)).map_err(|error| error.to_string()),
        );
        let host = HostRoot::new(&target.roots.host);
        let read = |rel: &str| host.try_read(rel).map_err(|error| error.to_string());
        let system = read("proc/version").map(|kernel| {
            let release = read("etc/os-release").unwrap_or_default();
            format!("holdfast {}\n{kernel}\n{release}\n", env!("CARGO_PKG_VERSION"))
        });
        this.text("version.txt", system);
        this.text("log.txt", log().or_else(|why| pod_log(&host).ok_or(why)));
        this
    }

    /// The configuration files as documents, without comments, since these may contain disabled
    /// secrets. The redactor learns the values that are not shown.
    fn configuration(&mut self, target: &Target, facts: &Facts) {
        let is_valid = facts.config.as_ref().is_some_and(Result::is_ok);
        let main =
            target.config.clone().unwrap_or_else(|| PathBuf::from(crate::config::DEFAULT_PATH));
        let files = facts
            .config
            .as_ref()
            .and_then(|config| config.as_ref().ok())
            .map(|wants| wants.files.clone());
        let mut documents = Vec::new();
        for file in files.unwrap_or_else(|| vec![main]) {
            let parsed =
                host::read_bounded(&file, CONFIG_BYTES_MAX).map_err(|error| error.to_string());
            let parsed = parsed.and_then(|bytes| {
                String::from_utf8(bytes).map_err(|_| "it is not UTF-8 text".to_owned())
            });
            // The parser's error would quote the line; the error in the report only names it.
            let parsed = parsed.and_then(|text| {
                toml::from_str::<Value>(&text).map_err(|_| "it cannot be parsed".to_owned())
            });
            match parsed {
                Ok(value) => {
                    self.redactor.learn_from(&value);
                    documents.push(
                        json!({ "file": file, "content": outline::of_config(value, is_valid) }),
                    );
                }
                Err(why) => self.missing.push((file.display().to_string(), why)),
            }
        }
        self.json("config.json", Ok(documents.into()));
    }

    fn json(&mut self, name: &str, value: Result<Value, String>) {
        let redacted = value.map(|value| self.redactor.document(value));
        match redacted.and_then(|value| {
            serde_json::to_string_pretty(&value).map_err(|error| error.to_string())
        }) {
            Ok(text) => self.files.push((name.to_owned(), text + "\n")),
            Err(why) => self.missing.push((name.to_owned(), why)),
        }
    }

    fn text(&mut self, name: &str, text: Result<String, String>) {
        match text {
            Ok(text) => self.files.push((name.to_owned(), self.redactor.text(&text))),
            Err(why) => self.missing.push((name.to_owned(), why)),
        }
    }

    /// The contents: one line for each file, and one for each missing file with the reason.
    #[must_use]
    pub fn contents(&self) -> String {
        let files = self.files.iter().map(|(name, text)| format!("{name}  {} bytes\n", text.len()));
        let missing = self.missing.iter().map(|(name, why)| {
            format!("left out: {}: {}\n", printable(name), printable(&self.redactor.text(why)))
        });
        files.chain(missing).collect()
    }

    /// Writes the archive to a new file; for a directory, to a new file in it. Returns the path.
    ///
    /// # Errors
    /// When the file exists already, or cannot be written.
    pub fn write(&self, to: &Path, now: Timestamp) -> io::Result<PathBuf> {
        let path = if to.is_dir() { to.join(format!("{}.tar", stem(now))) } else { to.to_owned() };
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        let written = self.write_to(&mut io::BufWriter::new(file), now);
        if written.is_err() {
            // An incomplete archive is useless.
            drop(std::fs::remove_file(&path));
        }
        written.map(|()| path)
    }

    /// Writes the archive to `out`.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write_to(&self, out: &mut dyn Write, now: Timestamp) -> io::Result<()> {
        let mut archive = tar::Builder::new(out);
        let readme = ("README.txt".to_owned(), readme(&self.contents()));
        for (name, text) in std::iter::once(&readme).chain(&self.files) {
            let mut header = tar::Header::new_ustar();
            header.set_mode(0o600);
            header.set_mtime(now.0 / 1000);
            header.set_size(text.len() as u64);
            archive.append_data(&mut header, format!("{}/{name}", stem(now)), text.as_bytes())?;
        }
        archive.into_inner()?.flush()
    }
}

/// The name of the archive and of its directory.
fn stem(now: Timestamp) -> String {
    format!("holdfast-{}", now.to_seconds().replace([':', '-'], ""))
}

fn readme(contents: &str) -> String {
    format!(
        "Data of a node for a problem report, collected by `holdfast doctor --bundle`.\n\n\
         Excluded: values of environments, commands and their arguments, texts of commands and operators, configured mounts,\n\
         sources of mounts, answers to the kubelet, and all values of an invalid configuration. Included are names: of pods,\n\
         namespaces, containers, devices, resources, variables, mount points and files. Check the content before you share it.\n\n{contents}"
    )
}

fn document(bytes: &[u8]) -> Result<Value, String> {
    if bytes.len() > DOCUMENT_BYTES_MAX {
        return Err(format!("it has {} bytes, more than the limit, and was left out", bytes.len()));
    }
    serde_json::from_slice(bytes).map_err(|error| error.to_string())
}

/// The part of the checkpoint that maps containers to devices, without the answers of plugins,
/// which contain environments.
fn kubelet_checkpoint(kubelet_dir: &Path) -> Result<Value, String> {
    let path = kubelet_dir.join("device-plugins").join(checkpoint::FILE_NAME);
    let bytes =
        host::read_bounded(&path, checkpoint::BYTES_MAX).map_err(|error| error.to_string())?;
    let mut value: Value = serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
    let entries = value
        .pointer_mut("/Data/PodDeviceEntries")
        .and_then(Value::as_array_mut)
        .map(std::mem::take)
        .unwrap_or_default();
    let kept = ["PodUID", "ContainerName", "ResourceName", "DeviceIDs"];
    let keep = |entry: Value| {
        Value::Object(
            kept.iter()
                .filter_map(|key| Some(((*key).to_owned(), entry.get(key)?.clone())))
                .collect(),
        )
    };
    let entries: Vec<Value> = entries.into_iter().map(keep).collect();
    Ok(
        json!({ "PodDeviceEntries": entries, "RegisteredDevices": value.pointer("/Data/RegisteredDevices") }),
    )
}

/// The end of the log of the daemon's container, from the kubelet's file
/// `var/log/pods/<pod>/holdfast/<n>.log`.
fn pod_log(host: &HostRoot) -> Option<String> {
    let written =
        |path: &String| host.path(path).metadata().and_then(|about| about.modified()).ok();
    let newest = host.glob("/var/log/pods/*/holdfast/*.log").into_iter().max_by_key(written)?;
    let mut file = open_to_read(&host.path(&newest)).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_BYTES))).ok()?;
    let mut bytes = Vec::new();
    file.take(LOG_BYTES).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}
