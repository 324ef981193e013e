//! The plugin manager: finds the sockets in `plugins_registry` and registers their drivers.
//!
//! Two differences from the real one: directories below are not watched, and a socket that is
//! renamed away is deregistered.

use super::instances::{Instance, keep_connected, watch_health};
use super::{Shared, State};
use crate::host::{Change, DirWatch};
use crate::kubelet::proto::pluginregistration as api;
use crate::kubelet::proto::pluginregistration::registration_client::RegistrationClient;
use crate::kubelet::uds;
use crate::lab::sim::kubelet::error::rpc_error;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

/// The group of the connections to registration sockets. Instances have the numbers from 1 on.
const REGISTRATIONS: u64 = u64::MAX;

/// The sockets that exist, and those that are registered.
#[derive(Debug, Default)]
pub(super) struct Registry {
    /// The sockets with the number of their newest creation.
    found: BTreeMap<PathBuf, u64>,
    registered: BTreeMap<PathBuf, Registered>,
    /// Sockets with an operation in progress.
    busy: BTreeSet<PathBuf>,
    /// After a failure: the wait, and its end.
    waits: BTreeMap<PathBuf, (Duration, Instant)>,
    creations: u64,
}

#[derive(Debug, Clone)]
struct Registered {
    creation: u64,
    driver: String,
    endpoint: String,
}

impl Registry {
    /// An event about a file.
    fn see(&mut self, path: PathBuf) {
        let is_hidden = path.file_name().is_none_or(|name| name.to_string_lossy().starts_with('.'));
        let is_socket = || fs::metadata(&path).is_ok_and(|about| about.file_type().is_socket());
        if !is_hidden && is_socket() {
            self.creations += 1;
            self.found.insert(path, self.creations);
        } else {
            self.found.remove(&path);
        }
    }

    /// Reads the whole directory, in the order of the names. Known sockets stay what they are.
    fn walk(&mut self, directory: &Path) {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        let present: BTreeSet<PathBuf> = entries.map(|entry| entry.path()).collect();
        self.found.retain(|path, _| present.contains(path));
        for path in present {
            if !self.found.contains_key(&path) {
                self.see(path);
            }
        }
    }

    /// The registrations whose socket was removed or made again.
    fn take_gone(&mut self) -> Vec<Registered> {
        let Registry { found, registered, .. } = self;
        let is_gone = |path: &PathBuf, of: &mut Registered| found.get(path) != Some(&of.creation);
        registered.extract_if(.., is_gone).map(|(_, of)| of).collect()
    }

    /// The sockets to register now.
    fn take_due(&mut self, now: Instant) -> Vec<(PathBuf, u64)> {
        let Registry { found, registered, busy, waits, .. } = self;
        let is_due = |path: &PathBuf| {
            !registered.contains_key(path)
                && !busy.contains(path)
                && waits.get(path).is_none_or(|(_, until)| *until <= now)
        };
        let due = found.iter().filter(|(path, _)| is_due(path));
        let due: Vec<_> = due.map(|(path, creation)| (path.clone(), *creation)).collect();
        busy.extend(due.iter().map(|(path, _)| path.clone()));
        due
    }
}

/// Watches the directory, and registers and deregisters at every turn, until the kubelet ends.
pub(super) async fn run(shared: Arc<Shared>, mut watch: DirWatch, directory: PathBuf) {
    shared.with(|state| state.registry.walk(&directory));
    let mut turns = tokio::time::interval(shared.config.times.turn);
    loop {
        tokio::select! {
            change = watch.next() => match change {
                Ok(Change::Entry { name, .. }) => {
                    shared.with(|state| state.registry.see(directory.join(name)));
                }
                Ok(Change::Anything) => {
                    watch.rearm();
                    shared.with(|state| state.registry.walk(&directory));
                }
                Err(_) => return,
            },
            _ = turns.tick() => turn(&shared),
        }
    }
}

/// Deregistrations first, as in the kubelet.
fn turn(shared: &Arc<Shared>) {
    let due = shared.with(|state| {
        for gone in state.registry.take_gone() {
            deregister(state, &gone.driver, &gone.endpoint);
        }
        state.registry.take_due(Instant::now())
    });
    for (path, creation) in due {
        let operation = Arc::clone(shared);
        shared.spawn(async move {
            let result = register(&operation, &path, creation).await;
            operation.with(|state| {
                state.registry.busy.remove(&path);
                match result {
                    Ok(()) => drop(state.registry.waits.remove(&path)),
                    Err(error) => {
                        let times = &operation.config.times;
                        let wait = match state.registry.waits.get(&path) {
                            Some((wait, _)) => (*wait * 2).min(times.again_max),
                            None => times.again,
                        };
                        state.registry.waits.insert(path, (wait, Instant::now() + wait));
                        state.failures.push(error);
                    }
                }
            });
        });
    }
}

fn deregister(state: &mut State, driver: &str, endpoint: &str) {
    let Some(instances) = state.instances.get_mut(driver) else { return };
    let before = instances.len();
    instances.retain(|instance| instance.endpoint != endpoint);
    if instances.len() < before {
        // Its health stream has ended.
        state.health.remove(driver);
    }
    if instances.is_empty() {
        state.instances.remove(driver);
    }
}

/// The authority that gRPC for Go sends for a path: percent-encoded.
pub(super) fn authority(path: &Path) -> String {
    let mut authority = String::new();
    for byte in path.as_os_str().as_encoded_bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~!$&'()*+,;=:[]@".contains(byte) {
            authority.push(char::from(*byte));
        } else {
            // Writing to memory cannot fail.
            let _infallible = write!(authority, "%{byte:02X}");
        }
    }
    authority
}

/// Dials until it succeeds or the time is over. `Ok(Err(_))` if `h2` refuses the authority: this
/// client cannot send it, and a server resets the call (a test of `kubelet::dra` has the frames).
async fn dial(shared: &Shared, path: &Path) -> Result<Result<Channel, Status>, String> {
    let Ok(endpoint) = Endpoint::from_shared(format!("http://{}", authority(path))) else {
        return Ok(Err(Status::internal(
            "stream terminated by RST_STREAM with error code: PROTOCOL_ERROR",
        )));
    };
    let dialling = async {
        loop {
            let links = shared.links();
            let add = move |stream| links.add(REGISTRATIONS, stream);
            match uds::connect_with(endpoint.clone(), path, add).await {
                Ok(channel) => return channel,
                Err(_) => tokio::time::sleep(shared.config.times.dial_again).await,
            }
        }
    };
    let dialled = tokio::time::timeout(shared.config.times.dial, dialling).await;
    dialled.map(Ok).map_err(|_| {
        let path = path.display();
        format!(
            "RegisterPlugin error -- dial failed at socket {path}, err: failed to dial socket {path}, \
             err: context deadline exceeded"
        )
    })
}

/// One try to register the driver behind a socket. An error has the kubelet's text.
async fn register(shared: &Arc<Shared>, path: &Path, creation: u64) -> Result<(), String> {
    let times = &shared.config.times;
    let socket = path.display();
    let no_info = |status: &Status| {
        let status = rpc_error(status);
        format!(
            "RegisterPlugin error -- failed to get plugin info using RPC GetInfo at socket {socket}, \
             err: {status}"
        )
    };
    let channel = dial(shared, path).await?.map_err(|status| no_info(&status))?;
    let mut client = RegistrationClient::new(channel);
    let info = tokio::time::timeout(times.get_info, client.get_info(api::InfoRequest {})).await;
    let late = || Status::deadline_exceeded("context deadline exceeded");
    let info =
        info.unwrap_or_else(|_| Err(late())).map_err(|status| no_info(&status))?.into_inner();
    let api::PluginInfo { r#type: kind, name, mut endpoint, supported_versions } = info;
    if kind != "DRAPlugin" {
        let error = format!(
            "RegisterPlugin error -- no handler registered for plugin type: {kind} at socket {socket}"
        );
        return notify(&mut client, times.notify, Err(error)).await;
    }
    if endpoint.is_empty() {
        endpoint = path.to_string_lossy().into_owned();
    }
    if let Err(error) = add(shared, &name, &endpoint, &supported_versions) {
        return notify(&mut client, times.notify, Err(error)).await;
    }
    shared.with(|state| {
        let registered = Registered { creation, driver: name.clone(), endpoint: endpoint.clone() };
        state.registry.registered.insert(path.to_owned(), registered);
    });
    let notified = notify(&mut client, times.notify, Ok(())).await;
    if notified.is_err() {
        shared.with(|state| {
            state.registry.registered.remove(path);
            deregister(state, &name, &endpoint);
        });
    }
    notified
}

/// Reports the result to the driver. An error is the result, or that of the report.
async fn notify(
    client: &mut RegistrationClient<Channel>,
    within: Duration,
    result: Result<(), String>,
) -> Result<(), String> {
    let status = api::RegistrationStatus {
        plugin_registered: result.is_ok(),
        error: result.clone().err().unwrap_or_default(),
    };
    match tokio::time::timeout(within, client.notify_registration_status(status)).await {
        Ok(Ok(_)) => result,
        Ok(Err(status)) => Err(format!(
            "RegisterPlugin error -- failed to send registration status: {}",
            rpc_error(&status)
        )),
        Err(_) => Err("RegisterPlugin error -- failed to send registration status: context \
                       deadline exceeded"
            .to_owned()),
    }
}

/// Validates a driver and adds its instance, the newest of the driver.
fn add(
    shared: &Arc<Shared>,
    driver: &str,
    endpoint: &str,
    offered: &[String],
) -> Result<(), String> {
    let release = shared.release();
    let version = release.choose(offered).map_err(|error| {
        format!(
            "RegisterPlugin error -- plugin validation failed with err: invalid supported gRPC \
             versions of DRA driver plugin {driver} at endpoint {endpoint}: {error}"
        )
    })?;
    shared.with(|state| {
        let others = state.instances.entry(driver.to_owned()).or_default();
        if others.iter().any(|other| other.endpoint == endpoint) {
            return Err(format!(
                "RegisterPlugin error -- plugin registration failed with err: endpoint {endpoint} \
                 already registered for DRA driver plugin {driver}"
            ));
        }
        state.numbers += 1;
        let number = state.numbers;
        let connection = keep_connected(Arc::clone(shared), number, endpoint.to_owned());
        let mut tasks = vec![state.tasks.spawn(connection)];
        if let Some(health) = release.health(offered) {
            let health = watch_health(Arc::clone(shared), number, driver.to_owned(), health);
            tasks.push(state.tasks.spawn(health));
        }
        let (endpoint, channel) = (endpoint.to_owned(), None);
        others.push(Instance { number, endpoint, version, channel, tasks });
        Ok(())
    })
}
