//! The kubelet's end of a connection in memory.

use super::node_state::Memory;
use super::plugin::Plugin;
use super::sockets::{Transport, latency};
use crate::domain::{ContainerEdits, DeviceId};
use crate::lab::sim::executor::{Handle, Task};
use crate::lab::sim::kubelet::core::{ListedDevice, Options};
use crate::lab::sim::kubelet::environment::{CLOSING, Connection, Lists};
use crate::lab::sim::kubelet::error::rpc_error;
use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

/// The error of a call whose connection broke, as grpc-go words it.
const BROKEN: &str = "rpc error: code = Unavailable desc = error reading from server: EOF";

/// The largest message that grpc-go accepts.
const MESSAGE_MAX: usize = 4 * 1024 * 1024;

/// A `ClientConn` of grpc-go: one transport at a time; after a break the next call creates a new
/// one.
#[derive(Debug)]
pub(super) struct MemoryConnection {
    memory: Arc<Memory>,
    path: String,
    transport: Mutex<Arc<Transport>>,
    closed: AtomicBool,
    has_options: AtomicBool,
    has_lists: Arc<AtomicBool>,
}

impl MemoryConnection {
    pub(super) fn new(memory: Arc<Memory>, path: String, transport: Arc<Transport>) -> Self {
        let (closed, has_options, has_lists) =
            (AtomicBool::new(false), AtomicBool::new(false), Arc::default());
        MemoryConnection {
            memory,
            path,
            transport: Mutex::new(transport),
            closed,
            has_options,
            has_lists,
        }
    }

    fn present(&self) -> Arc<Transport> {
        Arc::clone(&self.transport.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The transport for a call.
    fn transport(&self) -> Result<Arc<Transport>, String> {
        if self.closed.load(Ordering::Acquire) {
            return Err(CLOSING.to_owned());
        }
        let present = self.present();
        if !present.is_cut() {
            return Ok(present);
        }
        let again = self.memory.connect(&self.path).ok_or_else(|| {
            let path = &self.path;
            let cause = if self.memory.inode(path).is_some() { "connection refused" } else { "no such file or directory" };
            format!(
                "rpc error: code = Unavailable desc = connection error: desc = \"transport: Error while dialing: \
                 dial unix /var/lib/kubelet/device-plugins/{path}: connect: {cause}\""
            )
        })?;
        *self.transport.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&again);
        Ok(again)
    }

    /// One unary call: a task of the plugin's side, with the latency of both directions.
    async fn call<T: Send + 'static>(
        &self,
        method: impl FnOnce(Arc<dyn Plugin>) -> BoxFuture<'static, Result<T, Status>>,
    ) -> Result<T, String> {
        let transport = self.transport()?;
        let (answer, answered) = oneshot::channel();
        let handle = self.memory.handle.clone();
        let called = method(Arc::clone(&transport.plugin));
        let task = handle.clone().spawn(async move {
            handle.sleep(latency(&handle)).await;
            let result = called.await;
            handle.sleep(latency(&handle)).await;
            // The kubelet may have stopped waiting.
            let _ = answer.send(result);
        });
        transport.keep(task.clone());
        let _reset = Reset { task, handle: self.memory.handle.clone() };
        match answered.await {
            Ok(result) => result.map_err(|status| rpc_error(&status)),
            Err(_) => Err(BROKEN.to_owned()),
        }
    }

    fn shuffled(&self, ids: &BTreeSet<DeviceId>) -> Vec<DeviceId> {
        let mut left: Vec<DeviceId> = ids.iter().cloned().collect();
        self.memory.handle.random(|random| {
            for end in (1..left.len()).rev() {
                left.swap(end, random.below(end + 1));
            }
        });
        left
    }
}

/// Stops the task of the plugin's side when it is dropped: the caller no longer waits.
#[derive(Debug)]
struct Reset {
    task: Task,
    handle: Handle,
}

impl Drop for Reset {
    fn drop(&mut self) {
        if !self.task.is_finished() {
            let (task, handle) = (self.task.clone(), self.handle.clone());
            self.handle.spawn(async move {
                handle.sleep(latency(&handle)).await;
                task.abort();
            });
        }
    }
}

#[tonic::async_trait]
impl Connection for MemoryConnection {
    async fn options(&self) -> Result<Options, String> {
        let options = self.call(|plugin| Box::pin(async move { plugin.options().await })).await;
        self.has_options.fetch_or(options.is_ok(), Ordering::AcqRel);
        options
    }

    async fn list_and_watch(&self) -> Result<Box<dyn Lists>, String> {
        let transport = self.transport()?;
        let (lists, received) = mpsc::unbounded_channel();
        let (handle, plugin, id) =
            (self.memory.handle.clone(), Arc::clone(&transport.plugin), transport.id);
        let has_lists = Arc::clone(&self.has_lists);
        let task = handle.clone().spawn(async move {
            handle.sleep(latency(&handle)).await;
            has_lists.store(true, Ordering::Release);
            let Ok(mut stream) = plugin.list_and_watch(id).await else { return };
            while let Some(list) = stream.next().await {
                handle.sleep(latency(&handle)).await;
                if lists.send(list).is_err() {
                    return;
                }
            }
        });
        transport.keep(task.clone());
        Ok(Box::new(Listing {
            received,
            _reset: Reset { task, handle: self.memory.handle.clone() },
        }))
    }

    async fn preferred(
        &self,
        available: &BTreeSet<DeviceId>,
        must_include: &BTreeSet<DeviceId>,
        size: usize,
    ) -> Result<BTreeSet<DeviceId>, String> {
        let (available, must_include) = (self.shuffled(available), self.shuffled(must_include));
        self.call(move |plugin| {
            Box::pin(async move { plugin.preferred(available, must_include, size).await })
        })
        .await
    }

    async fn allocate(&self, ids: &BTreeSet<DeviceId>) -> Result<Option<ContainerEdits>, String> {
        let ids = self.shuffled(ids);
        self.call(move |plugin| Box::pin(async move { plugin.allocate(ids).await })).await
    }

    async fn pre_start(&self, ids: &BTreeSet<DeviceId>) -> Result<(), String> {
        let ids = self.shuffled(ids);
        self.call(move |plugin| Box::pin(async move { plugin.pre_start(ids).await })).await
    }

    fn close(&self) {
        let was_closed = self.closed.swap(true, Ordering::AcqRel);
        let transport = self.present();
        self.memory.cut_soon(Arc::clone(&transport));
        if self.has_options.load(Ordering::Acquire) && !was_closed {
            let (handle, has_lists) = (self.memory.handle.clone(), Arc::clone(&self.has_lists));
            self.memory.handle.spawn(async move {
                handle.sleep(latency(&handle)).await;
                if !has_lists.load(Ordering::Acquire) {
                    transport.plugin.hung_up();
                }
            });
        }
    }

    fn is_open(&self) -> bool {
        !self.closed.load(Ordering::Acquire) && !self.present().is_cut()
    }
}

#[derive(Debug)]
struct Listing {
    received: mpsc::UnboundedReceiver<Vec<ListedDevice>>,
    _reset: Reset,
}

#[tonic::async_trait]
impl Lists for Listing {
    async fn next(&mut self) -> Option<Vec<ListedDevice>> {
        // A message that is too large ends the stream.
        self.received
            .recv()
            .await
            .filter(|list| list.iter().map(encoded_len).sum::<usize>() <= MESSAGE_MAX)
    }
}

/// The approximate size of a device in a message: its id, its health, its NUMA nodes.
fn encoded_len(device: &ListedDevice) -> usize {
    let (tags, health) = (6, 9);
    tags + health + device.id.as_str().len() + 6 * device.numa_nodes.len()
}
