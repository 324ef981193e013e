//! The environment of a kubelet in memory: an executor's time and random numbers, and the node's
//! files as tables.

use super::connection::MemoryConnection;
use super::node_state::{CheckpointFile, KUBELET_SOCKET, Memory, clean};
use super::sockets::latency;
use crate::domain::{KubeletGeneration, PodName};
use crate::lab::sim::executor::Task;
use crate::lab::sim::kubelet::environment::{Connection, Environment, Snapshot, Stop};
use crate::lab::sim::kubelet::state::Shared;
use crate::lab::sim::kubelet::{Hook, PodSpec, Verdict};
use futures_util::future::BoxFuture;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How long the log folder of a pod outlives it.
const LOGS_KEPT: Duration = Duration::from_secs(5);
/// The longest time from the bind of `kubelet.sock`, which watchers see, to its listen.
const LISTEN_GAP: Duration = Duration::from_micros(200);
/// The longest time between two removals of the kubelet's clean-up.
const CLEAN_UP: Duration = Duration::from_micros(500);

impl Stop for Task {
    fn stop(&self) {
        self.abort();
    }

    fn is_over(&self) -> bool {
        self.is_finished()
    }
}

impl Environment for Memory {
    fn now(&self) -> Duration {
        self.handle.now()
    }

    fn sleep(&self, time: Duration) -> BoxFuture<'static, ()> {
        Box::pin(self.handle.sleep(time))
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) -> Box<dyn Stop> {
        Box::new(self.handle.spawn(task))
    }

    fn below(&self, count: usize) -> usize {
        self.handle.random(|random| random.below(count))
    }

    fn hook(&self, hook: Hook) -> Option<BoxFuture<'static, Verdict>> {
        let now = self.handle.now();
        let nth = self.steps.fetch_add(1, Ordering::Relaxed) + 1;
        let decision = self.handle.random(|random| self.faults.decide(nth, hook, now, random))?;
        let handle = self.handle.clone();
        Some(Box::pin(async move {
            handle.pass().await;
            handle.sleep(decision.wait).await;
            decision.verdict
        }))
    }

    fn dial(&self, _client: u64, socket: &str) -> BoxFuture<'static, Arc<dyn Connection>> {
        let (this, handle, path) = (Weak::clone(&self.this), self.handle.clone(), clean(socket));
        Box::pin(async move {
            // grpc-go's backoff: 1 s, 1.6 times longer each time, plus or minus 20 %.
            let mut pause = Duration::from_secs(1);
            loop {
                handle.sleep(latency(&handle)).await;
                if let Some(memory) = this.upgrade()
                    && let Some(transport) = memory.connect(&path)
                {
                    return Arc::new(MemoryConnection::new(memory, path, transport))
                        as Arc<dyn Connection>;
                }
                let jitter =
                    handle.random(|random| random.between(pause.mul_f64(0.8), pause.mul_f64(1.2)));
                handle.sleep(jitter).await;
                pause = pause.mul_f64(1.6);
            }
        })
    }

    fn prepare(&self) -> io::Result<()> {
        self.tables().dialled.clear();
        Ok(())
    }

    fn serve_pod_resources(&self, _shared: &Arc<Shared>, instance: u64) -> io::Result<()> {
        self.tables().pod_resources = Some(instance);
        Ok(())
    }

    /// One snapshot, in random order as in a directory.
    fn stale_sockets(&self) -> io::Result<Vec<String>> {
        let mut paths: Vec<String> =
            self.paths().into_iter().filter(|path| !path.contains('/')).collect();
        self.handle.random(|random| {
            for end in (1..paths.len()).rev() {
                paths.swap(end, random.below(end + 1));
            }
        });
        Ok(paths)
    }

    fn remove_socket(&self, name: &str) -> BoxFuture<'static, io::Result<()>> {
        self.unlink(name);
        if name == KUBELET_SOCKET {
            self.kubelet_socket.send_replace(None);
        }
        let wait = self.handle.random(|random| random.between(Duration::ZERO, CLEAN_UP));
        let sleep = self.handle.sleep(wait);
        Box::pin(async move {
            sleep.await;
            Ok(())
        })
    }

    fn serve_registration(&self, _shared: &Arc<Shared>, instance: u64) -> io::Result<()> {
        let mut tables = self.tables();
        let inode = tables.sockets.bind(KUBELET_SOCKET, Weak::new())?;
        drop(tables);
        let (this, handle) = (Weak::clone(&self.this), self.handle.clone());
        let gap = handle.random(|random| random.between(Duration::ZERO, LISTEN_GAP));
        self.handle.spawn(async move {
            handle.sleep(gap).await;
            if let Some(memory) = this.upgrade() {
                let mut tables = memory.tables();
                // Unless it was killed before it listened.
                if tables.pod_resources == Some(instance) {
                    tables.registration = Some(instance);
                }
            }
        });
        let wall = i64::try_from(self.moment().wall.0).unwrap_or_default();
        self.kubelet_socket
            .send_replace(Some(KubeletGeneration { inode, made_ns: wall * 1_000_000 }));
        Ok(())
    }

    fn cut(&self) {
        let dialled = {
            let mut tables = self.tables();
            (tables.registration, tables.pod_resources) = (None, None);
            std::mem::take(&mut tables.dialled)
        };
        dialled.iter().filter_map(Weak::upgrade).for_each(|transport| self.cut_soon(transport));
    }

    fn read_checkpoint(&self) -> Result<Option<Snapshot>, String> {
        match &self.tables().checkpoint {
            CheckpointFile::Missing => Ok(None),
            CheckpointFile::Corrupt => Err("checkpoint is corrupted".to_owned()),
            CheckpointFile::Written(snapshot, _) => Ok(Some(snapshot.clone())),
        }
    }

    fn write_checkpoint(&self, snapshot: Snapshot) -> Result<(), String> {
        let wall = self.moment().wall;
        self.tables().checkpoint = CheckpointFile::Written(snapshot, wall);
        self.checkpoint_writes.send_modify(|writes| *writes += 1);
        Ok(())
    }

    fn create_pod(&self, spec: &PodSpec) -> io::Result<()> {
        self.tables().cgroups.insert(spec.uid.clone(), true);
        Ok(())
    }

    fn create_logs(&self, spec: &PodSpec, _container: &str) -> io::Result<()> {
        let name = PodName { namespace: spec.namespace.clone(), name: spec.name.clone() };
        self.tables().names.insert(spec.uid.clone(), name);
        Ok(())
    }

    fn remove_cgroup(&self, uid: &str) -> io::Result<()> {
        self.remove_pod_cgroup(uid);
        Ok(())
    }

    fn remove_logs(&self, spec: &PodSpec) -> io::Result<()> {
        let (this, handle, uid) = (Weak::clone(&self.this), self.handle.clone(), spec.uid.clone());
        let wait = self.handle.random(|random| random.between(Duration::ZERO, LOGS_KEPT));
        self.handle.spawn(async move {
            handle.sleep(wait).await;
            if let Some(memory) = this.upgrade() {
                memory.tables().names.remove(&uid);
            }
        });
        Ok(())
    }

    fn resolves(&self, cdi_name: &str) -> bool {
        self.tables().cdi.as_ref().is_none_or(|known| known.contains(cdi_name))
    }
}
